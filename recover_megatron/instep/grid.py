"""The launch grid: the places of a run.  It is fixed for the run's life; who stands where is each epoch's decision.

A *slot* is a place, named by the id of the worker that had it at launch: slot = replicas[replica][position].  Groups,
rings and ranks are made of slots, so they keep their names when somebody else takes a place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchGrid:
    """Replicas of a launch, each with its slots by position.

    ``inner_ranks``: how many data-parallel ranks one replica holds (1; more where experts are spread over them).
    ``inner_rank_of[p]``: the inner rank of position p.  ``tensor``: the size of a tensor-parallel group; its positions
    follow each other.
    """

    replicas: tuple[tuple[int, ...], ...]
    inner_ranks: int
    inner_rank_of: tuple[int, ...]
    tensor: int = 1

    @property
    def size(self) -> int:
        """Workers of a replica."""
        return len(self.inner_rank_of)

    @property
    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """The positions of a replica, by tensor-parallel group."""
        return tuple(tuple(range(at, at + self.tensor)) for at in range(0, self.size, self.tensor))

    @property
    def world(self) -> int:
        """Number of workers at launch."""
        return sum(len(replica) for replica in self.replicas)

    def place(self, slot: int) -> tuple[int, int]:
        """(replica, position) of a slot; a worker's at launch."""
        for number, replica in enumerate(self.replicas):
            if slot in replica:
                return number, replica.index(slot)
        raise ValueError(f"{slot} is in no replica")

    def inner_rank(self, slot: int) -> int:
        """The inner rank of a slot in its replica."""
        return self.inner_rank_of[self.place(slot)[1]]


def launch_grid(
    world: int, *, tensor: int, context: int, pipeline: int, inner_ranks: int, pipeline_before_data: bool = False
) -> LaunchGrid:
    """The grid of Megatron's rank order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp with ``pipeline_before_data``.

    Positions are in the order (inner rank, pp, cp, tp), tensor fastest.  ValueError if the sizes do not fill the world.

    >>> launch_grid(8, tensor=2, context=1, pipeline=2, inner ranks=1).replicas
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    inner = tensor * context
    ranks, rest = divmod(world, inner * pipeline)
    if rest or ranks % inner_ranks:
        raise ValueError(f"{world} workers cannot hold replicas of {inner} x {pipeline} x {inner_ranks}")

    def worker(data: int, stage: int, at: int) -> int:
        if pipeline_before_data:
            return at + inner * (stage + pipeline * data)
        return at + inner * (data + ranks * stage)

    replicas = tuple(
        tuple(
            worker(replica * inner_ranks + inner_rank, stage, at)
            for inner_rank in range(inner_ranks)
            for stage in range(pipeline)
            for at in range(inner)
        )
        for replica in range(ranks // inner_ranks)
    )
    inner_rank_of = tuple(inner_rank for inner_rank in range(inner_ranks) for _ in range(pipeline * inner))
    return LaunchGrid(replicas, inner_ranks, inner_rank_of, tensor)
