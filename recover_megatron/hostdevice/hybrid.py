"""Layer specs of hybrid models with the local transformer's modules instead of Transformer Engine's.

The parameters, and their names in checkpoints, are the same as with Transformer Engine's modules, except that experts
are sequential.  This module never imports Megatron: ``localize`` is called when Megatron has imported the modules.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F


def localize(module: ModuleType) -> None:
    """Replace Transformer Engine's modules by local modules, in the attributes of ``module`` and in its layer specs."""
    local = {name: kind for name, kind in local_modules().items() if hasattr(module, name)}
    replaced = {id(getattr(module, name)): kind for name, kind in local.items()}
    for value in list(vars(module).values()):
        if not isinstance(value, type):
            _in_place(value, replaced)
    vars(module).update(local)


def _in_place(part: Any, replaced: dict[int, Any]) -> Any:
    """Return the replacement of ``part`` of a spec: another module, or ``part`` with its inner parts replaced."""
    if id(part) in replaced:
        return replaced[id(part)]
    if isinstance(part, list):
        part[:] = [_in_place(each, replaced) for each in part]
    elif isinstance(part, functools.partial) or (dataclasses.is_dataclass(part) and not isinstance(part, type)):
        inner = part.keywords if isinstance(part, functools.partial) else vars(part)
        inner.update({name: _in_place(each, replaced) for name, each in inner.items()})
    return part


@functools.cache
def local_modules() -> dict[str, type]:
    """Return Megatron's name of a Transformer Engine module -> the local transformer's module."""
    layers = sys.modules["megatron.core.tensor_parallel.layers"]
    column: Any = layers.ColumnParallelLinear
    norm_of: Any = sys.modules["megatron.core.fusions.fused_layer_norm"].FusedLayerNorm

    class LayerNormColumnParallelLinear(column):
        """Norm of the input and column-parallel linear layer as one module."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
            super().__init__(input_size, output_size, config=config, **others)
            self._rms, self._eps = config.normalization == "RMSNorm", config.layernorm_epsilon
            norm = norm_of(config=config, hidden_size=input_size, eps=self._eps)
            self._offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
            self.layer_norm_weight = norm.weight
            self.layer_norm_bias = None if self._rms else norm.bias
            for parameter in norm.parameters():
                parameter.data = parameter.data.to(config.params_dtype)

        def forward(self, input_: torch.Tensor, *rest: Any, **named: Any) -> Any:
            weight = self.layer_norm_weight + self._offset if self._offset else self.layer_norm_weight
            if self._rms:
                normed = F.rms_norm(input_, weight.shape, weight, self._eps)
            else:
                normed = F.layer_norm(input_, weight.shape, weight, self.layer_norm_bias, self._eps)
            return super().forward(normed, *rest, **named)

    return {
        "TEColumnParallelLinear": column,
        "TEDotProductAttention": sys.modules["megatron.core.transformer.dot_product_attention"].DotProductAttention,
        "TELayerNormColumnParallelLinear": LayerNormColumnParallelLinear,
        "TELinear": column,
        "TENorm": norm_of,
        "TERowParallelLinear": layers.RowParallelLinear,
    }
