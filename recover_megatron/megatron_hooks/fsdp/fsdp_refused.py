"""Flags of Megatron that --recover refuses only together with --use-megatron-fsdp (other flags: ``entry.refused``)."""

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
    _yet("--check-weight-hash-across-dp-replicas-interval", "it compares complete parameters, but workers hold shards"),
    _yet("--ddp-average-in-collective", "the step sums over shard groups and does not average"),
    _yet("--fp16", "Megatron 0.19.2 itself fails in its first step with an AttributeError: to unscale, it reads the "
         "gradient of each parameter, but a parameter without elements in a worker's shard has no gradient"),
    Rule(f"{_WITH} needs --num-distributed-optimizer-instances 2 or more: each instance is a replica, and with one "
         "replica a lost worker's shard has no copy", unless(is_above_one("num_distributed_optimizer_instances"))),
    Rule(f"{_WITH} needs a --data-parallel-sharding-strategy that shards: for plain data parallelism (no_shard), "
         "remove --use-megatron-fsdp",
         lambda args: getattr(args, _STRATEGY, "no_shard") == "no_shard"),
    _yet("--data-parallel-sharding-strategy {args.data_parallel_sharding_strategy}", f"use {' or '.join(_TAKEN)}",
         lambda args: getattr(args, _STRATEGY, "no_shard") not in ("no_shard", *_TAKEN)),
    Rule(f"{_WITH} needs --megatron-fsdp-grad-comm-dtype auto, or the dtype of --megatron-fsdp-main-grads-dtype: "
         "gradients are summed over shard groups in the dtype in which they are stored",
         lambda args: (getattr(args, "megatron_fsdp_grad_comm_dtype", None)
                       not in (None, "auto", getattr(args, "megatron_fsdp_main_grads_dtype", None)))),
    _yet("--pipeline-model-parallel-size", "with several shard groups, Megatron 0.19.2 itself leaves the pipeline "
         "stages out of its device mesh, and fails with an error of einops",
         is_above_one("pipeline_model_parallel_size")),
]  # fmt: skip

_SECOND = f"{_WITH} and --megatron-fsdp-version 2"
SECOND_RULES = [
    Rule(f"{_SECOND} needs --no-save-optim with --save: Megatron does not save this version's optimizer state",
         all_of(is_set("save"), unless(is_set("no_save_optim")))),
    Rule(f"{_SECOND} needs --clip-grad 0 with --expert-model-parallel-size: Megatron computes the norm of one "
         "parameter group only, and fails with an assertion",
         all_of(is_above_one("expert_model_parallel_size"), lambda args: getattr(args, "clip_grad", 1.0) > 0)),
    Rule(f"{_SECOND} cannot be combined with --log-num-zeros-in-grad and --expert-model-parallel-size: Megatron counts "
         "the zeros of one parameter group only, and fails with an assertion",
         all_of(is_above_one("expert_model_parallel_size"), is_set("log_num_zeros_in_grad"))),
    yet("bf16 types of --use-precision-aware-optimizer", "Megatron does not find the gradients, and clips by a norm "
        "of 0", keeps(*BF16), among=_SECOND),
]  # fmt: skip
"""Additional refusals with --megatron-fsdp-version 2.  Combinations that Megatron itself refuses are not listed."""

_OPTIM = f"{_WITH} and --outer-dp-sharding-strategy optim"
OUTER_RULES = [
    Rule(f"{_OPTIM} needs --data-parallel-sharding-strategy optim_grads_params, as in Megatron",
         unless(is_one_of(_STRATEGY, "optim_grads_params"))),
    Rule(f"{_OPTIM} needs --megatron-fsdp-main-params-dtype fp32: shadows are stored in 32 bits",
         lambda args: str(getattr(args, "megatron_fsdp_main_params_dtype", "fp32")) not in ("fp32", "torch.float32")),
    yet("bf16 types of --use-precision-aware-optimizer", "a checkpoint is written from moments in 32 bits",
        keeps(*BF16), among=_OPTIM),
    yet("--async-save", "the gathered state is freed as soon as the save has begun", among=_OPTIM),
]  # fmt: skip
"""Additional refusals with --outer-dp-sharding-strategy optim."""


def cannot_shard_model(args: argparse.Namespace, config: RecoverConfig, world: int) -> list[str]:
    """Return a message for each setting that --recover refuses with --use-megatron-fsdp; empty without that flag.

    ``args``: Megatron's arguments before their validation.  ``world``: the number of workers.
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
        found.append(f"{_WITH} and --outer-dp-sharding-strategy {outer}: use no_shard or optim")
    if config.verify_interval:
        found.append(f"{_WITH} cannot be combined with --recover-verify-interval yet: peers may gather a wrong shard "
                     "before the comparison replaces it")  # fmt: skip
    return found


def _too_small(args: argparse.Namespace, world: int) -> list[str]:
    """Return a message for each kind of shard group (dense layers, experts) that would have only one worker.

    A shard group of one worker keeps complete gradients, and Megatron-FSDP 0.19.2 (``GradReducePipeline``) wrongly
    scales their accumulated sum once per microbatch.  Shard groups of unequal sizes are refused, too.
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
            f"{world // tensor} data-parallel ranks of {world} workers: all shard groups must have the same size"
        ]
    return [
        f"{_WITH} needs shard groups of at least two workers: lower {flag}, or start more workers"
        for flag, size in sizes
        if size < 2
    ]
