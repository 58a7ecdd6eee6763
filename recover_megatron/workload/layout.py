"""Where Megatron's order of ranks puts the workers of each replica: arithmetic."""

from __future__ import annotations

from math import lcm

Replicas = tuple[tuple[int, ...], ...]
"""By number, the ranks of each, in the order (inner rank, stage, context, tensor), tensor fastest."""


def data_parallel_ranks_per_replica(*, tensor: int, context: int, expert: int, expert_tensor: int) -> int:
    """How many of Megatron's data-parallel ranks one replica (the fault unit) holds.

    Without experts spread over data-parallel ranks it is 1.  With them a replica is the smallest set of workers closed
    under both kinds of groups: dense ones take ``tensor * context`` neighbouring workers of a pipeline stage, expert
    ones ``expert_tensor * expert`` (Megatron's default order, tp-cp-ep-dp-pp), so the closed set is their least common
    multiple.

    >>> data_parallel_ranks_per_replica(tensor=2, context=1, expert=4, expert_tensor=1)
    2
    """
    dense = tensor * context
    return lcm(dense, expert * expert_tensor if expert > 1 else dense) // dense


def replicas_of(
    world: int, *, tensor: int, context: int, pipeline: int, inner_ranks: int, pipeline_before_data: bool = False
) -> Replicas:
    """The replicas of Megatron's rank order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp with ``pipeline_before_data``.

    ValueError if the sizes do not fill the world.

    >>> replicas_of(8, tensor=2, context=1, pipeline=2, inner_ranks=1)
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

    return tuple(
        tuple(
            worker(replica * inner_ranks + inner_rank, stage, at)
            for inner_rank in range(inner_ranks)
            for stage in range(pipeline)
            for at in range(inner)
        )
        for replica in range(ranks // inner_ranks)
    )
