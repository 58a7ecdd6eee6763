"""Megatron's flags that --recover refuses, with the reason: recovery would not be exact, or it is untested.

``ADJUSTED`` lists the flags that --recover accepts and implements in another way, each logged at the start:

    another way   --recover computes the same result by other means
    switched off  a speed-up or an extra report that cannot survive a death: the training is the same

A flag that changes what is trained is never switched off, but refused.
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
"""Megatron's optimizers from the package emerging-optimizers."""


def yet(flag: str, why: str, when: Condition | None = None, among: str = "--recover") -> Rule:
    """Return the rule that refuses ``flag`` for now; ``when``: by default, if the flag is given."""
    return Rule(f"{among} cannot be combined with {flag} yet: {why}", when or is_given(flag))


def _spreads_weights(flag: str, size: str) -> Rule:
    name = flag.removeprefix("--").replace("-", "_")

    def when(args: argparse.Namespace) -> bool:
        return (getattr(args, name, None) or 0) > (getattr(args, size, None) or args.tensor_model_parallel_size)

    return yet(f"{flag} {{args.{name}}}", "it spreads weights over replicas and gathers them within the step", when)


def balances_by(kind: str) -> Condition:
    """Return the condition that ``kind`` is among the load balancing types of the routers."""

    def when(args: argparse.Namespace) -> bool:
        kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
        return kind in ([kinds] if isinstance(kinds, str) else kinds)

    return when


scales_by_history = all_of(is_set("fp8"), lambda args: getattr(args, "fp8_recipe", "delayed") == "delayed")
"""True if Transformer Engine scales 8-bit numbers by the maxima of past steps (--fp8-recipe delayed)."""

RULES = [
    yet("the layer-wise distributed optimizer", "each worker holds state that no other worker has",
         is_set("use_layer_wise_distributed_optimizer")),
    yet("--use-torch-fsdp2", "its process groups cannot be changed"),
    yet("--inprocess-restart", "after a death it aborts the step on all workers and calls pretrain() again; "
         "--recover finishes the step"),
    yet("--enable-ft-package", "its ft_launcher restarts all workers when one dies; recover-run keeps them running, "
         "and --recover-hang-timeout detects a worker that hangs"),
    yet("--fault-injector-ranks, --fault-injector-num-ranks", "it broadcasts its plan at the start of train(), and "
         "a worker that joins later would wait for that; use --recover-inject to make a worker exit, hang or fail",
         is_set("fault_injector_ranks", "fault_injector_num_ranks")),
    yet("--hybrid-context-parallel", "its microbatches differ in size"),
    yet("--phase-transition-iterations", "Megatron restarts its sample count at a transition, but --recover numbers "
        "microbatches over the complete run: other samples would be trained"),
    yet("--perform-rl-step", "its microbatches have no numbers by which a lost one could be run again"),
    Rule("--recover has nothing to keep in a run that trains nothing (--skip-train, --train-iters 0, "
         "--freeze-all-layers): start it without --recover",
         lambda args: is_set("skip_train", "freeze_all_layers")(args) or getattr(args, "train_iters", None) == 0),
    yet("--ckpt-pg-tensors-cache-path", "it stores in files which worker writes which part of a checkpoint: after a "
        "death the parts of the dead workers would be missing"),
    yet("--use-precision-aware-optimizer without --use-distributed-optimizer", "it is untested",
         all_of(is_set("use_precision_aware_optimizer"), unless(is_set("use_distributed_optimizer",
                                                                       "use_megatron_fsdp")))),
    yet("--muon-tp-mode {args.muon_tp_mode}", "during the update it communicates with the other tensor ranks, which "
         "may be dead: use blockwise",
         all_of(is_one_of("optimizer", *EMERGING), is_above_one("tensor_model_parallel_size"),
                lambda args: getattr(args, "muon_tp_mode", "blockwise") != "blockwise")),
    _spreads_weights("--tensor-parallel-num-weight-shards", "tensor_model_parallel_size"),
    _spreads_weights("--expert-tensor-parallel-num-weight-shards", "expert_tensor_parallel_size"),
    Rule("--recover does not support --dataloader-type {args.dataloader_type}: use single, cyclic or external",
         lambda args: getattr(args, "dataloader_type", None) not in (None, "single", "cyclic", "external")),
    Rule("--recover cannot be combined with --rerun-mode {args.rerun_mode}: Megatron up to 0.20 does not start with it "
         "(ValueError: it expects a mode report_determinism_stats that the flag does not accept)",
         lambda args: getattr(args, "rerun_mode", "disabled") != "disabled"),
    yet("--moe-router-load-balancing-type global_aux_loss", "in the forward pass a router sums its tokens over all "
         "replicas, so the loss of a rank's n-th microbatch depends on the first n of every other rank, of which a "
         "death loses some (aux_loss and seq_aux_loss need no other replica)", balances_by("global_aux_loss")),
    yet("--use-transformer-engine-op-fuser and --fp8-recipe delayed", "its layers store their scales differently",
         all_of(is_set("use_transformer_engine_op_fuser"), scales_by_history)),
    yet("--overlap-moe-expert-parallel-comm and --fp8-recipe delayed", "the maxima that a layer records are untested "
         "if forward passes run concurrently with backward passes",
         all_of(is_set("overlap_moe_expert_parallel_comm"), scales_by_history)),
    yet("--non-persistent-ckpt-type local", "NVRx considers such a checkpoint complete only if every rank has written "
         "its part, so a restart cannot use one that was begun while a worker was lost; use --recover-memory-tier, "
         "which keeps snapshots in the memory of other nodes", is_one_of("non_persistent_ckpt_type", "local")),
    yet("--logits-load-dir", "a worker matches the teacher's n-th logits with the n-th microbatch that it runs; after "
         "a death that is another microbatch"),
    yet("--logits-save-dir", "each worker saves the logits that it computed; after a death these include logits "
         "of lost workers, and a run that loads them would match them with the wrong microbatches"),
    Rule("--qk-clip needs --bf16 or --fp16: without them Megatron itself does not find the attention layers and fails "
         "in the first step with an AttributeError", all_of(is_set("qk_clip"), unless(is_set("bf16", "fp16")))),
    Rule("--qk-clip with --tensor-model-parallel-size {args.tensor_model_parallel_size} needs "
         "--multi-latent-attention: with other attention Megatron itself mistakes a tensor rank's weight shard for "
         "the complete weight when it clips, and fails with a RuntimeError",
         all_of(is_set("qk_clip"), is_above_one("tensor_model_parallel_size"),
                unless(is_set("multi_latent_attention")))),
]  # fmt: skip

UNTESTED = [
    Rule("--recover takes delayed FP8 scaling (--fp8-recipe delayed, Megatron's default) only with --recover-untested: "
         "it updates scales once a step from exactly the counted microbatches, which was tested only with a stand-in "
         "for Transformer Engine; tensorwise, blockwise and mxfp8 scale by the current values",
         scales_by_history),
    Rule("--recover takes --te-rng-tracker only with --recover-untested: setting Transformer Engine's random states "
         "for each microbatch was tested only with a stand-in", is_set("te_rng_tracker")),
    Rule("--recover takes --use-precision-aware-optimizer with bf16 types on GPUs only with --recover-untested: they "
         "were tested only with a stand-in for Transformer Engine's optimizer",
         all_of(lambda args: not hostdevice.is_active(), keeps(*BF16))),
]  # fmt: skip
"""Refusals that --recover-untested lifts: implemented, but part of the test needs a GPU or Transformer Engine."""

_of_shards = partial(yet, among="--recover with --use-distributed-optimizer")

SHARDED_RULES = [
    _of_shards("--main-params-dtype, --exp-avg-dtype or --exp-avg-sq-dtype fp16 or fp8", "each shard of a parameter "
               "is scaled by its largest element, and after a death shards have other boundaries: use fp32, or bf16 "
               "for moments",
               keeps(*SCALED)),
    _of_shards("--optimizer-cpu-offload", "it moves the optimizer state between devices on its own"),
    _of_shards("--fp8-param-gather or --fp4-param-gather", "its parameters are not views of the gathered "
               "buffer", is_set("fp8_param", "fp4_param")),
    _of_shards("--ddp-reduce-scatter-with-fp32-accumulation", "gradients are summed in their own dtype: use "
               "--accumulate-allreduce-grads-in-fp32"),
    _of_shards("--save-wgrads-interval", "no worker holds the complete sum of the gradients"),
    _of_shards("--qk-clip", "it scales complete weights, but a worker holds only a shard of their float32 copies; "
               "Megatron itself fails with this combination"),
    _of_shards("--mtp-detach-heads", "their gradients have a separate norm"),
]  # fmt: skip


def cannot_shard(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """Return why --recover refuses these flags with the distributed optimizer; empty without that optimizer."""
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
    """Return why --recover refuses the flags for now: microbatches might not count exactly once, or it is untested."""
    rules = RULES if config.untested else [*RULES, *UNTESTED]
    found = reasons(rules, args)
    if hostdevice.is_active() and config.collective == "native":
        found.append("--recover-collective native needs GPUs: it uses NCCL's own collectives; on the CPU use ring, the "
                     "default there")  # fmt: skip
    if not hostdevice.is_active() and getattr(args, "distributed_backend", None) == "gloo":
        found.append("--recover cannot be combined with --distributed-backend gloo on GPUs: there gradients use NCCL: "
                     "remove the flag, or train on the CPU with --recover-device cpu")  # fmt: skip
    return [*found, *_groups_of_microbatches(args)]


def cannot_use_nccl(config: RecoverConfig) -> list[str]:
    """Return why gradients and groups inside a replica cannot use NCCL; empty if they can or on the host device."""
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
    """Return why a launch of ``replicas``, each of ``lanes`` data-parallel ranks, cannot use --recover-max-replicas."""
    if not config.max_replicas:
        return []
    flag, found = f"--recover-max-replicas {config.max_replicas}", []
    if getattr(args, "use_megatron_fsdp", False) or (getattr(args, "num_distributed_optimizer_instances", 1) or 1) > 1:
        return [f"{flag} cannot be combined with --use-megatron-fsdp or --num-distributed-optimizer-instances yet: "
                "their process groups keep the size of the launch"]  # fmt: skip
    if config.max_replicas < replicas:
        found.append(f"{flag}: this run starts with {replicas} replicas: raise the value, or remove the flag")
    if replicas < 2:
        found.append(f"{flag} needs at least two replicas at the launch: a single replica sums nothing over replicas")
    micro, whole = getattr(args, "micro_batch_size", None), min(batches_to_come(args), default=None)
    least = _least(args) * lanes
    if micro and whole and whole // (micro * least) < config.max_replicas:
        why = f" of at least {least} microbatches (interleaved pipeline)" if least > lanes else ""
        found.append(f"{flag}: a global batch of {whole // micro} microbatches is enough for "
                     f"{whole // (micro * least)} replicas{why}: lower it, or raise --global-batch-size")  # fmt: skip
    return found


def _least(args: argparse.Namespace) -> int:
    """Return the smallest number of microbatches that a rank can run: 1, or the stages if they are interleaved.

    Reads flags that Megatron has not validated yet.
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
    """Refuse a group size that does not fit a rank's share of the batch; Megatron would fail in the first pass."""
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
    """Flags that --recover changes: if ``given`` is true of Megatron's arguments, existing ones get the ``values``."""

    flag: str
    given: Condition
    values: dict[str, Any]
    words: str
    off: bool = True
    """True if the feature is switched off."""

    def __str__(self) -> str:
        return f"{self.flag}{' is off' if self.off else ''}: {self.words}"


def _spreads_layers(args: argparse.Namespace) -> bool:
    """Return whether Megatron would assign complete layers, with their optimizer state, to single workers."""
    optimizer = getattr(args, "optimizer", None)
    spread = is_set("use_distributed_optimizer", "overlap_param_gather")(args)
    return optimizer == "dist_muon" or (optimizer in EMERGING and spread)


_finds_attention = all_of(is_set("bf16", "fp16"), unless(is_set("use_megatron_fsdp")))
"""True if Megatron's ``clip_qk`` finds the attention: it expects a fixed depth of wrapper modules."""

ADJUSTED = (
    Adjusted("--rerun-mode validate_results", is_one_of("rerun_mode", "validate_results"), {"rerun_mode": "disabled"},
            "a worker that finds an unexpected result exits, and another worker runs the microbatch again; Megatron "
            "would run it again on the same worker and after a restart", off=False),
    Adjusted("--error-injection-rate", is_set("error_injection_rate"), {"error_injection_rate": 0},
            "it fakes unexpected results for Megatron's rerun machine, which --recover does not use; "
            "use --recover-inject to make a worker exit, hang or fail"),
    Adjusted("--fp16",
            all_of(is_set("fp16"), lambda args: not getattr(args, "accumulate_allreduce_grads_in_fp32", True)),
            {"accumulate_allreduce_grads_in_fp32": True},
            "gradients are accumulated in float32 (--accumulate-allreduce-grads-in-fp32; 2 more bytes per parameter): "
            "in float16 the overflow would depend on how many microbatches one replica accumulates", off=False),
    Adjusted("--fp8-param-gather, --fp4-param-gather", is_set("fp8_param_gather", "fp4_param_gather"),
            {"fp8_param_gather": False, "fp4_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False},
            "weights are stored and gathered in 16 bits, and Transformer Engine quantizes them for each forward pass "
            "(2 more bytes per parameter; with mxfp8 the numbers are the same, otherwise a weight is rounded "
            "to 16 bits first): shadows and states sent to other workers are slices of plain buffers"),
    Adjusted("--reuse-grad-buf-for-mxfp8-param-ag", is_set("reuse_grad_buf_for_mxfp8_param_ag"),
            {"reuse_grad_buf_for_mxfp8_param_ag": False},
            "weights get a separate buffer: gradients must outlive the update"),
    Adjusted("--use-distributed-optimizer with muon, soap or lion",
            all_of(_spreads_layers, unless(is_one_of("optimizer", "dist_muon"))),
            {"use_distributed_optimizer": False, "overlap_param_gather": False},
            "every worker keeps the optimizer state of all parameters (with muon in bf16: 8 bytes per parameter); "
            "a shard would be complete layers that no other worker has"),
    Adjusted("--optimizer dist_muon", is_one_of("optimizer", "dist_muon"),
            {"optimizer": "muon", "use_distributed_optimizer": False, "overlap_param_gather": False},
            "--optimizer muon, and every worker keeps the optimizer state of all parameters (in bf16: 8 bytes per "
            "parameter); a shard would be complete layers that no other worker has"),
    Adjusted("--use-precision-aware-optimizer with --use-megatron-fsdp",
            all_of(is_set("use_megatron_fsdp"), keeps("fp32", "float32"), unless(keeps(*BF16, *SCALED))),
            {"use_precision_aware_optimizer": False}, "all its dtypes are float32, as in the standard optimizer"),
    Adjusted("--use-megatron-fsdp with one shard group",
            all_of(is_set("use_megatron_fsdp"), unless(is_above_one("num_distributed_optimizer_instances"))),
            {"num_distributed_optimizer_instances": 2},
            "there are two shard groups (--num-distributed-optimizer-instances 2), so a worker's shards are twice as "
            "large: with one group the death of a worker would lose its shard of the state", off=False),
    Adjusted("--moe-token-dispatcher-type flex",
            lambda args: is_one_of("moe_token_dispatcher_type", "flex")(args) or is_set("moe_enable_deepep")(args),
            {"moe_token_dispatcher_type": "alltoall", "moe_enable_deepep": False,
             "moe_flex_dispatcher_backend": "deepep", "moe_expert_rank_capacity_factor": None,
             "moe_paged_stash": False},
            "the buffers of DeepEP and HybridEP keep the addresses of dead workers, and their kernels cannot be "
            "aborted; tokens are sent by alltoall, with buffers as large as needed"),
    Adjusted("CUDA graphs", lambda args: has_cuda_graphs(args) or is_set("optimizer_cuda_graph")(args),
            {"cuda_graph_impl": "none", "enable_cuda_graph": False, "external_cuda_graph": False,
             "optimizer_cuda_graph": False},
            "NCCL does not release a communicator while a graph has an operation on it: before it leaves its dead "
            "peers a worker would have to destroy its graphs, and then capture new ones"),
    Adjusted("--tp-comm-overlap", is_set("tp_comm_overlap"), {"tp_comm_overlap": False},
            "its userbuffers can be neither aborted nor rebuilt: an orphan's kernels would wait for a dead peer "
            "forever"),
    Adjusted("--defer-embedding-wgrad-compute", is_set("defer_embedding_wgrad_compute"),
            {"defer_embedding_wgrad_compute": False},
            "with --overlap-grad-reduce it computes these gradients after the sum, and Megatron cannot defer them for "
            "a single microbatch, such as one that is run again after a death"),
    Adjusted("--overlap-moe-expert-parallel-comm with --use-megatron-fsdp",
            all_of(is_set("overlap_moe_expert_parallel_comm"), is_set("use_megatron_fsdp"),
                   unless(all_of(is_set("untie_embeddings_and_output_weights"), unless(is_set("mtp_num_layers"))))),
            {"overlap_moe_expert_parallel_comm": False, "ep_overlap_early_attn_memory_release": False},
            "with both, Megatron 0.19.2 computes a wrong gradient of an embedding that is shared between modules"),
    Adjusted("--async-save with --use-megatron-fsdp and --async-strategy mcore",
            all_of(is_set("async_save"), is_set("use_megatron_fsdp"), is_one_of("async_strategy", "mcore")),
            {"async_save": False},
            "checkpoints are written synchronously: with this combination Megatron itself fails at the first one with "
            "a TypeError (enable_cache)"),
    Adjusted("--delay-wgrad-compute with --use-megatron-fsdp",
            all_of(is_set("delay_wgrad_compute"), is_set("use_megatron_fsdp")), {"delay_wgrad_compute": False},
            "it is untested"),
    Adjusted("--overlap-param-gather-with-optimizer-step", is_set("overlap_param_gather_with_optimizer_step"),
            {"overlap_param_gather_with_optimizer_step": False}, "the update must be one step, all or nothing"),
    Adjusted("--use-sharp, --use-nccl-ub", is_set("use_sharp", "nccl_ub"),
            {"use_sharp": False, "nccl_ub": False, "fsdp_manual_registration": False},
            "they speed up Megatron's data-parallel groups, which --recover does not use for gradients"),
    Adjusted("--distributed-timeout-seconds-after-init", is_set("distributed_timeout_seconds_after_init"),
            {"distributed_timeout_seconds_after_init": None},
            "a worker that joins later would wait for all others in its second iteration; use --recover-hang-timeout "
            "to detect a worker that hangs"),
    Adjusted("--gpu-sniff-test-interval", is_set("gpu_sniff_test_interval"), {"gpu_sniff_test_interval": None},
            "a worker that joins later would wait for all others before its first iteration; recover-run tests "
            "a device before it starts another worker on it"),
    Adjusted("--log-straggler", is_set("log_straggler"), {"log_straggler": False},
            "it reports to a rank that is fixed at the start; use recover-report, which shows each replica's seconds"),
    Adjusted("--log-max-attention-logit", all_of(is_set("log_max_attention_logit"), unless(_finds_attention)),
            {"log_max_attention_logit": False},
            "Megatron itself finds the attention layers only with --bf16 or --fp16 and without --use-megatron-fsdp; "
            "otherwise it fails in the first step with an AttributeError"),
)  # fmt: skip


def adjust(args: argparse.Namespace) -> list[Adjusted]:
    """Apply ``ADJUSTED`` to Megatron's parsed arguments; returns the entries that applied."""
    done = [one for one in ADJUSTED if one.given(args)]
    for one in done:
        vars(args).update({name: value for name, value in one.values.items() if hasattr(args, name)})
    return done


def refuse_unadjusted(args: argparse.Namespace) -> list[str]:
    """Refuse arguments from a --yaml-cfg file that ``adjust`` would change, because they bypass the parser."""
    return [
        f"--recover cannot be combined with {one.flag} from a --yaml-cfg file: {one.words}"
        for one in ADJUSTED
        if one.given(args)
    ]


@functools.cache
def say(settled: Adjusted) -> None:
    """Log the change once, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        log.info(f"with --recover, {settled}")
