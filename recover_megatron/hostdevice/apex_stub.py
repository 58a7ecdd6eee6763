"""Stand-ins for the apex kernels that Megatron's path without TransformerEngine is written for.

Without them Megatron falls back to ``torch.optim.AdamW``, whose per-parameter ``step`` its distributed optimizer cannot
reload, and to ``torch.nn.LayerNorm``, which it refuses to combine with sequence parallelism.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with apex's interface: the step count belongs to the parameter group."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step with the gradients in ``grad``; parameters without one are left alone."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            used = [p for p in group["params"] if p.grad is not None]
            for p in used:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            if group["bias_correction"]:
                self._update_all(used, group)
            else:
                for p in used:
                    self._update(p, group)

    def _update_all(self, used: list[torch.Tensor], group: dict[str, Any]) -> None:
        """In one pass over memory, as apex's kernel does it: four times as fast as a call for each operation."""
        (beta1, beta2), rule = group["betas"], adamw if self.adam_w_mode else adam
        rule(
            used,
            [p.grad for p in used],
            [self.state[p]["exp_avg"] for p in used],
            [self.state[p]["exp_avg_sq"] for p in used],
            [],
            [torch.tensor(float(group["step"]) - 1) for _ in used],  # of which the rule counts each up
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        """Without the correction of the bias, which torch's own rule always has."""
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        grad, state = p.grad, self.state[p]
        if self.adam_w_mode:
            p.mul_(1 - lr * decay)
        else:
            grad = grad.add(p, alpha=decay)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-lr)


class FusedLayerNormAffineFunction:
    """Layer norm with apex's calling convention; torch's own autograd does the backward pass."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):  # type: ignore[no-untyped-def]
        """Never called: Megatron reads the names of its arguments."""
        raise NotImplementedError

    @staticmethod
    def apply(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        normalized_shape: Any,
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        """``F.layer_norm``; ``memory_efficient`` changes what apex keeps, not what it computes."""
        return F.layer_norm(input, normalized_shape, weight, bias, eps)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm as Megatron constructs its norms (see megatron_fixes.py, "rms-norm")."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset))
        # Megatron sums the gradients of such weights over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        return F.rms_norm(x, weight.shape, weight, self.eps)


def install() -> None:
    """Put the stand-ins where Megatron looks for apex, and hide TransformerEngine."""
    members = {
        "apex": {},
        "apex.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD},
        "apex.normalization": {},
        "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": FusedLayerNormAffineFunction},
    }
    for name, contents in members.items():
        module = types.ModuleType(name, "stand-in of recover_megatron.hostdevice")
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
