"""Pieces of a distributed optimizer's state on one worker, cut so that each piece is part of one parameter.

    bucket   |--- parameter a ---|-- parameter b --|---- parameter c ----|pad|
    unit           |================================|                            owned by one worker (workload.shards)
    pieces         |=============|==================|                            each updated by the inner optimizer

The owner of a unit and the holders of its shadows cut the unit at the same offsets, and update it by the same calls on
tensors of the same shapes.  So all these workers compute the same bits, if their processors are of the same kind.  A
piece of a 32-bit parameter uses the model's own memory.  A piece of a 16-bit parameter is a 32-bit copy, as in Megatron
(`precision`).  A shadow on the host (``shadow_device``) is also a copy, and is updated on the host (`shadows`).
"""

from __future__ import annotations

import inspect
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import param_is_not_shared

from recover_megatron.collectives.state.transport import Digest
from recover_megatron.errors import Disagreement
from recover_megatron.hostdevice.apex_stub import sum_of_squares
from recover_megatron.megatron_hooks.optimizer import precision
from recover_megatron.workload.shards import ElementRange


@dataclass(frozen=True)
class ParameterRange:
    """The range of a parameter in a bucket."""

    start: int
    stop: int
    parameter: torch.nn.Parameter
    group: int
    """Number of the parameter's group in the inner optimizer."""


@dataclass(eq=False)
class ShardFragment:
    """Elements ``start`` to ``stop`` of bucket ``bucket``, all of one parameter."""

    bucket: int
    start: int
    stop: int
    group: int
    tensor: torch.Tensor
    """The tensor that the inner optimizer updates."""
    model: torch.Tensor
    """The same elements of the model's parameter, a view of Megatron's buffer."""
    gradient: torch.Tensor
    """The gradient of the same elements, a view of Megatron's gradient buffer."""
    counts: bool
    """True if this worker adds the gradient to the norm; False if another worker of the replica adds it."""
    state: dict[str, Any] = field(default_factory=dict)
    """State of the inner optimizer; empty before the first update."""
    on_shadow_device: bool = False
    """True if the piece is a shadow that the shadow device updates (--recover-shadow-device)."""
    borrowed: bool = False
    """True if the piece uses Megatron's memory, which is released as soon as separate pieces exist."""

    @property
    def is_copy(self) -> bool:
        """True if ``tensor`` and the model's parameter have separate memory."""
        return self.tensor.data_ptr() != self.model.data_ptr()

    def give(self, start: int, stop: int) -> dict[str, Any]:
        """Return the state of elements ``start`` to ``stop`` (offsets in the bucket), as a tree of tensors.

        "master" is None if the model's parameter has the same dtype as the piece.
        """
        part = slice(start - self.start, stop - self.start)
        return {
            "master": self.tensor[part] if self.tensor.dtype != self.model.dtype else None,
            "state": part_of_state(self.state, part),
        }

    def take(self, start: int, stop: int, given: dict[str, Any]) -> None:
        """Set the state of elements ``start`` to ``stop`` to ``given``, the result of another piece's ``give``."""
        if given["master"] is not None:
            _fill(self.room(start, stop), given["master"])
        for name, value in given["state"].items():
            if not isinstance(value, torch.Tensor):
                self.state[name] = value
            elif not value.dim():
                self.state[name] = value.clone()
            else:
                _fill(self.room(start, stop, value.dtype, name), value)

    def room(self, start: int, stop: int, dtype: torch.dtype | None = None, name: str = "") -> torch.Tensor:
        """Return a view of elements ``start`` to ``stop`` of the state ``name``; of ``tensor`` if ``name`` is empty.

        A missing state is created as zeros of type ``dtype``.
        """
        if name and name not in self.state:
            self.state[name] = torch.zeros(self.tensor.shape, dtype=dtype, device=self.tensor.device)
        whole: torch.Tensor = self.state[name] if name else self.tensor
        return whole[start - self.start : stop - self.start]


def _fill(own: torch.Tensor, given: torch.Tensor) -> None:
    if own.data_ptr() != given.data_ptr():  # if equal, ``given`` was received in place
        own.copy_(given)


InOrder = Mapping[int, Sequence[ShardFragment]]
"""Bucket -> its disjoint pieces, sorted by first element."""


def in_order(pieces: Iterable[ShardFragment]) -> InOrder:
    """Group ``pieces`` by bucket, and sort each group by first element."""
    found: dict[int, list[ShardFragment]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.start):
        found.setdefault(piece.bucket, []).append(piece)
    return found


def overlapping(pieces: InOrder, bucket: int, start: int, stop: int) -> list[ShardFragment]:
    """Return the ``pieces`` that have some of the elements ``start`` to ``stop``, by binary search."""
    found = pieces.get(bucket, ())
    first = bisect_right(found, start, key=lambda piece: piece.stop)
    return list(found[first : bisect_left(found, stop, key=lambda piece: piece.start)])


def part_of_state(state: dict[str, Any], part: slice) -> dict[str, Any]:
    """Return a parameter's optimizer state (name -> value), with each tensor cut to the elements ``part``.

    Scalars, such as a step count, are returned unchanged.
    """
    return {
        name: value[part] if isinstance(value, torch.Tensor) and value.dim() else value for name, value in state.items()
    }


class ShardFragments:
    """The pieces of one of Megatron's distributed optimizers that this worker holds.

    ``held``: unit -> pieces, sorted by bucket and element.  ``buckets``: number of a bucket in the model -> bucket, for
    the buckets that the optimizer updates.  ``groups``: model parameter -> number of the parameter's group.
    """

    def __init__(
        self, optimizer: Any, buckets: dict[int, Any], groups: dict[Any, int], shadow_device: torch.device | None
    ) -> None:
        self._optimizer = optimizer
        self._shadow_device = shadow_device
        self.buckets = buckets
        self.table = {number: _parameter_ranges(bucket, groups) for number, bucket in buckets.items()}
        self.held: dict[int, list[ShardFragment]] = {}

    # ---- creating the pieces

    def adopt(self, unit: int, parts: dict[int, Sequence[tuple[int, int]]]) -> None:
        """Adopt, at launch, Megatron's state of this worker's shard as ``unit``; ``parts``: bucket -> ranges in it."""
        inner, main = self.inner, dict[Any, torch.Tensor]()
        for models, masters in (
            (self._optimizer.model_float16_groups, self._optimizer.shard_fp32_from_float16_groups),
            (self._optimizer.model_fp32_groups, self._optimizer.shard_fp32_groups),
        ):
            for model_group, master_group in zip(models, masters, strict=True):
                main.update(zip(model_group, master_group, strict=True))
        found = []
        for number, start, stop, parameter_range in self._cut(parts):
            master = main[parameter_range.parameter]
            fragment = self._fragment(number, start, stop, parameter_range, shadow=False, tensor=master.detach())
            if fragment.model.dtype == torch.bfloat16:  # with any optimizer, a loaded checkpoint may contain remainders
                fragment.tensor.copy_(precision.whole(fragment.model, fragment.tensor))
            fragment.state = dict(inner.state.get(master, {}))
            found.append(fragment)
        self.install({unit: found})

    def make(self, parts: dict[int, Sequence[tuple[int, int]]], *, shadow: bool) -> list[ShardFragment]:
        """Create the pieces of a unit; ``parts``: bucket -> ranges.

        The pieces get the state that this worker already holds; the caller fetches all other state.  An existing piece
        with the same elements on the same device is reused.
        """
        here = in_order(self)
        known = {(p.bucket, p.start, p.stop): p for p in self if not p.borrowed}
        found = []
        for number, start, stop, parameter_range in self._cut(parts):
            fragment = known.get((number, start, stop))
            if fragment is None or fragment.tensor.device != self._device(number, shadow=shadow):
                fragment = self._fragment(number, start, stop, parameter_range, shadow=shadow)
                for other in overlapping(here, number, start, stop):
                    a, b = max(start, other.start), min(stop, other.stop)
                    fragment.take(a, b, other.give(a, b))
            fragment.on_shadow_device = shadow and self._shadow_device is not None
            found.append(fragment)
        return found

    def borrow(self, unit: int, number: int, parameter: Any, master: torch.Tensor, state: dict[str, Any]) -> None:
        """Add to ``unit`` one piece, in Megatron's memory: the elements of ``parameter`` in bucket ``number``."""
        found = next(one for one in self.table[number] if one.parameter is parameter)
        fragment = self._fragment(number, found.start, found.stop, found, shadow=False, tensor=master)
        fragment.state, fragment.borrowed = state, True
        self.held.setdefault(unit, []).append(fragment)

    def install(self, held: dict[int, list[ShardFragment]]) -> None:
        """Make ``held`` (unit -> pieces) the pieces that the inner optimizer updates, in the order of ``held``."""
        self.held = held
        optimizer, inner = self._optimizer, self.inner
        for number, group in enumerate(inner.param_groups):
            group["params"] = [fragment.tensor for fragment in self._updated if fragment.group == number]
        inner.state.clear()
        for fragment in self._updated:
            if fragment.state:
                inner.state[fragment.tensor] = fragment.state
        precision.set_scales(inner, ((fragment.tensor, fragment.state) for fragment in self))
        # Empty Megatron's own lists of parameter shards, so that Megatron processes only the pieces.
        for name in ("model_float16_groups", "model_fp32_groups", "shard_float16_groups", "shard_fp32_groups",
                     "shard_fp32_from_float16_groups"):  # fmt: skip
            if hasattr(optimizer, name):  # Megatron-FSDP's optimizer lacks the lists
                setattr(optimizer, name, [[] for _ in getattr(optimizer, name)])

    @property
    def inner(self) -> Any:
        """The optimizer that does the update."""
        return self._optimizer.optimizer

    @property
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The model's parameters that the optimizer updates on any worker of the column."""
        return (one.parameter for ranges in self.table.values() for one in ranges)

    def range_of(self, fragment: ShardFragment) -> ParameterRange:
        """Return the range of the model's parameter that contains ``fragment``."""
        ranges = self.table[fragment.bucket]
        return ranges[bisect_right(ranges, fragment.start, key=lambda one: one.start) - 1]

    def parameter_of(self, fragment: ShardFragment) -> torch.nn.Parameter:
        """Return the model's parameter that contains ``fragment``."""
        return self.range_of(fragment).parameter

    def new_state(self, fragment: ShardFragment) -> dict[str, Any]:
        """Return the inner optimizer's state of ``fragment``; zeros if the shadow device updates ``fragment``."""
        inner = self.inner.state
        if not fragment.on_shadow_device:
            return dict(inner[fragment.tensor])
        return {
            name: torch.zeros_like(fragment.tensor, dtype=value.dtype) if value.dim() else value.clone()
            for name, value in next(iter(inner.values())).items()
        }

    def has_remainder(self, fragment: ShardFragment) -> bool:
        """Return whether stock Megatron stores only the 16 bits of fp32 parameters that bf16 lacks (`precision`)."""
        return precision.has_remainders(self._optimizer, fragment.model.dtype)

    @property
    def on_shadow_device(self) -> Iterator[ShardFragment]:
        """The pieces that are updated on the shadow device."""
        return (fragment for fragment in self if fragment.on_shadow_device)

    @property
    def _updated(self) -> Iterator[ShardFragment]:
        return (fragment for fragment in self if not fragment.on_shadow_device)

    def __iter__(self) -> Iterator[ShardFragment]:
        return (fragment for fragments in self.held.values() for fragment in fragments)

    def overlapping(self, bucket: int, start: int, stop: int) -> list[ShardFragment]:
        """Return this worker's pieces that have some of the elements ``start`` to ``stop`` of ``bucket``."""
        return overlapping(in_order(self), bucket, start, stop)

    def _cut(self, parts: Mapping[int, Sequence[tuple[int, int]]]) -> Iterator[tuple[int, int, int, ParameterRange]]:
        for number, ranges in sorted(parts.items()):
            for start, stop in ranges:
                for parameter_range in self.table[number]:
                    a, b = max(start, parameter_range.start), min(stop, parameter_range.stop)
                    if a < b:
                        yield number, a, b, parameter_range

    def _device(self, number: int, *, shadow: bool) -> torch.device:
        device: torch.device = self.buckets[number].param_data.device
        return self._shadow_device if shadow and self._shadow_device is not None else device

    def _fragment(
        self,
        number: int,
        start: int,
        stop: int,
        parameter_range: ParameterRange,
        *,
        shadow: bool,
        tensor: torch.Tensor | None = None,
    ) -> ShardFragment:
        bucket = self.buckets[number]
        model = bucket.param_data.view(-1)[start:stop]
        if tensor is None:
            own = model.dtype == torch.float32 and not (shadow and self._shadow_device is not None)
            tensor = model if own else model.to(self._device(number, shadow=shadow), torch.float32, copy=True)
        parameter = parameter_range.parameter
        tensor_parallel.copy_tensor_model_parallel_attributes(tensor, parameter)
        for name in ("allreduce", "shared"):
            if hasattr(parameter, name):
                setattr(tensor, name, getattr(parameter, name))
        gradient = bucket.grad_data.view(-1)[start:stop]
        return ShardFragment(
            number, start, stop, parameter_range.group, tensor, model, gradient, self._counts(parameter)
        )

    def _counts(self, parameter: torch.nn.Parameter) -> bool:
        once = tensor_parallel.param_is_not_tensor_parallel_duplicate
        groups = {name: getattr(self._optimizer, name, None) for name in ("tp_group", "expert_tp_group")}
        known = {name: groups[name] for name in inspect.signature(once).parameters if name in groups}
        return bool(param_is_not_shared(parameter) and once(parameter, **known))

    # ---- using the pieces

    def begin_update(self) -> None:
        """Copy the model's gradients to the gradients of the main parameters, as Megatron does."""
        for fragment in self._updated:
            fragment.tensor.grad = fragment.gradient.to(fragment.tensor.device, torch.float32)

    def divide(self, by_scale: torch.Tensor) -> None:
        """Multiply the gradients by ``by_scale``, the reciprocal of a loss scale; after ``begin_update``."""
        for fragment in self._updated:
            assert fragment.tensor.grad is not None
            fragment.tensor.grad.mul_(by_scale)

    def end_update(self) -> None:
        """Copy the main parameters to the model, as Megatron does, and keep the inner optimizer's new state."""
        state = self.inner.state
        for fragment in self._updated:
            fragment.tensor.grad = None
            if fragment.is_copy:
                self._show(fragment)
            if not fragment.state and fragment.tensor in state:
                fragment.state = state[fragment.tensor]

    def copy_shadows_to_model(self, unit: int) -> None:
        """Copy to the model the pieces of ``unit`` that the shadow device has updated."""
        for fragment in self.held[unit]:
            if fragment.on_shadow_device:
                self._show(fragment)

    def _show(self, fragment: ShardFragment) -> None:
        fragment.model.copy_(precision.nearest(fragment.tensor) if self.has_remainder(fragment) else fragment.tensor)

    def sums(self, unit: int, *, zeros: bool) -> torch.Tensor:
        """Return [sum of squares, number of zeros] of a unit's gradients: float64, on the gradients' device.

        Gradients that another worker counts are left out.  The number of zeros is 0 if ``zeros`` is False.
        """
        gradients = [fragment.gradient for fragment in self.held[unit] if fragment.counts]
        device = next(iter(self.buckets.values())).grad_data.device
        found = torch.zeros(2, dtype=torch.float64, device=device)
        if gradients:
            found[0] = sum_of_squares(gradients)
        if gradients and zeros:
            found[1] = sum(g.numel() - torch.count_nonzero(g) for g in gradients)
        return found

    def digest(self, unit: int) -> Digest:
        """Return the digest of a unit's pieces.

        The owner and all shadows of the unit must have the same digest, unless the host updates the shadows of a GPU.
        """
        found = Digest()
        for fragment in self.held[unit]:
            found.add(fragment.tensor.detach())
            for name in sorted(fragment.state):
                if isinstance(fragment.state[name], torch.Tensor):
                    found.add(fragment.state[name])
        return found

    # ---- repartition

    def give(self, element_range: ElementRange) -> list[Any]:
        """Return the state of ``element_range``: one tree (``ShardFragment.give``) per parameter in it."""
        return [fragment.give(a, b) for fragment, a, b in self.parts(element_range, in_order(self))]

    def parts(self, element_range: ElementRange, pieces: InOrder) -> list[tuple[ShardFragment, int, int]]:
        """Cut ``element_range`` at parameter boundaries, and return (piece with the part, start, stop) for each part.

        Raises Disagreement if no single piece holds a part.
        """
        found = []
        whole = {element_range.bucket: [(element_range.start, element_range.stop)]}
        for bucket, start, stop, _ in self._cut(whole):
            fragment = next(iter(overlapping(pieces, bucket, start, stop)), None)
            if fragment is None or start < fragment.start or fragment.stop < stop:
                raise Disagreement(f"no single piece of the state holds elements {start}:{stop} of bucket {bucket}")
            found.append((fragment, start, stop))
        return found


def _parameter_ranges(bucket: Any, groups: dict[Any, int]) -> list[ParameterRange]:
    found = []
    for parameter in bucket.params_list:
        start, stop = bucket.param_to_index[parameter]
        found.append(ParameterRange(start, stop, parameter, groups[parameter]))
    return sorted(found, key=lambda parameter_range: parameter_range.start)
