"""Replacements for apex's FusedAdam and layer norm, which Megatron uses without TransformerEngine.

Without these replacements Megatron uses torch's AdamW and LayerNorm.  But Megatron's distributed optimizer cannot load
AdamW's ``step``, which is per parameter, and Megatron refuses torch's LayerNorm with sequence parallelism.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from recover_megatron.hostdevice import ssm


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with the interface of apex's and Transformer Engine's FusedAdam: one step count per group.

    As in Transformer Engine, moments may be bfloat16 (``exp_avg_dtype``, ``exp_avg_sq_dtype``; if None, they have
    the parameter's dtype).  A bfloat16 parameter may have a float32 main parameter (``master_weights``), stored
    completely or as the 16 bits that the parameter lacks (``store_param_remainders``).  Gradients of any dtype may be
    in ``decoupled_grad``.  The optimizer computes in float32.
    """

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
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self.name_to_dtype_map = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.use_decoupled_grad = use_decoupled_grad  # Megatron may change this attribute later
        self.store_param_remainders = store_param_remainders and master_weights
        self._scales: dict[Any, dict[str, torch.Tensor]] = {}
        """Parameter -> name of a bfloat16 state tensor -> its scale, which is 1; Transformer Engine has such scales."""
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            used = [p for p in group["params"] if self._gradient(p) is not None]
            for p in used:
                if not self.state[p]:
                    self.initialize_state(p, self._has_remainder(p))
            full = [self._in_full(p) for p in used]
            if group["bias_correction"]:
                self._update_all(full, group)
            else:
                for item in full:
                    self._update(item, group)
            for p, item in zip(used, full, strict=True):
                self._keep(p, item)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        for name in self.name_to_dtype_map:
            self._allot(param, name).zero_()
        if self.master_weights:
            self._allot(param, "master_param").copy_(torch.zeros_like(param) if store_param_remainders else param)

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        state: torch.Tensor = self.state[param][state_name]
        return state.float() if state.dtype == torch.bfloat16 else state

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        remainder = state_name == "master_param" and self._has_remainder(param)
        assert unscaled_state.dtype == (torch.int16 if remainder else torch.float32)
        state = self.state[param]
        (state[state_name] if state_name in state else self._allot(param, state_name)).copy_(unscaled_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with bfloat16 tensors converted to float32."""
        found = super().state_dict()
        every = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        for number, p in zip(numbers, every, strict=True):
            if number in found["state"]:
                found["state"][number] = {name: self.get_unscaled_state(p, name) for name in self.state[p]}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if None in self.name_to_dtype_map.values():
            return  # torch has loaded moments in the parameter's dtype, which is right here
        every = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, p in zip(numbers, every, strict=True):
            self.state.pop(p, None)
            for name, value in state_dict["state"].get(number, {}).items():
                remainder = name == "master_param" and self._has_remainder(p)
                self.set_scaled_state(p, name, value if remainder else value.float())

    def _gradient(self, p: torch.Tensor) -> Any:
        return getattr(p, "decoupled_grad" if self.use_decoupled_grad else "grad", None)

    def _has_remainder(self, p: torch.Tensor) -> bool:
        return self.store_param_remainders and p.dtype == torch.bfloat16

    def _allot(self, p: torch.Tensor, name: str) -> torch.Tensor:
        """Allocate the tensor ``name`` in the state of parameter ``p``; return the tensor uninitialized."""
        main = torch.int16 if self._has_remainder(p) else torch.float32
        dtype = main if name == "master_param" else self.name_to_dtype_map[name] or p.dtype
        if dtype == torch.bfloat16:
            self._scales.setdefault(p, {})[name] = torch.ones(1)
        self.state[p][name] = torch.empty_like(p, dtype=dtype)
        return self.state[p][name]

    def _in_full(self, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return main parameter, gradient, ``exp_avg`` and ``exp_avg_sq`` in float32, without a copy if possible."""
        state, gradient = self.state[p], self._gradient(p)
        main = p
        if self.master_weights and p.dtype != torch.float32:
            main = state["master_param"]
        if main.dtype == torch.int16:
            high = p.view(torch.int16).int() - (main < 0).int()  # negative low bits: ``p`` was rounded up
            main = (high << 16 | main.int() & 0xFFFF).view(torch.float32)
        moments = [state[name] for name in self.name_to_dtype_map]
        for name, moment in zip(self.name_to_dtype_map, moments, strict=True):
            if moment.dtype == torch.bfloat16:
                assert self._scales[p][name] == 1.0
        return main, *(item.to(main.dtype) for item in (gradient, *moments))

    def _keep(self, p: torch.Tensor, full: tuple[torch.Tensor, ...]) -> None:
        state, main = self.state[p], full[0]
        for name, item in zip(self.name_to_dtype_map, full[2:], strict=True):
            if item is not state[name]:
                state[name].copy_(item)
        if self._has_remainder(p):
            bits = main.view(torch.int32)
            state["master_param"].copy_(bits.to(torch.int16))
            p.view(torch.int16).copy_(((bits >> 16) + (bits.to(torch.int16) < 0)).to(torch.int16))
        elif main is not p:
            p.copy_(main)

    def _update_all(self, full: list[tuple[torch.Tensor, ...]], group: dict[str, Any]) -> None:
        """Update all parameters with torch's fused kernel, which is four times as fast as one call per operation."""
        (beta1, beta2), rule = group["betas"], adamw if self.adam_w_mode else adam
        rule(
            *([item[at] for item in full] for at in range(4)),
            [],
            [torch.tensor(float(group["step"]) - 1) for _ in full],  # torch's function adds 1 to the step count
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _update(self, full: tuple[torch.Tensor, ...], group: dict[str, Any]) -> None:
        """Update one parameter without bias correction, which torch's fused kernel always applies."""
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        p, grad, exp_avg, exp_avg_sq = full
        if self.adam_w_mode:
            p.mul_(1 - lr * decay)
        else:
            grad = grad.add(p, alpha=decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        p.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(group["eps"]), value=-lr)


class FusedLayerNormAffineFunction:
    """Layer norm with the interface of apex's autograd function; torch's autograd runs the backward pass."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):  # type: ignore[no-untyped-def]
        """Raise NotImplementedError.  Megatron reads the argument names of this function, but never calls it."""
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
        """Return the layer norm of ``input``.  ``memory_efficient`` has no effect; in apex it saves memory."""
        return F.layer_norm(input, normalized_shape, weight, bias, eps)


CHUNK = 1 << 18
"""Number of elements per call of ``vector_norm(..., dtype=torch.float64)``, which makes a float64 copy of its input."""


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of all elements, a float64 scalar on the device of ``tensors``.

    On the CPU, torch 2.15 adds up float32 squares in float32.  From 2^24 elements on, a norm from this sum is too small
    by up to some percent, and depends on how the elements are divided into tensors.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    parts = [part for item in flat for part in (item.split(CHUNK) if item.device.type == "cpu" else (item,))]
    norms = torch.empty(len(parts), dtype=torch.float64, device=parts[0].device if parts else None)
    for part, norm in zip(parts, norms, strict=True):
        torch.linalg.vector_norm(part, dtype=torch.float64, out=norm)
    return norms.square().sum()


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm with the interface of Megatron's norms (used by "rms-norm" in megatron_fixes.py)."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset))
        # If this attribute is True, Megatron sums the weight's gradients over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        return F.rms_norm(x, weight.shape, weight, self.eps)


def install() -> None:
    """Install stand-ins for apex, mamba_ssm, causal_conv1d and fla in ``sys.modules``, and hide TransformerEngine."""
    members: dict[str, dict[str, Any]] = {
        "apex": {},
        "apex.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD},
        "apex.normalization": {},
        # Megatron imports its precision-aware optimizer from this module, which can be imported without its parents.
        "transformer_engine.pytorch.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD},
        "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": FusedLayerNormAffineFunction},
        **ssm.MODULES,
    }
    for name, contents in members.items():
        module = types.ModuleType(name, "replacement by recover_megatron.hostdevice")
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None)  # ``importlib.util.find_spec`` fails for a module without a spec
        vars(module).update(contents)
        sys.modules[name] = module
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
