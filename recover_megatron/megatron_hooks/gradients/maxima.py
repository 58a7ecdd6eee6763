"""Maxima of layers over the microbatches of a step, which workers exchange in the step's tail (`instep.trainer.Tail`).

    ``AttentionLogits``   --qk-clip, --log-max-attention-logit: the largest logit per head
    ``Scales``            --fp8-recipe delayed: the largest value of each tensor that Transformer Engine rounds to 8
                          bits, from which it computes the scale

The tail is a sum, and parts of it may be final while workers sum the others again.  So it has separate numbers for each
microbatch.  Only the worker that ran the microbatch contributes to its numbers, and all workers receive them.  After
the commit each worker computes the maximum over the complete batch.  Evaluations, recomputations in the backward pass
and abandoned attempts do not count.
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
from recover_megatron.megatron_hooks.entry.refused import Adjusted, say, scales_by_history


class _Maxima:
    """Maxima of one step on this worker: a row of ``_width`` values for each microbatch that the worker has run."""

    def __init__(self) -> None:
        self._width = 0
        self._total = 0
        self._rows: dict[int, torch.Tensor] = {}

    @property
    def size(self) -> int:
        """Length of the result of ``read`` in this step; the same on all workers of a column."""
        return self._total * self._width

    def begin(self, total: int) -> None:
        """Begin a step of ``total`` microbatches over all replicas, and drop the values of the last step."""
        self._total = total
        self._rows = {}

    def _row(self, j: int, empty: float, like: torch.Tensor) -> torch.Tensor:
        if j not in self._rows:
            self._rows[j] = like.new_full((self._width,), empty, dtype=torch.float32)
        return self._rows[j]

    def _over(self, groups: Sequence[Any], ids: Sequence[int]) -> None:
        """Replace the rows of the microbatches ``ids`` by their maxima over ``groups``, which are inside the replica.

        All members of the groups call this method together.  Context-parallel ranks run the same microbatches, so only
        context-parallel rank 0 keeps the rows.
        """
        groups = [group for group in groups if group.size() > 1]
        if not self._rows or not groups:
            return
        whole = torch.stack([self._rows.pop(j) for j in ids])
        # NCCL and gloo drop NaN from a maximum, so a second number for each value is 1 if the value is NaN.
        both = torch.stack([whole, whole.isnan().to(whole.dtype)])
        for group in groups:
            torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=group)
        whole = both[0].masked_fill_(both[1] > 0, torch.nan)
        if parallel_state.get_context_parallel_rank() == 0:
            self._rows.update(zip(ids, whole, strict=True))

    def read(self) -> torch.Tensor:
        """Return the rows of all microbatches, with zeros for a microbatch that this worker has not run.

        The result is float64, flat (index: microbatch * width + index of the value) and on the host.
        """
        flat = torch.zeros(self._total, self._width, dtype=torch.float64)
        if self._rows:
            flat[list(self._rows)] = torch.stack(list(self._rows.values())).double().cpu()
        return flat.flatten()

    def _largest(self, whole: torch.Tensor) -> torch.Tensor:
        """Return each value's maximum over the batch (float32) from ``whole``, the sum of ``read`` over a column."""
        return whole.view(self._total, self._width).amax(dim=0).float()


LOGIT_FLAGS = ("qk_clip", "log_max_attention_logit")
"""Names of Megatron's arguments that enable ``AttentionLogits``."""


class AttentionLogits(_Maxima):
    """Largest attention logits of one worker's layers, with one of ``LOGIT_FLAGS``.  ``args``: Megatron's arguments.

    Megatron keeps a maximum per head over a worker's microbatches, and reduces it over all workers in the update
    (``clip_qk``).  With --recover a replica may be lost between the commit and the update, and its maxima would
    then be missing.  So the maxima are exchanged before the commit.  Maxima of an evaluation do not count; in stock
    Megatron they count for the next step.
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
        """Begin the forward pass of microbatch ``j`` on chunk ``chunk`` of the model.

        A concurrent backward pass of another microbatch may recompute layers.  The recomputed maxima then count for
        microbatch ``j``; the maximum over the batch is the same.
        """
        self.end_pass()
        for attention, _ in self._chunks[chunk]:
            attention.current_max_attn_logits = None
        self._pass = chunk, j

    def end_pass(self) -> None:
        """End the current forward pass, if one has begun, and store its maxima."""
        if self._pass is None:
            return
        (chunk, j), self._pass = self._pass, None
        for attention, heads in self._chunks[chunk]:
            largest = attention.current_max_attn_logits
            if largest is not None:
                self._row(j, -torch.inf, largest)[heads] = largest.detach().float()

    def ran(self, ids: Sequence[int]) -> None:
        """Reduce the maxima of ``ids``, the microbatches that have run, over the context-parallel ranks.

        All context-parallel ranks must call this method.
        """
        self.end_pass()
        self._over([parallel_state.get_context_parallel_group()], ids)

    def write(self, whole: torch.Tensor) -> None:
        """Store the batch's maxima in the attention layers; ``whole``: the sum of ``read`` over a column."""
        if not self._width:
            return
        largest = self._largest(whole)
        for attention, heads in (layer for chunk in self._chunks for layer in chunk):
            logits = largest[heads]
            # If no microbatch has passed the layer, None makes Megatron skip the layer.
            attention.current_max_attn_logits = None if bool((logits == -torch.inf).all()) else logits.to("cuda")


FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
"""Transformer Engine's keys, in a module's ``fp8_meta``, of the scales and the maxima of each pass."""
FORGOTTEN = "global_fp8_buffer_pos_fwd_recompute"
"""Transformer Engine's key of the scales that a module has saved for a recomputation; invalid after a ``reset``."""

ONCE_A_STEP = Adjusted(
    "--fp8-recipe delayed",
    scales_by_history,
    {},
    "scales change once a step, not after each microbatch, by the maxima of the complete batch, so a history covers "
    "--fp8-amax-history-len steps, and in the first step all scales are 1",
    off=False,
)


@functools.cache
def _engine() -> tuple[Any, Any, Callable[..., None]]:
    """Patch Transformer Engine; return (its module, its manager of scales, the manager's original update function).

    Transformer Engine updates the scales after each pass of a microbatch, from maxima that it reduces over workers.
    After the patch only the returned function updates scales, without a reduction.  Raises UserError if this
    Transformer Engine has unknown signatures.
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
        raise UserError(f"--fp8-recipe delayed with --recover: unknown Transformer Engine: {error}") from None
    known = [
        (manager, "reduce_and_update_fp8_tensors", ("forward",)),
        (manager, "reduce_tensor_across_group_op_max", ("tensor", "group")),
        (manager, "add_fp8_tensors_to_global_buffer", ("fp8_meta",)),
        (manager, "get_buffer_info", ()),
        (manager, "reset", ()),
        (module, "init_fp8_metadata", ("self", "num_gemms")),
        (module, "reset_fp8_meta_tensors", ("self",)),
    ]
    supported = "known: Transformer Engine 2.5 to 2.9 and its main branch of 2026"
    if reasons := [reason for one in known if (reason := misfit(*one))]:
        raise UserError(*(f"--fp8-recipe delayed with --recover: {reason} ({supported})" for reason in reasons))
    wrap(manager, *known[1][1:], lambda original: lambda tensor, group: None, supported)
    change = wrap(manager, *known[0][1:], lambda original: lambda forward=True: None, supported)
    return engine, manager, change


@dataclass(frozen=True)
class _Side:
    """Tensors that a model chunk rounds to 8 bits, in either the forward or the backward pass.

    ``key``: ``FORWARD`` or ``BACKWARD``.  ``at``: slice of a row of maxima that belongs to these tensors.
    """

    key: str
    modules: tuple[Any, ...]
    at: slice

    @property
    def states(self) -> list[Any]:
        return [module.fp8_meta[self.key] for module in self.modules]

    @property
    def rows(self) -> list[torch.Tensor]:
        """Views, one per module, of the memory to which Transformer Engine's kernels write the tensors' maxima."""
        return [state.amax_history[0] for state in self.states]

    def clear(self) -> None:
        if self.modules:
            torch._foreach_zero_(self.rows)


class Scales(_Maxima):
    """The 8-bit scales of one worker's layers with --fp8-recipe delayed.  ``args``: Megatron's arguments.

    Transformer Engine would change the scales after each microbatch.  Here each scale changes once a step, in the
    update (``move``), by the maximum over the complete batch.  So a microbatch gives the same numbers on every worker
    and in every attempt.  The scales are equal in a column and on all workers of a stage, and belong to the training
    state (``tensors``).

    ``microbatch`` is the context of a chunk's forward pass.  The chunk's backward pass begins when the gradient of the
    chunk's output is computed (``watch``), and ends with the next backward pass or in ``ran``.
    """

    def __init__(self, args: Any, model: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self._sides: list[tuple[_Side, _Side]] = []
        self._under_way: dict[int, int] = {}
        """Chunk -> microbatch of the chunk's backward pass, until the maxima of that pass are stored."""
        self._awaited: set[tuple[int, int]] = set()
        """(chunk, microbatch) of the backward passes that must still begin in this step."""
        self._found: torch.Tensor | None = None
        """Maxima of the batch, from the commit until the update; None at other times."""
        if not scales_by_history(args):
            return
        say(ONCE_A_STEP)
        engine, manager, self._change = _engine()
        manager.reset()
        self._sides = [self._prepare(engine, manager, chunk) for chunk in model]

    def _prepare(self, engine: Any, manager: Any, chunk: torch.nn.Module) -> tuple[_Side, _Side]:
        """Create the scales of ``chunk`` before its first forward pass, so that received scales can be loaded."""
        gemms, config = {}, get_model_config(chunk)
        if config.fp8_dot_product_attention or config.fp8_multi_head_attention:
            raise UserError("--fp8-recipe delayed with --recover needs attention in 16 bits (no FP8 attention)")
        for module in (one for one in chunk.modules() if hasattr(one, "fp8_meta")):
            if isinstance(module, (engine.Linear, engine.LayerNormLinear, engine.LayerNormMLP, engine.GroupedLinear)):
                gemms[module] = getattr(module, "num_gemms", 2 if isinstance(module, engine.LayerNormMLP) else 1)
            elif not isinstance(module, engine.DotProductAttention):
                kind = f"{type(module).__module__}.{type(module).__name__}"
                raise UserError(f"--fp8-recipe delayed with --recover does not support the FP8 module {kind}")
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
            # An aborted pass may have left entries in this FIFO, from which layers take the scales of a recomputation.
            for kept in getattr(manager, "quantization_state", manager).fp8_tensors_recompute_buffer:
                kept.clear()

    @contextmanager
    def microbatch(self, chunk: int, j: int) -> Iterator[None]:
        """Context of the forward pass of microbatch ``j`` on chunk ``chunk`` of the model."""
        if self._sides:
            self._sides[chunk][0].clear()
        yield
        if self._sides:
            self._take(self._sides[chunk][0], j)

    def watch(self, chunk: int, j: int, output: Any) -> None:
        """Watch the ``output`` of chunk ``chunk`` for microbatch ``j``: its gradient starts the backward pass."""
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
        """Reduce the maxima of ``ids``, the microbatches that have run, over the workers of the pipeline stage.

        All workers of the stage call this method.  Tensor and context ranks see parts of a tensor; an expert sees
        tokens of all ranks of its group.
        """
        for chunk in list(self._under_way):
            self._end_backward(chunk)
        if self._awaited:
            raise WrongGradients(f"no backward pass ran for (chunk, microbatch) {sorted(self._awaited)}")
        groups = [parallel_state.get_tensor_and_context_parallel_group()] if self._width else []
        if groups and parallel_state.get_expert_model_parallel_world_size() > 1:
            groups.append(parallel_state.get_expert_tensor_and_model_parallel_group())
        self._over(groups, ids)

    def write(self, whole: torch.Tensor) -> None:
        """Store the batch's maxima for ``move``; ``whole``: the sum of ``read`` over a column."""
        self._found = self._largest(whole) if self._width else None

    def move(self) -> None:
        """Compute the new scales from the maxima of the batch.  Called in the update; does not communicate."""
        if self._found is None:
            return
        for side in (side for sides in self._sides for side in sides if side.modules):
            rows = side.rows
            found = self._found[side.at].to(rows[0].device)
            torch._foreach_copy_(rows, list(found.split([row.numel() for row in rows])))
        for forward in (True, False):
            self._change(forward=forward)
        self._found = None

    # ---- the scales in the state

    def tensors(self, *, whole: bool = False) -> Iterator[torch.Tensor]:
        """Yield the live scales and histories in a fixed order; between two iterations they are equal in a column.

        ``whole``: False leaves out the first row of each history, because an evaluation writes to it.
        """
        for state in (state for sides in self._sides for side in sides for state in side.states):
            yield state.scale
            history = state.amax_history[0 if whole else 1 :]
            yield from [history] if history.numel() else []

    def reset(self) -> None:
        """Reset all scales and histories to their values before the first step."""
        for module in (module for forward, _ in self._sides for module in forward.modules):
            module.reset_fp8_meta_tensors()
