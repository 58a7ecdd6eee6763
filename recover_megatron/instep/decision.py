"""Status with which a worker joins an epoch, and the decision made from all statuses (`plan`), equal on all workers."""

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
"""Fields of a status that are sequences."""

Timeline = tuple[int, int]
"""The run since its last rollback: the epoch that decided that rollback, and the iteration to which it went back.

(0, 0): there was no rollback.  States of different timelines are never mixed, even if they have the same iteration.
"""
Checkpoint = tuple[int, str]
"""A complete checkpoint of this run: its iteration, and the argument of Megatron that names its folder (`SOURCES`)."""
NON_PERSISTENT = "non_persistent"
"""Source of checkpoints of which Megatron keeps only the last one (--non-persistent-ckpt-type global)."""
SOURCES = ("save", "load", NON_PERSISTENT)
MEMORY = "memory"
"""The source of a rollback to snapshots in the workers' memory (`snapshots`)."""
HELD = "held"
"""The source of a rollback to the older state of workers set aside, if the other workers' state is lost."""
Snapshot = tuple[int, int, int, int, int]
"""A snapshot part that a worker holds: the part (``workload.snapshots``), the iteration after which it was taken, the
epoch of its timeline, the epoch in which it was taken if parts of several epochs do not fit together (else 0), and the
number of parts of the snapshot."""


@dataclass(frozen=True)
class JoinStatus:
    """Status that a worker sends when it joins an epoch."""

    replica: int | None
    """Its replica; None: a spare."""
    position: int | None = None
    """The position for which its model is built; None: it has no model (yet, or any more)."""
    at: int = 0
    """Number of the decision that the worker works on or has just finished; steps and sections are counted together."""
    step: bool = False
    """True if ``at`` is a training step that has begun."""
    boundary: bool = False
    """True if ``at`` is a training step that this worker is about to begin: a plan may change its replica and state."""
    total: int = 0
    """Number of microbatches of the step ``at``, over all replicas."""
    ran: Sequence[int] = ()
    """Ids of the microbatches whose gradients this worker's replica holds, all inner ranks together."""
    iteration: int = 0
    """The training iteration under way, from 1; for a spare: the iteration in which it became a spare."""
    last_step: tuple[int, int] = (0, 0)
    """Iteration and decision number of the last training step that this worker has begun since it got its state."""
    version: int | None = None
    """Number of iterations that have updated its parameters and optimizer state; None: not known, or unusable."""
    digest: str = ""
    """Digest of the state of ``version``; empty: not computed."""
    aside: bool = False
    """True for a spare that was set aside, alive but late: if the state of the others is lost, all workers may go back
    to its state."""
    pace: float = 0.0
    """Measured seconds per microbatch of its replica, divided by those of the median replica; 0: not measured."""
    ready: bool = False
    """True for a spare that could take a place now."""
    node: str = ""
    """Name of its node: a tensor-parallel group stays within one node."""
    domains: Sequence[str] = ()
    """Names of its failure domains: its node, its rack (``workload.domains.names``)."""
    device: int | None = None
    """The number of its device on its node, from 0; None: not known.  Used in messages only."""
    checkpoint: str = ""
    """The last checkpoint that it knows of, as text for messages."""
    note: str = ""
    """Reason why it is a spare, for the log."""
    peer_store: str = ""
    """Address of the store on which it keeps the data that members of an epoch exchange (``collectives.peers``)."""
    unreached: Sequence[int] = ()
    """Live workers to which it tried to connect, and failed (``instep.meeting.edges``)."""
    building: bool = False
    """True for a spare that builds its model and has no state."""
    timeline: Timeline = (0, 0)
    """The newest timeline that it knows; ``iteration`` belongs to it."""
    undone: int = 0
    """The iteration that would have been next without the last rollback; 0: there was no rollback, or this worker knows
    that it was carried out."""
    state_of: int = 0
    """The epoch of the timeline to which ``version`` belongs."""
    same_as: int = -1
    """``Decision.same_as`` for ``timeline``."""
    checkpoints: Sequence[Checkpoint] = ()
    """The newest checkpoints that it knows."""
    unreadable: Sequence[int] = ()
    """Iterations of checkpoints that it could not load."""
    snapshots: Sequence[Snapshot] = ()
    """Complete snapshot parts that it holds."""
    spoiled: Sequence[tuple[int, int]] = ()
    """Iteration, and epoch of the timeline, of each snapshot that it could not load."""
    snapshot_interval: int = 0
    """Iterations between snapshots, as far as it knows; 0: not known."""
    draining: Sequence[str] = ()
    """Nodes that an epoch has decided to drain (the coordinator reads this field, too)."""
    flags: str = ""
    """Digest of the flags with which it was started (`comparison`); empty: not compared."""
    code: str = ""
    """Digest of the program that it runs (`program`); empty: not compared."""

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
    """Rollback after the run's state is lost: every worker with a place loads a checkpoint or a snapshot in place."""

    iteration: int
    """The last iteration whose update is in the state to which the run goes back."""
    source: str
    """The argument of Megatron that names the checkpoint's folder; or ``MEMORY``; or ``HELD``: the workers with a place
    have the state already."""
    lost: int
    """Number of iterations that were committed after ``iteration`` and are run again.  It includes those of an earlier
    rollback that this rollback replaced before it was carried out.  If no live worker knows the last iterations, the
    number is estimated from the last heartbeats of the lost workers; iterations after these heartbeats are not counted.
    """
    committed: bool = False
    """True if ``lost`` includes the iteration that was under way when the state was lost: its step was committed, but
    its evaluation may not have been run."""

    @property
    def next(self) -> int:
        """The first iteration after the iterations that are run again."""
        return self.iteration + self.lost + 1

    @property
    def under_way(self) -> int:
        """The iteration that was under way when the state was lost."""
        return self.next - self.committed


@dataclass(frozen=True)
class Kept:
    """The newest complete snapshot: each of its parts is held by some live worker."""

    iteration: int
    holders: Mapping[int, Mapping[int, str]]
    """Part -> worker that holds it -> the address of its peer store."""
    taken: int = 0
    """Epoch in which it was taken, if parts of several epochs do not fit together; else 0."""


@dataclass(frozen=True)
class Rules:
    """Settings that every worker of a run knows and that no epoch changes."""

    least: int = 1
    """Least number of microbatches per inner rank in a pass of a replica that runs any (``workload.assign``)."""
    cross_node: bool = False
    """True if a tensor-parallel group may span nodes."""
    strict: bool = False
    """True if the run terminates when the states of a column differ and no majority shows which is right."""
    spread: bool = False
    """True if the optimizer state is spread over the replicas: no worker has the complete state of its position."""
    replaced: bool = False
    """True if replacements may come for lost workers."""
    min_replicas: int = 1
    """Least number of replicas: with fewer the run terminates."""
    shards: int = 0
    """Number of shards per copy, if Megatron's optimizer instances are the copies of a spread state; else 0."""
    holders: int = 1
    """Number of workers that hold each part of a spread state: its primary and its shadows."""
    placed: bool = True
    """True if the holders are chosen by their failure domains, not by Megatron (its optimizer instances)."""
    memory: str = "off"
    """Mode of the snapshots in memory; "off": none are taken.  See ``workload.snapshots.copies``."""
    memory_interval: int = 0
    """Iterations between two snapshots; 0: chosen by their cost."""
    spares: int = 0
    """Number of workers without a place that a growing run keeps as spares for losses."""


@dataclass(frozen=True)
class Beyond:
    """Facts for an epoch's plan about workers that are not among its members."""

    committed: int = 0
    """Number of the last committed decision, which members that were set aside may not know."""
    seen: int = 0
    """The newest iteration reported by workers that were lost with the previous epoch; 0: no worker was lost."""
    aside: bool = False
    """True if some workers are set aside and may come back with their state."""


@dataclass(frozen=True)
class Decision:
    """Result of an epoch's rendezvous; ``plan`` computes it."""

    epoch: int
    grid: Mapping[int, tuple[int, ...]]
    """Replica -> its workers by position, in the order of the ids."""
    spares: tuple[int, ...]
    iteration: int = 0
    """The newest iteration that any member reports."""
    checkpoint: str = ""
    """The last checkpoint known to the members at that iteration, as text."""
    at: int = 0
    step: bool = False
    """True if ``at`` is a step for which some replica holds gradients."""
    rerun: Mapping[int, list[list[int]]] = field(default_factory=dict)
    """Replica -> for each inner rank, the ids of the lost microbatches that it runs."""
    paces: Mapping[int, float] = field(default_factory=dict)
    """Replica -> its pace, for replicas with a measured pace (``workload.quotas``)."""
    regroup: bool = False
    """True if the grid will change at the next boundary: replicas leave, or spares form new ones."""
    fresh: tuple[int, ...] = ()
    """The replicas that this epoch formed."""
    version: int | None = None
    """Version of the state with which the fresh replicas begin."""
    rollback: Rollback | None = None
    """The rollback that restores the run's state, if it is lost; ``iteration`` is then the one after the rollback's."""
    undone: int = 0
    """``JoinStatus.undone`` of all members until the pending rollback is carried out; 0: no rollback is pending."""
    timeline: Timeline = (0, 0)
    """The newest timeline: all workers with a place are in it, or will be after their rollback."""
    before: Timeline = (0, 0)
    """The timeline of all members when they met."""
    same_as: int = -1
    """The epoch of the earlier timeline whose states of iteration ``timeline[1]`` can still be used, because
    ``timeline`` began with these states, without loading any (``HELD``); -1: there is none."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """The newest checkpoints that any member knows, newest first."""
    copies: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Snapshot part -> the worker that takes and keeps it, and the worker with a copy; empty: none are taken."""
    kept: Kept | None = None
    """The newest complete snapshot of the timeline ``before``; None: there is none."""
    covered: bool = False
    """True if every worker that ``copies`` names for a part holds this part of ``kept``."""
    snapshot_interval: int = 0
    """Iterations between two snapshots."""
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Worker that needs a state -> all workers that hold it, the preferred sender first: they share the work."""
    repaired: tuple[int, ...] = ()
    """Workers that need a state because theirs differs from that of most of their column."""
    disputed: tuple[int, ...] = ()
    """Workers of columns whose states differ without a majority for any: the lowest replica's state was taken."""
    short: bool = False
    """True if the run could go back to a checkpoint if it had enough workers for a replica, and more may come."""
    rebuild: Mapping[int, int] = field(default_factory=dict)
    """Spare -> position for which it should build its model."""
    mirrors: Mapping[int, int] = field(default_factory=dict)
    """Spare -> worker whose state the spare copies before every step, because no other worker has that state."""
    enough: int = 0
    """Number of replicas that exist now, or may exist once all live workers are ready for a place."""
    state_lost: str = ""
    """Reason why the state is lost although enough workers for a replica live; empty: it is not lost."""
    peer_stores: Mapping[int, str] = field(default_factory=dict)
    """Worker with a place -> the address of its peer store."""
    touched: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Worker with a place -> the failure domains whose loss would break its replica."""
    broken: frozenset[Edge] = frozenset()
    """Pairs of live workers that cannot connect to each other."""
    left_out: Mapping[int, tuple[Edge, ...]] = field(default_factory=dict)
    """Complete replicas that are left out -> the broken edges that caused it."""
    draining: tuple[str, ...] = ()
    """Nodes that the run drains: workers there with a place leave at the next boundary, the others leave now."""
    undrained: Mapping[str, str] = field(default_factory=dict)
    """Node that should be drained, but is not -> the reason why the run cannot do without it."""
    leaving: frozenset[int] = frozenset()
    """The replicas that leave at the next boundary: they have a worker on a node to be drained."""

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(self.grid)

    @property
    def workers(self) -> list[int]:
        """All workers with a place in this epoch, ascending."""
        return sorted(worker for workers in self.grid.values() for worker in workers)

    def slots(self, launch: LaunchGrid) -> dict[Slot, int]:
        """Slot -> worker in it, ascending."""
        pairs = (
            (slot, worker)
            for replica, workers in self.grid.items()
            for slot, worker in zip(launch.replicas[replica], workers, strict=True)
        )
        return dict(sorted(pairs))

    def peer_stores_by_slot(self, launch: LaunchGrid) -> dict[Slot, str]:
        """Slot -> the address of the peer store of the worker in it."""
        return {slot: self.peer_stores[worker] for slot, worker in self.slots(launch).items()}

    def place(self, worker: int) -> tuple[int, int] | None:
        """(replica, position) of a worker; None: it has no place."""
        for replica, workers in self.grid.items():
            if worker in workers:
                return replica, workers.index(worker)
        return None


MOST_CHECKPOINTS = 4
"""Number of newest checkpoints that are reported: if the newest cannot be read, an older one is loaded."""


def merged(*known: Iterable[Checkpoint], until: Rollback | None = None) -> tuple[Checkpoint, ...]:
    """Return the newest of the ``known`` checkpoints, newest first, at most two of them ``NON_PERSISTENT``.

    ``until``: the rollback in progress; checkpoints newer than its state could not be loaded, and are left out.
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
    """Number of its device on its node, from 0."""
    phase: str = ""
    """Its phase in the iteration of its loss, from its last heartbeat, which may be up to one interval old."""

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
"""A snapshot's iteration, and the epoch in which it was taken if that matters, else 0; a newer snapshot is larger."""


@dataclass(frozen=True)
class Taking:
    """A snapshot that all workers take together, in ``epoch`` after ``iteration``."""

    epoch: int
    iteration: int
    parts: int
    """The number of its parts (``workload.snapshots``)."""
    together: bool = False
    """True if its parts are shards, cut for the members of one epoch: then only parts of one epoch fit together."""

    @property
    def name(self) -> SnapshotName:
        return self.iteration, self.epoch if self.together else 0
