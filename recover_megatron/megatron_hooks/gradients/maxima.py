"""The largest values that layers meet in the microbatches of a step: they travel in its tail (`instep.trainer.Tail`).

    ``AttentionLogits``   --qk-clip, --log-max-attention-logit: the largest logit per head
    ``Scales``            --fp8-recipe delayed: of each tensor that Transformer Engine rounds to 8 bits, by whose
                          largest values before it is scaled

The tail is a sum, of which parts may be final before others are summed again, by other workers; so each microbatch has
numbers of its own: each is added by the worker that ran it, and is the same on all.  When the step is committed each
worker has the maximum over all of the batch.  What else passes through the layers counts for nothing: an evaluation,
a layer that is computed again in the backward pass, an attempt that was given up.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import fp8_utils, parallel_state
from megatron.core.utils import get_model_config

from recover_megatron.errors import UserError
from recover_megatron.instep.faults import WrongGradients
from recover_megatron.integrate import misfit, wrap
from recover_megatron.megatron_hooks.entry.refused import Settled, say, scales_by_history


class _Maxima:
    """Numbers of the microbatches of a step, ``width`` each, in the rows of those that this worker has run."""

    def __init__(self) -> None:
        self._width = 0
        self._total = 0
        self._rows: dict[int, torch.Tensor] = {}

    @property
    def size(self) -> int:
        """How many numbers ``read`` gives in this step: the same for all of a column."""
        return self._total * self._width

    def begin(self, total: int) -> None:
        """A step of ``total`` microbatches, over all replicas, begins: what was left of another one is dropped."""
        self._total = total
        self._rows = {}

    def _row(self, j: int, empty: float, like: torch.Tensor) -> torch.Tensor:
        if j not in self._rows:
            self._rows[j] = like.new_full((self._width,), empty, dtype=torch.float32)
        return self._rows[j]

    def _over(self, groups: Sequence[Any], ids: Sequence[int]) -> None:
        """Have the maxima of the n-th microbatches, ``ids`` here, over these groups inside the replica.

        All members call it together.  Context-parallel ranks have run the same ones: the first of them tells.
        """
        groups = [group for group in groups if group.size() > 1]
        if not self._rows or not groups:
            return
        whole = torch.stack([self._rows.pop(j) for j in ids])
        # The maximum of NCCL or gloo loses a NaN: whether there is one is a number beside each.
        both = torch.stack([whole, whole.isnan().to(whole.dtype)])
        for group in groups:
            torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=group)
        whole = both[0].masked_fill_(both[1] > 0, torch.nan)
        if parallel_state.get_context_parallel_rank() == 0:
            self._rows.update(zip(ids, whole, strict=True))

    def read(self) -> torch.Tensor:
        """The numbers by microbatch, zero for microbatches of which this worker does not tell.

        float64, flat (microbatch * width + number), on the host.
        """
        flat = torch.zeros(self._total, self._width, dtype=torch.float64)
        if self._rows:
            flat[list(self._rows)] = torch.stack(list(self._rows.values())).double().cpu()
        return flat.flatten()

    def _largest(self, whole: torch.Tensor) -> torch.Tensor:
        """Of each number over the batch, float32; ``whole``: the sum of what a column has read."""
        return whole.view(self._total, self._width).amax(dim=0).float()


LOGIT_FLAGS = ("qk_clip", "log_max_attention_logit")
"""Attributes of Megatron's arguments: each has it keep these maxima."""


class AttentionLogits(_Maxima):
    """The largest logits of one worker's layers.  ``args``: Megatron's; without one of ``LOGIT_FLAGS`` there are none.

    Megatron keeps a maximum per head over the microbatches that a worker has run, and takes that over all workers when
    the update is made (``clip_qk``).  Then it is too late here: of what a lost replica ran, and a committed step has
    counted, nobody would know it.  An evaluation counts for nothing (in Megatron it counts for the next step).
    """

    def __init__(self, args: Any, model: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self._chunks: list[list[tuple[Any, slice]]] = []
        self._pass: tuple[int, int] | None = None
        wanted = any(getattr(args, name, False) for name in LOGIT_FLAGS)
        for chunk in model:
            self._chunks.append([])
            for module in chunk.modules() if wanted else ():
                attention = getattr(module, "core_attention", None)
                if hasattr(module, "clip_qk") and hasattr(attention, "current_max_attn_logits"):
                    at, self._width = self._width, self._width + module.num_attention_heads_per_partition
                    self._chunks[-1].append((attention, slice(at, self._width)))

    def begin(self, total: int) -> None:
        super().begin(total)
        self._pass = None

    def begin_pass(self, chunk: int, j: int) -> None:
        """Chunk ``chunk`` of the model runs its forward pass of microbatch ``j`` from here on.

        Beside it may run the backward pass of another microbatch, whose layers may be computed again: what these tell
        counts for ``j`` then, which is in the same batch.
        """
        self.end_pass()
        for attention, _ in self._chunks[chunk]:
            attention.current_max_attn_logits = None
        self._pass = chunk, j

    def end_pass(self) -> None:
        """The forward pass under way is over, if there is one."""
        if self._pass is None:
            return
        (chunk, j), self._pass = self._pass, None
        for attention, heads in self._chunks[chunk]:
            largest = attention.current_max_attn_logits
            if largest is not None:
                self._row(j, -torch.inf, largest)[heads] = largest.detach().float()

    def ran(self, ids: Sequence[int]) -> None:
        """The microbatches ``ids`` were run.  All context-parallel ranks, which have seen parts, call it together."""
        self.end_pass()
        self._over([parallel_state.get_context_parallel_group()], ids)

    def write(self, whole: torch.Tensor) -> None:
        """``whole``: the sum of what a column has read."""
        if not self._width:
            return
        largest = self._largest(whole)
        for attention, heads in (its for chunk in self._chunks for its in chunk):
            its = largest[heads]
            # A layer that has told of none is passed over by Megatron, too.
            attention.current_max_attn_logits = None if bool((its == -torch.inf).all()) else its.to("cuda")


FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
"""Transformer Engine's names of a module's scales, and of the largest values by which it has made them."""
FORGOTTEN = "global_fp8_buffer_pos_fwd_recompute"
"""Where a module finds the scales that it is to take when it computes again; unknown after ``reset``."""

ONCE_A_STEP = Settled(
    "--fp8-recipe delayed",
    scales_by_history,
    {},
    "scales change once a step, not after each microbatch, by the largest values of the whole batch: a history is of "
    "--fp8-amax-history-len steps, and in the first one all scales are 1",
    off=False,
)


@functools.cache
def _engine() -> tuple[Any, Any, Callable[..., None]]:
    """Transformer Engine, its manager of scales, and the function by which that changes them.

    From now on scales are changed by that call alone, and no other worker is asked for its largest values: Transformer
    Engine does both after each pass of a microbatch.  Raises UserError where it is another one than we know.
    """
    try:
        names = (
            "transformer_engine.pytorch",
            "transformer_engine.pytorch.fp8",
            "transformer_engine.pytorch.module.base",
        )
        engine, scaling, base = map(importlib.import_module, names)
        manager, module = scaling.FP8GlobalStateManager, base.TransformerEngineBaseModule
    except (ImportError, AttributeError) as error:
        raise UserError(f"--fp8-recipe delayed with --recover: Transformer Engine is another one: {error}") from None
    known = [
        (manager, "reduce_and_update_fp8_tensors", ("forward",)),
        (manager, "reduce_tensor_across_group_op_max", ("tensor", "group")),
        (manager, "add_fp8_tensors_to_global_buffer", ("fp8_meta",)),
        (manager, "get_buffer_info", ()),
        (manager, "reset", ()),
        (module, "init_fp8_metadata", ("self", "num_gemms")),
        (module, "reset_fp8_meta_tensors", ("self",)),
    ]
    supported = "Transformer Engine 2.5 to 2.9 and its main branch of 2026 were read"
    if reasons := [reason for its in known if (reason := misfit(*its))]:
        raise UserError(*(f"--fp8-recipe delayed with --recover: {reason} ({supported})" for reason in reasons))
    wrap(manager, *known[1][1:], lambda original: lambda tensor, group: None, supported)
    change = wrap(manager, *known[0][1:], lambda original: lambda forward=True: None, supported)
    return engine, manager, change


@dataclass(frozen=True)
class _Side:
    """What a chunk of the model rounds to 8 bits in one direction.  ``at``: its place among a microbatch's numbers."""

    key: str
    modules: tuple[Any, ...]
    at: slice

    @property
    def states(self) -> list[Any]:
        return [module.fp8_meta[self.key] for module in self.modules]

    @property
    def rows(self) -> list[torch.Tensor]:
        """Where the kernels put the largest values that they meet: views, one per module."""
        return [state.amax_history[0] for state in self.states]

    def clear(self) -> None:
        if self.modules:
            torch._foreach_zero_(self.rows)


class Scales(_Maxima):
    """The scales of one worker's layers.  ``args``: Megatron's; without delayed scaling there are none.

    A scale is made from the largest values of the last steps.  In a step no scale changes, so a microbatch has the same
    numbers wherever and however often it is run; when the update is made, each changes once, by the largest value of
    the batch (``move``).  (Transformer Engine alone changes it after each microbatch.)  So the scales are a function of
    the steps, equal in a column, and on all of a stage: a part of the training's state (``tensors``).

    A chunk's forward pass is told by ``microbatch``, its backward pass begins with the gradient of its output
    (``watch``) and ends at the latest when the pass has ended (``ran``).
    """

    def __init__(self, args: Any, model: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self._sides: list[tuple[_Side, _Side]] = []
        self._under_way: dict[int, int] = {}
        """Chunk -> the microbatch whose backward pass it runs, or has run last."""
        self._awaited: set[tuple[int, int]] = set()
        """(chunk, microbatch) whose backward pass has not begun."""
        self._found: torch.Tensor | None = None
        """The largest values of the batch, from the commit to the update."""
        if not scales_by_history(args):
            return
        say(ONCE_A_STEP)
        engine, manager, self._change = _engine()
        manager.reset()
        self._sides = [self._prepare(engine, manager, chunk) for chunk in model]

    def _prepare(self, engine: Any, manager: Any, chunk: torch.nn.Module) -> tuple[_Side, _Side]:
        """Have the scales of a chunk now, before its first forward pass: a state may arrive for them."""
        gemms, config = {}, get_model_config(chunk)
        if config.fp8_dot_product_attention or config.fp8_multi_head_attention:
            raise UserError("--fp8-recipe delayed with --recover needs an attention in 16 bits")
        for module in (its for its in chunk.modules() if hasattr(its, "fp8_meta")):
            if isinstance(module, (engine.Linear, engine.LayerNormLinear, engine.LayerNormMLP, engine.GroupedLinear)):
                gemms[module] = getattr(module, "num_gemms", 2 if isinstance(module, engine.LayerNormMLP) else 1)
            elif not isinstance(module, engine.DotProductAttention):
                kind = f"{type(module).__module__}.{type(module).__name__}"
                raise UserError(f"--fp8-recipe delayed with --recover does not know what {kind} rounds to 8 bits")
        with fp8_utils.get_fp8_context(config):
            for module, number in gemms.items():
                for key in (manager.get_buffer_info(), FORGOTTEN):
                    module.fp8_meta.pop(key, None)
                module.init_fp8_metadata(num_gemms=number)
                manager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
        return self._side(FORWARD, tuple(gemms)), self._side(BACKWARD, tuple(gemms))

    def _side(self, key: str, modules: tuple[Any, ...]) -> _Side:
        at, self._width = self._width, self._width + sum(module.fp8_meta[key].scale.numel() for module in modules)
        return _Side(key, modules, slice(at, self._width))

    def begin(self, total: int) -> None:
        super().begin(total)
        self._under_way, self._awaited, self._found = {}, set(), None
        if self._sides:
            _, manager, _ = _engine()
            # Layers find in there, first in first out, what to compute again with: an aborted pass has left some.
            for kept in getattr(manager, "quantization_state", manager).fp8_tensors_recompute_buffer:
                kept.clear()

    @contextmanager
    def microbatch(self, chunk: int, j: int) -> Iterator[None]:
        """Chunk ``chunk`` of the model runs its forward pass of microbatch ``j`` meanwhile."""
        if self._sides:
            self._sides[chunk][0].clear()
        yield
        if self._sides:
            self._take(self._sides[chunk][0], j)

    def watch(self, chunk: int, j: int, output: Any) -> None:
        """``output``: what chunk ``chunk`` has given for microbatch ``j``; its gradient begins the backward pass."""
        first = output[0] if isinstance(output, list) else output
        if self._sides and self._sides[chunk][1].modules and getattr(first, "requires_grad", False):
            self._awaited.add((chunk, j))
            first.register_hook(partial(self._backward, chunk, j))

    def _backward(self, chunk: int, j: int, gradient: torch.Tensor) -> None:
        self._end_backward(chunk)
        self._sides[chunk][1].clear()
        self._awaited.discard((chunk, j))
        self._under_way[chunk] = j

    def _end_backward(self, chunk: int) -> None:
        if (j := self._under_way.pop(chunk, None)) is not None:
            self._take(self._sides[chunk][1], j)

    def _take(self, side: _Side, j: int) -> None:
        if side.modules:
            largest = torch.cat(side.rows)
            self._row(j, 0.0, largest)[side.at] = largest

    def ran(self, ids: Sequence[int]) -> None:
        """The microbatches ``ids`` were run, forward and backward.  All workers of a stage of the replica call it.

        Tensor and context ranks have parts of a tensor; an expert has met what all ranks of its group have sent.
        """
        for chunk in list(self._under_way):
            self._end_backward(chunk)
        if self._awaited:
            raise WrongGradients(f"of {sorted(self._awaited)} (chunk, microbatch) no backward pass was seen")
        groups = [parallel_state.get_tensor_and_context_parallel_group()] if self._width else []
        if groups and parallel_state.get_expert_model_parallel_world_size() > 1:
            groups.append(parallel_state.get_expert_tensor_and_model_parallel_group())
        self._over(groups, ids)

    def write(self, whole: torch.Tensor) -> None:
        """``whole``: the sum of what a column has read."""
        self._found = self._largest(whole) if self._width else None

    def move(self) -> None:
        """The update is made: change each scale by what was found in the batch.  Asks nobody."""
        if self._found is None:
            return
        for side in (side for sides in self._sides for side in sides if side.modules):
            rows = side.rows
            found = self._found[side.at].to(rows[0].device)
            torch._foreach_copy_(rows, list(found.split([row.numel() for row in rows])))
        for forward in (True, False):
            self._change(forward=forward)
        self._found = None

    # ---- as a part of the state

    def tensors(self, *, whole: bool = False) -> Iterator[torch.Tensor]:
        """The living scales and histories, in one order: equal in a column between two iterations.

        Not ``whole``: without the first rows, in which an evaluation leaves what it meets.
        """
        for state in (state for sides in self._sides for side in sides for state in side.states):
            yield state.scale
            history = state.amax_history[0 if whole else 1 :]
            yield from [history] if history.numel() else []

    def reset(self) -> None:
        """Have those of a model that has seen no step."""
        for module in (module for forward, _ in self._sides for module in forward.modules):
            module.reset_fp8_meta_tensors()
