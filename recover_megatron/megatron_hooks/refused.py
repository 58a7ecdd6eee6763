"""Megatron's flags that --recover refuses, with the reason: what it could not keep exact, or has not been tried."""

from __future__ import annotations

import argparse
import importlib.util

from recover_megatron import hostdevice
from recover_megatron.arguments import RecoverConfig

EMERGING = ("muon", "dist_muon", "adaptive_muon", "soap", "lion")
"""Megatron's optimizers that are in the package emerging-optimizers."""

REFUSED = {
    "use_layer_wise_distributed_optimizer": "each worker would hold state that nobody else has",
    "use_torch_fsdp2": "its groups can't be changed",
    "use_megatron_fsdp": "its groups can't be changed",
    "ddp_average_in_collective": "an average would depend on who is alive",
    "inprocess_restart": "when a worker dies it ends the step on all others and calls pretrain() again; --recover "
    "finishes the step",
    "enable_ft_package": "its ft_launcher restarts all workers when one dies; recover-run keeps them running, and "
    "--recover-hang-timeout finds one that hangs",
    "hybrid_context_parallel": "its microbatches differ in size",
    "perform_rl_step": "its microbatches are not known by their numbers",
    "fim_data": "its samples depend on who read which before",
    "full_validation": "its evaluation steps depend on the number of replicas",
    "iterations_to_skip": "skipped samples are read past the hooks",
    "decrease_batch_size_if_needed": "the batch must not depend on who is alive",
    "te_rng_tracker": "its random states can't be set per microbatch",
    "qk_clip": "it takes a maximum over all replicas in the step",
    "log_max_attention_logit": "it takes a maximum over all replicas in the step",
    "moe_router_enable_expert_bias": "it sums over all replicas in the step",
    "overlap_moe_expert_parallel_comm": "its schedule was not examined",
    "log_straggler": "it reports to a rank that it chooses at the start",
    "delay_wgrad_compute": "gradients would come after the sum",
    "tp_comm_overlap": "its userbuffers can neither be aborted nor made anew: an orphan's kernels would wait for its "
    "dead mate for good",
    "use_sharp": "the gradients do not go through Megatron's data-parallel groups, for which it reserves SHARP",
    "nccl_ub": "the gradients do not go through Megatron's data-parallel groups, with which it registers its buffers",
    "moe_enable_deepep": "its buffers keep the addresses of dead workers, and its kernels can't be aborted",
}
"""Attribute of Megatron's arguments -> why its flag is refused with --recover."""

REFUSED_SHARDED = {
    "fp16": "its loss scale would be found from one worker's part of the gradients",
    "use_precision_aware_optimizer": "the inner optimizer holds the main parameters",
    "optimizer_cpu_offload": "its state moves between devices by itself",
    "fp8_param_gather": "its parameters are not views of the buffer that is gathered",
    "fp8_param": "its parameters are not views of the buffer that is gathered",
    "fp4_param": "its parameters are not views of the buffer that is gathered",
    "reuse_grad_buf_for_mxfp8_param_ag": "gradients must outlive the update",
    "overlap_param_gather_with_optimizer_step": "the update is one step, all or nothing",
    "reduce_scatter_with_fp32_accumulation": "the ring sums in the gradients' type: use "
    "--accumulate-allreduce-grads-in-fp32",
    "mtp_num_layers": "its gradients have a norm of their own",
}
"""The same for what is refused with --recover and --use-distributed-optimizer together."""

NAMES = {
    "nccl_ub": "--use-nccl-ub",
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
    if not getattr(args, "use_distributed_optimizer", False):
        return []
    if (optimizer := getattr(args, "optimizer", None)) in EMERGING:
        return [f"--recover with --use-distributed-optimizer cannot be combined with --optimizer {optimizer} yet: "
                "its shards are whole layers"]  # fmt: skip
    if (
        config.shadow_device == "cpu"
        and not hostdevice.is_active()
        and any(importlib.util.find_spec(name) for name in ("apex", "transformer_engine"))
    ):
        return ["--recover-shadow-device cpu needs torch's Adam: apex and Transformer Engine update on the GPU alone"]
    return [
        f"--recover with --use-distributed-optimizer cannot be combined with {flag} yet: {why}"
        for flag, why in _refused(args, REFUSED_SHARDED).items()
    ]


def cannot_recover(args: argparse.Namespace) -> list[str]:
    """What --recover refuses for now: where it could not keep every microbatch counted once, or has not been tried."""
    found = [f"--recover cannot be combined with {flag} yet: {why}" for flag, why in _refused(args, REFUSED).items()]
    if getattr(args, "skip_train", False) or getattr(args, "train_iters", None) == 0:
        found.append("--recover has nothing to keep in a run that trains nothing (--skip-train, --train-iters 0): "
                     "start it without --recover")  # fmt: skip
    if getattr(args, "optimizer", None) == "dist_muon":
        found.append("--recover cannot be combined with --optimizer dist_muon yet: each worker would hold optimizer "
                     "state that nobody else has")  # fmt: skip
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
    graphs = getattr(args, "cuda_graph_impl", None)
    if graphs not in (None, "none") or getattr(args, "enable_cuda_graph", False):
        found.append("--recover cannot be combined with CUDA graphs yet: leave --cuda-graph-impl at none")
    loader = getattr(args, "dataloader_type", None)
    if loader not in (None, "single"):
        found.append(
            f"--recover needs --dataloader-type single (microbatch ids are defined by its order), not {loader}"
        )
    if getattr(args, "fp16", False) and not getattr(args, "accumulate_allreduce_grads_in_fp32", False):
        found.append(
            "--recover with --fp16 needs --accumulate-allreduce-grads-in-fp32: added up in fp16, gradients overflow by "
            "how many of them one replica adds, so after a death other iterations would be skipped than without it"
        )
    if getattr(args, "rerun_mode", "disabled") != "disabled":
        found.append("--recover needs --rerun-mode disabled: a re-run of a step would count its microbatches twice")
    balancing = getattr(args, "moe_router_load_balancing_type", None) or ()
    for kind in {balancing} if isinstance(balancing, str) else set(balancing):
        if kind in ("global_aux_loss", "quantile_balancing"):
            found.append(f"--recover cannot be combined with --moe-router-load-balancing-type {kind} yet: "
                         "it sums over all replicas in the step")  # fmt: skip
    if getattr(args, "moe_token_dispatcher_type", None) == "flex":
        found.append(
            "--recover cannot be combined with --moe-token-dispatcher-type flex (DeepEP, HybridEP, NCCL EP) yet: its "
            "buffers keep the addresses of dead workers, and its kernels can't be aborted; take alltoall"
        )
    if getattr(args, "fp8", None) and getattr(args, "fp8_recipe", "delayed") == "delayed":
        found.append(
            "--recover cannot be combined with delayed FP8 scaling yet: its scales are a history of what each worker "
            "has computed, to which a re-run adds and which a worker that takes a place has not; take another "
            "--fp8-recipe (tensorwise, blockwise, mxfp8), which scales by what it is about to multiply"
        )
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        found.append("--recover cannot be combined with --non-persistent-ckpt-type local yet: its groups are fixed")
    group = getattr(args, "microbatch_group_size_per_vp_stage", None)
    if group not in (None, getattr(args, "pipeline_model_parallel_size", 1)):
        found.append(
            "--recover needs --microbatch-group-size-per-virtual-pipeline-stage at its default, the pipeline size"
        )
    return found
