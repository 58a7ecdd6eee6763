"""A run as it is shown to people and programs: ``RunStatus`` and what it consists of, without a way to get it.

    RunStatus:  grid       replicas that run, each with its workers by position
                spares     live workers without a place in a whole replica
                unplaced   live workers of which no place is known (yet)
                gone       dead, put out, left: why, and how long ago

``view_reader`` makes it of what the coordinator answers; ``with_files`` adds what the log folder tells.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from recover_megatron.status.history import Training

Raw = Mapping[str, Any]
"""A JSON object."""
SCHEMA = 2
"""Of ``--json``: raised when a field changes its meaning or goes; new fields may come at any time."""


@dataclass(frozen=True)
class WorkerStatus:
    """A live worker. Times are seconds ago; None: not known."""

    worker: int
    host: str
    node: str
    replica: int | None
    position: int | None
    iteration: int
    phase: str
    microbatch: int | None
    silence: float | None
    """Since anything was heard of it; None: it has no connection to this coordinator."""
    marked: float | None
    """Since its last progress mark."""
    waiting: float | None
    """Since when it waits for others; None: it does not."""
    joined: bool
    """Whether it has come to the rendezvous that is (or was last) open."""
    quota: int | None
    note: str
    device: int | None = None
    """The number of its device on its host."""
    pid: int | None = None


@dataclass(frozen=True)
class Replica:
    """One that runs."""

    replica: int
    workers: Sequence[WorkerStatus]
    quota: int | None
    """Microbatches of an iteration, where the plan tells them."""


@dataclass(frozen=True)
class Gone:
    """A worker that is no part of the run any more."""

    worker: int
    fate: str
    host: str
    why: str
    ago: float | None
    exit: str = ""
    """How its process ended, as its launcher saw it: "SIGKILL", "exit code 1"."""
    phase: str = ""
    """What it was doing when it was last heard."""
    iteration: int | None = None

    @property
    def cause(self) -> str:
        """One word for why it is gone, of few, as metrics need; of a fault that nobody has named "ended"."""
        if self.fate == "out":
            silent = "silent" in self.why or "acknowledged" in self.why
            return "hang" if "no progress" in self.why else "silent" if silent else "unreachable"
        if self.exit.startswith(("SIG", "signal")) or "(SIG" in self.why:
            return "killed"
        return "exit" if self.exit or "(exit code" in self.why else "ended"


@dataclass(frozen=True)
class Fault:
    """One of the last faults."""

    ago: float
    kind: str
    worker: int | None
    host: str
    why: str


@dataclass(frozen=True)
class RecoveryStatus:
    """One of the last plans."""

    ago: float
    epoch: int
    reason: str
    workers: int
    rendezvous: float | None
    since_fault: float | None


@dataclass(frozen=True)
class Stall:
    """The run waits for workers that are late: too many to go on without, or with their data."""

    seconds: float
    """Since when."""
    left: float
    """For how long it will go on waiting."""
    workers: Sequence[int]
    where: Sequence[str]
    """Of the first of them: who, on which host, and what it was doing."""


@dataclass(frozen=True)
class DrainStatus:
    """A node that somebody wants, or wanted, to switch off."""

    node: str
    state: str
    """``asked``, ``moving``, ``drained`` (it may be switched off) or ``refused``."""
    workers: Sequence[int]
    """Those of it that live."""
    reason: str = ""
    """Why it was refused."""
    names: Sequence[str] = ()
    """By which it may be asked for: its own, its host's."""


@dataclass(frozen=True)
class RunStatus:
    """The whole run, as its coordinator at ``address`` knows it."""

    address: str
    state: str
    """As the coordinator calls it (``membership/events.py``): standby, gathering, rendezvous, steady, stopped."""
    code: int | None = None
    """Of a run that has ended: its exit code."""
    reason: str = ""
    """Of a run that has ended: why."""
    ended_age: float | None = None
    """Of a run that has ended, where its log folder is known: seconds since then."""
    term: int = 0
    epoch: int = 0
    opened: int = 0
    iteration: int = 0
    """The newest that a worker with a place tells of."""
    committed: int = 0
    """The last decision (steps, evaluations and checkpoints are counted together)."""
    commit_age: float | None = None
    world: int = 0
    live: int = 0
    workers_of_launch: int | None = None
    replicas_of_launch: int | None = None
    grid: Sequence[Replica] = ()
    spares: Sequence[WorkerStatus] = ()
    unplaced: Sequence[WorkerStatus] = ()
    gone: Sequence[Gone] = ()
    faults: Sequence[Fault] = ()
    recoveries: Sequence[RecoveryStatus] = ()
    hidden: int = 0
    """Live workers that the view had no room for."""
    awaited: Sequence[int] = ()
    """Members that an open rendezvous waits for."""
    stall: Stall | None = None
    drains: Sequence[DrainStatus] = ()
    """Nodes that were to be drained."""
    training: Training | None = None
    """How the training gets on, where its log folder is known."""
    restarts: int | None = None
    """Workers that were started in place of others, where the log folder is known."""

    @property
    def attached(self) -> int:
        """Live workers that have a connection to this coordinator."""
        placed = [worker for replica in self.grid for worker in replica.workers]
        return sum(worker.silence is not None for worker in [*placed, *self.spares, *self.unplaced])

    @property
    def lost(self) -> list[Gone]:
        """Workers that died or were put out: without those that left in order, are aside, or were told to end."""
        return [gone for gone in self.gone if gone.fate not in ("left", "aside", "stopped")]

    @property
    def aside(self) -> list[int]:
        """Workers that live, are late, and may come back (--recover-grace)."""
        return [worker.worker for worker in self.gone if worker.fate == "aside"]

    @property
    def draining(self) -> list[str]:
        """Nodes that are being drained: not those that may be switched off, nor those that were refused."""
        return [drain.node for drain in self.drains if drain.state in ("asked", "moving")]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"schema": SCHEMA, "replicas_running": len(self.grid), **asdict(self)}

    def with_files(self, training: Training | None, processes: Mapping[int, Raw]) -> RunStatus:
        """With what the log folder tells; ``processes``: by worker id, of workers.json.

        Heartbeats tell of iterations up to an interval late; what is committed was begun.
        """
        return replace(
            self,
            training=training,
            iteration=max(self.iteration, training.iteration if training is not None else 0),
            restarts=sum(entry.get("replaces") is not None for entry in processes.values()) if processes else None,
            grid=[replace(r, workers=[_processed(w, processes) for w in r.workers]) for r in self.grid],
            spares=[_processed(worker, processes) for worker in self.spares],
            unplaced=[_processed(worker, processes) for worker in self.unplaced],
            gone=[replace(gone, exit=gone.exit or _exit(processes.get(gone.worker, {}))) for gone in self.gone],
        )


def of_launch(running: int, launched: int, noun: str = "") -> str:
    """ "7 of 8", "9 (8 at the launch)" where the run has grown; with a ``noun`` behind the first number or both."""
    noun = f" {noun}" if noun else ""
    return f"{running} of {launched}{noun}" if running <= launched else f"{running}{noun} ({launched} at the launch)"


def _processed(worker: WorkerStatus, processes: Mapping[int, Raw]) -> WorkerStatus:
    entry = processes.get(worker.worker, {})
    device = worker.device if worker.device is not None else entry.get("local_rank")
    return replace(worker, pid=entry.get("pid"), device=device)


def _exit(entry: Raw) -> str:
    if (number := entry.get("signal")) is not None:
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return "" if (code := entry.get("exit_code")) is None else f"exit code {code}"
