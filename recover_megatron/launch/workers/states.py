"""States of a worker and of a launch, the record of a worker, and the exit code that results from the workers' ends.

A worker::

    STARTING --process exists--> RUNNING --exit 0--> FINISHED
        |                           |----exit N----> FAILED
        |                           `---signal-----> KILLED
        `--never started (the launch ended before)--> KILLED, without a pid

The launch::

    STARTING --all workers run--> RUNNING --own workers ended--> WAITING --other nodes ended too--> ENDED
        |                            |                              |
        `------ signal, store lost before the start, refused -------`--> STOPPING --all ended or killed--> ENDED

While WAITING, node 0 keeps the store up for the other nodes, and another node delivers its report to node 0.
"""

from __future__ import annotations

import enum
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from recover_megatron.membership.records import EXIT_FENCED, EXIT_NO_REPLICA, WorkerId

OK = 0
LAUNCH_FAILED = 1
"""Exit code: the launch failed, because the store could not be created, or a node did not appear or was lost."""
REFUSED = 2
"""Exit code: refused before the training; most often, the command line is wrong or differs between the nodes."""
LEFT_OUT = 14
"""Exit code: the run continues without this node, whose launcher was started again and has started no worker."""
RUN_VERDICTS = (10, 11, 12)
"""Exit codes of a run: 10: too few live workers for one replica; 11: the majority was lost; 12: the state was lost."""
NO_FAULT = (*RUN_VERDICTS, EXIT_FENCED)
"""Exit codes (10 to 13) of workers that ended because of the run or another worker, without an error of their own."""


class ExitOutcome(NamedTuple):
    """End of one worker: exactly one of ``exit_code`` and ``signal`` is set; ``ended``: seconds since the epoch."""

    worker_id: int
    exit_code: int | None
    signal: int | None
    ended: float

    @property
    def code(self) -> int:
        """Return the exit code as a shell reports it: 128 + S for a worker that signal S has killed."""
        return 128 + self.signal if self.signal is not None else self.exit_code or 0


def start_exit_code(outcomes: Sequence[ExitOutcome], fault_tolerant: bool) -> int:
    """Return the exit code of a launch that lost a worker before the training began.

    ``outcomes``: ends of the workers that have ended.

    The first row that fits decides:

    ===================================================  ==========================================================
    the workers                                          exit code
    ===================================================  ==========================================================
    fault_tolerant is false                              the code that ``run_exit_code`` returns
    any failed with a code other than 10 to 13           the first such code: it shows an error of the training
    else                                                 10: workers are missing; another attempt may succeed
    ===================================================  ==========================================================

    Codes 10 to 13 show no error of the training: a worker that lost its connection to another worker exits with 10.
    """
    if not fault_tolerant:
        return run_exit_code(outcomes, fault_tolerant)
    codes = [outcome.exit_code or 0 for outcome in sorted(outcomes, key=lambda outcome: outcome.ended)]
    return next((code for code in codes if code not in (0, *NO_FAULT)), EXIT_NO_REPLICA)


def exit_code_after(outcomes: Sequence[ExitOutcome], *, only_node: bool = True) -> int:
    """Return the exit code of a launcher whose run was finished.

    ``outcomes``: ends of those workers of this launcher that had left the run normally.

    ``only_node``: True if no other launcher has workers of the run.  The first row that fits decides:

    ===================================================  ==========================================================
    after the training                                   exit code
    ===================================================  ==========================================================
    any failed with a code other than 10 to 13           the first such code: it shows an error at the script's end
    only_node, and every worker failed or was killed     code of the first end: 128 + S for signal S, 1 for 10 to 13
    else                                                 0: a killed worker counts as a death in the training
    ===================================================  ==========================================================
    """
    in_order = sorted(outcomes, key=lambda outcome: outcome.ended)
    faults = [outcome.code for outcome in in_order if outcome.exit_code not in (None, OK, *NO_FAULT)]
    if not faults and only_node and all(outcome.code for outcome in in_order):
        faults = [LAUNCH_FAILED if outcome.code in NO_FAULT else outcome.code for outcome in in_order]
    return faults[0] if faults else OK


def run_exit_code(outcomes: Sequence[ExitOutcome], fault_tolerant: bool) -> int:
    """Return the exit code of a run from the ends of its workers.

    Use it only if no coordinator has decided the exit code (``ControlPlane.verdict``), and the launch was not stopped,
    for example by signal S (exit code 128 + S).  The first row that fits decides:

    ===================================================  ==========================================================
    the workers                                          exit code
    ===================================================  ==========================================================
    any exited with 10, 11 or 12                         the first such code
    all finished with 0 (or there were none)             0
    some failed, fault_tolerant is false                 code of the first failure; 128 + S if killed by signal S
    some finished with 0, fault_tolerant                 0: the survivors finished the run
    none finished with 0, fault_tolerant                 the most frequent code; the earliest of equal frequency
    ===================================================  ==========================================================

    ``fault_tolerant``: the script's arguments contain ``--recover``.
    """
    in_order = sorted(outcomes, key=lambda outcome: outcome.ended)
    failures = [outcome.code for outcome in in_order if outcome.code]
    verdicts = [code for code in failures if code in RUN_VERDICTS]
    if verdicts:
        return verdicts[0]
    if not failures:
        return OK
    if not fault_tolerant:
        return failures[0]
    if len(failures) < len(in_order):
        return OK
    return Counter(failures).most_common(1)[0][0]  # Counter keeps equal counts in order of appearance


class WorkerState(enum.StrEnum):
    """State of a worker in workers.json."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"


class LaunchState(enum.StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPING = "stopping"
    ENDED = "ended"


LIVE = (WorkerState.STARTING, WorkerState.RUNNING)


@dataclass
class WorkerProcess:
    """Launcher's record of one worker; an object of workers.json has these fields, in this order.

    Times are seconds since the epoch (UTC).  ``exit_code`` and ``signal`` are None while the worker is live; when it
    has ended, exactly one of them is set.
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
    """Rank at launch; a replacement has the rank of the worker that it replaces; None: a spare or a joined worker."""
    replaces: int | None = None
    """Id of the worker that this worker replaces; None: this worker is no replacement."""
    note: str = ""
    """Text for the user: why the worker has no place in the training, was not started, or was killed; may be empty."""
    kernel: str = ""
    """Cause of the end that the kernel reports: "out of memory", "Xid 79 of GPU 0000:c1:00"; empty: unknown."""

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def outcome(self) -> ExitOutcome:
        """Return the worker's end, from which the exit code of the run is derived."""
        return ExitOutcome(self.worker_id, self.exit_code, self.signal, self.ended or 0.0)

    @property
    def how(self) -> str:
        """Return the worker's end in words, for the coordinator: "SIGKILL", "exit code 1", "SIGKILL, out of memory"."""
        how = signal_name(self.signal) if self.signal is not None else f"exit code {self.exit_code}"
        return f"{how}, {self.kernel}" if self.kernel else how

    @property
    def end_in_words(self) -> str:
        """Return the end for log lines: "exit code 3", "SIGKILL (signal 9), according to the kernel out of memory,"."""
        end = describe_end(self.exit_code, self.signal)
        return f"{end}, according to the kernel {self.kernel}," if self.kernel else end

    def end(self, status: int, now: float) -> None:
        """Record the worker's end: ``status`` is the exit code, or minus the signal that killed the worker."""
        self.ended = now
        if status < 0:
            self.state, self.signal = WorkerState.KILLED, -status
        else:
            self.state, self.exit_code = (WorkerState.FAILED if status else WorkerState.FINISHED), status


def describe_end(exit_code: int | None, signal_number: int | None) -> str:
    """Return the end of a process in words: "exit code 3", "SIGKILL (signal 9)"."""
    if signal_number is None:
        return f"exit code {exit_code}"
    name = signal_name(signal_number)
    return name if name.startswith("signal") else f"{name} (signal {signal_number})"


def has_ended(status: int) -> str:
    """Return the end of a process as a predicate: "was killed by SIGKILL"; ``status``: exit code or minus signal."""
    return f"was killed by {signal_name(-status)}" if status < 0 else f"has ended with exit code {status}"


def signal_name(number: int) -> str:
    """Return the name of a signal, "SIGKILL", or "signal 40" for a signal without a name (most real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
