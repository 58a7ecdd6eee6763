"""The launch grid: the places of a run.  It is fixed for the run's life; each epoch decides which worker has which.

A *slot* is a place, named by the id of the worker that had it at launch: slot = replicas[replica][position].  Groups,
rings and ranks are made of slots, so they keep their names when another worker takes a place.

A run that may grow also has slots for further replicas, numbered after those of the launch and empty at first.  Values
that are divided by a number of replicas (losses, gradients, sample counts) are divided by ``launched``, the number at
launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NewType

from recover_megatron.workload.domains import replicas_of

Slot = NewType("Slot", int)


@dataclass(frozen=True)
class LaunchGrid:
    """Slots of a run's replicas by position: first the replicas of the launch, then those to which it may grow.

    ``inner_ranks``: number of data-parallel ranks in one replica (1; more if experts are spread over them).
    ``inner_rank_of[p]``: the inner rank of position p.  ``tensor``: the size of a tensor-parallel group; its positions
    are consecutive.  ``more``: number of replicas that the run may have in addition to those of the launch.
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
        """The positions of a replica, by tensor-parallel group."""
        return tuple(tuple(range(at, at + self.tensor)) for at in range(0, self.size, self.tensor))

    @property
    def world(self) -> int:
        return self.launched * self.size

    def with_room_for(self, most: int) -> LaunchGrid:
        """Return this grid with places for ``most`` replicas in all, but at least for the replicas of the launch."""
        launch = self.replicas[: self.launched]
        more = max(0, most - len(launch))
        first = range(self.world, self.world + more * self.size, self.size)
        further = tuple(tuple(map(Slot, range(slot, slot + self.size))) for slot in first)
        return replace(self, replicas=launch + further, more=more)

    def column(self, slots: Sequence[Slot]) -> tuple[Slot, ...]:
        """Return a group of the launch with the same positions in all replicas, extended to the further replicas.

        Any other group is returned unchanged: it is inside a replica.
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
        """Return (replica, position) of a slot, or of a worker at launch."""
        for number, replica in enumerate(self.replicas):
            if slot in replica:
                return number, replica.index(slot)
        raise ValueError(f"{slot} is in no replica")


def launch_grid(
    world: int, *, tensor: int, context: int, pipeline: int, inner_ranks: int, pipeline_before_data: bool = False
) -> LaunchGrid:
    """Return the grid of ``replicas_of``: positions are in the order (inner rank, pp, cp, tp), tensor fastest.

    Raises ValueError if the sizes do not fill the world.
    """
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline, "inner_ranks": inner_ranks}
    replicas = replicas_of(world, **sizes, pipeline_before_data=pipeline_before_data)
    size = tensor * context * pipeline
    inner_rank_of = tuple(inner_rank for inner_rank in range(inner_ranks) for _ in range(size))
    return LaunchGrid(tuple(tuple(map(Slot, replica)) for replica in replicas), inner_ranks, inner_rank_of, tensor)


Column = tuple[Slot, ...]
"""Slots whose buckets are summed together, in the order of the ring."""


def ring_order(column: Sequence[Slot], grid: LaunchGrid, instances: int = 1) -> Column:
    """Return the slots of a column such that neighbours are in different replicas, if possible.

    Then a worker's shadow, on the next worker, is not lost when the worker's replica breaks.  With several optimizer
    instances the holders of one shard are consecutive, so that a finished sum is sent over a short distance.
    """
    if instances > 1:
        shards = len(column) // instances
        return tuple(slot for shard in range(shards) for slot in column[shard::shards])
    places = {slot: grid.place(slot) for slot in column}
    return tuple(sorted(column, key=lambda slot: (places[slot][1], places[slot][0])))
