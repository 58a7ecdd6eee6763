"""What of Megatron-FSDP --recover refuses: what it could not keep exact, or has not been tried."""

from __future__ import annotations

import argparse

from recover_megatron.arguments import RecoverConfig

REFUSED = {
    "check_weight_hash_across_dp_replicas_interval": "it compares parameters that are not whole",
    "ddp_average_in_collective": "the step sums over shard groups, and does not average",
    "megatron_fsdp_enable_fine_grained_param_gather": "it has not been tried",
    "fp16": "it has not been tried",
}
"""Attribute of Megatron's arguments -> why its flag is refused with --recover and --use-megatron-fsdp."""

REFUSED_OUTER = {
    "log_params_norm": "it is that of the parameters in 32 bits, of which each shard group has a part",
    "async_save": "the state that is written is there only until the save has begun",
}
"""The same with --outer-dp-sharding-strategy optim."""

SIZES = {
    "pipeline_model_parallel_size": "Megatron 0.19.2 makes its mesh of several shard groups as if there were no "
    "stages, and ends with an error of einops, without --recover, too",
}
"""The same of sizes above 1."""

STRATEGIES = ("optim_grads_params", "optim_grads", "optim")


def cannot_shard_model(args: argparse.Namespace, config: RecoverConfig, world: int) -> list[str]:
    """What is refused with --recover and --use-megatron-fsdp in a run of ``world`` workers; empty without the latter.

    ``args``: as parsed, not yet validated.
    """
    if not getattr(args, "use_megatron_fsdp", False):
        return []
    found = [
        f"--recover with --use-megatron-fsdp cannot be combined with --{name.replace('_', '-')} yet: {why}"
        for name, why in REFUSED.items()
        if getattr(args, name, None)
    ]
    if (getattr(args, "num_distributed_optimizer_instances", None) or 1) < 2:
        found.append(
            "--recover with --use-megatron-fsdp needs --num-distributed-optimizer-instances 2 or more: a replica is a "
            "shard group, and of one alone nothing is left when one of its workers dies"
        )
    found += _too_small(args, world)
    strategy = getattr(args, "data_parallel_sharding_strategy", "no_shard")
    if strategy == "no_shard":
        found.append(
            "--recover with --use-megatron-fsdp needs a --data-parallel-sharding-strategy that shards: with no_shard "
            "it is plain data parallelism, which --recover has without --use-megatron-fsdp"
        )
    elif strategy not in STRATEGIES:
        found.append(
            f"--recover with --use-megatron-fsdp cannot be combined with --data-parallel-sharding-strategy {strategy} "
            f"yet: take {' or '.join(STRATEGIES)}"
        )
    found += _outer(args, strategy)
    kept = getattr(args, "megatron_fsdp_main_grads_dtype", None)
    if getattr(args, "megatron_fsdp_grad_comm_dtype", None) not in (None, "auto", kept):
        found.append(
            "--recover with --use-megatron-fsdp needs --megatron-fsdp-grad-comm-dtype auto or that of "
            "--megatron-fsdp-main-grads-dtype: over shard groups gradients are summed in the type in which they are "
            "kept"
        )
    for name, why in SIZES.items():
        if (getattr(args, name, None) or 1) > 1:
            found.append(
                f"--recover with --use-megatron-fsdp cannot be combined with --{name.replace('_', '-')} yet: {why}"
            )
    balancing = getattr(args, "moe_router_load_balancing_type", None) or ()
    if "quantile_balancing" in ([balancing] if isinstance(balancing, str) else balancing):
        found.append(
            "--recover with --use-megatron-fsdp cannot be combined with --moe-router-load-balancing-type "
            "quantile_balancing yet: it has not been tried"
        )
    if config.verify_interval:
        found.append(
            "--recover with --use-megatron-fsdp cannot be combined with --recover-verify-interval yet: a shard that is "
            "replaced may have been gathered by its mates before"
        )
    return found


def _outer(args: argparse.Namespace, strategy: str) -> list[str]:
    """With ``optim`` as far as Megatron has it: where shard groups share all they have, main parameters in 32 bits."""
    outer = getattr(args, "outer_dp_sharding_strategy", "no_shard")
    if outer == "no_shard":
        return []
    said = "--recover with --use-megatron-fsdp and --outer-dp-sharding-strategy"
    if outer != "optim":
        return [f"{said} {outer}: take no_shard or optim"]
    found = []
    if strategy != "optim_grads_params":
        found.append(f"{said} optim needs --data-parallel-sharding-strategy optim_grads_params, as in Megatron")
    if str(getattr(args, "megatron_fsdp_main_params_dtype", "fp32")) not in ("fp32", "torch.float32"):
        found.append(f"{said} optim needs --megatron-fsdp-main-params-dtype fp32: shadows are kept in 32 bits")
    for name, why in REFUSED_OUTER.items():
        if getattr(args, name, False):
            found.append(f"{said} optim cannot be combined with --{name.replace('_', '-')} yet: {why}")
    return found


def _too_small(args: argparse.Namespace, world: int) -> list[str]:
    """A shard group of one worker keeps whole gradients, and Megatron scales those once a microbatch, all that is in.

    Seen in Megatron-FSDP of 0.19.2 (``GradReducePipeline``), with experts, whose shard groups are the smaller ones.
    """
    tensor, experts = args.tensor_model_parallel_size, getattr(args, "expert_model_parallel_size", None) or 1
    workers = world // (getattr(args, "num_distributed_optimizer_instances", None) or 1)
    sizes = [("--num-distributed-optimizer-instances", workers // tensor)]
    if getattr(args, "num_experts", None):
        of_expert = (getattr(args, "expert_tensor_parallel_size", None) or tensor) * experts
        sizes.append(("--expert-model-parallel-size", workers // of_expert))
    if world // tensor % (getattr(args, "num_distributed_optimizer_instances", None) or 1):
        return [
            f"--num-distributed-optimizer-instances {args.num_distributed_optimizer_instances} does not divide the "
            f"{world // tensor} data-parallel ranks of {world} workers: all shard groups are of one size"
        ]
    return [
        f"--recover with --use-megatron-fsdp needs shard groups of two workers or more: lower {flag}, or start more "
        "workers"
        for flag, size in sizes
        if size < 2
    ]
