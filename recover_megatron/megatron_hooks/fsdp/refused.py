"""Megatron's flags that --recover refuses with --use-megatron-fsdp; the others: ``megatron_hooks.entry.refused``."""

from __future__ import annotations

import argparse
from functools import partial

from recover_megatron.arguments import RecoverConfig
from recover_megatron.megatron_hooks.entry.refused import yet
from recover_megatron.rules import BF16, Rule, all_of, is_above_one, is_one_of, is_set, keeps, reasons, unless

_WITH = "--recover with --use-megatron-fsdp"
_TAKEN = ("optim_grads_params", "optim_grads", "optim")
_STRATEGY = "data_parallel_sharding_strategy"

_yet = partial(yet, among=_WITH)
FSDP_RULES = [
    _yet("--check-weight-hash-across-dp-replicas-interval", "it compares parameters that are not whole"),
    _yet("--ddp-average-in-collective", "the step sums over shard groups, and does not average"),
    _yet("--fp16", "Megatron 0.19.2 ends in its first step with an AttributeError, without --recover, too: to divide "
         "gradients by the loss scale it asks each parameter for its own, and where a worker's shard has nothing of a "
         "parameter there is none"),
    Rule(f"{_WITH} needs --num-distributed-optimizer-instances 2 or more: a replica is a shard group, and of one alone "
         "nothing is left when one of its workers dies", unless(is_above_one("num_distributed_optimizer_instances"))),
    Rule(f"{_WITH} needs a --data-parallel-sharding-strategy that shards: with no_shard it is plain data parallelism, "
         "which --recover has without --use-megatron-fsdp",
         lambda args: getattr(args, _STRATEGY, "no_shard") == "no_shard"),
    _yet("--data-parallel-sharding-strategy {args.data_parallel_sharding_strategy}", f"take {' or '.join(_TAKEN)}",
         lambda args: getattr(args, _STRATEGY, "no_shard") not in ("no_shard", *_TAKEN)),
    Rule(f"{_WITH} needs --megatron-fsdp-grad-comm-dtype auto or that of --megatron-fsdp-main-grads-dtype: over shard "
         "groups gradients are summed in the type in which they are kept",
         lambda args: (getattr(args, "megatron_fsdp_grad_comm_dtype", None)
                       not in (None, "auto", getattr(args, "megatron_fsdp_main_grads_dtype", None)))),
    _yet("--pipeline-model-parallel-size", "Megatron 0.19.2 makes its mesh of several shard groups as if there were no "
         "stages, and ends with an error of einops, without --recover, too",
         is_above_one("pipeline_model_parallel_size")),
]  # fmt: skip

_SECOND = f"{_WITH} and --megatron-fsdp-version 2"
SECOND_RULES = [
    Rule(f"{_SECOND} needs --no-save-optim with --save: Megatron writes no optimizer's state of it",
         all_of(is_set("save"), unless(is_set("no_save_optim")))),
    Rule(f"{_SECOND} needs --clip-grad 0 with --expert-model-parallel-size: Megatron's norm is that of parameters of "
         "one group, and ends with an assertion",
         all_of(is_above_one("expert_model_parallel_size"), lambda args: getattr(args, "clip_grad", 1.0) > 0)),
    Rule(f"{_SECOND} cannot be combined with --log-num-zeros-in-grad and --expert-model-parallel-size: Megatron counts "
         "in parameters of one group, and ends with an assertion",
         all_of(is_above_one("expert_model_parallel_size"), is_set("log_num_zeros_in_grad"))),
    yet("bf16 types of --use-precision-aware-optimizer", "Megatron looks for gradients where there are none, and clips "
        "by a norm of 0", keeps(*BF16), among=_SECOND),
]  # fmt: skip
"""The same with --megatron-fsdp-version 2; what Megatron itself refuses of it is left to Megatron."""

_OPTIM = f"{_WITH} and --outer-dp-sharding-strategy optim"
OUTER_RULES = [
    Rule(f"{_OPTIM} needs --data-parallel-sharding-strategy optim_grads_params, as in Megatron",
         unless(is_one_of(_STRATEGY, "optim_grads_params"))),
    Rule(f"{_OPTIM} needs --megatron-fsdp-main-params-dtype fp32: shadows are kept in 32 bits",
         lambda args: str(getattr(args, "megatron_fsdp_main_params_dtype", "fp32")) not in ("fp32", "torch.float32")),
    yet("bf16 types of --use-precision-aware-optimizer", "what a checkpoint is written of are moments in 32 bits",
        keeps(*BF16), among=_OPTIM),
    yet("--async-save", "the state that is written is there only until the save has begun", among=_OPTIM),
]  # fmt: skip
"""The same with --outer-dp-sharding-strategy optim, as far as Megatron has it: where shard groups share all they have,
main parameters in 32 bits."""


def cannot_shard_model(args: argparse.Namespace, config: RecoverConfig, world: int) -> list[str]:
    """What is refused with --recover and --use-megatron-fsdp in a run of ``world`` workers; empty without the latter.

    ``args``: as parsed, not yet validated.
    """
    if not getattr(args, "use_megatron_fsdp", False):
        return []
    found = [*reasons(FSDP_RULES, args), *_too_small(args, world)]
    if getattr(args, "megatron_fsdp_version", 1) == 2:
        found += reasons(SECOND_RULES, args)
    outer = getattr(args, "outer_dp_sharding_strategy", "no_shard")
    if outer == "optim":
        found += reasons(OUTER_RULES, args)
    elif outer != "no_shard":
        found.append(f"{_WITH} and --outer-dp-sharding-strategy {outer}: take no_shard or optim")
    if config.verify_interval:
        found.append(f"{_WITH} cannot be combined with --recover-verify-interval yet: a shard that is replaced may "
                     "have been gathered by its mates before")  # fmt: skip
    return found


def _too_small(args: argparse.Namespace, world: int) -> list[str]:
    """A shard group of one worker (one of experts is the smaller) keeps whole gradients; Megatron-FSDP 0.19.2
    (``GradReducePipeline``) scales those once a microbatch, all that is in."""
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
        f"{_WITH} needs shard groups of two workers or more: lower {flag}, or start more workers"
        for flag, size in sizes
        if size < 2
    ]
