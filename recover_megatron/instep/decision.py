"""What a worker tells when it joins an epoch, and what the epoch decides from it (`plan`): data, equal on all workers.

Status     of one worker, when it joins
Rules      what all workers of a run know from the start
Decision   of one epoch: who stands where, who runs what, who gives its state to whom
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recover_megatron.instep.errors import Disagreement
from recover_megatron.instep.grid import LaunchGrid
from recover_megatron.workload.edges import Edge


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
    version: int | None = None
    """How many iterations its parameters and optimizer state have seen; None: not known, or of no use."""
    digest: str = ""
    """Of that state; empty: not taken."""
    ready: bool = False
    """A spare's: it could take a place now."""
    node: str = ""
    """Where it runs: a tensor-parallel group stays within one node."""
    checkpoint: str = ""
    """The last checkpoint that it knows of, in words."""
    note: str = ""
    """Why it is a spare, for the log."""
    peer_store: str = ""
    """Where it keeps what the members of an epoch tell each other (``collectives.peer_store_client``)."""
    unreached: Sequence[int] = ()
    """Live workers that it has tried to reach, and could not (``instep.edges``)."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ran": list(self.ran), "unreached": list(self.unreached)}

    @classmethod
    def from_json(cls, value: Any) -> JoinStatus:
        """Raises Disagreement for what no worker of this version sends."""
        try:
            return cls(**{**value, "ran": tuple(value["ran"]), "unreached": tuple(value["unreached"])})
        except (TypeError, KeyError) as error:
            raise Disagreement(f"a worker joined with a status that this version does not know: {value!r}") from error


@dataclass(frozen=True)
class Rules:
    """What every worker of a run knows and no epoch changes."""

    multiple_of: int = 1
    """What every replica's number of microbatches must be a multiple of, per inner rank."""
    cross_node: bool = False
    """Whether a tensor-parallel group may reach over nodes."""
    strict: bool = False
    """Whether the run ends where a column's states differ and no majority says which is right."""
    spread: bool = False
    """Whether the optimizer's state is spread over the replicas: then no worker has all of its position's."""
    mesh: bool = False
    """Whether replicas all connect to all when they sum (NCCL, gloo), so that no order of a ring avoids an edge."""


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
    regroup: bool = False
    """Whether an epoch at the next boundary would have more replicas."""
    fresh: tuple[int, ...] = ()
    """The replicas that this epoch put together."""
    version: int | None = None
    """Of the state that the fresh replicas begin with."""
    transfers: Mapping[int, int] = field(default_factory=dict)
    """Worker that needs a state -> worker that gives it its own."""
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Worker that needs a state -> all that hold the same one, who gives it first: they share the work."""
    mended: tuple[int, ...] = ()
    """Those of them that had one, which differed from that of most of their column."""
    disputed: tuple[int, ...] = ()
    """Workers of columns whose states differ without a majority for any: the lowest replica's was taken."""
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
    broken: frozenset[Edge] = frozenset()
    """Pairs of live workers that cannot talk to each other."""
    order: tuple[int, ...] = ()
    """The replicas in the order of the rings, where that is not the order of their ids; it avoids what is broken."""
    put_out: Mapping[int, tuple[Edge, ...]] = field(default_factory=dict)
    """Replicas that were whole and are left out, and the broken edges for which they are."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """The ids of the replicas."""
        return tuple(self.grid)

    @property
    def workers(self) -> list[int]:
        """All that have a place in this epoch, ascending."""
        return sorted(worker for workers in self.grid.values() for worker in workers)

    def slots(self, launch: LaunchGrid) -> dict[int, int]:
        """Slot -> worker that stands there, ascending."""
        pairs = (
            (slot, worker)
            for replica, workers in self.grid.items()
            for slot, worker in zip(launch.replicas[replica], workers, strict=True)
        )
        return dict(sorted(pairs))

    def peer_stores_by_slot(self, launch: LaunchGrid) -> dict[int, str]:
        """Slot -> the address of the peer store of who stands there."""
        return {slot: self.peer_stores[worker] for slot, worker in self.slots(launch).items()}

    def place(self, worker: int) -> tuple[int, int] | None:
        """(replica, position) of a worker; None: it has no place."""
        for replica, workers in self.grid.items():
            if worker in workers:
                return replica, workers.index(worker)
        return None
