"""Megatron's flags that --recover refuses, with the reason: what it could not keep exact, or has not been tried.

And those that are taken and done in another way than Megatron does them, said at the start (``SETTLED``):

    another way   the same is computed, or the same is found out, by other means
    switched off  what makes a step faster, or is told beside it, and cannot survive a death: the training is the same

A flag that changes what is trained is never switched off: it is refused.
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
"""Megatron's optimizers that are in the package emerging-optimizers."""


def yet(flag: str, why: str, when: Condition | None = None, among: str = "--recover") -> Rule:
    """``when``: by default, where the flag is given."""
    return Rule(f"{among} cannot be combined with {flag} yet: {why}", when or is_given(flag))


def _spreads_weights(flag: str, size: str) -> Rule:
    name = flag.removeprefix("--").replace("-", "_")

    def when(args: argparse.Namespace) -> bool:
        return (getattr(args, name, None) or 0) > (getattr(args, size, None) or args.tensor_model_parallel_size)

    return yet(f"{flag} {{args.{name}}}", "weights would be spread over replicas, and gathered in the step", when)


def balances_by(kind: str) -> Condition:
    """Whether routers are balanced in this way, among others."""

    def when(args: argparse.Namespace) -> bool:
        kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
        return kind in ([kinds] if isinstance(kinds, str) else kinds)

    return when


scales_by_history = all_of(is_set("fp8"), lambda args: getattr(args, "fp8_recipe", "delayed") == "delayed")
"""Whether Transformer Engine scales 8-bit numbers by the largest values of the past (--fp8-recipe delayed)."""

RULES = [
    yet("the layer-wise distributed optimizer", "each worker would hold state that nobody else has",
         is_set("use_layer_wise_distributed_optimizer")),
    yet("--use-torch-fsdp2", "its groups can't be changed"),
    yet("--inprocess-restart", "when a worker dies it ends the step on all others and calls pretrain() again; "
         "--recover finishes the step"),
    yet("--enable-ft-package", "its ft_launcher restarts all workers when one dies; recover-run keeps them running, "
         "and --recover-hang-timeout finds one that hangs"),
    yet("--fault-injector-ranks, --fault-injector-num-ranks", "its plan is sent to all when train() is entered, for "
         "which a worker that comes later would wait; --recover-inject has a worker end, hang or fail where you say",
         is_set("fault_injector_ranks", "fault_injector_num_ranks")),
    yet("--hybrid-context-parallel", "its microbatches differ in size"),
    yet("--phase-transition-iterations", "after a transition Megatron counts samples from there, and microbatches are "
        "known by their number in the whole run: others would be trained"),
    yet("--perform-rl-step", "its microbatches are not known by their numbers"),
    Rule("--recover has nothing to keep in a run that trains nothing (--skip-train, --train-iters 0, "
         "--freeze-all-layers): start it without --recover",
         lambda args: is_set("skip_train", "freeze_all_layers")(args) or getattr(args, "train_iters", None) == 0),
    yet("--ckpt-pg-tensors-cache-path", "it keeps in files who writes which part of a checkpoint, and after a death "
        "nobody would write those of the dead"),
    yet("--use-precision-aware-optimizer without --use-distributed-optimizer", "it has not been tried",
         all_of(is_set("use_precision_aware_optimizer"), unless(is_set("use_distributed_optimizer",
                                                                       "use_megatron_fsdp")))),
    yet("--muon-tp-mode {args.muon_tp_mode}", "in the middle of the update it asks the other tensor ranks, of which "
         "one may be dead: take blockwise",
         all_of(is_one_of("optimizer", *EMERGING), is_above_one("tensor_model_parallel_size"),
                lambda args: getattr(args, "muon_tp_mode", "blockwise") != "blockwise")),
    _spreads_weights("--tensor-parallel-num-weight-shards", "tensor_model_parallel_size"),
    _spreads_weights("--expert-tensor-parallel-num-weight-shards", "expert_tensor_parallel_size"),
    Rule("--recover takes no loaders of the type {args.dataloader_type}: single, cyclic or external",
         lambda args: getattr(args, "dataloader_type", None) not in (None, "single", "cyclic", "external")),
    Rule("--recover cannot be combined with --rerun-mode {args.rerun_mode}: no Megatron up to 0.20 starts with it "
         "(ValueError: it looks for a mode report_determinism_stats, which its flag does not take)",
         lambda args: getattr(args, "rerun_mode", "disabled") != "disabled"),
    yet("--moe-router-load-balancing-type global_aux_loss", "in the forward pass a router sums its tokens over all "
         "replicas, so the loss of a rank's n-th microbatch is made of the first n ones of all others: of a lost one "
         "nobody would have them, and what runs them again comes too late (aux_loss and seq_aux_loss need no other "
         "replica)", balances_by("global_aux_loss")),
    yet("--use-transformer-engine-op-fuser and --fp8-recipe delayed", "its layers keep their scales in another way",
         all_of(is_set("use_transformer_engine_op_fuser"), scales_by_history)),
    yet("--overlap-moe-expert-parallel-comm and --fp8-recipe delayed", "whose largest values a layer tells was not "
         "examined where forward passes run beside backward passes",
         all_of(is_set("overlap_moe_expert_parallel_comm"), scales_by_history)),
    yet("--non-persistent-ckpt-type local", "NVRx takes such a checkpoint for complete where every rank has written "
         "its own, and a restart would find none that was begun while one is lost; --recover-memory-tier keeps states "
         "in the memory of other nodes", is_one_of("non_persistent_ckpt_type", "local")),
    yet("--logits-load-dir", "a worker takes the teacher's n-th logits for the n-th microbatch that it runs, which "
         "after a death is another one"),
    yet("--logits-save-dir", "they are saved by the worker that computed them, which after a death has those of "
         "others, too, and a run that loads them would take them for its own"),
    Rule("--qk-clip needs --bf16 or --fp16: without them Megatron itself does not find the attention, and ends in the "
         "first step with an AttributeError", all_of(is_set("qk_clip"), unless(is_set("bf16", "fp16")))),
    Rule("--qk-clip with --tensor-model-parallel-size {args.tensor_model_parallel_size} needs "
         "--multi-latent-attention: elsewhere Megatron itself takes a tensor rank's weight for the whole one where it "
         "clips, and ends with a RuntimeError",
         all_of(is_set("qk_clip"), is_above_one("tensor_model_parallel_size"),
                unless(is_set("multi_latent_attention")))),
]  # fmt: skip

UNTESTED = [
    Rule("--recover takes delayed FP8 scaling (--fp8-recipe delayed, Megatron's default) only with --recover-untested: "
         "scales change once a step, by exactly the counted microbatches, which was run on a stand-in for Transformer "
         "Engine alone; the others (tensorwise, blockwise, mxfp8) scale by what they are about to multiply",
         scales_by_history),
    Rule("--recover takes --te-rng-tracker only with --recover-untested: Transformer Engine's random states are set "
         "per microbatch, which was run on a stand-in alone", is_set("te_rng_tracker")),
    Rule("--recover takes --use-precision-aware-optimizer with bf16 types on GPUs only with --recover-untested: they "
         "were run with a stand-in of Transformer Engine's optimizer alone",
         all_of(lambda args: not hostdevice.is_active(), keeps(*BF16))),
]  # fmt: skip
"""What is refused without --recover-untested: it is built, and a part of it needs a GPU or Transformer Engine."""

_of_shards = partial(yet, among="--recover with --use-distributed-optimizer")

SHARDED_RULES = [
    _of_shards("--main-params-dtype, --exp-avg-dtype or --exp-avg-sq-dtype fp16 or fp8", "each piece of a parameter "
               "is rounded by its largest element, and after a death pieces are cut in other places: take fp32, for "
               "moments also bf16",
               keeps(*SCALED)),
    _of_shards("--optimizer-cpu-offload", "its state moves between devices by itself"),
    _of_shards("--fp8-param-gather or --fp4-param-gather", "its parameters are not views of the buffer that is "
               "gathered", is_set("fp8_param", "fp4_param")),
    _of_shards("--ddp-reduce-scatter-with-fp32-accumulation", "gradients are summed in their own type: use "
               "--accumulate-allreduce-grads-in-fp32"),
    _of_shards("--save-wgrads-interval", "no worker has the sum of all gradients, of which it would save what it has"),
    _of_shards("--qk-clip", "it scales whole weights, of whose copies in 32 bits a worker has a part alone; Megatron "
               "itself ends with an error there"),
    _of_shards("--mtp-detach-heads", "their gradients have a norm of their own"),
]  # fmt: skip


def cannot_shard(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """What is refused with --recover and the distributed optimizer; empty without it."""
    # Megatron turns the distributed optimizer on with Megatron-FSDP.
    if not is_set("use_distributed_optimizer", "use_megatron_fsdp")(args):
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
    return reasons(SHARDED_RULES, args)


def cannot_recover(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """What --recover refuses for now: where it could not keep every microbatch counted once, or has not been tried."""
    rules = RULES if config.untested else [*RULES, *UNTESTED]
    found = reasons(rules, args)
    if hostdevice.is_active() and config.collective == "native":
        found.append("--recover-collective native needs GPUs: it is NCCL's own collectives; on the CPU take ring, the "
                     "default there")  # fmt: skip
    if not hostdevice.is_active() and getattr(args, "distributed_backend", None) == "gloo":
        found.append("--recover cannot be combined with --distributed-backend gloo on GPUs: gradients travel over NCCL "
                     "there: leave the flag out, or train on the CPU with --recover-device cpu")  # fmt: skip
    return [*found, *_groups_of_microbatches(args)]


def cannot_use_nccl(config: RecoverConfig) -> list[str]:
    """Why neither gradients nor the groups inside a replica can go over NCCL; empty on the host device."""
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
    """What --recover-max-replicas refuses of a launch of ``replicas``, each of ``lanes`` data-parallel ranks."""
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
    micro, whole = getattr(args, "micro_batch_size", None), min(batches_to_come(args), default=None)
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
    if pattern := getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None):
        return stages if pattern.partition("/")[0].count("|") >= stages else 1
    layers, chunks = getattr(args, "num_layers_per_virtual_pipeline_stage", None), 1
    if layers:
        chunks = (args.num_layers or 0) // (stages * layers)
    return stages if max(chunks, getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1) > 1 else 1


def _groups_of_microbatches(args: argparse.Namespace) -> list[str]:
    """A group size with which Megatron refuses the launch's share of a rank, when its first pass has begun."""
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
            f"in such groups: each, also the last one, needs {stages} at least"
            for share in shares if not runs(share, stages, group)]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Settled:
    """``values``: Megatron's arguments as they are set, those that it has, where ``given`` is true of them."""

    flag: str
    given: Condition
    values: dict[str, Any]
    words: str
    off: bool = True
    """Whether it is switched off."""

    def __str__(self) -> str:
        return f"{self.flag}{' is off' if self.off else ''}: {self.words}"


def _spreads_layers(args: argparse.Namespace) -> bool:
    """Whether Megatron would spread whole layers over the workers, each with its optimizer's state."""
    optimizer = getattr(args, "optimizer", None)
    spread = is_set("use_distributed_optimizer", "overlap_param_gather")(args)
    return optimizer == "dist_muon" or (optimizer in EMERGING and spread)


_finds_attention = all_of(is_set("bf16", "fp16"), unless(is_set("use_megatron_fsdp")))
"""Whether Megatron's ``clip_qk``, which looks for it at a fixed depth of wrappers, does."""

SETTLED = (
    Settled("--rerun-mode validate_results", is_one_of("rerun_mode", "validate_results"), {"rerun_mode": "disabled"},
            "a worker that finds an unexpected result ends, and the microbatch runs on another worker, instead of "
            "on the same one and after a restart", off=False),
    Settled("--error-injection-rate", is_set("error_injection_rate"), {"error_injection_rate": 0},
            "it makes up unexpected results for Megatron's rerun machine, in whose place a worker ends; "
            "--recover-inject has a worker end, hang or fail where you say"),
    Settled("--fp16",
            all_of(is_set("fp16"), lambda args: not getattr(args, "accumulate_allreduce_grads_in_fp32", True)),
            {"accumulate_allreduce_grads_in_fp32": True},
            "gradients are added up in float32 (--accumulate-allreduce-grads-in-fp32), which takes 2 more bytes per "
            "parameter: in float16 they overflow by how many of them one replica adds up", off=False),
    Settled("--fp8-param-gather, --fp4-param-gather", is_set("fp8_param_gather", "fp4_param_gather"),
            {"fp8_param_gather": False, "fp4_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False},
            "weights are kept and gathered in 16 bits, and Transformer Engine makes those of a forward pass from "
            "them (2 more bytes per parameter; with mxfp8 the numbers are the same, elsewhere a weight is rounded "
            "to 16 bits first): shadows and states that change hands are parts of plain buffers"),
    Settled("--reuse-grad-buf-for-mxfp8-param-ag", is_set("reuse_grad_buf_for_mxfp8_param_ag"),
            {"reuse_grad_buf_for_mxfp8_param_ag": False},
            "weights have a buffer of their own: gradients must outlive the update"),
    Settled("--use-distributed-optimizer with muon and its kin",
            all_of(_spreads_layers, unless(is_one_of("optimizer", "dist_muon"))),
            {"use_distributed_optimizer": False, "overlap_param_gather": False},
            "every worker keeps the optimizer's state of all parameters (in bf16 8 bytes each with muon): shards "
            "would be whole layers, of which nobody else had a copy"),
    Settled("--optimizer dist_muon", is_one_of("optimizer", "dist_muon"),
            {"optimizer": "muon", "use_distributed_optimizer": False, "overlap_param_gather": False},
            "--optimizer muon, with the optimizer's state of all parameters in every worker (in bf16 8 bytes each): "
            "shards would be whole layers, of which nobody else had a copy"),
    Settled("--use-precision-aware-optimizer with --use-megatron-fsdp",
            all_of(is_set("use_megatron_fsdp"), keeps("fp32", "float32"), unless(keeps(*BF16, *SCALED))),
            {"use_precision_aware_optimizer": False}, "its types are all float32, as are the other optimizer's"),
    Settled("--use-megatron-fsdp with one shard group",
            all_of(is_set("use_megatron_fsdp"), unless(is_above_one("num_distributed_optimizer_instances"))),
            {"num_distributed_optimizer_instances": 2},
            "there are two (--num-distributed-optimizer-instances 2), so a worker's shards are twice as large: of "
            "one alone nothing would be left when one of its workers dies", off=False),
    Settled("--moe-token-dispatcher-type flex",
            lambda args: is_one_of("moe_token_dispatcher_type", "flex")(args) or is_set("moe_enable_deepep")(args),
            {"moe_token_dispatcher_type": "alltoall", "moe_enable_deepep": False,
             "moe_flex_dispatcher_backend": "deepep", "moe_expert_rank_capacity_factor": None,
             "moe_paged_stash": False},
            "the buffers of DeepEP and HybridEP keep the addresses of dead workers, and their kernels can't be "
            "aborted; tokens go by alltoall, in buffers as large as it takes"),
    Settled("CUDA graphs", lambda args: has_cuda_graphs(args) or is_set("optimizer_cuda_graph")(args),
            {"cuda_graph_impl": "none", "enable_cuda_graph": False, "external_cuda_graph": False,
             "optimizer_cuda_graph": False},
            "NCCL does not give up a communicator as long as there is a graph with an operation over it: a worker "
            "would have to drop its graphs before it can leave its dead mates, and to capture others"),
    Settled("--tp-comm-overlap", is_set("tp_comm_overlap"), {"tp_comm_overlap": False},
            "its userbuffers can neither be aborted nor made anew: an orphan's kernels would wait for its dead mate "
            "for good"),
    Settled("--defer-embedding-wgrad-compute", is_set("defer_embedding_wgrad_compute"),
            {"defer_embedding_wgrad_compute": False},
            "with --overlap-grad-reduce these gradients come after the sum, and Megatron cannot put off those of one "
            "microbatch, which may be all that is run again"),
    Settled("--overlap-moe-expert-parallel-comm with --use-megatron-fsdp",
            all_of(is_set("overlap_moe_expert_parallel_comm"), is_set("use_megatron_fsdp"),
                   unless(all_of(is_set("untie_embeddings_and_output_weights"), unless(is_set("mtp_num_layers"))))),
            {"overlap_moe_expert_parallel_comm": False, "ep_overlap_early_attn_memory_release": False},
            "Megatron 0.19.2 itself gets a wrong gradient there of an embedding that several parts of the model share"),
    Settled("--async-save with --use-megatron-fsdp and --async-strategy mcore",
            all_of(is_set("async_save"), is_set("use_megatron_fsdp"), is_one_of("async_strategy", "mcore")),
            {"async_save": False},
            "a checkpoint is written before the next iteration: Megatron itself ends at the first one, with a "
            "TypeError (enable_cache)"),
    Settled("--delay-wgrad-compute with --use-megatron-fsdp",
            all_of(is_set("delay_wgrad_compute"), is_set("use_megatron_fsdp")), {"delay_wgrad_compute": False},
            "it was not tried"),
    Settled("--overlap-param-gather-with-optimizer-step", is_set("overlap_param_gather_with_optimizer_step"),
            {"overlap_param_gather_with_optimizer_step": False}, "the update is one step, all or nothing"),
    Settled("--use-sharp, --use-nccl-ub", is_set("use_sharp", "nccl_ub"),
            {"use_sharp": False, "nccl_ub": False, "fsdp_manual_registration": False},
            "the gradients do not go through Megatron's data-parallel groups, which both are for"),
    Settled("--distributed-timeout-seconds-after-init", is_set("distributed_timeout_seconds_after_init"),
            {"distributed_timeout_seconds_after_init": None},
            "a worker that comes later would wait for all others in its second iteration; who hangs is found by "
            "--recover-hang-timeout"),
    Settled("--gpu-sniff-test-interval", is_set("gpu_sniff_test_interval"), {"gpu_sniff_test_interval": None},
            "a worker that comes later would wait for all others before its first iteration; recover-run tests "
            "a device before it starts another worker on it"),
    Settled("--log-straggler", is_set("log_straggler"), {"log_straggler": False},
            "it reports to a rank that it chooses at the start; recover-report shows each replica's seconds"),
    Settled("--log-max-attention-logit", all_of(is_set("log_max_attention_logit"), unless(_finds_attention)),
            {"log_max_attention_logit": False},
            "Megatron itself finds the attention with --bf16 or --fp16 alone, and not with --use-megatron-fsdp: "
            "elsewhere it ends in the first step with an AttributeError"),
)  # fmt: skip


def settle(args: argparse.Namespace) -> list[Settled]:
    """Set these in Megatron's parsed arguments; returns what was done."""
    done = [its for its in SETTLED if its.given(args)]
    for its in done:
        vars(args).update({name: value for name, value in its.values.items() if hasattr(args, name)})
    return done


def not_settled(args: argparse.Namespace) -> list[str]:
    """Why these arguments are refused: they did not come through the parser, which would have set them (--yaml-cfg)."""
    return [
        f"--recover cannot be combined with {its.flag} from a file of --yaml-cfg: {its.words}"
        for its in SETTLED
        if its.given(args)
    ]


@functools.cache
def say(settled: Settled) -> None:
    if os.environ.get("RANK", "0") == "0":
        log.info(f"with --recover {settled}")
