"""What a worker tells when it joins an epoch, and what the epoch decides from it (`plan`): equal on all workers."""

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
"""Of a status."""

Timeline = tuple[int, int]
"""What the run has done since it last went back: the epoch that decided that, and the iteration it went back to.

(0, 0): it never did.  States of different timelines are never mixed, though they may be of one iteration.
"""
Checkpoint = tuple[int, str]
"""A complete checkpoint of this run: its iteration, and what of Megatron's arguments names its folder (`SOURCES`)."""
NON_PERSISTENT = "non_persistent"
"""Of those that Megatron keeps the last one of (--non-persistent-ckpt-type global)."""
SOURCES = ("save", "load", NON_PERSISTENT)
MEMORY = "memory"
"""The source of a rollback to snapshots in the workers' memory (`snapshots`)."""
HELD = "held"
"""That of one to an older state that workers hold themselves: they were set aside, and the others are lost."""
Snapshot = tuple[int, int, int, int, int]
"""A part that a worker holds: which (``workload.snapshots``), after which iteration, of which timeline (its epoch); in
which epoch it was taken, if parts of several do not fit together, else 0; and of how many parts it is one."""


@dataclass(frozen=True)
class JoinStatus:
    """What a worker tells when it joins an epoch."""

    replica: int | None
    """Its replica; None: a spare."""
    position: int | None = None
    """What its model is built for; None: for nothing (yet, or any more)."""
    at: int = 0
    """The decision that it works on (steps, evaluations and checkpoints are counted together), or has just finished."""
    step: bool = False
    """Whether that is a training step that has begun."""
    boundary: bool = False
    """Whether that is a training step that this worker is about to begin: it may get new mates, or a new state."""
    total: int = 0
    """Microbatches of that step, over all replicas."""
    ran: Sequence[int] = ()
    """Ids whose gradients the workers of this replica hold, all inner ranks together."""
    iteration: int = 0
    """The training iteration under way, from 1; a spare's: when it became one."""
    last_step: tuple[int, int] = (0, 0)
    """Of the last training step that it has begun since it has its state: the iteration, and which decision it is."""
    version: int | None = None
    """How many iterations its parameters and optimizer state have seen; None: not known, or of no use."""
    digest: str = ""
    """Of that state; empty: not taken."""
    aside: bool = False
    """A spare's: it was left out alive, since it was late; if what the others have seen is lost, all may go back to
    its state."""
    pace: float = 0.0
    """The seconds per microbatch of its replica over those of the median one, as it has measured; 0: it has not."""
    ready: bool = False
    """A spare's: it could take a place now."""
    node: str = ""
    """Where it runs: a tensor-parallel group stays within one node."""
    domains: Sequence[str] = ()
    """What it may be lost with: its node, its rack (``workload.domains.names``)."""
    device: int | None = None
    """The number of its device there, from 0; None: not known. For people."""
    checkpoint: str = ""
    """The last checkpoint that it knows of, in words."""
    note: str = ""
    """Why it is a spare, for the log."""
    peer_store: str = ""
    """Where it keeps what the members of an epoch tell each other (``collectives.peers``)."""
    unreached: Sequence[int] = ()
    """Live workers that it has tried to reach, and could not (``instep.meeting.edges``)."""
    building: bool = False
    """A spare's: it builds its model, and has no state."""
    timeline: Timeline = (0, 0)
    """The newest that it has heard of; ``iteration`` is of it."""
    undone: int = 0
    """The iteration that would have been next before the last rollback, as long as this worker does not know that it
    was carried out; 0: there is none."""
    state_of: int = 0
    """The epoch of the timeline that ``version`` is of."""
    same_as: int = -1
    """``Decision.same_as`` of ``timeline``."""
    checkpoints: Sequence[Checkpoint] = ()
    """The newest that it knows of."""
    unreadable: Sequence[int] = ()
    """Iterations of those that it could not load."""
    snapshots: Sequence[Snapshot] = ()
    """Those that it holds, as a whole."""
    spoiled: Sequence[tuple[int, int]] = ()
    """Of snapshots that it could not load: iteration and timeline."""
    snapshot_interval: int = 0
    """Iterations between snapshots, as far as it knows; 0: it does not."""
    draining: Sequence[str] = ()
    """Nodes that an epoch has decided to do without (the coordinator reads this, too)."""
    flags: str = ""
    """A digest of the flags that it was started with (`comparison`); empty: not to be compared."""
    code: str = ""
    """A digest of the program that it runs (`program`); empty: not to be compared."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), **{name: list(getattr(self, name)) for name in _SEQUENCES}}

    @classmethod
    def from_json(cls, value: Any) -> JoinStatus:
        """Raises Disagreement for what no worker of this version sends."""
        try:
            status = cls(**{**value, **{name: tuple(map(_hashable, value[name])) for name in _SEQUENCES}})
            if any(type(iteration) is not int or source not in SOURCES for iteration, source in status.checkpoints):
                raise ValueError(status.checkpoints)
            return status
        except (TypeError, KeyError, ValueError) as error:
            raise Disagreement(f"a worker joined with a status that this version does not know: {value!r}") from error


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Rollback:
    """The state of the run is lost: whoever has a place goes back to a checkpoint or a snapshot, loaded in place."""

    iteration: int
    """The last one that the checkpoint has seen."""
    source: str
    """Which of Megatron's arguments names its folder; or ``MEMORY``; or ``HELD``: whoever has a place has it."""
    lost: int
    """How many iterations were committed after it, and are run again; those of a rollback included that another epoch
    took the place of before it was carried out. Where nobody lives who has seen them, by where the lost were last seen:
    what they did after their last heartbeat is not counted.
    """
    committed: bool = False
    """Whether the iteration that was under way is one of these: its step was over, its evaluation may not have been."""

    @property
    def next(self) -> int:
        """The iteration that would have followed those that are run again."""
        return self.iteration + self.lost + 1

    @property
    def under_way(self) -> int:
        """The iteration that was when the state was lost."""
        return self.next - self.committed


@dataclass(frozen=True)
class Kept:
    """The newest snapshot that is complete: of every part somebody who lives holds it."""

    iteration: int
    holders: Mapping[int, Mapping[int, str]]
    """Part -> worker that holds it -> the address of its peer store."""
    taken: int = 0
    """See ``Snapshot``."""


@dataclass(frozen=True)
class Rules:
    """What every worker of a run knows and no epoch changes."""

    least: int = 1
    """So many microbatches, per inner rank, a replica runs in one pass at least, if any (``workload.assign``)."""
    cross_node: bool = False
    """Whether a tensor-parallel group may reach over nodes."""
    strict: bool = False
    """Whether the run ends where a column's states differ and no majority says which is right."""
    spread: bool = False
    """Whether the optimizer's state is spread over the replicas: then no worker has all of its position's."""
    replaced: bool = False
    """Whether workers may come in place of those that are lost."""
    min_replicas: int = 1
    """With fewer the run ends."""
    shards: int = 0
    """Where Megatron's optimizer instances are the copies of a spread state: how many shards each is cut in."""
    holders: int = 1
    """Of each part of a state that is spread: who has it, and its shadows."""
    placed: bool = True
    """Whether these are chosen by their domains, not by Megatron (its optimizer instances)."""
    memory: str = "off"
    """Whether snapshots are kept in memory: see ``workload.snapshots.copies``."""
    memory_interval: int = 0
    """Iterations between two; 0: by what they cost."""
    spares: int = 0
    """So many workers without a place are left as they are by a run that grows: they are for losses."""


@dataclass(frozen=True)
class Beyond:
    """What an epoch's plan tells beside what its members joined with: of those who are not among them."""

    committed: int = 0
    """The last decision that is committed: members that were aside may not know it."""
    seen: int = 0
    """The newest iteration in which those were seen who were lost with the epoch before; 0: nobody was."""
    aside: bool = False
    """Whether there are workers that are aside: they may come back, with the state that they have."""


@dataclass(frozen=True)
class Decision:
    """What an epoch decides; ``plan`` says how."""

    epoch: int
    grid: Mapping[int, tuple[int, ...]]
    """Replica -> its workers by position, in the order of the ids."""
    spares: tuple[int, ...]
    iteration: int = 0
    """The newest that anybody tells of."""
    checkpoint: str = ""
    """The last that is known to who is at that iteration."""
    at: int = 0
    step: bool = False
    """Whether ``at`` is a step that some replica has gradients of."""
    rerun: Mapping[int, list[list[int]]] = field(default_factory=dict)
    """Replica -> by inner rank, the ids to run on top of what it ran."""
    paces: Mapping[int, float] = field(default_factory=dict)
    """Replica -> its pace, of those that were measured (``workload.quotas``)."""
    regroup: bool = False
    """Whether an epoch at the next boundary would have more replicas."""
    fresh: tuple[int, ...] = ()
    """The replicas that this epoch put together."""
    version: int | None = None
    """Of the state that the fresh replicas begin with."""
    rollback: Rollback | None = None
    """Where they get it, if nobody has it any more; ``iteration`` is that which follows it."""
    undone: int = 0
    """What is to be joined with until its rollback, if any, was carried out (``JoinStatus.undone``)."""
    timeline: Timeline = (0, 0)
    """The newest: all that have a place are in it, or will be when they have gone back."""
    before: Timeline = (0, 0)
    """That which all were in when they met."""
    same_as: int = -1
    """The epoch of the timeline whose states of iteration ``timeline[1]`` are those that ``timeline`` began with, since
    nothing was loaded (``HELD``); -1: there is none."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """The newest that anybody knows of, newest first."""
    copies: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Part of a snapshot -> who gives it and keeps it, and who else keeps it; empty: none are taken."""
    kept: Kept | None = None
    """The newest complete snapshot of ``before``; None: there is none."""
    covered: bool = False
    """Whether that is where ``copies`` wants it."""
    snapshot_interval: int = 0
    """Iterations between two."""
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Worker that needs a state -> all that hold the same one, who gives it first: they share the work."""
    mended: tuple[int, ...] = ()
    """Those of them that had one, which differed from that of most of their column."""
    disputed: tuple[int, ...] = ()
    """Workers of columns whose states differ without a majority for any: the lowest replica's was taken."""
    short: bool = False
    """Whether the run could go back to a checkpoint if there were workers enough for a replica, which may come."""
    rebuild: Mapping[int, int] = field(default_factory=dict)
    """Spare -> position that it should build its model for."""
    mirrors: Mapping[int, int] = field(default_factory=dict)
    """Spare -> worker whose state it takes over before every step: nobody else would have it, should that one die."""
    enough: int = 0
    """How many replicas there are, or may be once all who are on their way have come."""
    state_lost: str = ""
    """Why the state is lost although workers enough for a replica live; empty: it is not."""
    peer_stores: Mapping[int, str] = field(default_factory=dict)
    """Worker with a place -> the address of its peer store."""
    touched: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Worker with a place -> the failure domains with which its replica would break."""
    broken: frozenset[Edge] = frozenset()
    """Pairs of live workers that cannot talk to each other."""
    put_out: Mapping[int, tuple[Edge, ...]] = field(default_factory=dict)
    """Replicas that were whole and are left out, and the broken edges for which they are."""
    draining: tuple[str, ...] = ()
    """Nodes that the run does without: whoever stands there leaves at the next boundary, who does not leaves now."""
    undrained: Mapping[str, str] = field(default_factory=dict)
    """Nodes that should have been drained, and why the run cannot do without them."""
    leaving: frozenset[int] = frozenset()
    """The replicas that leave at the next boundary: those with a worker on such a node."""

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(self.grid)

    @property
    def workers(self) -> list[int]:
        """All that have a place in this epoch, ascending."""
        return sorted(worker for workers in self.grid.values() for worker in workers)

    def slots(self, launch: LaunchGrid) -> dict[Slot, int]:
        """Slot -> worker that stands there, ascending."""
        pairs = (
            (slot, worker)
            for replica, workers in self.grid.items()
            for slot, worker in zip(launch.replicas[replica], workers, strict=True)
        )
        return dict(sorted(pairs))

    def peer_stores_by_slot(self, launch: LaunchGrid) -> dict[Slot, str]:
        """Slot -> the address of the peer store of who stands there."""
        return {slot: self.peer_stores[worker] for slot, worker in self.slots(launch).items()}

    def place(self, worker: int) -> tuple[int, int] | None:
        """(replica, position) of a worker; None: it has no place."""
        for replica, workers in self.grid.items():
            if worker in workers:
                return replica, workers.index(worker)
        return None


MOST_CHECKPOINTS = 4
"""Checkpoints that are told of: the newest; an older one is there should one not be readable."""


def merged(*known: Iterable[Checkpoint], until: Rollback | None = None) -> tuple[Checkpoint, ...]:
    """The newest of them, newest first; of those that Megatron deletes soon two.

    ``until``: what the run goes back to; a newer one, which could not be loaded, is not to be gone forward to later.
    """
    last = inf if until is None else until.iteration
    every = sorted({checkpoint for its in known for checkpoint in its if checkpoint[0] <= last}, reverse=True)
    kept = [one for one in every if one[1] != NON_PERSISTENT][:MOST_CHECKPOINTS]
    return tuple(sorted([*kept, *[one for one in every if one[1] == NON_PERSISTENT][:2]], reverse=True))


@dataclass(frozen=True)
class LostWorker:
    """A worker that is gone; what is not known is empty or None."""

    worker: int
    node: str = ""
    device: int | None = None
    """Number of its device on its node, from 0."""
    phase: str = ""
    """Its phase in the iteration of its loss, by its last heartbeat, which is up to an interval old."""

    def __str__(self) -> str:
        places = [f"node {self.node}"] * bool(self.node) + [f"GPU {self.device}"] * (self.device is not None)
        return f"worker {self.worker}" + (f" ({', '.join(places)})" if places else "")


@dataclass(frozen=True)
class Failure:
    """Workers that an epoch found missing."""

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
"""A snapshot's iteration, and the epoch in which it was taken where that matters, else 0; a newer one is larger."""


@dataclass(frozen=True)
class Taking:
    """A snapshot that all take together, in ``epoch`` after ``iteration``."""

    epoch: int
    iteration: int
    parts: int
    """The number of parts of which it is made (``workload.snapshots``)."""
    together: bool = False
    """True where its parts are shards, which are cut for the members of an epoch: they fit only those of the same."""

    @property
    def name(self) -> SnapshotName:
        return self.iteration, self.epoch if self.together else 0
