"""Status of a run for users and programs: ``RunStatus`` and its parts.  Pure.

    RunStatus:  grid       complete replicas, each with its workers by position
                spares     live workers without a place in a complete replica
                unplaced   live workers that have reported no place yet
                gone       workers that are dead, evicted, set aside or have left, with the reason

``read`` creates a ``RunStatus`` from the coordinator's answer, whose types ``membership.wire`` has checked.
``with_files`` adds data from the log folder.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from recover_megatron.membership.messages.to_member import Stop, View

Raw = Mapping[str, Any]
"""A JSON object."""
SCHEMA = 2
"""Version of the JSON of ``--json``; increased when a field is removed or gets another meaning."""

CAUSES = ("killed", "exit", "hang", "silent", "unreachable", "ended")
"""Causes of a worker's loss.  If the workers lost in a recovery have several causes, the first in this list counts."""


@dataclass(frozen=True)
class WorkerStatus:
    """State of a live worker.  Unknown values are None."""

    worker: int
    host: str
    node: str
    replica: int | None
    position: int | None
    iteration: int
    phase: str
    microbatch: int | None
    silence: float | None
    """Seconds since the worker's last message; None: the worker is not connected to this coordinator."""
    marked: float | None
    """Seconds since the worker's last progress mark."""
    waiting: float | None
    """Seconds since the worker began to wait for other workers; None: it does not wait."""
    joined: bool
    """True if the worker has joined the open rendezvous or, if none is open, the last rendezvous."""
    quota: int | None
    note: str
    device: int | None = None
    """Number of the worker's device on its host."""
    pid: int | None = None


@dataclass(frozen=True)
class Replica:
    replica: int
    workers: Sequence[WorkerStatus]
    quota: int | None
    """Number of microbatches per iteration; None if the plan has no quotas."""


@dataclass(frozen=True)
class Gone:
    """Worker that is no longer part of the run."""

    worker: int
    fate: str
    host: str
    why: str
    ago: float | None
    exit: str = ""
    """End of the worker's process, from its launcher: "SIGKILL", "SIGKILL, out of memory", "exit code 1"."""
    phase: str = ""
    """Phase that the worker last reported."""
    iteration: int | None = None

    @property
    def cause(self) -> str:
        """Cause of the worker's loss for metrics, one of ``CAUSES``; "ended" if it is unknown."""
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
    """Wait of the run for late workers, not evicted yet: too many are late, or they may be waiting for storage."""

    seconds: float
    """Seconds since the wait began."""
    left: float | None
    """Seconds until the run evicts the workers; None: it waits without limit."""
    workers: Sequence[int]
    where: Sequence[str]
    """Descriptions of the first late workers: worker id, host and phase."""


@dataclass(frozen=True)
class DrainStatus:
    """Node that a user asked to drain."""

    node: str
    state: str
    """State of the drain: ``asked``, ``moving``, ``drained`` (the node may be switched off) or ``refused``."""
    workers: Sequence[int]
    """Live workers of the node."""
    reason: str = ""
    """Reason, if the drain was refused."""
    names: Sequence[str] = ()
    """Names that a user may give for the node: its own name, and names of its host."""


@dataclass(frozen=True)
class Training:
    """Progress of the training; unknown values are None."""

    iteration: int
    """The last committed iteration."""
    train_iters: int | None
    loss: float | None
    seconds_per_iteration: float | None
    """Mean time of the last ``folder.RECENT`` iterations, including the time of recoveries."""
    samples_per_second: float | None
    tflops_per_gpu: float | None
    """TFLOP/s by Megatron's formula, divided by the number of workers at launch."""
    eta_seconds: float | None
    goodput: float | None
    """Time in committed iterations, without recoveries, as a share of the time since the start of training: 0 to 1.

    The time of an iteration with half of the launch's replicas counts half.
    """
    checkpoint: int | None
    """Iteration of the last checkpoint of this launch."""
    checkpoint_folder: str | None
    checkpoint_age: float | None
    recoveries: int
    microbatches_rerun: int


@dataclass(frozen=True)
class RunStatus:
    """Status of a run, as the coordinator at ``address`` knows it."""

    address: str
    state: str
    """State of the coordinator (``membership/events.py``): standby, gathering, rendezvous, steady or stopped."""
    code: int | None = None
    """Exit code, if the run has ended."""
    reason: str = ""
    """Reason, if the run has ended."""
    ended_age: float | None = None
    """Seconds since the run ended; None if it runs, or its log folder is not known."""
    term: int = 0
    epoch: int = 0
    opened: int = 0
    iteration: int = 0
    """Newest iteration that a worker with a place has reported."""
    loss: float | None = None
    """Loss of the last step, if the workers use the library's API; NaN if the loss is not finite."""
    committed: int = 0
    """Number of the last committed decision, counting steps, evaluations and checkpoints."""
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
    """Number of live workers that the coordinator's view leaves out, since the size of the message is limited."""
    awaited: Sequence[int] = ()
    """Ids of the members that have not joined the open rendezvous yet; empty if none is open."""
    stall: Stall | None = None
    drains: Sequence[DrainStatus] = ()
    """Nodes that users asked to drain, with the state of each drain."""
    training: Training | None = None
    """Progress of the training; None if the log folder is not known."""
    restarts: int | None = None
    """Number of replacement workers started; None if the log folder is not known."""
    started_age: float | None = None
    """Seconds since the launch's first worker was started; None if the log folder is not known."""

    @property
    def workers(self) -> list[WorkerStatus]:
        """All live workers, in the order of their ids."""
        return sorted([*self.placed, *self.spares, *self.unplaced], key=lambda worker: worker.worker)

    @property
    def between(self) -> float | None:
        """Seconds since the present start or recovery began; None if it is unknown, or if none is under way."""
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
        """The workers of the complete replicas."""
        return [worker for replica in self.grid for worker in replica.workers]

    @property
    def attached(self) -> int:
        """Number of live workers that have a connection to this coordinator."""
        return sum(worker.silence is not None for worker in self.workers)

    @property
    def lost(self) -> list[Gone]:
        """Workers that died or were evicted; without workers that left normally, are set aside, or were stopped."""
        return [gone for gone in self.gone if gone.fate not in ("left", "aside", "stopped")]

    @property
    def aside(self) -> list[int]:
        """Ids of the workers that are set aside: live, but late by more than --recover-grace; may come back."""
        return [worker.worker for worker in self.gone if worker.fate == "aside"]

    @property
    def draining(self) -> list[str]:
        """Names of the nodes whose drain is under way."""
        return [drain.node for drain in self.drains if drain.state in ("asked", "moving")]

    def to_json(self) -> dict[str, Any]:
        value = {"schema": SCHEMA, "replicas_running": len(self.grid), "between": self.between, **asdict(self)}
        for part in (value, value["training"] or {}):
            if not math.isfinite(part.get("loss") or 0.0):
                part["loss"] = None  # JSON has no NaN
        return value

    def with_files(self, training: Training | None, processes: Mapping[int, Raw]) -> RunStatus:
        """Return this status with data of the log folder; ``processes``: worker id -> entry of workers.json.

        The returned ``iteration`` is the newer of the iterations in the log folder and in the workers' last heartbeats,
        which may be up to a heartbeat interval old.
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
    """Return "7 of 8 NOUN" or, if the run has grown, "9 NOUN (8 at launch)"; NOUN is ``noun``, or nothing."""
    noun = f" {noun}" if noun else ""
    return f"{running} of {launched}{noun}" if running <= launched else f"{running}{noun} ({launched} at launch)"


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


def read(answer: View | Stop, address: str) -> RunStatus:
    """Return the status in a coordinator's message.

    Raises KeyError, TypeError or ValueError if another version of this package sent the message.
    """
    if isinstance(answer, Stop):
        return RunStatus(address, "stopped", code=answer.code, reason=printable(answer.reason), epoch=answer.epoch)
    rows, stall = printable(answer.workers), printable(answer.stall)
    live = {row["worker"]: _worker(row) for row in rows if row["fate"] == "live"}
    grid = _grid([worker for worker in live.values() if worker.replica is not None], answer.replica_size)
    placed = {worker.worker for replica in grid for worker in replica.workers}
    places = {row["worker"] for row in rows if "replica" in row.get("status", ())}
    idle = {row["worker"] for row in rows if row.get("idle")}
    rendezvous = answer.state in ("gathering", "rendezvous")
    members = {row["worker"] for row in rows if row.get("member")} or live.keys()
    return RunStatus(
        address=address,
        state=printable(answer.state),
        **{name: getattr(answer, name) for name in ("term", "epoch", "opened", "committed", "world", "live", "hidden")},
        iteration=max((live[n].iteration for n in placed or live), default=0),
        loss=_loss([row["loss"] for row in rows if "loss" in row]),
        commit_age=answer.commit_age,
        workers_of_launch=answer.launched,
        replicas_of_launch=_replicas_of_launch(answer),
        grid=grid,
        spares=[_spare(live[n]) for n in sorted((places | idle) & live.keys() - placed)],
        unplaced=[live[n] for n in sorted(live.keys() - placed - places - idle)],
        gone=[_gone(row) for row in rows if row["worker"] not in live],
        faults=[Fault(**row) for row in printable(answer.faults)],
        recoveries=[_recovery(row) for row in printable(answer.recoveries)],
        stall=Stall(**{**stall, "workers": _workers(stall)}) if stall is not None else None,
        drains=[_drain(row) for row in printable(answer.drains)],
        awaited=[n for n in sorted(members & live.keys()) if rendezvous and not live[n].joined],
    )


def printable(value: Any) -> Any:
    """Replace unprintable characters in all strings of ``value``, so that members' data cannot control the terminal."""
    match value:
        case str():
            return "".join(c if c.isprintable() else "?" for c in value)
        case list():
            return [printable(part) for part in value]
        case dict():
            return {name: printable(part) for name, part in value.items()}
    return value


def _grid(workers: Sequence[WorkerStatus], size: int) -> list[Replica]:
    """Return the replicas that have a live worker in each of their ``size`` positions.

    ``size`` is from the coordinator's plans, because live workers alone do not show that a replica has lost a worker.
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
    """Return the worker's position or, if the position is unknown, the worker's id, which also tells workers apart."""
    return worker.worker if worker.position is None else worker.position


def _replicas_of_launch(answer: View) -> int | None:
    """Return the number of replicas at launch; None if the plans name no replicas.

    If the number of workers at launch is unknown, return the number of all replicas that plans have named, which is
    larger if the run has grown.
    """
    size, runs = answer.replica_size, answer.replicas
    return (answer.launched // size or sum(last - first + 1 for first, last in runs)) if size else None


def _spare(worker: WorkerStatus) -> WorkerStatus:
    broken = "" if worker.replica is None else f"replica {worker.replica} is not complete"
    return replace(worker, note=worker.note or broken)


def _worker(row: Raw) -> WorkerStatus:
    status = row["status"]
    # A plan may have given the worker another place than the one in ``status``, with which the worker joined.
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
    fields = {name: row[name] for name in ("ago", "epoch", "reason", "workers")}
    return RecoveryStatus(**fields, **{name: row["seconds"].get(name) for name in ("rendezvous", "since_fault")})


def _drain(row: Raw) -> DrainStatus:
    return DrainStatus(**{**row, "workers": _workers(row), "names": [row["node"], *row["names"]]})


def _loss(reports: Sequence[tuple[int, float | None]]) -> float | None:
    """Return the loss of the newest step in ``reports`` (step, loss); None without reports, NaN if not finite."""
    if not reports:
        return None
    _, loss = max(reports, key=lambda report: report[0])
    return math.nan if loss is None else loss


def _workers(row: Raw) -> list[int]:
    return [worker for first, last in row["workers"] for worker in range(first, min(last, first + 999) + 1)]
