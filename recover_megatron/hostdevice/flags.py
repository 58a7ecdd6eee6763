"""Megatron flags on the host device: which it needs, which cannot run there.  Imports neither torch nor Megatron."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def host_defaults() -> list[str]:
    """The Megatron flags without which a run on the host device ends with an error, as argv items.

    For a script to put before the user's own flags, so that argparse lets the user's win.  Fusions that run on the
    host as written are left at Megatron's default: they compute what the same command line computes on a GPU.
    """
    return [
        "--transformer-impl=local",
        "--distributed-backend=gloo",
        "--no-gradient-accumulation-fusion",
        "--no-masked-softmax-fusion",
        "--no-rope-fusion",
    ]


@dataclass(frozen=True)
class _Rule:
    """What cannot run: ``reason`` holds where ``applies(args)``."""

    applies: Callable[[Any], bool]
    reason: str


def _set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


def _is(name: str, *values: Any) -> Callable[[Any], bool]:
    return lambda args: getattr(args, name, None) in values


def _half(args: Any) -> bool:
    return bool(getattr(args, "bf16", False) or getattr(args, "fp16", False))


_TE = "needs TransformerEngine's GPU kernels"

RULES = [
    _Rule(
        lambda args: getattr(args, "transformer_impl", "local") != "local",
        f"--transformer-impl other than local: {_TE}; use --transformer-impl local "
        "(megatron/core/models/gpt/gpt_layer_specs.py)",
    ),
    _Rule(
        _is("distributed_backend", "nccl", "ucc"),
        "--distributed-backend nccl: NCCL reaches GPU memory only; use --distributed-backend gloo "
        "(megatron/training/initialize.py)",
    ),
    _Rule(
        _set("gradient_accumulation_fusion"),
        "gradient accumulation fusion: a CUDA extension; use --no-gradient-accumulation-fusion "
        "(megatron/core/tensor_parallel/layers.py)",
    ),
    _Rule(
        lambda args: _half(args) and bool(getattr(args, "masked_softmax_fusion", False)),
        "masked softmax fusion with --bf16 or --fp16: a CUDA extension; use --no-masked-softmax-fusion "
        "(megatron/core/fusions/fused_softmax.py)",
    ),
    _Rule(
        lambda args: (
            bool(getattr(args, "apply_rope_fusion", False))
            and getattr(args, "position_embedding_type", None) in ("rope", "yarn", "mrope")
        ),
        f"rope fusion: {_TE}; use --no-rope-fusion (megatron/core/transformer/transformer_config.py)",
    ),
    _Rule(
        _set("fp8"),
        "--fp8-format: the local transformer ignores it silently and would train at another precision; leave it out "
        "(megatron/core/fp8_utils.py)",
    ),
    _Rule(_set("fp4"), f"--fp4-format: {_TE}; leave it out (megatron/training/arguments.py)"),
    _Rule(
        lambda args: (
            getattr(args, "cuda_graph_impl", "none") not in ("none", None)
            or bool(getattr(args, "enable_cuda_graph", False) or getattr(args, "external_cuda_graph", False))
        ),
        "CUDA graphs: there is no CUDA; use --cuda-graph-impl none and neither --enable-cuda-graph nor "
        "--external-cuda-graph (megatron/core/transformer/cuda_graphs.py)",
    ),
    _Rule(
        _set("optimizer_cuda_graph"),
        "--optimizer-cuda-graph: there is no CUDA; leave it out (megatron/core/optimizer/optimizer_cuda_graph.py)",
    ),
    _Rule(_set("nccl_ub"), "--use-nccl-ub: NCCL only; leave it out (megatron/core/nccl_allocator.py)"),
    _Rule(_set("use_sharp"), "--use-sharp: NCCL only; leave it out (megatron/core/parallel_state.py)"),
    _Rule(_set("tp_comm_overlap"), f"--tp-comm-overlap: {_TE}; leave it out (megatron/training/initialize.py)"),
    _Rule(
        _set("symmetric_ar_type"),
        f"--symmetric-ar-type: {_TE}; leave it out (megatron/core/transformer/transformer_config.py)",
    ),
    _Rule(
        lambda args: (
            bool(getattr(args, "cross_entropy_loss_fusion", False))
            and getattr(args, "cross_entropy_fusion_impl", "native") == "te"
        ),
        f"--cross-entropy-fusion-impl te: {_TE}; use native "
        "(megatron/core/models/common/language_module/language_module.py)",
    ),
    _Rule(
        _set("moe_permute_fusion"),
        f"--moe-permute-fusion: {_TE}; leave it out (megatron/core/transformer/transformer_config.py)",
    ),
    _Rule(
        _set("moe_router_fusion"),
        f"--moe-router-fusion: {_TE}; leave it out (megatron/core/transformer/moe/moe_utils.py)",
    ),
    _Rule(
        lambda args: (
            bool(getattr(args, "moe_enable_deepep", False))
            or getattr(args, "moe_token_dispatcher_type", None) == "flex"
        ),
        "--moe-token-dispatcher-type flex (DeepEP, HybridEP): GPU communication libraries; use alltoall or allgather "
        "(megatron/core/transformer/moe/token_dispatcher.py)",
    ),
    _Rule(
        _set("use_precision_aware_optimizer"),
        "--use-precision-aware-optimizer: needs TransformerEngine's FusedAdam; leave it out "
        "(megatron/core/optimizer/optimizer_config.py)",
    ),
    _Rule(
        _set("optimizer_cpu_offload"),
        "--optimizer-cpu-offload: there is no device to offload from; leave it out "
        "(megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py)",
    ),
    _Rule(
        _set("cpu_offloading_num_layers"),
        f"--cpu-offloading-num-layers: {_TE}; leave it out (megatron/core/transformer/transformer_block.py)",
    ),
    _Rule(
        _set("fine_grained_activation_offloading"),
        f"--fine-grained-activation-offloading: {_TE}; leave it out (megatron/training/arguments.py)",
    ),
    _Rule(
        _set("delay_wgrad_compute"),
        f"--delay-wgrad-compute: {_TE}; leave it out (megatron/training/arguments.py)",
    ),
    _Rule(
        _set("batch_invariant_mode"),
        "--batch-invariant-mode: FlashAttention and Triton kernels; leave it out "
        "(megatron/core/transformer/custom_layers/batch_invariant_kernels.py)",
    ),
    _Rule(
        lambda args: bool(getattr(args, "profile", False)) and not getattr(args, "use_pytorch_profiler", False),
        "--profile alone: starts the CUDA profiler; add --use-pytorch-profiler (megatron/training/training.py)",
    ),
    _Rule(
        _set("record_memory_history"),
        "--record-memory-history: of CUDA memory; leave it out (megatron/training/utils/utils.py)",
    ),
    _Rule(
        _set("log_straggler"),
        "--log-straggler: reads the GPU's clock and power; leave it out (megatron/core/utils.py)",
    ),
]
"""Each was seen to fail (or, --fp8-format, to be ignored) in a run of Megatron 0.19.2 on the host device."""


def unsupported(args: Any) -> list[str]:
    """What of ``args``, Megatron's parsed namespace, cannot run without a GPU; empty if everything can.

    One line each: the flag, why, what to do, and the file of Megatron where it ends.  Works before and after Megatron's
    own validation; an attribute that this version of Megatron lacks counts as not set.
    """
    return [rule.reason for rule in RULES if rule.applies(args)]


def never_summed(args: Any) -> list[str]:
    """One line where Megatron would train without an error, but each instance of Megatron-FSDP a model of its own.

    ``training.train`` sets ``config.no_sync_func`` only with --overlap-grad-reduce.  Without it nothing tells
    Megatron-FSDP which microbatch is the last one, and it sums over the instances after that one only.
    Seen with Megatron 0.19.2.
    """
    instances = getattr(args, "num_distributed_optimizer_instances", 1) or 1
    if not getattr(args, "use_megatron_fsdp", False) or instances < 2 or getattr(args, "overlap_grad_reduce", False):
        return []
    return [
        f"--use-megatron-fsdp with --num-distributed-optimizer-instances {instances} needs --overlap-grad-reduce: "
        "without it Megatron never sums the gradients of the instances, and each trains a model of its own, silently"
    ]


def outer_sharding(args: Any) -> list[str]:
    """One line where Megatron-FSDP would train without an error, but not as plain data parallelism does.

    With an optimizer that is sharded over the instances, too, the buffers that add up gradients inside an instance have
    no scaling factor (``_create_hfsdp_helper_buffer``), and the norm is that of an instance's part of the gradients
    (``grad_stats_parallel_group``).  With both mended the numbers are those of plain data parallelism; seen with
    Megatron 0.19.2.  --recover does not use that part of Megatron.
    """
    sharded = getattr(args, "outer_dp_sharding_strategy", "no_shard") != "no_shard"
    if not getattr(args, "use_megatron_fsdp", False) or not sharded or getattr(args, "recover", False):
        return []
    return [
        "--outer-dp-sharding-strategy optim: this Megatron sums gradients without dividing them by the number of "
        "data-parallel ranks, and each instance clips its part of them by the norm of that part alone; take no_shard"
    ]
