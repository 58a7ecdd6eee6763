"""Flags of Megatron that --recover changes, or refuses because recovery would not be exact or is untested.

``ADJUSTED`` lists the flags that --recover changes.  Each change is logged at the start, and is of one of two kinds:

    another way   --recover computes the same result by other means
    switched off  the flag is a speed-up or an extra report that cannot survive a death; the training is the same

A flag that changes the result of the training is never switched off, but refused.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from recover_megatron import hostdevice
from recover_megatron.arguments import RecoverConfig
from recover_megatron.errors import UserError
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.layout import batches_to_come
from recover_megatron.rules import (
    BF16,
    SCALED,
    Condition,
    Rule,
    all_of,
    has_cuda_graphs,
    is_above_one,
    is_given,
    is_one_of,
    is_set,
    keeps,
    reasons,
    unless,
)
from recover_megatron.workload.assign import runs

log = get_logger(__name__)

EMERGING = ("muon", "dist_muon", "adaptive_muon", "soap", "lion")
"""Names of Megatron's optimizers that come from the Python package emerging-optimizers."""


def yet(flag: str, why: str, when: Condition | None = None, among: str = "--recover") -> Rule:
    """Return a rule that refuses ``flag`` if ``when`` is true, or, without ``when``, if the flag is given.

    ``why``: the reason, as a clause.  ``among``: the flags with which ``flag`` cannot be combined.
    """
    return Rule(f"{among} cannot be combined with {flag} yet: {why}", when or is_given(flag))


def _spreads_weights(flag: str, size: str) -> Rule:
    name = flag.removeprefix("--").replace("-", "_")

    def when(args: argparse.Namespace) -> bool:
        return (getattr(args, name, None) or 0) > (getattr(args, size, None) or args.tensor_model_parallel_size)

    return yet(f"{flag} {{args.{name}}}", "weights are then spread over replicas and gathered in the step", when)


def balances_by(kind: str) -> Condition:
    """Return the condition that the routers balance their load by ``kind`` (--moe-router-load-balancing-type)."""

    def when(args: argparse.Namespace) -> bool:
        kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
        return kind in ([kinds] if isinstance(kinds, str) else kinds)

    return when


scales_by_history = all_of(is_set("fp8"), lambda args: getattr(args, "fp8_recipe", "delayed") == "delayed")
"""Condition: Transformer Engine scales 8-bit numbers by the maxima of past steps (--fp8-recipe delayed)."""

RULES = [
    yet("the layer-wise distributed optimizer", "each worker holds state that no other worker has",
         is_set("use_layer_wise_distributed_optimizer")),
    yet("--use-torch-fsdp2", "the process groups of torch's FSDP2 cannot be replaced after a death"),
    yet("--inprocess-restart", "after a death Megatron aborts the step on all workers and calls pretrain() again, but "
         "--recover finishes the step"),
    yet("--enable-ft-package", "its ft_launcher restarts all workers when one dies, but recover-run keeps the others "
         "running; --recover-hang-timeout detects a worker that hangs"),
    yet("--fault-injector-ranks, --fault-injector-num-ranks", "Megatron's injector broadcasts a plan at the start of "
         "train(), for which a newcomer would wait; use --recover-inject to make a worker exit, hang or fail",
         is_set("fault_injector_ranks", "fault_injector_num_ranks")),
    yet("--hybrid-context-parallel", "microbatches then differ in size"),
    yet("--phase-transition-iterations", "Megatron restarts its sample count at a transition, but --recover numbers "
        "microbatches over the complete run: other samples would be trained"),
    yet("--perform-rl-step", "the microbatches of RL have no numbers, so a lost microbatch could not be run again"),
    Rule("--recover has nothing to protect in a run that trains nothing (--skip-train, --train-iters 0, "
         "--freeze-all-layers): start the run without --recover",
         lambda args: is_set("skip_train", "freeze_all_layers")(args) or getattr(args, "train_iters", None) == 0),
    yet("--ckpt-pg-tensors-cache-path", "cache files assign parts of a checkpoint to workers: after a "
        "death the parts of the dead workers would be missing"),
    yet("--use-precision-aware-optimizer without --use-distributed-optimizer", "this combination is untested",
         all_of(is_set("use_precision_aware_optimizer"), unless(is_set("use_distributed_optimizer",
                                                                       "use_megatron_fsdp")))),
    yet("--muon-tp-mode {args.muon_tp_mode}", "in this mode the update communicates with the other tensor ranks, which "
         "may be dead: use blockwise",
         all_of(is_one_of("optimizer", *EMERGING), is_above_one("tensor_model_parallel_size"),
                lambda args: getattr(args, "muon_tp_mode", "blockwise") != "blockwise")),
    _spreads_weights("--tensor-parallel-num-weight-shards", "tensor_model_parallel_size"),
    _spreads_weights("--expert-tensor-parallel-num-weight-shards", "expert_tensor_parallel_size"),
    Rule("--recover does not support --dataloader-type {args.dataloader_type}: use single, cyclic or external",
         lambda args: getattr(args, "dataloader_type", None) not in (None, "single", "cyclic", "external")),
    Rule("--recover cannot be combined with --rerun-mode {args.rerun_mode}: Megatron up to 0.20 does not start in this "
         "mode (ValueError: Megatron expects the name report_determinism_stats, which the flag does not accept)",
         lambda args: getattr(args, "rerun_mode", "disabled") != "disabled"),
    yet("--moe-router-load-balancing-type global_aux_loss", "in the forward pass a router sums its tokens over all "
         "replicas, so the loss of a microbatch depends on earlier microbatches of all other ranks, and a death loses "
         "some of these (aux_loss and seq_aux_loss need no other replica)", balances_by("global_aux_loss")),
    yet("--use-transformer-engine-op-fuser and --fp8-recipe delayed", "fused layers store their scales differently",
         all_of(is_set("use_transformer_engine_op_fuser"), scales_by_history)),
    yet("--overlap-moe-expert-parallel-comm and --fp8-recipe delayed", "forward and backward passes then run "
         "concurrently, for which recording the maxima of FP8 tensors is untested",
         all_of(is_set("overlap_moe_expert_parallel_comm"), scales_by_history)),
    yet("--non-persistent-ckpt-type local", "NVRx considers a local checkpoint complete only if every rank has written "
         "its part, so a restart cannot use a checkpoint that lacks a lost worker's part; use --recover-memory-tier, "
         "which keeps snapshots in the memory of other nodes", is_one_of("non_persistent_ckpt_type", "local")),
    yet("--logits-load-dir", "each worker pairs the teacher's n-th logits with the n-th microbatch that it runs, but "
         "after a death its n-th microbatch is a different one"),
    yet("--logits-save-dir", "each worker saves the logits of the microbatches that it runs, and after a death it also "
         "runs those of lost workers: a run that loads the logits would pair them with the wrong microbatches"),
    Rule("--qk-clip needs --bf16 or --fp16: in float32 Megatron itself does not find the attention layers and fails "
         "in the first step with an AttributeError", all_of(is_set("qk_clip"), unless(is_set("bf16", "fp16")))),
    Rule("--qk-clip with --tensor-model-parallel-size {args.tensor_model_parallel_size} needs "
         "--multi-latent-attention: with other attention Megatron itself mistakes a tensor rank's weight shard for "
         "the complete weight when it clips, and fails with a RuntimeError",
         all_of(is_set("qk_clip"), is_above_one("tensor_model_parallel_size"),
                unless(is_set("multi_latent_attention")))),
]  # fmt: skip

UNTESTED = [
    Rule("--recover accepts delayed FP8 scaling (--fp8-recipe delayed, Megatron's default) only with "
         "--recover-untested: the update of scales once a step, from exactly the counted microbatches, was tested only "
         "with a stand-in for Transformer Engine; tensorwise, blockwise and mxfp8 need no such update",
         scales_by_history),
    Rule("--recover accepts --te-rng-tracker only with --recover-untested: setting Transformer Engine's random states "
         "for each microbatch was tested only with a stand-in for Transformer Engine", is_set("te_rng_tracker")),
    Rule("--recover accepts --use-precision-aware-optimizer with bf16 types on GPUs only with --recover-untested: this "
         "combination was tested only with a stand-in for Transformer Engine's optimizer",
         all_of(lambda args: not hostdevice.is_active(), keeps(*BF16))),
]  # fmt: skip
"""Refusals that --recover-untested lifts: implemented, but not fully tested on a GPU or with Transformer Engine."""

_of_shards = partial(yet, among="--recover with --use-distributed-optimizer")

SHARDED_RULES = [
    _of_shards("--main-params-dtype, --exp-avg-dtype or --exp-avg-sq-dtype fp16 or fp8", "each shard of a parameter "
               "is scaled by the shard's largest element, but a death changes the boundaries of shards: use fp32, or "
               "bf16 for moments",
               keeps(*SCALED)),
    _of_shards("--optimizer-cpu-offload", "Megatron then moves the optimizer state between devices by itself"),
    _of_shards("--fp8-param-gather or --fp4-param-gather", "the parameters are then not views of the gathered "
               "buffer", is_set("fp8_param", "fp4_param")),
    _of_shards("--ddp-reduce-scatter-with-fp32-accumulation", "--recover sums gradients in their dtype: use "
               "--accumulate-allreduce-grads-in-fp32"),
    _of_shards("--save-wgrads-interval", "no worker holds the complete sum of the gradients"),
    _of_shards("--qk-clip", "clipping scales complete weights, but a worker has only a shard of their float32 copies; "
               "Megatron itself fails with this combination"),
    _of_shards("--mtp-detach-heads", "the gradients of detached heads have a separate norm"),
]  # fmt: skip


def cannot_shard(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """Return the reasons why --recover refuses ``args`` because of the distributed optimizer; empty without it."""
    # Megatron turns the distributed optimizer on with Megatron-FSDP.
    if not is_set("use_distributed_optimizer", "use_megatron_fsdp")(args):
        return []
    if (
        config.shadow_device == "cpu"
        and not hostdevice.is_active()
        and any(importlib.util.find_spec(name) for name in ("apex", "transformer_engine"))
    ):
        return ["--recover-shadow-device cpu needs torch's Adam: apex and Transformer Engine update only on the GPU"]
    if config.grace and not config.shadow_shards:
        return ["--recover-grace with --use-distributed-optimizer needs --recover-shadow-shards 1 or 2: otherwise "
                "no other worker holds the optimizer shards of a replica that is set aside"]  # fmt: skip
    return reasons(SHARDED_RULES, args)


def cannot_recover(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """Return the reasons why --recover refuses the flags ``args``; empty if there are none.

    Reasons that concern the distributed optimizer are left to ``cannot_shard``.
    """
    rules = RULES if config.untested else [*RULES, *UNTESTED]
    found = reasons(rules, args)
    if hostdevice.is_active() and config.collective == "native":
        found.append("--recover-collective native needs GPUs, since it uses NCCL's collectives: on the CPU use ring, "
                     "the default")  # fmt: skip
    if not hostdevice.is_active() and getattr(args, "distributed_backend", None) == "gloo":
        found.append("--recover cannot be combined with --distributed-backend gloo on GPUs, where it sums gradients by "
                     "NCCL: remove the flag, or train on the CPU with --recover-device cpu")  # fmt: skip
    return [*found, *_groups_of_microbatches(args)]


def cannot_use_nccl(config: RecoverConfig) -> list[str]:
    """Return the reasons why this process cannot use NCCL; empty if it can, or if it trains on the host device."""
    if hostdevice.is_active():
        return []
    from recover_megatron.collectives import torch_nccl
    from recover_megatron.collectives.nccl import library

    found = torch_nccl.keep_one_kind()
    try:
        if config.collective != "ring":
            library.load()
    except UserError as error:
        found += error.reasons
    return found


def cannot_grow(args: argparse.Namespace, config: RecoverConfig, replicas: int, lanes: int) -> list[str]:
    """Return the reasons why a launch cannot use --recover-max-replicas; empty if it can, or if the flag is not given.

    ``replicas``: number of replicas at launch.  ``lanes``: number of data-parallel ranks in a replica.
    """
    if not config.max_replicas:
        return []
    flag, found = f"--recover-max-replicas {config.max_replicas}", []
    if getattr(args, "use_megatron_fsdp", False) or (getattr(args, "num_distributed_optimizer_instances", 1) or 1) > 1:
        return [f"{flag} cannot be combined with --use-megatron-fsdp or --num-distributed-optimizer-instances yet: "
                "their process groups keep the size of the launch"]  # fmt: skip
    if config.max_replicas < replicas:
        found.append(f"{flag}: this run starts with {replicas} replicas: raise the value, or remove the flag")
    if replicas < 2:
        found.append(f"{flag} needs at least two replicas at the launch: a single replica has no sums over replicas")
    micro, whole = getattr(args, "micro_batch_size", None), min(batches_to_come(args), default=None)
    least = _least(args) * lanes
    if micro and whole and whole // (micro * least) < config.max_replicas:
        why = f" of at least {least} microbatches (interleaved pipeline)" if least > lanes else ""
        found.append(f"{flag}: a global batch of {whole // micro} microbatches is enough for {whole // (micro * least)}"
                     f" replicas{why}: lower the value or raise --global-batch-size")  # fmt: skip
    return found


def _least(args: argparse.Namespace) -> int:
    """Return the smallest number of microbatches that a rank can run in an iteration.

    In an interleaved pipeline this is the number of stages, otherwise 1.  ``args`` need not be validated by Megatron.
    """
    stages: int = args.pipeline_model_parallel_size
    if layout := getattr(args, "pipeline_model_parallel_layout", None):
        every = re.sub(r"(?:\(([^()]*)\)|(.))\*(\d+)", lambda m: (m[1] or m[2]) * int(m[3]), str(layout))
        return stages if every.count("|") >= stages else 1
    if pattern := getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None):
        return stages if pattern.partition("/")[0].count("|") >= stages else 1
    layers, chunks = getattr(args, "num_layers_per_virtual_pipeline_stage", None), 1
    if layers:
        chunks = (args.num_layers or 0) // (stages * layers)
    return stages if max(chunks, getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1) > 1 else 1


def _groups_of_microbatches(args: argparse.Namespace) -> list[str]:
    """Refuse a microbatch group size that does not fit a rank's microbatches; Megatron would fail in the first step."""
    flag, group = "--microbatch-group-size-per-virtual-pipeline-stage", args.microbatch_group_size_per_vp_stage
    stages = args.pipeline_model_parallel_size
    if group in (None, stages):
        return []
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    ranks = int(os.environ.get("WORLD_SIZE", "1")) // model
    micro = getattr(args, "micro_batch_size", None)
    if not micro or ranks < 1:
        return []
    shares = (whole // (micro * ranks) for whole in batches_to_come(args))
    return [f"{flag} {group}: an interleaved pipeline of {stages} stages cannot run the {share} microbatches of a rank "
            f"in groups of this size: every group, including the last one, needs at least {stages}"
            for share in shares if not runs(share, stages, group)]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Adjusted:
    """Change that --recover makes to Megatron's arguments: if they fulfil ``given``, --recover sets ``values``.

    ``values``: name of an argument -> value; names that this Megatron lacks are ignored.  ``words``: the change and its
    reason, for the log.
    """

    flag: str
    given: Condition
    values: dict[str, Any]
    words: str
    off: bool = True
    """True if the feature is switched off."""

    def __str__(self) -> str:
        return f"{self.flag}{' is off' if self.off else ''}: {self.words}"


def _spreads_layers(args: argparse.Namespace) -> bool:
    """Return whether Megatron would give the optimizer state of each layer to a single worker."""
    optimizer = getattr(args, "optimizer", None)
    spread = is_set("use_distributed_optimizer", "overlap_param_gather")(args)
    return optimizer == "dist_muon" or (optimizer in EMERGING and spread)


_finds_attention = all_of(is_set("bf16", "fp16"), unless(is_set("use_megatron_fsdp")))
"""Condition: Megatron's ``clip_qk`` finds the attention layers, for which it expects a fixed depth of wrappers."""

ADJUSTED = (
    Adjusted("--rerun-mode validate_results", is_one_of("rerun_mode", "validate_results"), {"rerun_mode": "disabled"},
            "a worker that finds an unexpected result exits, and another worker runs the microbatch again; Megatron "
            "would run it again on the same worker, and once more after a restart", off=False),
    Adjusted("--error-injection-rate", is_set("error_injection_rate"), {"error_injection_rate": 0},
            "the flag fakes unexpected results for Megatron's rerun machine, which --recover does not use; "
            "use --recover-inject to make a worker exit, hang or fail"),
    Adjusted("--fp16",
            all_of(is_set("fp16"), lambda args: not getattr(args, "accumulate_allreduce_grads_in_fp32", True)),
            {"accumulate_allreduce_grads_in_fp32": True},
            "gradients are accumulated in float32 (--accumulate-allreduce-grads-in-fp32; 2 more bytes per parameter): "
            "in float16 an overflow would depend on the number of microbatches that a replica accumulates", off=False),
    Adjusted("--fp8-param-gather, --fp4-param-gather", is_set("fp8_param_gather", "fp4_param_gather"),
            {"fp8_param_gather": False, "fp4_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False},
            "weights are stored and gathered in 16 bits, and Transformer Engine quantizes them for each forward pass, "
            "because shadows and sent states must be slices of plain buffers (2 more bytes per parameter; with mxfp8 "
            "the numbers are the same, otherwise a weight is first rounded to 16 bits)"),
    Adjusted("--reuse-grad-buf-for-mxfp8-param-ag", is_set("reuse_grad_buf_for_mxfp8_param_ag"),
            {"reuse_grad_buf_for_mxfp8_param_ag": False},
            "weights get a separate buffer, because --recover needs the gradients until the update is done"),
    Adjusted("--use-distributed-optimizer with muon, soap or lion",
            all_of(_spreads_layers, unless(is_one_of("optimizer", "dist_muon"))),
            {"use_distributed_optimizer": False, "overlap_param_gather": False},
            "every worker keeps the optimizer state of all parameters (with muon in bf16: 8 bytes per parameter); "
            "if the state were sharded, one death would lose the state of complete layers"),
    Adjusted("--optimizer dist_muon", is_one_of("optimizer", "dist_muon"),
            {"optimizer": "muon", "use_distributed_optimizer": False, "overlap_param_gather": False},
            "--optimizer muon is used, and every worker keeps the optimizer state of all parameters (in bf16: 8 bytes "
            "per parameter); if the state were sharded, one death would lose the state of complete layers"),
    Adjusted("--use-precision-aware-optimizer with --use-megatron-fsdp",
            all_of(is_set("use_megatron_fsdp"), keeps("fp32", "float32"), unless(keeps(*BF16, *SCALED))),
            {"use_precision_aware_optimizer": False}, "all its dtypes are float32, so the standard optimizer is used"),
    Adjusted("--use-megatron-fsdp with one shard group",
            all_of(is_set("use_megatron_fsdp"), unless(is_above_one("num_distributed_optimizer_instances"))),
            {"num_distributed_optimizer_instances": 2},
            "two shard groups are used (--num-distributed-optimizer-instances 2), so a worker's shards are twice as "
            "large: with one group the death of a worker would lose a shard of the state", off=False),
    Adjusted("--moe-token-dispatcher-type flex",
            lambda args: is_one_of("moe_token_dispatcher_type", "flex")(args) or is_set("moe_enable_deepep")(args),
            {"moe_token_dispatcher_type": "alltoall", "moe_enable_deepep": False,
             "moe_flex_dispatcher_backend": "deepep", "moe_expert_rank_capacity_factor": None,
             "moe_paged_stash": False},
            "the buffers of DeepEP and HybridEP keep the addresses of dead workers, and the kernels of these libraries "
            "cannot be aborted; tokens are sent by alltoall instead, with buffers as large as needed"),
    Adjusted("CUDA graphs", lambda args: has_cuda_graphs(args) or is_set("optimizer_cuda_graph")(args),
            {"cuda_graph_impl": "none", "enable_cuda_graph": False, "external_cuda_graph": False,
             "optimizer_cuda_graph": False},
            "NCCL does not release a communicator while a graph contains an operation on it: after a death a worker "
            "would have to destroy its graphs and capture new ones"),
    Adjusted("--tp-comm-overlap", is_set("tp_comm_overlap"), {"tp_comm_overlap": False},
            "the userbuffers of Transformer Engine can be neither aborted nor rebuilt: an orphan's kernels would wait "
            "for a dead peer forever"),
    Adjusted("--defer-embedding-wgrad-compute", is_set("defer_embedding_wgrad_compute"),
            {"defer_embedding_wgrad_compute": False},
            "with --overlap-grad-reduce Megatron sums a bucket before it computes the deferred gradients, and it "
            "cannot defer them for a single microbatch, such as one that is run again after a death"),
    Adjusted("--overlap-moe-expert-parallel-comm with --use-megatron-fsdp",
            all_of(is_set("overlap_moe_expert_parallel_comm"), is_set("use_megatron_fsdp"),
                   unless(all_of(is_set("untie_embeddings_and_output_weights"), unless(is_set("mtp_num_layers"))))),
            {"overlap_moe_expert_parallel_comm": False, "ep_overlap_early_attn_memory_release": False},
            "with both flags Megatron 0.19.2 computes a wrong gradient of an embedding that modules share"),
    Adjusted("--async-save with --use-megatron-fsdp and --async-strategy mcore",
            all_of(is_set("async_save"), is_set("use_megatron_fsdp"), is_one_of("async_strategy", "mcore")),
            {"async_save": False},
            "checkpoints are written synchronously, because with these flags Megatron itself fails at the first "
            "checkpoint with a TypeError (enable_cache)"),
    Adjusted("--delay-wgrad-compute with --use-megatron-fsdp",
            all_of(is_set("delay_wgrad_compute"), is_set("use_megatron_fsdp")), {"delay_wgrad_compute": False},
            "this combination is untested"),
    Adjusted("--overlap-param-gather-with-optimizer-step", is_set("overlap_param_gather_with_optimizer_step"),
            {"overlap_param_gather_with_optimizer_step": False}, "all parameters must be updated in one step, or none"),
    Adjusted("--use-sharp, --use-nccl-ub", is_set("use_sharp", "nccl_ub"),
            {"use_sharp": False, "nccl_ub": False, "fsdp_manual_registration": False},
            "these flags speed up Megatron's data-parallel groups, which --recover does not use for gradients"),
    Adjusted("--distributed-timeout-seconds-after-init", is_set("distributed_timeout_seconds_after_init"),
            {"distributed_timeout_seconds_after_init": None},
            "a worker that joins later would wait for all other workers in its second iteration; use "
            "--recover-hang-timeout to detect a worker that hangs"),
    Adjusted("--gpu-sniff-test-interval", is_set("gpu_sniff_test_interval"), {"gpu_sniff_test_interval": None},
            "a worker that joins later would wait for all other workers before its first iteration; instead, "
            "recover-run tests a device before it restarts a worker there"),
    Adjusted("--log-straggler", is_set("log_straggler"), {"log_straggler": False},
            "workers report to a fixed rank, which may die; recover-report shows each replica's seconds per step"),
    Adjusted("--log-max-attention-logit", all_of(is_set("log_max_attention_logit"), unless(_finds_attention)),
            {"log_max_attention_logit": False},
            "Megatron itself finds the attention layers only with --bf16 or --fp16 and without --use-megatron-fsdp; "
            "otherwise it fails in the first step with an AttributeError"),
)  # fmt: skip


def adjust(args: argparse.Namespace) -> list[Adjusted]:
    """Apply ``ADJUSTED`` to Megatron's parsed arguments ``args``; return the entries that were applied."""
    done = [one for one in ADJUSTED if one.given(args)]
    for one in done:
        vars(args).update({name: value for name, value in one.values.items() if hasattr(args, name)})
    return done


def refuse_unadjusted(args: argparse.Namespace) -> list[str]:
    """Refuse arguments that ``adjust`` would change, but that come from a --yaml-cfg file and bypass the parser."""
    return [
        f"--recover cannot be combined with {one.flag} from a --yaml-cfg file: {one.words}"
        for one in ADJUSTED
        if one.given(args)
    ]


@functools.cache
def say(adjusted: Adjusted) -> None:
    """Log the change ``adjusted`` once, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        log.info(f"with --recover, {adjusted}")
