"""From the coordinator's answer, which ``wire`` has checked, to a ``RunStatus``: pure.

A replica runs when every one of its positions has a live worker that joined the epoch with it. How many positions that
are the coordinator remembers from all plans it made, so a replica that lost a worker is not taken for a small one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from recover_megatron.status.model import (
    DrainStatus,
    Fault,
    Gone,
    Raw,
    RecoveryStatus,
    Replica,
    RunStatus,
    Stall,
    WorkerStatus,
)


def read(answer: Raw, address: str) -> RunStatus:
    """The status in an answer of the coordinator at ``address``: a ``view``, or ``stop``.

    Raises KeyError, TypeError or ValueError for rows that no coordinator of this version makes.
    """
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
    size, runs = answer["replica_size"], answer["replicas"]
    return (answer["launched"] // size or sum(last - first + 1 for first, last in runs)) if size else None


def _spare(worker: WorkerStatus) -> WorkerStatus:
    """One that joined with a place has lost it since."""
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


def _workers(row: Raw) -> list[int]:
    return [worker for first, last in row["workers"] for worker in range(first, min(last, first + 999) + 1)]
