"""Flags that are taken with --recover and done in another way than Megatron does them, said at the start.

    another way   the same is computed, or the same is found out, by other means
    switched off  what makes a step faster, or is told beside it, and cannot survive a death: the training is the same

A flag that changes what is trained is never switched off: it is refused (`refused`).
"""

from __future__ import annotations

import argparse
import functools
import os
from dataclasses import dataclass
from typing import Any

from recover_megatron.hostdevice.flags import (
    Condition,
    all_of,
    has_cuda_graphs,
    is_above_one,
    is_one_of,
    is_set,
    unless,
)
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.refused import EMERGING

log = get_logger(__name__)


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


def _keeps_all_in_float32(args: argparse.Namespace) -> bool:
    """Whether the precision-aware optimizer is given, and is to keep all in float32, as the other one does."""
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    fp32 = all(str(getattr(args, name, "fp32")) in ("fp32", "torch.float32") for name in names)
    return fp32 and is_set("use_precision_aware_optimizer")(args) and not is_set("optimizer_cpu_offload")(args)


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
    Settled("--use-precision-aware-optimizer", _keeps_all_in_float32, {"use_precision_aware_optimizer": False},
            "its types are all float32 here, and so are the other optimizer's; its main parameters take 4 bytes "
            "each in a shard, where Transformer Engine may keep the 2 that a weight in 16 bits lacks"),
    Settled("--use-megatron-fsdp with one shard group",
            all_of(is_set("use_megatron_fsdp"), unless(is_above_one("num_distributed_optimizer_instances"))),
            {"num_distributed_optimizer_instances": 2},
            "there are two (--num-distributed-optimizer-instances 2), so a worker's shards are twice as large: of "
            "one alone nothing would be left when one of its workers dies", off=False),
    Settled("--fsdp-double-buffer", is_set("fsdp_double_buffer", "megatron_fsdp_max_pool_double_buffer"),
            {"fsdp_double_buffer": False, "megatron_fsdp_max_pool_double_buffer": False},
            "what an interrupted iteration leaves in its buffers was not examined; memory is asked for as it is "
            "needed"),
    Settled("--moe-token-dispatcher-type flex",
            lambda args: is_one_of("moe_token_dispatcher_type", "flex")(args) or is_set("moe_enable_deepep")(args),
            {"moe_token_dispatcher_type": "alltoall", "moe_enable_deepep": False},
            "the buffers of DeepEP and HybridEP keep the addresses of dead workers, and their kernels can't be "
            "aborted; tokens go by alltoall"),
    Settled("CUDA graphs", has_cuda_graphs,
            {"cuda_graph_impl": "none", "enable_cuda_graph": False, "external_cuda_graph": False},
            "a replayed graph passes none of the places where microbatches are seeded and counted"),
    Settled("--tp-comm-overlap", is_set("tp_comm_overlap"), {"tp_comm_overlap": False},
            "its userbuffers can neither be aborted nor made anew: an orphan's kernels would wait for its dead mate "
            "for good"),
    Settled("--overlap-moe-expert-parallel-comm, --delay-wgrad-compute",
            is_set("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
            {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False},
            "the schedule of the one was not examined, and by the other gradients come after the sum"),
    Settled("--overlap-param-gather-with-optimizer-step", is_set("overlap_param_gather_with_optimizer_step"),
            {"overlap_param_gather_with_optimizer_step": False},
            "the update is one step, all or nothing"),
    Settled("--use-sharp, --use-nccl-ub", is_set("use_sharp", "nccl_ub"),
            {"use_sharp": False, "nccl_ub": False, "fsdp_manual_registration": False},
            "the gradients do not go through Megatron's data-parallel groups, which both are for"),
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
    """Tell the user, once."""
    if os.environ.get("RANK", "0") == "0":
        log.info(f"with --recover {settled}")
