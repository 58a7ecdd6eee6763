"""The launch grid: the places of a run.  The grid never changes; each epoch's plan says which worker has which place.

A *slot* is a place, named by the id of the worker that had it at launch: slot = replicas[replica][position].  Process
groups, rings and ranks consist of slots, so their names stay the same when another worker takes a place.

A run that may grow also has slots for further replicas.  These slots are numbered after the slots of the launch, and
are empty at first.  Values that are divided by a number of replicas (losses, gradients, sample counts) are divided by
``launched``, the number of replicas at launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NewType

from recover_megatron.workload.domains import replicas_of

Slot = NewType("Slot", int)


@dataclass(frozen=True)
class LaunchGrid:
    """Slots of a run.

    ``replicas``: for each replica, its slots by position; the replicas of the launch come first, then the ``more``
    replicas by which the run may grow.  ``inner_ranks``: number of data-parallel ranks in one replica; 1 unless experts
    or the shards of Megatron-FSDP are spread over them.  ``inner_rank_of[p]``: the inner rank of position p.
    ``tensor``: size of a tensor-parallel group, whose positions are consecutive.
    """

    replicas: tuple[tuple[Slot, ...], ...]
    inner_ranks: int
    inner_rank_of: tuple[int, ...]
    tensor: int = 1
    more: int = 0

    @property
    def launched(self) -> int:
        return len(self.replicas) - self.more

    @property
    def size(self) -> int:
        """Number of workers in a replica."""
        return len(self.inner_rank_of)

    @property
    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """Positions of each tensor-parallel group of a replica."""
        return tuple(tuple(range(at, at + self.tensor)) for at in range(0, self.size, self.tensor))

    @property
    def world(self) -> int:
        return self.launched * self.size

    def with_room_for(self, most: int) -> LaunchGrid:
        """Return this grid with places for ``most`` replicas, or for the replicas of the launch if these are more."""
        launch = self.replicas[: self.launched]
        more = max(0, most - len(launch))
        first = range(self.world, self.world + more * self.size, self.size)
        further = tuple(tuple(map(Slot, range(slot, slot + self.size))) for slot in first)
        return replace(self, replicas=launch + further, more=more)

    def column(self, slots: Sequence[Slot]) -> tuple[Slot, ...]:
        """Return ``slots``, a process group of the launch, plus the same positions of replicas that may be added later.

        A group that does not span all replicas of the launch is returned unchanged, and so is every group if the launch
        has only one replica.
        """
        positions: dict[int, list[int]] = {}
        for slot in slots:
            replica, position = self.place(slot)
            positions.setdefault(replica, []).append(position)
        if len(positions) < self.launched or self.launched < 2:
            return tuple(slots)
        each = sorted(positions[self.launched - 1])
        return (*slots, *(row[position] for row in self.replicas[self.launched :] for position in each))

    def place(self, slot: Slot) -> tuple[int, int]:
        """Return (replica, position) of a slot.  Raises ValueError if no replica has the slot."""
        for number, replica in enumerate(self.replicas):
            if slot in replica:
                return number, replica.index(slot)
        raise ValueError(f"slot {slot} is in no replica of the launch grid")


def launch_grid(
    world: int, *, tensor: int, context: int, pipeline: int, inner_ranks: int, pipeline_before_data: bool = False
) -> LaunchGrid:
    """Return the launch grid of ``world`` workers, with the replicas that ``replicas_of`` returns.

    Positions are in the order (inner rank, pp, cp, tp), tp fastest.  Raises ValueError if ``world`` is no multiple of a
    replica's size.
    """
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline, "inner_ranks": inner_ranks}
    replicas = replicas_of(world, **sizes, pipeline_before_data=pipeline_before_data)
    size = tensor * context * pipeline
    inner_rank_of = tuple(inner_rank for inner_rank in range(inner_ranks) for _ in range(size))
    return LaunchGrid(tuple(tuple(map(Slot, replica)) for replica in replicas), inner_ranks, inner_rank_of, tensor)


Column = tuple[Slot, ...]
"""Slots whose buckets are summed together, in the order of the ring."""


def ring_order(column: Sequence[Slot], grid: LaunchGrid, instances: int = 1) -> Column:
    """Return the slots of a column in the order of its ring.

    Neighbours are in different replicas, if possible.  Then the shadow of a worker's shard, on the next worker,
    survives the loss of the worker's replica.  With several optimizer instances the holders of one shard are
    consecutive, so that a finished sum is sent over a short distance.
    """
    if instances > 1:
        shards = len(column) // instances
        return tuple(slot for shard in range(shards) for slot in column[shard::shards])
    places = {slot: grid.place(slot) for slot in column}
    return tuple(sorted(column, key=lambda slot: (places[slot][1], places[slot][0])))
