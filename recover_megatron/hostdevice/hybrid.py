"""Layer specs of hybrid models with the local transformer's modules instead of Transformer Engine's modules.

The parameters and their names in checkpoints do not change, except that each expert is a separate module.  This module
does not import Megatron: ``localize`` is called after Megatron has imported the modules that are needed here.
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
    """Replace Transformer Engine's modules by local modules in the attributes and layer specs of a Megatron module."""
    local = {name: kind for name, kind in local_modules().items() if hasattr(module, name)}
    replaced = {id(getattr(module, name)): kind for name, kind in local.items()}
    for value in list(vars(module).values()):
        if not isinstance(value, type):
            _in_place(value, replaced)
    vars(module).update(local)


def _in_place(part: Any, replaced: dict[int, Any]) -> Any:
    """Replace Transformer Engine's modules in ``part`` of a layer spec, in place; return ``part`` or its replacement.

    ``replaced``: ``id`` of a module's class -> class that replaces it.
    """
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
    """Return a map: name of a Transformer Engine module in Megatron -> local module that replaces it."""
    layers = sys.modules["megatron.core.tensor_parallel.layers"]
    column: Any = layers.ColumnParallelLinear
    norm_of: Any = sys.modules["megatron.core.fusions.fused_layer_norm"].FusedLayerNorm

    class LayerNormColumnParallelLinear(column):
        """Column-parallel linear layer that first normalizes its input, as one module."""

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
