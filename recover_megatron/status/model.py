"""What a view says, sorted for people: pure, and tolerant of keys that another version leaves out.

    coordinator's answer --read--> Status:  grid       replicas that run, each with its workers by position
                                            spares     live workers without a place in a whole replica
                                            unplaced   live workers of which no place is known (yet)
                                            gone       dead, put out, left: why, and how long ago

A replica runs when every one of its positions has a live worker that joined the epoch with it. How many positions that
are the coordinator remembers from all plans it made, so a replica that lost a worker is not taken for a small one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Raw = Mapping[str, Any]


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
class RunStatus:
    """The whole run, as its coordinator at ``address`` knows it."""

    address: str
    state: str
    """As the coordinator calls it: standby, rendezvous, steady, stopped."""
    code: int | None = None
    """Of a run that has ended: its exit code."""
    reason: str = ""
    """Of a run that has ended: why."""
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

    @property
    def attached(self) -> int:
        """Live workers that have a connection to this coordinator."""
        placed = [worker for replica in self.grid for worker in replica.workers]
        return sum(worker.silence is not None for worker in [*placed, *self.spares, *self.unplaced])

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"replicas_running": len(self.grid), **asdict(self)}


def read(answer: Raw, address: str) -> RunStatus:
    """The status in an answer of the coordinator at ``address``: a ``view``, or ``stop``."""
    if answer.get("type") == "stop":
        code, reason = _number(answer, "code"), _text(answer, "reason")
        return RunStatus(address, "stopped", code=code, reason=reason, epoch=_number(answer, "epoch") or 0)
    rows = [row for row in answer.get("workers", ()) if _number(row, "worker") is not None]
    live = {row["worker"]: _worker(row) for row in rows if row.get("fate", "live") == "live"}
    statuses = {row["worker"]: row.get("status") or {} for row in rows}
    size = max(1, _number(answer, "replica_size") or 0)
    grid = _grid([worker for worker in live.values() if worker.replica is not None], size)
    placed = {worker.worker for replica in grid for worker in replica.workers}
    places = {number for number, row in statuses.items() if "replica" in row}
    idle = {row["worker"] for row in rows if row.get("idle")}
    rendezvous = answer.get("state") in ("gathering", "rendezvous")
    members = {row["worker"] for row in rows if row.get("member")} or live.keys()
    return RunStatus(
        address=address,
        state=_text(answer, "state"),
        term=_number(answer, "term") or 0,
        epoch=_number(answer, "epoch") or 0,
        opened=_number(answer, "opened") or 0,
        iteration=max((live[n].iteration for n in placed or live), default=0),
        committed=_number(answer, "committed") or 0,
        commit_age=_seconds(answer, "commit_age"),
        world=_number(answer, "world") or 0,
        live=_number(answer, "live") or len(live),
        replicas_of_launch=_replicas_of_launch(answer),
        grid=grid,
        spares=[_spare(live[n]) for n in sorted((places | idle) & live.keys() - placed)],
        unplaced=[live[n] for n in sorted(live.keys() - placed - places - idle)],
        gone=[_gone(row) for row in rows if row["worker"] not in live],
        faults=[_fault(row) for row in answer.get("faults", ())],
        recoveries=[_recovery(row) for row in answer.get("recoveries", ())],
        hidden=_number(answer, "hidden") or 0,
        stall=_stall(answer.get("stall")),
        awaited=[n for n in sorted(members & live.keys()) if rendezvous and not live[n].joined],
    )


def _grid(workers: Sequence[WorkerStatus], size: int) -> list[Replica]:
    """The replicas of which every position is there; ``size``: how many positions one has."""
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
    """As many as its workers make, and at least all that any plan had; None where plans tell of no replicas."""
    runs = [run for run in answer.get("replicas", ()) if isinstance(run, list) and len(run) == 2]
    size, launched = _number(answer, "replica_size"), _number(answer, "launched") or 0
    return max(sum(last - first + 1 for first, last in runs), launched // size) if size else None


def _spare(worker: WorkerStatus) -> WorkerStatus:
    """One that joined with a place has lost it since."""
    if worker.note or worker.replica is None:
        return worker
    return WorkerStatus(**{**worker.__dict__, "note": f"replica {worker.replica} is not whole"})


def _worker(row: Raw) -> WorkerStatus:
    status = row.get("status") or {}
    # What it says now, if it does: a plan may have given it another place than it joined with.
    replica, position, quota = row.get("place") or (
        _number(status, "replica"),
        _number(status, "position"),
        _number(status, "quota"),
    )
    return WorkerStatus(
        worker=row["worker"],
        host=_text(row, "host"),
        node=_text(status, "node") or _text(row, "node"),
        replica=replica,
        position=position,
        iteration=_number(row, "iteration") or _number(status, "iteration") or 0,
        phase=_text(row, "phase"),
        microbatch=_number(row, "microbatch"),
        silence=_seconds(row, "silence"),
        marked=_seconds(row, "marked"),
        waiting=_seconds(row, "waiting"),
        joined=bool(row.get("joined")),
        quota=quota,
        note=_text(status, "note"),
    )


def _gone(row: Raw) -> Gone:
    return Gone(row["worker"], _text(row, "fate"), _text(row, "host"), _text(row, "why"), _seconds(row, "ago"))


def _fault(row: Raw) -> Fault:
    ago = _seconds(row, "ago") or 0.0
    return Fault(ago, _text(row, "kind"), _number(row, "worker"), _text(row, "host"), _text(row, "why"))


def _recovery(row: Raw) -> RecoveryStatus:
    seconds = row.get("seconds") or {}
    return RecoveryStatus(
        ago=_seconds(row, "ago") or 0.0,
        epoch=_number(row, "epoch") or 0,
        reason=_text(row, "reason"),
        workers=_number(row, "workers") or 0,
        rendezvous=_seconds(seconds, "rendezvous"),
        since_fault=_seconds(seconds, "since_fault"),
    )


def _stall(value: Any) -> Stall | None:
    if not isinstance(value, dict):
        return None
    runs = [run for run in value.get("workers", ()) if isinstance(run, list) and [*map(type, run)] == [int, int]]
    workers = [worker for first, last in runs for worker in range(first, min(last, first + 999) + 1)]
    where = ["".join(c if c.isprintable() else "?" for c in str(text)) for text in value.get("where", ())]
    return Stall(_seconds(value, "seconds") or 0.0, _seconds(value, "left") or 0.0, workers, where)


def _number(row: Raw, name: str) -> int | None:
    value = row.get(name)
    return value if type(value) is int else None


def _seconds(row: Raw, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _text(row: Raw, name: str) -> str:
    """Printable: what a member sends must not steer the terminal that shows it."""
    return "".join(c if c.isprintable() else "?" for c in str(row.get(name) or ""))
