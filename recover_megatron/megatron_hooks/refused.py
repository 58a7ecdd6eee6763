"""Megatron's flags that --recover refuses, with the reason: what it could not keep exact, or has not been tried."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re

from recover_megatron import hostdevice
from recover_megatron.arguments import RecoverConfig
from recover_megatron.workload.interleaved import runs

EMERGING = ("muon", "dist_muon", "adaptive_muon", "soap", "lion")
"""Megatron's optimizers that are in the package emerging-optimizers."""

REFUSED = {
    "use_layer_wise_distributed_optimizer": "each worker would hold state that nobody else has",
    "use_torch_fsdp2": "its groups can't be changed",
    "inprocess_restart": "when a worker dies it ends the step on all others and calls pretrain() again; --recover "
    "finishes the step",
    "enable_ft_package": "its ft_launcher restarts all workers when one dies; recover-run keeps them running, and "
    "--recover-hang-timeout finds one that hangs",
    "hybrid_context_parallel": "its microbatches differ in size",
    "perform_rl_step": "its microbatches are not known by their numbers",
}
"""Attribute of Megatron's arguments -> why its flag is refused with --recover."""

REFUSED_SHARDED = {
    "use_precision_aware_optimizer": "with types other than float32 "
    "(--main-grads-dtype, --main-params-dtype, --exp-avg-dtype, --exp-avg-sq-dtype) Transformer Engine's optimizer "
    "holds and rounds the main parameters and the moments, of which shadows would need the same bits",
    "optimizer_cpu_offload": "its state moves between devices by itself",
    "fp8_param": "its parameters are not views of the buffer that is gathered",
    "fp4_param": "its parameters are not views of the buffer that is gathered",
    "reduce_scatter_with_fp32_accumulation": "the ring sums in the gradients' type: use "
    "--accumulate-allreduce-grads-in-fp32",
    "qk_clip": "it scales whole weights, of whose copies in 32 bits a worker has a part alone; Megatron itself ends "
    "with an error there",
    "mtp_detach_heads": "their gradients have a norm of their own",
}
"""The same for what is refused with --recover and --use-distributed-optimizer together."""

UNTESTED = {
    "te_rng_tracker": "Transformer Engine's random states are set per microbatch, which was run on a stand-in alone",
}
"""What is refused without --recover-untested: it is built, and a part of it needs a GPU or Transformer Engine."""

NAMES = {
    "use_layer_wise_distributed_optimizer": "the layer-wise distributed optimizer",
    "fp8_param": "--fp8-param-gather",
    "fp4_param": "--fp4-param-gather",
}
"""Attributes that are not their flag's name with underscores."""


def _refused(args: argparse.Namespace, table: dict[str, str]) -> dict[str, str]:
    """Flag -> why, of what is set; two attributes of one flag are one."""
    set_here = {name: why for name, why in table.items() if getattr(args, name, None)}
    return {NAMES.get(name, f"--{name.replace('_', '-')}"): why for name, why in set_here.items()}


def cannot_shard(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """What is refused with --recover and the distributed optimizer; empty without it."""
    # Megatron turns the distributed optimizer on with Megatron-FSDP.
    if not getattr(args, "use_distributed_optimizer", False) and not getattr(args, "use_megatron_fsdp", False):
        return []
    if (
        config.shadow_device == "cpu"
        and not hostdevice.is_active()
        and any(importlib.util.find_spec(name) for name in ("apex", "transformer_engine"))
    ):
        return ["--recover-shadow-device cpu needs torch's Adam: apex and Transformer Engine update on the GPU alone"]
    if config.grace and not config.shadow_shards:
        return ["--recover-grace with --use-distributed-optimizer needs --recover-shadow-shards 1 or 2: while a "
                "replica is set aside nobody else has its part of the optimizer's state"]  # fmt: skip
    return [
        f"--recover with --use-distributed-optimizer cannot be combined with {flag} yet: {why}"
        for flag, why in _refused(args, REFUSED_SHARDED).items()
    ]


def cannot_recover(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """What --recover refuses for now: where it could not keep every microbatch counted once, or has not been tried."""
    found = [f"--recover cannot be combined with {flag} yet: {why}" for flag, why in _refused(args, REFUSED).items()]
    if not config.untested:
        found += [f"--recover takes {flag} only with --recover-untested: {why}"
                  for flag, why in _refused(args, UNTESTED).items()]  # fmt: skip
    if hostdevice.is_active() and config.collective == "native":
        found.append("--recover-collective native needs GPUs: it is NCCL's own collectives; on the CPU take ring, the "
                     "default there")  # fmt: skip
    if not hostdevice.is_active() and getattr(args, "distributed_backend", None) == "gloo":
        found.append("--recover cannot be combined with --distributed-backend gloo on GPUs: gradients travel over NCCL "
                     "there: leave the flag out, or train on the CPU with --recover-device cpu")  # fmt: skip
    if getattr(args, "skip_train", False) or getattr(args, "train_iters", None) == 0:
        found.append("--recover has nothing to keep in a run that trains nothing (--skip-train, --train-iters 0): "
                     "start it without --recover")  # fmt: skip
    if getattr(args, "optimizer", None) in EMERGING and args.tensor_model_parallel_size > 1:
        mode = getattr(args, "muon_tp_mode", "blockwise")
        if mode != "blockwise":
            found.append(f"--recover cannot be combined with --muon-tp-mode {mode} yet: in the middle of the update it "
                         "asks the other tensor ranks, of which one may be dead: take blockwise")  # fmt: skip
    for name, size in (
        ("tensor_parallel_num_weight_shards", "tensor_model_parallel_size"),
        ("expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size"),
    ):
        shards = getattr(args, name, None)
        if shards is not None and shards > (getattr(args, size, None) or args.tensor_model_parallel_size):
            found.append(
                f"--recover cannot be combined with --{name.replace('_', '-')} {shards} yet: "
                "weights would be spread over replicas, and gathered in the step"
            )
    loader = getattr(args, "dataloader_type", None)
    if loader not in (None, "single", "cyclic"):
        found.append(f"--recover needs --dataloader-type single or cyclic, not {loader}: a loader of your own gives "
                     "batches one after the other, and a lost one must be read by its number")  # fmt: skip
    if getattr(args, "rerun_mode", "disabled") != "disabled":
        found.append(
            f"--recover cannot be combined with --rerun-mode {args.rerun_mode}: Megatron 0.17 to 0.19 does not start "
            "with it either (ValueError: it looks for a mode report_determinism_stats, which its flag does not take); "
            "a Megatron that does runs each step twice and compares the n-th result with the n-th, which after a death "
            "is of another microbatch"
        )
    balancing = getattr(args, "moe_router_load_balancing_type", None) or ()
    for kind in {balancing} if isinstance(balancing, str) else set(balancing):
        if kind == "global_aux_loss":
            found.append(
                f"--recover cannot be combined with --moe-router-load-balancing-type {kind} yet: in the "
                "forward pass a router sums its tokens over all replicas, so the loss of a rank's n-th "
                "microbatch is made of the n-th ones of all others: of a lost one nobody would have them, and "
                "what runs them again comes too late (aux_loss and seq_aux_loss need no other replica)"
            )
    if getattr(args, "fp8", None) and getattr(args, "fp8_recipe", "delayed") == "delayed":
        found.append(
            "--recover cannot be combined with delayed FP8 scaling yet: its scales are a history of what each worker "
            "has computed, to which a re-run adds and which a worker that takes a place has not; take another "
            "--fp8-recipe (tensorwise, blockwise, mxfp8), which scales by what it is about to multiply"
        )
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        found.append(
            "--recover cannot be combined with --non-persistent-ckpt-type local yet: NVRx takes such a checkpoint for "
            "complete where every rank has written its own, and a restart would find none that was begun while one is "
            "lost; --recover-memory-tier keeps states in the memory of other nodes"
        )
    if getattr(args, "iterations_to_skip", None) and _grows(args):
        found.append("--recover cannot be combined with --iterations-to-skip and a batch that grows yet")
    return [*found, *_never_clips(args), *_groups_of_microbatches(args)]


def cannot_grow(args: argparse.Namespace, config: RecoverConfig, replicas: int, lanes: int) -> list[str]:
    """What is refused with --recover-max-replicas, for a launch of ``replicas`` that each hold ``lanes`` data-parallel
    ranks; empty without it.
    """
    if not config.max_replicas:
        return []
    flag, found = f"--recover-max-replicas {config.max_replicas}", []
    if getattr(args, "use_megatron_fsdp", False) or (getattr(args, "num_distributed_optimizer_instances", 1) or 1) > 1:
        return [f"{flag} cannot be combined with --use-megatron-fsdp or --num-distributed-optimizer-instances yet: "
                "their groups are those of the launch for good"]  # fmt: skip
    if config.max_replicas < replicas:
        found.append(f"{flag}: this run has {replicas} at its launch: give at least as many, or leave it out")
    if replicas < 2:
        found.append(f"{flag} needs a launch of two replicas at least: with one nothing is summed over replicas")
    micro, whole = getattr(args, "micro_batch_size", None), getattr(args, "global_batch_size", None)
    least = _least(args) * lanes
    if micro and whole and whole // (micro * least) < config.max_replicas:
        why = f" of {least} microbatches at least (an interleaved pipeline)" if least > lanes else ""
        found.append(f"{flag}: a global batch of {whole // micro} microbatches is enough for "
                     f"{whole // (micro * least)} replicas{why}: lower it, or raise --global-batch-size")  # fmt: skip
    return found


def _least(args: argparse.Namespace) -> int:
    """So many microbatches a data-parallel rank runs at least, if any: of an interleaved pipeline, its stages.

    By flags that Megatron has not looked at yet.
    """
    stages: int = args.pipeline_model_parallel_size
    if layout := getattr(args, "pipeline_model_parallel_layout", None):
        every = re.sub(r"(?:\(([^()]*)\)|(.))\*(\d+)", lambda its: (its[1] or its[2]) * int(its[3]), str(layout))
        return stages if every.count("|") >= stages else 1
    layers, chunks = getattr(args, "num_layers_per_virtual_pipeline_stage", None), 1
    if layers:
        chunks = (args.num_layers or 0) // (stages * layers)
    return stages if max(chunks, getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1) > 1 else 1


def _never_clips(args: argparse.Namespace) -> list[str]:
    """What Megatron itself takes with --qk-clip, and ends at in the first step, or where it would clip first."""
    if not getattr(args, "qk_clip", False):
        return []
    found = []
    if not (getattr(args, "bf16", False) or getattr(args, "fp16", False)):
        found.append("--qk-clip needs --bf16 or --fp16: without them Megatron itself does not find the attention, and "
                     "ends in the first step with an AttributeError")  # fmt: skip
    if args.tensor_model_parallel_size > 1 and not getattr(args, "multi_latent_attention", False):
        found.append(f"--qk-clip with --tensor-model-parallel-size {args.tensor_model_parallel_size} needs "
                     "--multi-latent-attention: elsewhere Megatron itself takes a tensor rank's weight for the whole "
                     "one where it clips, and ends with a RuntimeError")  # fmt: skip
    return found


def _grows(args: argparse.Namespace) -> bool:
    return bool(getattr(args, "rampup_batch_size", None) or getattr(args, "step_batch_size_schedule", None))


def _groups_of_microbatches(args: argparse.Namespace) -> list[str]:
    """A group size with which Megatron refuses the launch's share of a rank, when its first pass has begun."""
    flag, group = "--microbatch-group-size-per-virtual-pipeline-stage", args.microbatch_group_size_per_vp_stage
    stages = args.pipeline_model_parallel_size
    if group in (None, stages):
        return []
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    ranks = int(os.environ.get("WORLD_SIZE", "1")) // model
    micro, whole = getattr(args, "micro_batch_size", None), getattr(args, "global_batch_size", None)
    if not micro or not whole or ranks < 1 or runs(whole // (micro * ranks), stages, group):
        return []
    return [f"{flag} {group}: an interleaved pipeline of {stages} stages cannot run the {whole // (micro * ranks)} "
            f"microbatches of a rank in such groups: each, also the last one, needs {stages} at least"]  # fmt: skip
