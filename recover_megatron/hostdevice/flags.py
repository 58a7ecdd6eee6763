"""Megatron flags on the host device: which are needed, which cannot run."""

from __future__ import annotations

from typing import Any


def host_defaults() -> list[str]:
    """Megatron flags that a run on the host device needs, as argv items."""
    return [
        "--transformer-impl=local",
        "--no-gradient-accumulation-fusion",
        "--no-persist-layer-norm",
        "--no-masked-softmax-fusion",
        "--no-bias-gelu-fusion",
        "--no-bias-dropout-fusion",
        "--no-rope-fusion",
        "--attention-softmax-in-fp32",
        "--distributed-backend=gloo",
    ]


def unsupported(args: Any) -> list[str]:
    """What of ``args`` (Megatron's parsed namespace) cannot run without a GPU: one line each, naming the flag."""
    problems = []
    if getattr(args, "context_parallel_size", 1) > 1:
        problems.append("--context-parallel-size above 1")
    return problems
