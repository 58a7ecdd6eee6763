"""How Megatron lays workers out: pure arithmetic, no state of Megatron's."""

from __future__ import annotations

from math import prod
from typing import Any

from recover_megatron.workload.domains import data_parallel_ranks_per_replica


def inner_ranks_of(args: Any, world: int) -> int:
    """How many data-parallel ranks one replica holds in a run of ``world`` workers with these flags of Megatron's.

    With Megatron-FSDP a replica is a shard group, an instance of the distributed optimizer to Megatron.
    """
    if getattr(args, "use_megatron_fsdp", False):
        inside = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
        return max(1, world // prod(inside) // (getattr(args, "num_distributed_optimizer_instances", None) or 1))
    return data_parallel_ranks_per_replica(
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        expert=getattr(args, "expert_model_parallel_size", 1) or 1,
        expert_tensor=getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size,
    )


def rolls_back(args: Any) -> bool:
    """Whether the run can go back to a checkpoint in place: one that has all of the state, and in one piece."""
    if args.no_save_optim or getattr(args, "use_megatron_fsdp", False):
        return False
    by_bucket = args.ckpt_format == "torch_dist" and not getattr(args, "dist_ckpt_optim_fully_reshardable", False)
    return by_bucket or not args.use_distributed_optimizer


def spreads_optimizer(args: Any) -> bool:
    """Whether the optimizer's state is spread over the replicas: with Megatron-FSDP as a rule inside each alone."""
    if getattr(args, "use_megatron_fsdp", False):
        return bool(getattr(args, "outer_dp_sharding_strategy", "no_shard") == "optim")
    return bool(args.use_distributed_optimizer)


def optimizer_instances(args: Any) -> int:
    """In how many places Megatron itself has each shard of the optimizer's state; not with Megatron-FSDP."""
    if getattr(args, "use_megatron_fsdp", False):
        return 1
    return int(getattr(args, "num_distributed_optimizer_instances", None) or 1)
