"""The states of a worker and of a launch, and the record that is kept of each worker.

A worker::

    STARTING --process exists--> RUNNING --exit 0--> FINISHED
        |                           |----exit N----> FAILED
        |                           `---signal-----> KILLED
        `--never started (the launch ended before)--> KILLED, without a pid

The launch::

    STARTING --all workers run--> RUNNING --own workers ended--> WAITING --other nodes ended too--> ENDED
        |                            |                              |
        `------ signal, store lost before the start, refused -------`--> STOPPING --all ended or killed--> ENDED

WAITING: node 0 keeps the store up for the other nodes, another node delivers its report to node 0.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from recover_megatron.launch.exit_codes import ExitOutcome
from recover_megatron.membership.records import WorkerId


class WorkerState(enum.StrEnum):
    """What workers.json says of a worker."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"


class LaunchState(enum.StrEnum):
    """Where the launch of this node is."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPING = "stopping"
    ENDED = "ended"


LIVE = (WorkerState.STARTING, WorkerState.RUNNING)


@dataclass
class WorkerProcess:
    """One worker as the launcher knows it; the fields, in this order, are the objects of workers.json.

    Times are seconds since the epoch (UTC).  ``exit_code`` and ``signal`` are None while it lives, and one of them
    stays None afterwards.
    """

    worker_id: WorkerId
    pid: int | None
    host: str
    state: WorkerState
    node_rank: int
    local_rank: int
    exit_code: int | None = None
    signal: int | None = None
    started: float | None = None
    ended: float | None = None
    log: str | None = None
    rank: int | None = None
    """Its rank at launch, or that of the one in whose place it is; None: a spare, or one that joined."""
    replaces: int | None = None
    """The worker in whose place it was started."""
    note: str = ""
    """What it says of itself: why it has no place in the training although it runs."""

    @property
    def live(self) -> bool:
        """Whether it runs or is about to."""
        return self.state in LIVE

    @property
    def outcome(self) -> ExitOutcome:
        """Its end, for the exit code of the run."""
        return ExitOutcome(self.worker_id, self.exit_code, self.signal, self.ended or 0.0)

    @property
    def how(self) -> str:
        """Its end, for the coordinator: "SIGKILL", "exit code 1"."""
        return signal_name(self.signal) if self.signal is not None else f"exit code {self.exit_code}"

    def end(self, status: int, now: float) -> None:
        """Record its end: ``status`` is the exit code, or the negative number of the signal that killed it."""
        self.ended = now
        if status < 0:
            self.state, self.signal = WorkerState.KILLED, -status
        else:
            self.state, self.exit_code = (WorkerState.FAILED if status else WorkerState.FINISHED), status


def describe_end(exit_code: int | None, signal_number: int | None) -> str:
    """The end of a process in words: "exit code 3", "SIGKILL (signal 9)"."""
    if signal_number is None:
        return f"exit code {exit_code}"
    name = signal_name(signal_number)
    return name if name.startswith("signal") else f"{name} (signal {signal_number})"


def signal_name(number: int) -> str:
    """ "SIGKILL"; "signal 40" for one that has no name, as most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
