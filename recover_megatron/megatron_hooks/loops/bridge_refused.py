"""What of Megatron-Bridge's configuration is refused with --recover: what was not tried, or could not be kept exact."""

from __future__ import annotations

from typing import Any

from recover_megatron.arguments import RecoverConfig
from recover_megatron.megatron_hooks.attention_logits import FLAGS as LOGITS
from recover_megatron.megatron_hooks.entry.settled import SETTLED
from recover_megatron.megatron_hooks.loops.bridge_arguments import BridgeArguments
from recover_megatron.megatron_hooks.refused import cannot_recover, cannot_shard

NOT_TRIED = {
    "dist.use_decentralized_pg": "the hooks know the process groups of Megatron-Core's parallel state alone",
    "dist.use_torch_fsdp2": "its groups can't be changed",
    "dist.use_megatron_fsdp": "it was not tried with this loop",
    "ddp.use_megatron_fsdp": "it was not tried with this loop",
    "checkpoint.async_save": "it was not tried with this loop",
    "checkpoint.non_persistent_save_interval": "local checkpoints are of workers that may be gone",
    "checkpoint.also_save_hf_checkpoint": "it gathers the weights over replicas in a place that was not tried",
    "train.num_epochs": "its batches are not known by the numbers of their samples",
    "train.iterations_to_skip": "Bridge counts skipped samples by the replicas that are left",
    "optimizer.optimizer_cuda_graph": "a replayed graph passes none of the places where microbatches are counted",
    "model.moe_expert_rank_capacity_factor": "it runs a whole iteration again",
    "peft": "it was not tried",
    "nvrx_straggler": "it gathers times over all replicas; recover-report shows each replica's seconds",
    "tensor_inspect": "it sums over replicas in the step",
    "logger.log_progress": "it compares the number of workers with that of the launch",
    "validation.eval_context_parallel_size": "it makes process groups of its own for an evaluation",
    "dist.eval_context_parallel_size": "it makes process groups of its own for an evaluation",
}
"""Where it is set -> why it is refused."""


SIZES = ("context_parallel_size", "expert_model_parallel_size", "virtual_pipeline_model_parallel_size")
"""Of the model: what was not tried."""


def _value(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def problems(config: Any, recover: RecoverConfig) -> list[str]:
    """Every reason why this run cannot start, one line each.  ``config``: up to date (``runtime_config_update``)."""
    arguments: Any = BridgeArguments(config)
    found = [f"{path} = {value!r}: {why}" for path, why in NOT_TRIED.items() if (value := _value(config, path))]
    if hasattr(config.dataset, "collate_fn") or not hasattr(config.dataset, "random_seed"):
        found.append(f"dataset: {type(config.dataset).__name__}: pre-training with GPTDatasetConfig alone was tried")
    found += [f"{its.flag}: {its.words}" for its in SETTLED if its.given(arguments)]
    found += [f"model.{name}: it was not tried with this loop" for name in LOGITS if getattr(arguments, name, False)]
    sizes = {name: _value(config.model, name) or 1 for name in SIZES}
    found += [f"model.{name} = {size}: it was not tried with this loop" for name, size in sizes.items() if size > 1]
    found = [f"--recover with Megatron-Bridge cannot take {reason}" for reason in found]
    return found + cannot_recover(arguments, recover) + cannot_shard(arguments, recover)
