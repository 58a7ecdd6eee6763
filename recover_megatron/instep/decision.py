"""Records of a rendezvous: the status that each worker sends, and the decision that all workers compute (`plan`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from recover_megatron.errors import Disagreement
from recover_megatron.workload.grid import LaunchGrid, Slot
from recover_megatron.workload.placement import Edge

_SEQUENCES = (
    "ran", "last_step", "unreached", "domains", "timeline", "checkpoints", "unreadable", "snapshots", "spoiled",
    "draining",
)  # fmt: skip
"""Fields of ``JoinStatus`` that are sequences."""

Timeline = tuple[int, int]
"""The run since its last rollback: (epoch that decided the rollback, iteration to which the run went back).

(0, 0): there was no rollback.  States of different timelines are never mixed, even if they have the same iteration.
"""
Checkpoint = tuple[int, str]
"""Complete checkpoint: (iteration, argument of Megatron that names the checkpoint's folder (``SOURCES``))."""
NON_PERSISTENT = "non_persistent"
"""Source of checkpoints of which Megatron keeps only the last one (--non-persistent-ckpt-type global)."""
SOURCES = ("save", "load", NON_PERSISTENT)
MEMORY = "memory"
"""``Rollback.source`` of a rollback to the snapshots in the workers' memory (`snapshots`)."""
HELD = "held"
"""``Rollback.source`` of a rollback after the newer state is lost.  The older state is held by workers that were set
aside."""
Snapshot = tuple[int, int, int, int, int]
"""Snapshot part that a worker holds: (part (``workload.snapshots``), iteration after which it was taken, epoch of its
timeline, epoch in which it was taken, number of parts of the snapshot).  The epoch in which it was taken is 0 if parts
taken in different epochs fit together."""


@dataclass(frozen=True)
class JoinStatus:
    """Status that a worker sends when it joins an epoch."""

    replica: int | None
    """Replica of the worker; None: the worker is a spare."""
    position: int | None = None
    """Position for which the worker's model is built; None: the worker has no model."""
    at: int = 0
    """Number of the decision that the worker works on, or of its last decision; steps and sections share one count."""
    step: bool = False
    """True if decision ``at`` is a training step that the worker has begun."""
    boundary: bool = False
    """True if decision ``at`` is a training step that the worker is about to begin.  Then the plan may replace the
    worker's state."""
    total: int = 0
    """Number of microbatches of step ``at`` over all replicas."""
    ran: Sequence[int] = ()
    """Ids of the microbatches whose gradients the worker's replica holds, in any of its inner ranks."""
    iteration: int = 0
    """Training iteration under way, from 1; for a spare: the newest iteration that it knows of."""
    last_step: tuple[int, int] = (0, 0)
    """(iteration, decision number) of the last training step that the worker has begun with its present state."""
    version: int | None = None
    """Number of iterations whose updates are in the worker's parameters and optimizer state; None: not known yet, or
    not usable."""
    digest: str = ""
    """Digest of the worker's state after ``version`` iterations; empty: not computed."""
    aside: bool = False
    """True for a spare that was set aside: alive, but late.  If no newer state is left, all workers may go back to this
    spare's state."""
    pace: float = 0.0
    """Seconds per microbatch of the worker's replica, divided by those of the median replica; 0: not measured."""
    ready: bool = False
    """True for a spare that can take a place now."""
    node: str = ""
    """Name of the worker's node.  Tensor-parallel groups stay within a node, unless ``Rules.cross_node`` is True."""
    domains: Sequence[str] = ()
    """Names of the worker's failure domains, such as its node and its rack (``workload.domains.names``)."""
    device: int | None = None
    """Number of the worker's device on its node, from 0; None: not known.  Used in messages only."""
    checkpoint: str = ""
    """The last checkpoint that the worker knows of, as text for messages."""
    note: str = ""
    """Reason why the worker is a spare, for the log."""
    peer_store: str = ""
    """Address of the worker's peer store, on which it publishes data for other members (``collectives.peers``)."""
    unreached: Sequence[int] = ()
    """Live workers to which the worker could not connect (``instep.meeting.edges``)."""
    building: bool = False
    """True for a spare that is building its model, and so has no state."""
    timeline: Timeline = (0, 0)
    """Newest timeline that the worker knows; ``iteration`` belongs to this timeline."""
    undone: int = 0
    """Iteration that would be next if the last rollback had not been decided; 0: no rollback is pending, as far as the
    worker knows."""
    state_of: int = 0
    """Epoch of the timeline to which the worker's state belongs."""
    same_as: int = -1
    """Value of ``Decision.same_as`` in the worker's last plan; belongs to ``timeline``."""
    checkpoints: Sequence[Checkpoint] = ()
    """The newest checkpoints that the worker knows."""
    unreadable: Sequence[int] = ()
    """Iterations of the checkpoints that the worker could not load."""
    snapshots: Sequence[Snapshot] = ()
    """Complete snapshot parts that the worker holds."""
    spoiled: Sequence[tuple[int, int]] = ()
    """(iteration, epoch of the timeline) of each snapshot that the worker could not load."""
    snapshot_interval: int = 0
    """Iterations between two snapshots, as far as the worker knows; 0: not known."""
    draining: Sequence[str] = ()
    """Nodes that an earlier epoch has decided to drain.  The coordinator reads this field, too."""
    flags: str = ""
    """Digest of the flags with which the worker was started (`comparison`); empty: not compared."""
    code: str = ""
    """Digest of the program that the worker runs (`program`); empty: not compared."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), **{name: list(getattr(self, name)) for name in _SEQUENCES}}

    @classmethod
    def from_json(cls, value: Any) -> JoinStatus:
        """Parse a status; raise Disagreement for a value that no worker of this version sends."""
        try:
            status = cls(**{**value, **{name: tuple(map(_hashable, value[name])) for name in _SEQUENCES}})
            if any(type(iteration) is not int or source not in SOURCES for iteration, source in status.checkpoints):
                raise ValueError(status.checkpoints)
            return status
        except (TypeError, KeyError, ValueError) as error:
            raise Disagreement(f"a worker joined with a status that this version cannot read: {value!r}") from error


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Rollback:
    """Rollback of a run whose state is lost: all workers with a place continue from an older state, without a
    restart."""

    iteration: int
    """Last iteration whose update is in the state to which the run goes back."""
    source: str
    """Argument of Megatron that names the checkpoint's folder (``SOURCES``); ``MEMORY`` if a snapshot is loaded;
    ``HELD`` if the workers with a place already have the older state."""
    lost: int
    """Number of iterations that were committed after ``iteration`` and are run again.

    If this rollback replaces an earlier rollback that was not carried out, the number includes the iterations
    counted in the earlier one.  If no live worker knows the last iterations, the number is estimated from the last
    heartbeats of the lost workers; iterations after these heartbeats are not counted.
    """
    committed: bool = False
    """True if ``lost`` includes the iteration that was under way when the state was lost: its step was committed, but
    its evaluation may not have been run."""

    @property
    def next(self) -> int:
        """The first iteration after those that are run again."""
        return self.iteration + self.lost + 1

    @property
    def under_way(self) -> int:
        """The iteration that was under way when the state was lost."""
        return self.next - self.committed


@dataclass(frozen=True)
class CompleteSnapshot:
    """The newest complete snapshot: live workers hold all of its parts."""

    iteration: int
    holders: Mapping[int, Mapping[int, str]]
    """Part -> worker that holds this part -> address of the worker's peer store."""
    taken: int = 0
    """Epoch in which the snapshot was taken; 0 if parts taken in different epochs fit together."""


@dataclass(frozen=True)
class Rules:
    """Settings of a run: equal on all workers, and never changed by an epoch."""

    least: int = 1
    """Least number of microbatches per inner rank in a pass, unless the replica runs none (``workload.assign``)."""
    cross_node: bool = False
    """True if a tensor-parallel group may span nodes."""
    strict: bool = False
    """True if the run ends when the states of a column differ and no state has a majority."""
    spread: bool = False
    """True if the optimizer state is spread over the replicas, so that no worker has the complete state of its
    position."""
    replaced: bool = False
    """True if replacements for lost workers may join the run."""
    min_replicas: int = 1
    """Least number of replicas with which the run continues."""
    shards: int = 0
    """Number of shards in each copy of a spread state, if Megatron's optimizer instances are the copies; else 0."""
    holders: int = 1
    """Number of workers that hold each part of a spread state: one primary, and its shadows."""
    placed: bool = True
    """True if failure domains decide which workers hold a part; False if Megatron's optimizer instances do."""
    memory: str = "off"
    """Mode of the snapshots in memory; "off": no snapshots are taken.  See ``workload.snapshots.copies``."""
    memory_interval: int = 0
    """Iterations between two snapshots; 0: the run chooses the number by the cost of a snapshot."""
    spares: int = 0
    """Number of spares that a growing run keeps for losses, instead of giving them places."""


@dataclass(frozen=True)
class Beyond:
    """Facts that an epoch's plan needs about workers outside the epoch."""

    committed: int = 0
    """Number of the last committed decision; members that were set aside may not know it."""
    seen: int = 0
    """Newest iteration reported by members of the previous epoch that were lost or set aside since then; 0: no such
    member."""
    aside: bool = False
    """True if some workers are set aside and may come back with their state."""


@dataclass(frozen=True)
class Decision:
    """Plan of an epoch: places, lost microbatches, and states to send; `plan` computes it from the statuses."""

    epoch: int
    grid: Mapping[int, tuple[int, ...]]
    """Replica, ascending -> its workers by position."""
    spares: tuple[int, ...]
    iteration: int = 0
    """Newest iteration that any member reports; at least ``Beyond.seen`` if no member has begun the last committed
    decision.  With a rollback: the iteration after ``rollback.iteration``."""
    checkpoint: str = ""
    """Last checkpoint known to the members that report the newest iteration, as text."""
    at: int = 0
    step: bool = False
    """True if decision ``at`` is a step that some replica has begun."""
    rerun: Mapping[int, list[list[int]]] = field(default_factory=dict)
    """Replica -> for each inner rank, the ids of the lost microbatches that this inner rank runs."""
    paces: Mapping[int, float] = field(default_factory=dict)
    """Replica -> pace (``JoinStatus.pace``), for replicas with a measured pace."""
    regroup: bool = False
    """True if the grid will change at the next boundary: replicas leave, or spares form new ones."""
    fresh: tuple[int, ...] = ()
    """New replicas that this epoch forms."""
    version: int | None = None
    """Version of the state with which the fresh replicas begin."""
    rollback: Rollback | None = None
    """Rollback that restores the run's lost state; None: the state is not lost, or cannot be restored in this epoch."""
    undone: int = 0
    """Value that all members report as ``JoinStatus.undone`` until a rollback is carried out; 0: no rollback is
    pending."""
    timeline: Timeline = (0, 0)
    """Newest timeline.  All workers with a place are in it, or will be after their rollback."""
    before: Timeline = (0, 0)
    """Newest timeline in the statuses from which this decision was computed."""
    same_as: int = -1
    """Epoch of the previous timeline if ``timeline`` began with states that workers held already (``HELD``): their
    states of iteration ``timeline[1]`` remain usable.  -1: no state of an earlier timeline is usable."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Newest checkpoints that any member knows, newest first."""
    copies: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Snapshot part -> (worker that takes and keeps it, worker that keeps a copy); empty: no snapshots are taken."""
    kept: CompleteSnapshot | None = None
    """The newest complete snapshot of the timeline ``before``; None: no snapshot is complete."""
    covered: bool = False
    """True if every worker that ``copies`` names for a part holds this part of ``kept``."""
    snapshot_interval: int = 0
    """Iterations between two snapshots."""
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Worker that needs a state -> all workers that can send this state, the preferred one first; each sends a
    share."""
    repaired: tuple[int, ...] = ()
    """Workers that receive a state because their own state differs from the majority of their column."""
    disputed: tuple[int, ...] = ()
    """Workers of columns whose states differ without a majority; these columns use the state of their lowest
    replica."""
    short: bool = False
    """True if live workers are too few for a replica, but more may come, and the run could then go back to an older
    state."""
    rebuild: Mapping[int, int] = field(default_factory=dict)
    """Spare -> position for which this spare must build a model."""
    mirrors: Mapping[int, int] = field(default_factory=dict)
    """Spare -> worker whose state this spare copies before every step, because no other worker has the state."""
    enough: int = 0
    """Greatest number of replicas that the run may have after all live workers have become ready for a place."""
    state_lost: str = ""
    """Reason why the state is lost although enough workers for a replica live; empty: the state is not lost."""
    peer_stores: Mapping[int, str] = field(default_factory=dict)
    """Worker with a place -> address of this worker's peer store."""
    touched: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Worker with a place -> failure domains whose loss would break this worker's replica."""
    broken: frozenset[Edge] = frozenset()
    """Pairs of live workers that cannot connect to each other."""
    left_out: Mapping[int, tuple[Edge, ...]] = field(default_factory=dict)
    """Complete replica that gets no place -> the pairs in ``broken`` that are the reason."""
    draining: tuple[str, ...] = ()
    """Nodes that the run drains.  Their workers leave: those with a place at the next boundary, spares now."""
    undrained: Mapping[str, str] = field(default_factory=dict)
    """Node whose drain was refused -> reason why the run needs this node."""
    leaving: frozenset[int] = frozenset()
    """Replicas that leave at the next boundary, because one of their workers is on a node to be drained."""

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(self.grid)

    @property
    def workers(self) -> list[int]:
        """All workers with a place in this epoch, ascending."""
        return sorted(worker for workers in self.grid.values() for worker in workers)

    def slots(self, launch: LaunchGrid) -> dict[Slot, int]:
        """Return slot -> worker in this slot, in ascending order of the slots."""
        pairs = (
            (slot, worker)
            for replica, workers in self.grid.items()
            for slot, worker in zip(launch.replicas[replica], workers, strict=True)
        )
        return dict(sorted(pairs))

    def peer_stores_by_slot(self, launch: LaunchGrid) -> dict[Slot, str]:
        """Return slot -> address of the peer store of the worker in this slot."""
        return {slot: self.peer_stores[worker] for slot, worker in self.slots(launch).items()}

    def place(self, worker: int) -> tuple[int, int] | None:
        """Return (replica, position) of ``worker``; None: the worker has no place."""
        for replica, workers in self.grid.items():
            if worker in workers:
                return replica, workers.index(worker)
        return None


MOST_CHECKPOINTS = 4
"""Greatest number of persistent checkpoints that a worker reports.  If the newest cannot be read, the run loads an
older one."""


def merged(*known: Iterable[Checkpoint], until: Rollback | None = None) -> tuple[Checkpoint, ...]:
    """Return the newest of the ``known`` checkpoints, newest first, at most two of them ``NON_PERSISTENT``.

    ``until``: a rollback.  Checkpoints after the rollback's iteration could not be loaded, and are left out.
    """
    last = inf if until is None else until.iteration
    every = sorted({checkpoint for group in known for checkpoint in group if checkpoint[0] <= last}, reverse=True)
    kept = [one for one in every if one[1] != NON_PERSISTENT][:MOST_CHECKPOINTS]
    return tuple(sorted([*kept, *[one for one in every if one[1] == NON_PERSISTENT][:2]], reverse=True))


@dataclass(frozen=True)
class LostWorker:
    """A lost worker; fields that are not known are empty or None."""

    worker: int
    node: str = ""
    device: int | None = None
    """Number of the worker's device on its node, from 0."""
    phase: str = ""
    """Last reported phase in the iteration of the loss; at most one heartbeat interval older than the loss."""

    def __str__(self) -> str:
        places = [f"node {self.node}"] * bool(self.node) + [f"GPU {self.device}"] * (self.device is not None)
        return f"worker {self.worker}" + (f" ({', '.join(places)})" if places else "")


@dataclass(frozen=True)
class Failure:
    """Workers that were lost since the previous plan."""

    iteration: int
    lost: tuple[LostWorker, ...]
    replicas: tuple[int, ...] = ()
    """The replicas in which the lost workers had a place."""

    @property
    def workers(self) -> list[int]:
        return [lost.worker for lost in self.lost]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.workers))} (iteration {self.iteration})"


SnapshotName = tuple[int, int]
"""Name of a snapshot: (iteration after which it was taken, epoch in which it was taken).  The epoch is 0 if parts taken
in different epochs fit together.  Newer snapshots have larger names."""


@dataclass(frozen=True)
class Taking:
    """A snapshot that all workers take together, in ``epoch`` after ``iteration``."""

    epoch: int
    iteration: int
    parts: int
    """Number of parts of the snapshot (``workload.snapshots``)."""
    together: bool = False
    """True if the parts are shards cut for one epoch's members, so that parts of different epochs do not fit
    together."""

    @property
    def name(self) -> SnapshotName:
        return self.iteration, self.epoch if self.together else 0
