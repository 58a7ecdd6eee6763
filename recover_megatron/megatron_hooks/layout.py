"""Arithmetic on Megatron's flags: ranks per replica, batch sizes, and the layout of the optimizer's state.

It uses no state of Megatron, so Megatron need not be initialized.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import inf, prod
from pathlib import Path
from typing import Any

from recover_megatron.workload.domains import data_parallel_ranks_per_replica


def inner_ranks_of(args: Any, world: int) -> int:
    """Return the number of data-parallel ranks per replica in a run of ``world`` workers with these Megatron flags.

    With Megatron-FSDP a replica is a shard group, which Megatron calls an instance of the distributed optimizer.
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


def batches_to_come(args: Any, consumed: int | None = None, iteration: int = 0) -> list[int]:
    """Return the sizes, in samples and in order, of the batches that this launch still trains, one per schedule entry.

    The run has already trained ``consumed`` samples in ``iteration`` steps.  Megatron need not have validated ``args``.
    The list is empty if Megatron will refuse the arguments, or if the run resumes a batch size schedule and
    ``consumed`` is None (unknown).
    """
    schedule, fixed = getattr(args, "step_batch_size_schedule", None), getattr(args, "global_batch_size", None)
    if not schedule:
        return [fixed] if fixed else []
    if consumed is None:
        if _resumes(args):
            return []
        consumed = 0
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator as Calculator

    try:
        entries = Calculator._parse_schedule(schedule, getattr(args, "seq_length", None))
    except ValueError:
        return []
    left, samples = (getattr(args, "train_iters", None) or inf) - iteration, getattr(args, "train_samples", None) or inf
    # --exit-interval ends this launch.  The next launch may have other workers, so its batches are not listed.
    if interval := getattr(args, "exit_interval", None):
        left = min(left, interval - iteration % interval)
    found: list[int] = []
    for (_, size), following in zip(entries, [start for start, _ in entries[1:]] + [inf], strict=True):
        end = min(following, samples)
        if size < 1 or left < 1 or end <= consumed:
            continue
        found.append(size)
        steps = inf if end == inf else -((consumed - end) // size)
        consumed, left = consumed + steps * size, left - steps
    return found


def misfits(args: Any, ranks: int, batches: list[int]) -> list[str]:
    """Return the reasons why Megatron cannot train ``batches`` (sizes in samples) on ``ranks`` data-parallel ranks."""
    micro, steps = getattr(args, "micro_batch_size", None), bool(getattr(args, "step_batch_size_schedule", None))
    if not micro or getattr(args, "decrease_batch_size_if_needed", False):
        return []
    named = "batch size {} of --step-batch-size-schedule" if steps else "global batch size {}"
    change = "--step-batch-size-schedule" if steps else "--global-batch-size"
    found = [
        f"{named.format(size)} is not a multiple of micro batch size {micro} x {ranks} data-parallel ranks: "
        f"change {change}, --micro-batch-size or the number of workers"
        for size in dict.fromkeys(batches)
        if size % (micro * ranks)
    ]
    return found + [
        f"--step-batch-size-schedule: batch {after} follows batch {before}, but Megatron does not accept a batch with "
        "fewer microbatches than the previous one"
        for before, after in itertools.pairwise(batches)
        if after // (micro * ranks) < before // (micro * ranks)
    ]


def _resumes(args: Any) -> bool:
    """Return whether the run may resume from a checkpoint, as far as the flags and the tracker file show."""
    load = getattr(args, "load", None)
    if not load or getattr(args, "finetune", False):
        return False
    unknown = "://" in load or any(getattr(args, name, None) for name in ("ckpt_step", "non_persistent_ckpt_type"))
    return unknown or (Path(load) / "latest_checkpointed_iteration.txt").is_file()


def no_rollback_reason(args: Any, optimizers: Sequence[Any] = ()) -> str:
    """Return why the run cannot roll back to its checkpoints in place, as a clause; empty if it can.

    ``optimizers``: the optimizers that Megatron has built; empty before it builds them.
    """
    if reason := getattr(args, "no_rollback_reason", ""):  # a training loop other than Megatron-LM's has set it
        return str(reason)
    if args.no_save_optim:
        return "its checkpoints lack the optimizer's state (--no-save-optim)"
    if getattr(args, "use_megatron_fsdp", False):
        return ""
    if args.use_distributed_optimizer:
        if args.ckpt_format not in ("torch_dist", "torch"):
            return f"a distributed optimizer cannot be loaded in place from --ckpt-format {args.ckpt_format}"
    elif args.ckpt_format == "torch_dist" and any(getattr(one, "init_state_fn", ...) is None for one in optimizers):
        return f"Megatron itself cannot load --optimizer {args.optimizer} from --ckpt-format torch_dist"
    return ""


def spreads_optimizer(args: Any) -> bool:
    """Return whether the optimizer's state is sharded over replicas; with Megatron-FSDP a flag requests this."""
    if getattr(args, "use_megatron_fsdp", False):
        return bool(getattr(args, "outer_dp_sharding_strategy", "no_shard") == "optim")
    return bool(args.use_distributed_optimizer)


def optimizer_instances(args: Any) -> int:
    """Return the number of copies that Megatron keeps of each shard of the optimizer's state; 1 with Megatron-FSDP."""
    if getattr(args, "use_megatron_fsdp", False):
        return 1
    return int(getattr(args, "num_distributed_optimizer_instances", None) or 1)
