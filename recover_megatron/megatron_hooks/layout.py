"""How Megatron lays workers out: pure arithmetic, no state of Megatron's."""

from __future__ import annotations

from math import lcm
from typing import Any


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


def inner_ranks_of(args: Any) -> int:
    """``data_parallel_ranks_per_replica`` of a run with these flags of Megatron's."""
    return data_parallel_ranks_per_replica(
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        expert=getattr(args, "expert_model_parallel_size", 1) or 1,
        expert_tensor=getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size,
    )
