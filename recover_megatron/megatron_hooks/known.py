"""What Megatron does over replicas inside a training step and the recovery knows of: where, and why nothing is sent.

What is not in here ends the run (``UnknownOperation``): made by each replica alone, it would let the replicas drift
apart, or count what has been counted.
"""

from __future__ import annotations

from recover_megatron.instep.callers import Caller

KNOWN = {
    ("megatron.core.distributed.finalize_model_grads", "finalize_model_grads", "allreduce"): (
        "the number of tokens: it is that of the whole batch already, from the tail of the step's sum"),
    ("megatron.core.transformer.moe.moe_utils", "get_updated_expert_bias", "allreduce"): (
        "the tokens of each expert: they are those of the whole batch already, from the same tail"),
    ("megatron.core.distributed.finalize_model_grads", "_update_router_qb_beta", "allreduce"): (
        "the quantiles of the experts' scores: they are those of the whole batch already, from the same tail"),
    ("megatron.core.optimizer.qk_clip", "clip_qk", "allreduce"): (
        "the largest logits of attention: they are those of the whole batch already, from the same tail"),
    ("megatron.training.training", "train_step", "allreduce"): (
        "the loss and its divisor: they are those of the whole batch already, from the same tail"),
    ("megatron.bridge.training.train", "train_step", "allreduce"): (
        "the same, in Megatron-Bridge's loop"),
    ("megatron.core.optimizer.optimizer", "has_grad_norm_group", "allreduce"): (
        "whether anybody's part of the parameters has a norm of its own (asked of all replicas with the distributed "
        "optimizer): detached heads of multi-token prediction alone have, which are refused with it"),
    ("megatron.core.timers", "start", "barrier"): (
        "before a time is taken (--timing-log-level 1 and 2): nothing is computed"),
    ("megatron.core.timers", "stop", "barrier"): "the same, after it",
}  # fmt: skip
"""(Module, function, operation) -> why."""


def is_known(caller: Caller) -> bool:
    """Whether the step has done already what this operation is for."""
    return (caller.module, caller.function, caller.operation) in KNOWN
