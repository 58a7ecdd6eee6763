"""What one worker holds of a distributed optimizer's state, cut so that each piece lies in one parameter.

    bucket   |--- parameter a ---|-- parameter b --|---- parameter c ----|pad|
    unit           |================================|                            what a worker owns (workload.shards)
    pieces         |=============|==================|                            each updated by the inner optimizer

A unit's owner and its shadows cut it in the same places and update it by the same calls on tensors of the same shapes,
so that they get the same bits, on processors of one kind.  A piece of a 32-bit parameter is the model's own memory;
of a 16-bit one it is a copy in 32 bits, as Megatron has it (`precision`).  Shadows may be kept on the host
(``shadow_device``): then they are copies, too, and updated *aside*, see `shadows`.
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
    """Where a parameter lies in a bucket."""

    start: int
    stop: int
    parameter: torch.nn.Parameter
    group: int
    """Number of its group in the inner optimizer."""


@dataclass(eq=False)
class ShardFragment:
    """Elements ``start`` to ``stop`` of bucket ``bucket``, all of one parameter."""

    bucket: int
    start: int
    stop: int
    group: int
    tensor: torch.Tensor
    """What the inner optimizer updates."""
    model: torch.Tensor
    """The model's parameter, a view of Megatron's buffer."""
    gradient: torch.Tensor
    """Its gradient, as well."""
    counts: bool
    """Whether its gradient is part of the norm: not if another worker of the replica has the same one."""
    state: dict[str, Any] = field(default_factory=dict)
    """The inner optimizer's; empty before the first update."""
    aside: bool = False
    """Whether it is a shadow that the device's own update leaves out."""
    borrowed: bool = False
    """Whether its memory is Megatron's, which goes to others as soon as there are pieces of our own."""

    @property
    def is_copy(self) -> bool:
        """Whether ``tensor`` is other memory than the model's."""
        return self.tensor.data_ptr() != self.model.data_ptr()

    def give(self, start: int, stop: int) -> dict[str, Any]:
        """The state of some of its elements, as a tree; ``start`` and ``stop`` as elements of the bucket."""
        part = slice(start - self.start, stop - self.start)
        return {
            "master": self.tensor[part] if self.tensor.dtype != self.model.dtype else None,
            "state": part_of_state(self.state, part),
        }

    def take(self, start: int, stop: int, its: dict[str, Any]) -> None:
        """Become what another one's ``give`` gave for these elements."""
        if its["master"] is not None:
            _fill(self.room(start, stop), its["master"])
        for name, value in its["state"].items():
            if not isinstance(value, torch.Tensor):
                self.state[name] = value
            elif not value.dim():
                self.state[name] = value.clone()
            else:
                _fill(self.room(start, stop, value.dtype, name), value)

    def room(self, start: int, stop: int, dtype: torch.dtype | None = None, name: str = "") -> torch.Tensor:
        """The memory of some of its elements, of the optimizer's state ``name``; without a name of ``tensor``.

        A state that is not there yet is made, of type ``dtype``.
        """
        if name and name not in self.state:
            self.state[name] = torch.zeros(self.tensor.shape, dtype=dtype, device=self.tensor.device)
        whole: torch.Tensor = self.state[name] if name else self.tensor
        return whole[start - self.start : stop - self.start]


def _fill(own: torch.Tensor, given: torch.Tensor) -> None:
    if own.data_ptr() != given.data_ptr():  # else it was received where it belongs
        own.copy_(given)


InOrder = Mapping[int, Sequence[ShardFragment]]
"""By bucket pieces that have no element in common, ascending."""


def in_order(pieces: Iterable[ShardFragment]) -> InOrder:
    """Sort ``pieces`` by their buckets and elements."""
    found: dict[int, list[ShardFragment]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.start):
        found.setdefault(piece.bucket, []).append(piece)
    return found


def overlapping(pieces: InOrder, bucket: int, start: int, stop: int) -> list[ShardFragment]:
    """Return the ``pieces`` that have some of these elements, in time that grows with how many these are."""
    its = pieces.get(bucket, ())
    first = bisect_right(its, start, key=lambda piece: piece.stop)
    return list(its[first : bisect_left(its, stop, key=lambda piece: piece.start)])


def part_of_state(state: dict[str, Any], part: slice) -> dict[str, Any]:
    """Of some elements, the state of an optimizer by its names; what is one for all elements stays."""
    return {
        name: value[part] if isinstance(value, torch.Tensor) and value.dim() else value for name, value in state.items()
    }


class ShardFragments:
    """The pieces of one of Megatron's distributed optimizers: unit -> pieces, ascending by bucket and element.

    ``buckets``: number (of all the model's buckets) -> Megatron's bucket, of those that it updates.  ``groups``: model
    parameter -> number of its group, of all of them.
    """

    def __init__(
        self, optimizer: Any, buckets: dict[int, Any], groups: dict[Any, int], shadow_device: torch.device | None
    ) -> None:
        self._optimizer = optimizer
        self._shadow_device = shadow_device
        self.buckets = buckets
        self.table = {number: _parameter_ranges(bucket, groups) for number, bucket in buckets.items()}
        self.held: dict[int, list[ShardFragment]] = {}

    # ---- making them

    def adopt(self, unit: int, parts: dict[int, Sequence[tuple[int, int]]]) -> None:
        """At launch: take over what Megatron has made for this worker's shard, ``parts`` of its buckets."""
        inner, made = self.inner, dict[Any, torch.Tensor]()
        for models, masters in (
            (self._optimizer.model_float16_groups, self._optimizer.shard_fp32_from_float16_groups),
            (self._optimizer.model_fp32_groups, self._optimizer.shard_fp32_groups),
        ):
            for model_group, master_group in zip(models, masters, strict=True):
                made.update(zip(model_group, master_group, strict=True))
        found = []
        for number, start, stop, parameter_range in self._cut(parts):
            master = made[parameter_range.parameter]
            fragment = self._fragment(number, start, stop, parameter_range, shadow=False, tensor=master.detach())
            if fragment.model.dtype == torch.bfloat16:  # with that optimizer or not: the checkpoint's may have been
                fragment.tensor.copy_(precision.whole(fragment.model, fragment.tensor))
            fragment.state = dict(inner.state.get(master, {}))
            found.append(fragment)
        self.install({unit: found})

    def make(self, parts: dict[int, Sequence[tuple[int, int]]], *, shadow: bool) -> list[ShardFragment]:
        """Pieces for ``parts`` of a unit, by bucket; their state is still to come, but where it is held already.

        A piece that this worker has, of the same elements on the same device, is that very piece.
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
            fragment.aside = shadow and self._shadow_device is not None
            found.append(fragment)
        return found

    def borrow(self, unit: int, number: int, parameter: Any, master: torch.Tensor, state: dict[str, Any]) -> None:
        """At launch: what Megatron has of all of a parameter's elements in bucket ``number``; held under ``unit``."""
        found = next(its for its in self.table[number] if its.parameter is parameter)
        fragment = self._fragment(number, found.start, found.stop, found, shadow=False, tensor=master)
        fragment.state, fragment.borrowed = state, True
        self.held.setdefault(unit, []).append(fragment)

    def install(self, held: dict[int, list[ShardFragment]]) -> None:
        """From now on the inner optimizer updates the pieces of ``held``, those of each unit together."""
        self.held = held
        optimizer, inner = self._optimizer, self.inner
        for number, group in enumerate(inner.param_groups):
            group["params"] = [fragment.tensor for fragment in self._updated if fragment.group == number]
        inner.state.clear()
        for fragment in self._updated:
            if fragment.state:
                inner.state[fragment.tensor] = fragment.state
        precision.set_scales(inner, ((fragment.tensor, fragment.state) for fragment in self))
        # Megatron's own lists, of one part of each parameter: nothing is to be done for them any more.
        for name in ("model_float16_groups", "model_fp32_groups", "shard_float16_groups", "shard_fp32_groups",
                     "shard_fp32_from_float16_groups"):  # fmt: skip
            if hasattr(optimizer, name):  # not with Megatron-FSDP
                setattr(optimizer, name, [[] for _ in getattr(optimizer, name)])

    @property
    def inner(self) -> Any:
        """The optimizer that makes the update."""
        return self._optimizer.optimizer

    @property
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The model's parameters that it updates, here or elsewhere."""
        return (its.parameter for ranges in self.table.values() for its in ranges)

    def range_of(self, fragment: ShardFragment) -> ParameterRange:
        """Where the model's parameter lies of which it is a part."""
        ranges = self.table[fragment.bucket]
        return ranges[bisect_right(ranges, fragment.start, key=lambda its: its.start) - 1]

    def parameter_of(self, fragment: ShardFragment) -> torch.nn.Parameter:
        """The model's parameter of which it is a part."""
        return self.range_of(fragment).parameter

    def new_state(self, fragment: ShardFragment) -> dict[str, Any]:
        """What the inner optimizer has for it; for one that it leaves out the like, with zeros for each element."""
        inner = self.inner.state
        if not fragment.aside:
            return dict(inner[fragment.tensor])
        return {
            name: torch.zeros_like(fragment.tensor, dtype=its.dtype) if its.dim() else its.clone()
            for name, its in next(iter(inner.values())).items()
        }

    def has_remainder(self, fragment: ShardFragment) -> bool:
        """Whether stock Megatron would keep what the model lacks of it, and not the whole (`precision`)."""
        return precision.has_remainders(self._optimizer, fragment.model.dtype)

    @property
    def aside(self) -> Iterator[ShardFragment]:
        """The pieces that it leaves out."""
        return (fragment for fragment in self if fragment.aside)

    @property
    def _updated(self) -> Iterator[ShardFragment]:
        return (fragment for fragment in self if not fragment.aside)

    def __iter__(self) -> Iterator[ShardFragment]:
        return (fragment for fragments in self.held.values() for fragment in fragments)

    def overlapping(self, bucket: int, start: int, stop: int) -> list[ShardFragment]:
        """The pieces that this worker holds of some elements."""
        return overlapping(in_order(self), bucket, start, stop)

    def _cut(self, parts: Mapping[int, Sequence[tuple[int, int]]]) -> Iterator[tuple[int, int, int, ParameterRange]]:
        for number, its in sorted(parts.items()):
            for start, stop in its:
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

    # ---- using them

    def begin_update(self) -> None:
        """As Megatron's copy of the model's gradients to those of the main parameters."""
        for fragment in self._updated:
            fragment.tensor.grad = fragment.gradient.to(fragment.tensor.device, torch.float32)

    def divide(self, by_scale: torch.Tensor) -> None:
        """Multiply what is updated with by ``by_scale``, the reciprocal of a loss scale; after ``begin_update``."""
        for fragment in self._updated:
            assert fragment.tensor.grad is not None
            fragment.tensor.grad.mul_(by_scale)

    def end_update(self) -> None:
        """As Megatron's copy of the main parameters to the model's; and what the inner optimizer made is noted."""
        state = self.inner.state
        for fragment in self._updated:
            fragment.tensor.grad = None
            if fragment.is_copy:
                self._show(fragment)
            if not fragment.state and fragment.tensor in state:
                fragment.state = state[fragment.tensor]

    def show_aside(self, unit: int) -> None:
        """Copy what was updated aside of a unit to the model."""
        for fragment in self.held[unit]:
            if fragment.aside:
                self._show(fragment)

    def _show(self, fragment: ShardFragment) -> None:
        fragment.model.copy_(precision.nearest(fragment.tensor) if self.has_remainder(fragment) else fragment.tensor)

    def sums(self, unit: int, *, zeros: bool) -> torch.Tensor:
        """[sum of the squares, number of zeros] of the gradients of a unit that count, float64, on their device."""
        gradients = [fragment.gradient for fragment in self.held[unit] if fragment.counts]
        device = next(iter(self.buckets.values())).grad_data.device
        found = torch.zeros(2, dtype=torch.float64, device=device)
        if gradients:
            found[0] = sum_of_squares(gradients)
        if gradients and zeros:
            found[1] = sum(g.numel() - torch.count_nonzero(g) for g in gradients)
        return found

    def digest(self, unit: int) -> Digest:
        """Of all that is held of a unit: the same at its owner and its shadows."""
        found = Digest()
        for fragment in self.held[unit]:
            found.add(fragment.tensor.detach())
            for name in sorted(fragment.state):
                if isinstance(fragment.state[name], torch.Tensor):
                    found.add(fragment.state[name])
        return found

    # ---- changing hands

    def give(self, element_range: ElementRange) -> list[Any]:
        """The tree of some elements that this worker holds: of each of their ``parts`` what the piece gives."""
        return [fragment.give(a, b) for fragment, a, b in self.parts(element_range, in_order(self))]

    def parts(self, element_range: ElementRange, pieces: InOrder) -> list[tuple[ShardFragment, int, int]]:
        """Cut some elements where parameters are: of each cut the one of ``pieces`` that has it, first and end."""
        found = []
        whole = {element_range.bucket: [(element_range.start, element_range.stop)]}
        for bucket, start, stop, _ in self._cut(whole):
            fragment = next(iter(overlapping(pieces, bucket, start, stop)), None)
            if fragment is None or start < fragment.start or fragment.stop < stop:
                raise Disagreement(f"elements {start} to {stop} of bucket {bucket} change hands, and are not one piece")
            found.append((fragment, start, stop))
        return found


def _parameter_ranges(bucket: Any, groups: dict[Any, int]) -> list[ParameterRange]:
    found = []
    for parameter in bucket.params_list:
        start, stop = bucket.param_to_index[parameter]
        found.append(ParameterRange(start, stop, parameter, groups[parameter]))
    return sorted(found, key=lambda parameter_range: parameter_range.start)
