"""Megatron flags that the host device requires or does not support.  Imports neither torch nor Megatron."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from recover_megatron.logger import get_logger
from recover_megatron.rules import (
    SCALED,
    Condition,
    Rule,
    all_of,
    has_cuda_graphs,
    has_layers,
    is_above_one,
    is_given,
    is_one_of,
    is_set,
    keeps,
    reasons,
    unless,
)
from recover_megatron.variables import PREPARED_VARIABLE, WORKER_ID_VARIABLE

log = get_logger(__name__)

_warned = False


def host_defaults() -> list[str]:
    """Return the Megatron flags that a run on the host device needs, as items of argv.

    A script puts these flags before the user's flags, which take precedence.  Fusions that work on the host keep
    Megatron's default, so that a command line computes the same numbers as on a GPU.
    """
    return [
        "--transformer-impl=local",
        "--distributed-backend=gloo",
        "--no-gradient-accumulation-fusion",
        "--no-masked-softmax-fusion",
        "--no-rope-fusion",
    ]


def _out(flag: str, why: str, file: str, when: Condition | None = None, do: str = "leave it out") -> Rule:
    """Return a rule that refuses ``flag`` because of ``why``; ``do`` is the remedy.

    ``file``: Megatron's file in which the run would fail.  ``when``: condition under which the flag is refused; None
    if it is refused whenever it is given.
    """
    return Rule(f"{flag}: {why}; {do} (megatron/{file})", when or is_given(flag))


def _knows_documents(args: Any) -> bool:
    """Return whether parts of the model other than its attention need to know in which document a token is."""
    rotary = is_one_of("position_embedding_type", "rope", "yarn", "mrope")
    return has_layers("MG")(args) or rotary(args) or is_set("multi_latent_attention", "mtp_num_layers")(args)


def _splits_experts(args: Any) -> bool:
    size = getattr(args, "expert_tensor_parallel_size", None) or getattr(args, "tensor_model_parallel_size", None)
    return (size or 1) > 1


_TE = "needs TransformerEngine's GPU kernels"
_CONFIG = "core/transformer/transformer_config.py"
_ARGUMENTS = "training/arguments.py"

RULES = [
    _out("--transformer-impl other than local", _TE, "core/models/gpt/gpt_layer_specs.py",
         lambda args: getattr(args, "transformer_impl", "local") != "local", "use --transformer-impl local"),
    _out("--distributed-backend nccl", "NCCL can access GPU memory only", "training/initialize.py",
         is_one_of("distributed_backend", "nccl", "ucc"), "use --distributed-backend gloo"),
    _out("gradient accumulation fusion", "needs a CUDA extension", "core/tensor_parallel/layers.py",
         is_set("gradient_accumulation_fusion"), "use --no-gradient-accumulation-fusion"),
    _out("masked softmax fusion with --bf16 or --fp16", "needs a CUDA extension", "core/fusions/fused_softmax.py",
         all_of(is_set("bf16", "fp16"), is_set("masked_softmax_fusion")), "use --no-masked-softmax-fusion"),
    _out("rope fusion", _TE, _CONFIG,
         all_of(is_set("apply_rope_fusion"), is_one_of("position_embedding_type", "rope", "yarn", "mrope")),
         "use --no-rope-fusion"),
    _out("--fp8-format", "the local transformer silently ignores it and would train at another precision",
         "core/fp8_utils.py", is_set("fp8")),
    _out("--fp4-format", _TE, _ARGUMENTS, is_set("fp4")),
    _out("CUDA graphs", "there is no CUDA", "core/transformer/cuda_graphs.py",
         has_cuda_graphs, "use --cuda-graph-impl none and neither --enable-cuda-graph nor --external-cuda-graph"),
    _out("--optimizer-cuda-graph", "there is no CUDA", "core/optimizer/optimizer_cuda_graph.py"),
    _out("--use-nccl-ub", "works with NCCL only", "core/nccl_allocator.py", is_set("nccl_ub")),
    _out("--use-sharp", "works with NCCL only", "core/parallel_state.py"),
    _out("--tp-comm-overlap", _TE, "training/initialize.py"),
    _out("--symmetric-ar-type", _TE, _CONFIG),
    _out("--cross-entropy-fusion-impl te", _TE, "core/models/common/language_module/language_module.py",
         all_of(is_set("cross_entropy_loss_fusion"), is_one_of("cross_entropy_fusion_impl", "te")), "use native"),
    _out("--moe-permute-fusion", _TE, _CONFIG),
    _out("--moe-router-fusion", _TE, "core/transformer/moe/moe_utils.py"),
    _out("--moe-token-dispatcher-type flex (DeepEP, HybridEP)", "needs GPU communication libraries",
         "core/transformer/moe/token_dispatcher.py",
         lambda args: is_set("moe_enable_deepep")(args) or is_one_of("moe_token_dispatcher_type", "flex")(args),
         "use alltoall or allgather"),
    _out("--main-params-dtype, --exp-avg-dtype or --exp-avg-sq-dtype fp16 or fp8", _TE, "core/optimizer/__init__.py",
         keeps(*SCALED), "use fp32; moments may also be bf16"),
    _out("--optimizer-cpu-offload", "there is no device to offload from",
         "core/optimizer/cpu_offloading/hybrid_optimizer.py"),
    _out("--cpu-offloading-num-layers", _TE, "core/transformer/transformer_block.py"),
    _out("--fine-grained-activation-offloading", _TE, _ARGUMENTS),
    _out("--delay-wgrad-compute", _TE, _ARGUMENTS),
    _out("--batch-invariant-mode", "needs FlashAttention and Triton kernels",
         "core/transformer/custom_layers/batch_invariant_kernels.py"),
    _out("--hybrid-context-parallel", _TE, "core/transformer/dot_product_attention.py"),
    _out("--sft with --context-parallel-size", _TE, "core/utils.py",
         all_of(is_set("sft"), is_above_one("context_parallel_size")), "use --context-parallel-size 1"),
    _out("--dataloader-inter-document-masking with --context-parallel-size and rotary positions, --mtp-num-layers, "
         "Mamba or a delta net",
         "Megatron splits the sequence over the ranks, but these layers assume that it splits each document",
         "core/models/common/embeddings/rope_utils.py",
         all_of(is_set("dataloader_inter_document_masking"), is_above_one("context_parallel_size"), _knows_documents),
         "use --context-parallel-size 1"),
    _out("--expert-tensor-parallel-size above 1 with --moe-token-dispatcher-type alltoall",
         "gloo cannot gather parts of different sizes", "core/transformer/moe/token_dispatcher.py",
         all_of(is_set("num_experts"), is_one_of("moe_token_dispatcher_type", "alltoall"), _splits_experts,
                unless(is_set("moe_pad_expert_input_to_capacity"))),
         "use --expert-tensor-parallel-size 1, or allgather"),
    _out("--hybrid-layer-pattern with D (DSA)", _TE, "core/models/hybrid/hybrid_layer_specs.py",
         has_layers("D"), "use * or + for attention"),
    _out("--mla-down-proj-fusion in a hybrid model", _TE, "core/transformer/multi_latent_attention.py",
         all_of(is_set("mla_down_proj_fusion"), is_set("hybrid_layer_pattern"))),
    _out("--profile alone", "starts the CUDA profiler", "training/training.py",
         all_of(is_set("profile"), unless(is_set("use_pytorch_profiler"))),
         "add --use-pytorch-profiler"),
    _out("--record-memory-history", "records CUDA memory", "training/utils/utils.py"),
    _out("--log-straggler", "reads the GPU's clock and power", "core/utils.py"),
]  # fmt: skip
"""Refused flags.  With Megatron 0.19.2 on the host device, each made a run fail; only --fp8-format was ignored."""


def unsupported(args: Any) -> list[str]:
    """Return the reasons why Megatron cannot run with the parsed flags ``args`` without a GPU; empty if it can.

    Each reason is a line with the flag, the reason, the remedy, and Megatron's file in which the run would fail.  May
    be called before or after Megatron's own validation of ``args``.
    """
    return reasons(RULES, args)


def never_summed(args: Any) -> list[str]:
    """Return one line if Megatron-FSDP would silently train a separate model in each of its instances.

    ``training.train`` sets ``config.no_sync_func`` only with --overlap-grad-reduce.  Without this flag Megatron-FSDP
    does not know which microbatch is the last one, so it never sums over the instances.  Seen with Megatron 0.19.2.
    Megatron-FSDP 2 is not affected: it has only one instance.
    """
    instances = getattr(args, "num_distributed_optimizer_instances", 1) or 1
    first = getattr(args, "use_megatron_fsdp", False) and getattr(args, "megatron_fsdp_version", 1) == 1
    if not first or instances < 2 or getattr(args, "overlap_grad_reduce", False):
        return []
    return [
        f"--use-megatron-fsdp with --num-distributed-optimizer-instances {instances} needs --overlap-grad-reduce: "
        "without it Megatron never sums gradients over the instances, and each instance silently trains its own model"
    ]


def norm_of_version_2(args: Any) -> list[str]:
    """Return one line if Megatron-FSDP 2 would clip gradients whose norm is below the limit.

    ``get_grad_norm_fp32`` sums the squares twice over the data-parallel ranks: over the mesh of the gradients, and over
    ``grad_stats_parallel_group``.  So the norm is too large by the square root of the number of ranks.  Seen with
    Megatron main, d98e8a6.  With --recover the squares are summed once.
    """
    second = getattr(args, "use_megatron_fsdp", False) and getattr(args, "megatron_fsdp_version", 1) == 2
    if not second or getattr(args, "recover", False) or getattr(args, "clip_grad", 0.0) <= 0.0:
        return []
    return [
        "--megatron-fsdp-version 2: this Megatron overestimates the gradient norm by the root of the number of "
        "data-parallel ranks, so it clips too much; multiply --clip-grad by the root of the number of ranks"
    ]


def outer_sharding(args: Any) -> list[str]:
    """Return one line if Megatron-FSDP would silently compute other numbers than plain data parallelism.

    This happens if the optimizer is sharded over the instances.  The buffers that add up gradients inside an instance
    lack a scaling factor (``_create_hfsdp_helper_buffer``), and the gradient norm covers only the gradients of one
    instance (``grad_stats_parallel_group``).  Seen with Megatron 0.19.2; with both faults fixed the numbers are right.
    --recover does not use this part of Megatron.
    """
    sharded = getattr(args, "outer_dp_sharding_strategy", "no_shard") != "no_shard"
    if not getattr(args, "use_megatron_fsdp", False) or not sharded or getattr(args, "recover", False):
        return []
    return [
        "--outer-dp-sharding-strategy optim: this Megatron sums gradients without dividing them by the number of "
        "data-parallel ranks, and each instance clips its gradients by the norm of these gradients alone; use no_shard"
    ]


def warn_of_what_is_never_summed(args: Any) -> None:
    """Log warnings about wrong sums in Megatron-FSDP, once per run, in the process of rank 0."""
    global _warned
    if _warned or not speaks():
        return
    for line in [*never_summed(args), *outer_sharding(args), *norm_of_version_2(args)]:
        _warned = True
        log.warning(line)


def speaks() -> bool:
    """Return whether this process logs for the run: it has rank 0 or no rank, and is neither spawned nor prepared.

    A fork server has no worker id and no rank; that of node 0 logs for the workers that it forks later.
    """
    main = sys.modules.get("__mp_main__")  # set by script.py, and by multiprocessing in a spawned process
    spawned = multiprocessing.parent_process() is not None or getattr(main, "__name__", None) == "__mp_main__"
    prepared = PREPARED_VARIABLE in os.environ and WORKER_ID_VARIABLE in os.environ
    return os.environ.get("RANK", os.environ.get("GROUP_RANK", "0")) == "0" and not spawned and not prepared
