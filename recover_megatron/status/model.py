"""A run as it is shown to people and programs: ``RunStatus`` and what it consists of.  Pure.

    RunStatus:  grid       replicas that run, each with its workers by position
                spares     live workers without a place in a whole replica
                unplaced   live workers of which no place is known (yet)
                gone       dead, put out, left: why, and how long ago

``read`` makes it of what the coordinator answers, which ``wire`` has checked; ``with_files`` adds what the log folder
tells.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Raw = Mapping[str, Any]
"""A JSON object."""
SCHEMA = 2
"""Of ``--json``: raised when a field changes its meaning or goes; new fields may come at any time."""

CAUSES = ("killed", "exit", "hang", "silent", "unreachable", "ended")
"""Of the end of a worker, in the order in which one of several is told."""


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
    """How its process ended, as its launcher saw it: "SIGKILL", "SIGKILL, out of memory", "exit code 1"."""
    phase: str = ""
    """What it was doing when it was last heard."""
    iteration: int | None = None

    @property
    def cause(self) -> str:
        """One of ``CAUSES``, as metrics need; of a fault that nobody has named "ended"."""
        if self.fate == "out":
            silent = "silent" in self.why or "acknowledged" in self.why
            return "hang" if "no progress" in self.why else "silent" if silent else "unreachable"
        if self.exit.startswith(("SIG", "signal")) or "(SIG" in self.why:
            return "killed"
        return "exit" if self.exit or "(exit code" in self.why else "ended"


@dataclass(frozen=True)
class Fault:
    ago: float
    kind: str
    worker: int | None
    host: str
    why: str


@dataclass(frozen=True)
class RecoveryStatus:
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
    left: float | None
    """For how long it will go on waiting; None: as long as it takes."""
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
class Training:
    """How the training gets on; what is not known is None."""

    iteration: int
    """The last that was committed."""
    train_iters: int | None
    loss: float | None
    seconds_per_iteration: float | None
    """Mean of the last ``folder.RECENT``, recoveries included."""
    samples_per_second: float | None
    tflops_per_gpu: float | None
    """By Megatron's own formula, over the workers of the launch."""
    eta_seconds: float | None
    goodput: float | None
    """Share of the launch's worker time since the training began that went into committed iterations, 0 to 1."""
    checkpoint: int | None
    """The iteration of the last one of this launch."""
    checkpoint_folder: str | None
    checkpoint_age: float | None
    recoveries: int
    microbatches_rerun: int


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
    loss: float | None = None
    """The loss of the last step that workers of the library tell of; NaN where it is not finite."""
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
    started_age: float | None = None
    """Seconds since the launch's first worker was started, where the log folder is known."""

    @property
    def workers(self) -> list[WorkerStatus]:
        """All live workers, by number."""
        return sorted([*self.placed, *self.spares, *self.unplaced], key=lambda worker: worker.worker)

    @property
    def between(self) -> float | None:
        """For how long the start, or the recovery, has been under way, for all that is known; None: neither is."""
        if self.state not in ("standby", "gathering", "rendezvous"):
            return None
        if not self.epoch:
            ages = [self.started_age, *(worker.marked for worker in self.workers)]
        else:
            planned = self.recoveries[-1].ago if self.recoveries else math.inf
            ages = [fault.ago for fault in self.faults if fault.ago < planned]
            ages += [worker.waiting for worker in self.workers if worker.joined]
        return max((age for age in ages if age is not None), default=None)

    @property
    def placed(self) -> list[WorkerStatus]:
        """The workers of the replicas that run."""
        return [worker for replica in self.grid for worker in replica.workers]

    @property
    def attached(self) -> int:
        """Live workers that have a connection to this coordinator."""
        return sum(worker.silence is not None for worker in self.workers)

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
        told = {"schema": SCHEMA, "replicas_running": len(self.grid), "between": self.between, **asdict(self)}
        for its in (told, told["training"] or {}):
            if not math.isfinite(its.get("loss") or 0.0):
                its["loss"] = None  # JSON has no NaN
        return told

    def with_files(self, training: Training | None, processes: Mapping[int, Raw]) -> RunStatus:
        """With what the log folder tells; ``processes``: by worker id, of workers.json.

        Heartbeats tell of iterations up to an interval late; what is committed was begun.
        """
        started = [entry["started"] for entry in processes.values() if entry.get("started") is not None]
        return replace(
            self,
            training=training,
            started_age=max(0.0, time.time() - min(started)) if started else None,
            iteration=max(self.iteration, training.iteration if training is not None else 0),
            restarts=sum(entry.get("replaces") is not None for entry in processes.values()) if processes else None,
            grid=[replace(r, workers=[_processed(w, processes) for w in r.workers]) for r in self.grid],
            spares=[_processed(worker, processes) for worker in self.spares],
            unplaced=[_processed(worker, processes) for worker in self.unplaced],
            gone=[_ended(gone, processes.get(gone.worker, {})) for gone in self.gone],
        )


def of_launch(running: int, launched: int, noun: str = "") -> str:
    """ "7 of 8", "9 (8 at the launch)" where the run has grown; with a ``noun`` behind the first number or both."""
    noun = f" {noun}" if noun else ""
    return f"{running} of {launched}{noun}" if running <= launched else f"{running}{noun} ({launched} at the launch)"


def _processed(worker: WorkerStatus, processes: Mapping[int, Raw]) -> WorkerStatus:
    entry = processes.get(worker.worker, {})
    device = worker.device if worker.device is not None else entry.get("local_rank")
    return replace(worker, pid=entry.get("pid"), device=device, host=worker.host or entry.get("host", ""))


def _ended(gone: Gone, entry: Raw) -> Gone:
    return replace(gone, exit=gone.exit or _exit(entry), host=gone.host or entry.get("host", ""))


def _exit(entry: Raw) -> str:
    if (number := entry.get("signal")) is not None:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    elif (code := entry.get("exit_code")) is not None:
        name = f"exit code {code}"
    else:
        return entry.get("note", "") if entry.get("state") == "running" else ""
    return f"{name}, {entry['kernel']}" if entry.get("kernel") else name


def read(answer: Raw, address: str) -> RunStatus:
    """The status in a ``view`` or ``stop`` of ``address``.  KeyError, TypeError, ValueError: not of this version."""
    answer = printable(answer)
    if answer["type"] == "stop":
        return RunStatus(address, "stopped", code=answer["code"], reason=answer["reason"], epoch=answer["epoch"])
    rows = answer["workers"]
    live = {row["worker"]: _worker(row) for row in rows if row["fate"] == "live"}
    grid = _grid([worker for worker in live.values() if worker.replica is not None], answer["replica_size"])
    placed = {worker.worker for replica in grid for worker in replica.workers}
    places = {row["worker"] for row in rows if "replica" in row.get("status", ())}
    idle = {row["worker"] for row in rows if row.get("idle")}
    rendezvous = answer["state"] in ("gathering", "rendezvous")
    members = {row["worker"] for row in rows if row.get("member")} or live.keys()
    return RunStatus(
        address=address,
        **{name: answer[name] for name in ("state", "term", "epoch", "opened", "committed", "world", "live", "hidden")},
        iteration=max((live[n].iteration for n in placed or live), default=0),
        loss=_loss([row["loss"] for row in rows if "loss" in row]),
        commit_age=answer.get("commit_age"),
        workers_of_launch=answer["launched"],
        replicas_of_launch=_replicas_of_launch(answer),
        grid=grid,
        spares=[_spare(live[n]) for n in sorted((places | idle) & live.keys() - placed)],
        unplaced=[live[n] for n in sorted(live.keys() - placed - places - idle)],
        gone=[_gone(row) for row in rows if row["worker"] not in live],
        faults=[Fault(**row) for row in answer["faults"]],
        recoveries=[_recovery(row) for row in answer["recoveries"]],
        stall=Stall(**{**answer["stall"], "workers": _workers(answer["stall"])}) if "stall" in answer else None,
        drains=[_drain(row) for row in answer.get("drains", ())],
        awaited=[n for n in sorted(members & live.keys()) if rendezvous and not live[n].joined],
    )


def printable(value: Any) -> Any:
    """``value`` with all texts in it made harmless: what a member sends must not steer the terminal that shows it."""
    match value:
        case str():
            return "".join(c if c.isprintable() else "?" for c in value)
        case list():
            return [printable(part) for part in value]
        case dict():
            return {name: printable(part) for name, part in value.items()}
    return value


def _grid(workers: Sequence[WorkerStatus], size: int) -> list[Replica]:
    """The replicas of which every position has a live worker; ``size``: how many positions one has.

    The coordinator remembers that of all plans it made: a replica that lost a worker is not taken for a small one.
    """
    by_replica: dict[int, list[WorkerStatus]] = {}
    for worker in workers:
        assert worker.replica is not None
        by_replica.setdefault(worker.replica, []).append(worker)
    grid = []
    for number, members in sorted(by_replica.items()):
        members.sort(key=lambda worker: (worker.position is None, worker.position, worker.worker))
        if len({(worker.position is None, _place(worker)) for worker in members}) >= size:
            quota = next((worker.quota for worker in members if worker.quota is not None), None)
            grid.append(Replica(number, members, quota))
    return grid


def _place(worker: WorkerStatus) -> int:
    """Two workers of one replica at the same position are one place; where none is told, each has its own."""
    return worker.worker if worker.position is None else worker.position


def _replicas_of_launch(answer: Raw) -> int | None:
    """As many as its workers make; all that any plan had where those are not told; None where plans tell of none.

    (A run that has grown has had more of them than at the launch.)
    """
    size, runs = answer["replica_size"], answer["replicas"]
    return (answer["launched"] // size or sum(last - first + 1 for first, last in runs)) if size else None


def _spare(worker: WorkerStatus) -> WorkerStatus:
    if worker.note or worker.replica is None:
        return worker
    return replace(worker, note=f"replica {worker.replica} is not whole")


def _worker(row: Raw) -> WorkerStatus:
    status = row["status"]
    # What it says now, if it does: a plan may have given it another place than it joined with.
    replica, position, quota = row.get("place") or map(status.get, ("replica", "position", "quota"))
    return WorkerStatus(
        worker=row["worker"],
        host=row["host"],
        node=status.get("node") or row["node"],
        replica=replica,
        position=position,
        iteration=row["iteration"] or status.get("iteration") or 0,
        phase=row["phase"],
        **{name: row.get(name) for name in ("microbatch", "silence", "marked", "waiting")},
        joined=row["joined"],
        quota=quota,
        note=status.get("note", ""),
        device=status.get("device"),
    )


def _gone(row: Raw) -> Gone:
    seen = {name: row[name] for name in ("phase", "iteration") if name in row}
    return Gone(row["worker"], row["fate"], row["host"], row["why"], row.get("ago"), **seen)


def _recovery(row: Raw) -> RecoveryStatus:
    told = {name: row[name] for name in ("ago", "epoch", "reason", "workers")}
    return RecoveryStatus(**told, **{name: row["seconds"].get(name) for name in ("rendezvous", "since_fault")})


def _drain(row: Raw) -> DrainStatus:
    return DrainStatus(**{**row, "workers": _workers(row), "names": [row["node"], *row["names"]]})


def _loss(told: Sequence[tuple[int, float | None]]) -> float | None:
    """Return the loss of the newest of these steps: all workers that have finished it tell the same."""
    if not told:
        return None
    _, loss = max(told, key=lambda its: its[0])
    return math.nan if loss is None else loss


def _workers(row: Raw) -> list[int]:
    return [worker for first, last in row["workers"] for worker in range(first, min(last, first + 999) + 1)]
