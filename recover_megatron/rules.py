"""Rules that refuse Megatron arguments: a rule is a condition and a reason for the user.

The lists of rules are ``hostdevice.flags`` and ``megatron_hooks.entry.refused``.  Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Condition = Callable[[Any], bool]


@dataclass(frozen=True)
class Rule:
    """Rule that refuses Megatron's arguments if ``when(args)`` is true.

    ``reason``: text for the user, which may contain values of arguments ("{args.seed}").
    """

    reason: str
    when: Condition


def is_set(*names: str) -> Condition:
    """Return the condition that any of these arguments is set; an argument that this Megatron lacks is not set."""
    return lambda args: any(getattr(args, name, None) for name in names)


def is_one_of(name: str, *values: Any) -> Condition:
    return lambda args: getattr(args, name, None) in values


def is_given(flag: str) -> Condition:
    return is_set(flag.removeprefix("--").replace("-", "_"))


def is_above_one(name: str) -> Condition:
    return lambda args: (getattr(args, name, None) or 1) > 1


def has_layers(kinds: str) -> Condition:
    """Return the condition that a hybrid model has a layer of one of these kinds; ``kinds``: a letter for each kind."""

    def when(args: Any) -> bool:
        pattern = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None) or ""
        return any(kind in pattern for kind in kinds)

    return when


def all_of(*conditions: Condition) -> Condition:
    return lambda args: all(condition(args) for condition in conditions)


def unless(condition: Condition) -> Condition:
    return lambda args: not condition(args)


def has_cuda_graphs(args: Any) -> bool:
    older = is_set("enable_cuda_graph", "external_cuda_graph")
    return getattr(args, "cuda_graph_impl", None) not in (None, "none") or older(args)


BF16, SCALED = ("bf16", "bfloat16"), ("fp16", "float16", "fp8", "uint8")
"""Data types of the precision-aware optimizer's state: both the names in Megatron's flags and the names in torch."""


def keeps(*types: str) -> Condition:
    """Return the condition that the precision-aware optimizer is used and keeps some state in one of ``types``."""
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    aware = is_set("use_precision_aware_optimizer")
    return lambda args: (
        aware(args) and any(str(getattr(args, name, "fp32")).removeprefix("torch.") in types for name in names)
    )


def reasons(rules: Iterable[Rule], args: Any) -> list[str]:
    """Return the reasons of the rules that refuse the arguments ``args``, in the order of the rules."""
    return [rule.reason.format(args=args) for rule in rules if rule.when(args)]
