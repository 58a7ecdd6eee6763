"""A double of Transformer Engine, on the CPU: delayed scaling, and a layer that rounds to 8 bits by it.

    autocast(...)                  in it modules round; when it is left the scales of the forward pass change
    Linear()(x, weight, first)     what a linear layer multiplies, rounded to E4M3; the gradient is rounded to E5M2, and
                                   with that of the first layer the scales of the backward pass change
    FP8GlobalStateManager          the functions and buffers of Transformer Engine 2.9 that take part

Sources: transformer_engine/pytorch/quantization.py, module/base.py, common/recipe/delayed_scaling.cu.  A kernel takes
the maximum of what it meets onto row 0 of a history; a history of which that is 0 stays as it is.
"""

from __future__ import annotations

import importlib.machinery
import io
import sys
from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch

FORMATS = {True: (torch.float8_e4m3fn, 448.0), False: (torch.float8_e5m2, 57344.0)}
"""By whether it is of the forward pass."""


@dataclass(frozen=True)
class DelayedScaling:
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True


class State:
    """The scales of a module's tensors of one direction."""

    def __init__(self, length: int, tensors: int) -> None:
        self.scale = torch.ones(tensors, dtype=torch.float32)
        self.amax_history = torch.zeros(length, tensors, dtype=torch.float32)

    def rounded(self, values: torch.Tensor, tensor: int, forward: bool) -> torch.Tensor:
        kind, most = FORMATS[forward]
        row = self.amax_history[0]
        if values.numel():  # an expert may meet nothing
            row[tensor] = torch.maximum(row[tensor], values.abs().max().float())
        scale = self.scale[tensor].to(values.dtype)
        return (values * scale).clamp(-most, most).to(kind).to(values.dtype) / scale

    def change(self, largest: torch.Tensor, algorithm: str, most: float) -> None:
        for tensor, last in enumerate(largest.tolist()):
            if last == 0:
                continue
            history = self.amax_history[:, tensor]
            rolled = torch.cat([history[1:], torch.tensor([last])])
            found = rolled.max() if algorithm == "max" else torch.tensor(last)
            self.amax_history[:, tensor] = torch.cat([torch.zeros(1), rolled[1:]])
            if bool(torch.isfinite(found)):
                self.scale[tensor] = most / found


class FP8GlobalStateManager:
    enabled = False
    depth = 0
    recipe: Any = None
    group: Any = None
    first = False
    buffers: ClassVar[dict[str, list[State]]] = {}
    arguments: ClassVar[dict[str, tuple[Any, Any]]] = {}
    fp8_tensors_recompute_buffer: ClassVar[list[deque[Any]]] = []

    @classmethod
    def reset(cls) -> None:
        cls.enabled, cls.depth, cls.buffers, cls.arguments = False, 0, {}, {}
        cls.fp8_tensors_recompute_buffer = []

    @classmethod
    def get_buffer_info(cls) -> str:
        return "buffer_index_and_autocast_key"

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        if cls.get_buffer_info() in fp8_meta:
            return
        fp8_meta[cls.get_buffer_info()] = []
        for direction, key in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
            name = f"{direction}_{fp8_meta['recipe']},{id(fp8_meta['fp8_group'])}"
            cls.buffers.setdefault(name, []).append(fp8_meta[key])
            fp8_meta[cls.get_buffer_info()].append(name)

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        first, cls.first = cls.first, False
        return first

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: torch.Tensor, group: Any) -> None:
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        for name, states in cls.buffers.items():
            direction, arguments = name.split("_", 1)
            if (direction == "forward") != forward:
                continue
            recipe, group = cls.arguments[arguments]
            largest = torch.cat([state.amax_history[0] for state in states])
            if recipe.reduce_amax and torch.distributed.get_world_size(group=group) > 1:
                cls.reduce_tensor_across_group_op_max(largest, group)
            parts = largest.split([state.scale.numel() for state in states])
            for state, part in zip(states, parts, strict=True):
                state.change(part, recipe.amax_compute_algo, FORMATS[forward][1])


class autocast:
    """``group``: over which maxima are taken."""

    def __init__(self, recipe: DelayedScaling, group: Any) -> None:
        self._recipe, self._group = recipe, group

    def __enter__(self) -> None:
        manager = FP8GlobalStateManager
        self._before = manager.enabled, manager.recipe, manager.group, manager.first
        manager.arguments[f"{self._recipe},{id(self._group)}"] = self._recipe, self._group
        manager.enabled, manager.recipe, manager.group = True, self._recipe, self._group
        manager.first = manager.first or manager.depth == 0
        manager.depth += 1

    def __exit__(self, *exception: object) -> None:
        manager = FP8GlobalStateManager
        manager.enabled, manager.recipe, manager.group, manager.first = self._before
        manager.depth -= 1
        if manager.depth == 0 and torch.is_grad_enabled():
            manager.reduce_and_update_fp8_tensors(forward=True)


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"recipe": None, "fp8_group": None}
        self.fp8 = False

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        manager, meta = FP8GlobalStateManager, self.fp8_meta
        self.fp8 = manager.enabled
        if not self.fp8 or ("fp8_group" in meta and meta["recipe"] == manager.recipe and "scaling_fwd" in meta):
            meta["fp8_group"] = manager.group
            return
        meta["recipe"], meta["fp8_group"] = manager.recipe, manager.group
        for key, tensors in (("scaling_fwd", 3 * num_gemms), ("scaling_bwd", 2 * num_gemms)):
            meta[key] = State(manager.recipe.amax_history_len, tensors)

    def reset_fp8_meta_tensors(self, fp8_meta_tensors: Any = None) -> None:
        for key in ("scaling_fwd", "scaling_bwd"):
            self.fp8_meta[key].scale.fill_(1)
            self.fp8_meta[key].amax_history.zero_()

    def get_extra_state(self) -> torch.Tensor:
        file, meta = io.BytesIO(), self.fp8_meta
        kept = {key: vars(meta[key]) for key in ("scaling_fwd", "scaling_bwd")} if self.fp8 else {}
        torch.save({"recipe": vars(meta["recipe"]) if kept else {}, "kept": kept}, file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        if state is None or not state.numel():
            return
        read = torch.load(io.BytesIO(bytes(state.tolist())))
        for key, its in read["kept"].items():
            if key not in self.fp8_meta:
                self.fp8_meta[key] = State(*its["amax_history"].shape)
            self.fp8_meta[key].scale.copy_(its["scale"])
            self.fp8_meta[key].amax_history.copy_(its["amax_history"])
        self.fp8_meta["recipe"] = DelayedScaling(**read["recipe"]) if read["kept"] else None


class Linear(TransformerEngineBaseModule):
    """Of a linear layer what is multiplied; the product is the caller's.  Not rounded outside of an ``autocast``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_first_microbatch = True
        self._weight: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.init_fp8_metadata()
        if not self.fp8:
            return x, weight
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
        if self.is_first_microbatch or self._weight is None:
            self._weight = self.fp8_meta["scaling_fwd"].rounded(weight.detach(), 1, True)
        self.is_first_microbatch = False
        return _Rounded.apply(x, self), weight + (self._weight - weight).detach()


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Linear) -> torch.Tensor:
        ctx.module, ctx.first = module, FP8GlobalStateManager.is_first_fp8_module()
        return module.fp8_meta["scaling_fwd"].rounded(x, 0, True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        rounded = ctx.module.fp8_meta["scaling_bwd"].rounded(gradient, 0, False)
        if ctx.first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return rounded, None


class LayerNormLinear(Linear):
    pass


class LayerNormMLP(TransformerEngineBaseModule):
    pass


class GroupedLinear(TransformerEngineBaseModule):
    pass


class DotProductAttention(TransformerEngineBaseModule):
    pass


def install() -> None:
    """Be what ``import transformer_engine`` finds, for who imports it from now on."""
    kinds = (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, DotProductAttention)
    contents = {
        "transformer_engine": [],
        "transformer_engine.pytorch": kinds,
        "transformer_engine.pytorch.fp8": [FP8GlobalStateManager],
        "transformer_engine.pytorch.module": [],
        "transformer_engine.pytorch.module.base": [TransformerEngineBaseModule],
    }
    for name, its in contents.items():
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        vars(module).update({one.__name__: one for one in its})
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
