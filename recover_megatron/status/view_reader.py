"""From the coordinator's answer to a ``RunStatus``: pure, and tolerant of keys that another version leaves out.

A replica runs when every one of its positions has a live worker that joined the epoch with it. How many positions that
are the coordinator remembers from all plans it made, so a replica that lost a worker is not taken for a small one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from recover_megatron.status import fields
from recover_megatron.status.fields import Raw
from recover_megatron.status.model import (
    DrainStatus,
    Fault,
    Gone,
    RecoveryStatus,
    Replica,
    RunStatus,
    Stall,
    WorkerStatus,
)


def read(answer: Raw, address: str) -> RunStatus:
    """The status in an answer of the coordinator at ``address``: a ``view``, or ``stop``."""
    if answer.get("type") == "stop":
        code, reason = fields.number(answer, "code"), fields.text(answer, "reason")
        return RunStatus(address, "stopped", code=code, reason=reason, epoch=fields.number(answer, "epoch") or 0)
    rows = [row for row in answer.get("workers", ()) if fields.number(row, "worker") is not None]
    live = {row["worker"]: _worker(row) for row in rows if row.get("fate", "live") == "live"}
    statuses = {row["worker"]: row.get("status") or {} for row in rows}
    size = max(1, fields.number(answer, "replica_size") or 0)
    grid = _grid([worker for worker in live.values() if worker.replica is not None], size)
    placed = {worker.worker for replica in grid for worker in replica.workers}
    places = {number for number, row in statuses.items() if "replica" in row}
    idle = {row["worker"] for row in rows if row.get("idle")}
    rendezvous = answer.get("state") in ("gathering", "rendezvous")
    members = {row["worker"] for row in rows if row.get("member")} or live.keys()
    return RunStatus(
        address=address,
        state=fields.text(answer, "state"),
        term=fields.number(answer, "term") or 0,
        epoch=fields.number(answer, "epoch") or 0,
        opened=fields.number(answer, "opened") or 0,
        iteration=max((live[n].iteration for n in placed or live), default=0),
        committed=fields.number(answer, "committed") or 0,
        commit_age=fields.seconds(answer, "commit_age"),
        world=fields.number(answer, "world") or 0,
        live=fields.number(answer, "live") or len(live),
        workers_of_launch=fields.number(answer, "launched"),
        replicas_of_launch=_replicas_of_launch(answer),
        grid=grid,
        spares=[_spare(live[n]) for n in sorted((places | idle) & live.keys() - placed)],
        unplaced=[live[n] for n in sorted(live.keys() - placed - places - idle)],
        gone=[_gone(row) for row in rows if row["worker"] not in live],
        faults=[_fault(row) for row in answer.get("faults", ())],
        recoveries=[_recovery(row) for row in answer.get("recoveries", ())],
        hidden=fields.number(answer, "hidden") or 0,
        stall=_stall(answer.get("stall")),
        drains=[_drain(row) for row in answer.get("drains", ())],
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
    """As many as its workers make; all that any plan had where those are not told; None where plans tell of none.

    (A run that has grown has had more of them than at the launch.)
    """
    runs = [run for run in answer.get("replicas", ()) if isinstance(run, list) and len(run) == 2]
    size, launched = fields.number(answer, "replica_size"), fields.number(answer, "launched") or 0
    return (launched // size or sum(last - first + 1 for first, last in runs)) if size else None


def _spare(worker: WorkerStatus) -> WorkerStatus:
    """One that joined with a place has lost it since."""
    if worker.note or worker.replica is None:
        return worker
    return replace(worker, note=f"replica {worker.replica} is not whole")


def _worker(row: Raw) -> WorkerStatus:
    status = row.get("status") or {}
    # What it says now, if it does: a plan may have given it another place than it joined with.
    replica, position, quota = row.get("place") or (
        fields.number(status, "replica"),
        fields.number(status, "position"),
        fields.number(status, "quota"),
    )
    return WorkerStatus(
        worker=row["worker"],
        host=fields.text(row, "host"),
        node=fields.text(status, "node") or fields.text(row, "node"),
        replica=replica,
        position=position,
        iteration=fields.number(row, "iteration") or fields.number(status, "iteration") or 0,
        phase=fields.text(row, "phase"),
        microbatch=fields.number(row, "microbatch"),
        silence=fields.seconds(row, "silence"),
        marked=fields.seconds(row, "marked"),
        waiting=fields.seconds(row, "waiting"),
        joined=bool(row.get("joined")),
        quota=quota,
        note=fields.text(status, "note"),
        device=fields.number(status, "device"),
    )


def _gone(row: Raw) -> Gone:
    return Gone(
        row["worker"],
        fields.text(row, "fate"),
        fields.text(row, "host"),
        fields.text(row, "why"),
        fields.seconds(row, "ago"),
        phase=fields.text(row, "phase"),
        iteration=fields.number(row, "iteration"),
    )


def _fault(row: Raw) -> Fault:
    ago = fields.seconds(row, "ago") or 0.0
    return Fault(
        ago, fields.text(row, "kind"), fields.number(row, "worker"), fields.text(row, "host"), fields.text(row, "why")
    )


def _recovery(row: Raw) -> RecoveryStatus:
    seconds = row.get("seconds") or {}
    return RecoveryStatus(
        ago=fields.seconds(row, "ago") or 0.0,
        epoch=fields.number(row, "epoch") or 0,
        reason=fields.text(row, "reason"),
        workers=fields.number(row, "workers") or 0,
        rendezvous=fields.seconds(seconds, "rendezvous"),
        since_fault=fields.seconds(seconds, "since_fault"),
    )


def _drain(row: Raw) -> DrainStatus:
    names = [fields.printable(name or "") for name in row.get("names", ())]
    node = fields.text(row, "node")
    return DrainStatus(node, fields.text(row, "state"), _workers(row), fields.text(row, "reason"), [node, *names])


def _workers(row: Raw) -> list[int]:
    runs = [run for run in row.get("workers", ()) if isinstance(run, list) and [*map(type, run)] == [int, int]]
    return [worker for first, last in runs for worker in range(first, min(last, first + 999) + 1)]


def _stall(value: Any) -> Stall | None:
    if not isinstance(value, dict):
        return None
    workers = _workers(value)
    where = [fields.printable(line) for line in value.get("where", ())]
    return Stall(fields.seconds(value, "seconds") or 0.0, fields.seconds(value, "left") or 0.0, workers, where)
