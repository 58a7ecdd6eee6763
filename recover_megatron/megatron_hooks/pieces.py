"""What one worker holds of a distributed optimizer's state, cut so that each piece lies in one parameter.

    bucket   |--- parameter a ---|-- parameter b --|---- parameter c ----|pad|
    unit           |================================|                            what a worker owns (workload.shards)
    pieces         |=============|==================|                            each updated by the inner optimizer

A unit's owner and its shadows cut it in the same places and update it by the same calls on tensors of the same shapes,
so that they get the same bits, on processors of one kind.  A piece of a 32-bit parameter is the model's own memory;
of a 16-bit one it is a copy in 32 bits, as Megatron has it.  Shadows may be kept on the host (``shadow_device``): then
they are copies, too, and updated *aside*, see `host_shadows`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import param_is_not_shared

from recover_megatron.instep.errors import Disagreement
from recover_megatron.instep.shards import Portion
from recover_megatron.instep.transfer import Digest


@dataclass(frozen=True)
class Stretch:
    """Where a parameter lies in a bucket."""

    start: int
    stop: int
    parameter: torch.nn.Parameter
    group: int
    """Number of its group in the inner optimizer."""


@dataclass(eq=False)
class Piece:
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

    @property
    def is_copy(self) -> bool:
        """Whether ``tensor`` is other memory than the model's."""
        return self.tensor.data_ptr() != self.model.data_ptr()

    def give(self, start: int, stop: int) -> dict[str, Any]:
        """The state of some of its elements, as a tree; ``start`` and ``stop`` as elements of the bucket."""
        part = slice(start - self.start, stop - self.start)
        return {
            "master": self.tensor[part] if self.tensor.dtype != self.model.dtype else None,
            "state": {
                name: value[part] if isinstance(value, torch.Tensor) and value.dim() else value
                for name, value in self.state.items()
            },
        }

    def take(self, start: int, stop: int, its: dict[str, Any]) -> None:
        """Become what another one's ``give`` gave for these elements."""
        part = slice(start - self.start, stop - self.start)
        if its["master"] is not None:
            self.tensor[part].copy_(its["master"])
        for name, value in its["state"].items():
            if not isinstance(value, torch.Tensor):
                self.state[name] = value
            elif not value.dim():
                self.state[name] = value.clone()
            else:
                if name not in self.state:
                    self.state[name] = torch.zeros(self.tensor.shape, dtype=value.dtype, device=self.tensor.device)
                self.state[name][part].copy_(value)


class Pieces:
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
        self.table = {number: _stretches(bucket, groups) for number, bucket in buckets.items()}
        self.held: dict[int, list[Piece]] = {}

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
        self.held = {unit: []}
        for number, start, stop, stretch in self._cut(parts):
            master = made[stretch.parameter]
            piece = self._piece(number, start, stop, stretch, shadow=False, tensor=master.detach())
            piece.state = dict(inner.state.get(master, {}))
            self.held[unit].append(piece)
        self.install()

    def make(self, unit: int, parts: dict[int, Sequence[tuple[int, int]]], *, shadow: bool) -> list[Piece]:
        """Pieces for ``parts`` of a unit, by bucket; their state is still to come, but where it is held already.

        A piece that this worker has, of the same elements on the same device, is that very piece.
        """
        known = {(p.bucket, p.start, p.stop): p for pieces in self.held.values() for p in pieces}
        found = []
        for number, start, stop, stretch in self._cut(parts):
            piece = known.get((number, start, stop))
            if piece is None or piece.tensor.device != self._device(number, shadow=shadow):
                piece = self._piece(number, start, stop, stretch, shadow=shadow)
                for portion in self.overlapping(number, start, stop):
                    a, b = max(start, portion.start), min(stop, portion.stop)
                    piece.take(a, b, portion.give(a, b))
            piece.aside = shadow and self._shadow_device is not None
            found.append(piece)
        return found

    def install(self, held: dict[int, list[Piece]] | None = None) -> None:
        """From now on the inner optimizer updates the pieces of ``held``, those of each unit together."""
        self.held = self.held if held is None else held
        optimizer, inner = self._optimizer, self.inner
        for number, group in enumerate(inner.param_groups):
            group["params"] = [piece.tensor for piece in self._updated if piece.group == number]
        inner.state.clear()
        for piece in self._updated:
            if piece.state:
                inner.state[piece.tensor] = piece.state
        # Megatron's own lists, of one part of each parameter: nothing is to be done for them any more.
        for name in ("model_float16_groups", "model_fp32_groups", "shard_float16_groups", "shard_fp32_groups",
                     "shard_fp32_from_float16_groups"):  # fmt: skip
            setattr(optimizer, name, [[] for _ in getattr(optimizer, name)])

    @property
    def inner(self) -> Any:
        """The optimizer that makes the update."""
        return self._optimizer.optimizer

    @property
    def aside(self) -> Iterator[Piece]:
        """The pieces that it leaves out."""
        return (piece for piece in self if piece.aside)

    @property
    def _updated(self) -> Iterator[Piece]:
        return (piece for piece in self if not piece.aside)

    def __iter__(self) -> Iterator[Piece]:
        return (piece for pieces in self.held.values() for piece in pieces)

    def overlapping(self, bucket: int, start: int, stop: int) -> list[Piece]:
        """The pieces that this worker holds of some elements."""
        return [p for p in self if p.bucket == bucket and p.start < stop and start < p.stop]

    def _cut(self, parts: Mapping[int, Sequence[tuple[int, int]]]) -> Iterator[tuple[int, int, int, Stretch]]:
        for number, its in sorted(parts.items()):
            for start, stop in its:
                for stretch in self.table[number]:
                    a, b = max(start, stretch.start), min(stop, stretch.stop)
                    if a < b:
                        yield number, a, b, stretch

    def _device(self, number: int, *, shadow: bool) -> torch.device:
        device: torch.device = self.buckets[number].param_data.device
        return self._shadow_device if shadow and self._shadow_device is not None else device

    def _piece(
        self, number: int, start: int, stop: int, stretch: Stretch, *, shadow: bool, tensor: torch.Tensor | None = None
    ) -> Piece:
        bucket = self.buckets[number]
        model = bucket.param_data.view(-1)[start:stop]
        if tensor is None:
            own = model.dtype == torch.float32 and not (shadow and self._shadow_device is not None)
            tensor = model if own else model.to(self._device(number, shadow=shadow), torch.float32, copy=True)
        parameter = stretch.parameter
        tensor_parallel.copy_tensor_model_parallel_attributes(tensor, parameter)
        for name in ("allreduce", "shared"):
            if hasattr(parameter, name):
                setattr(tensor, name, getattr(parameter, name))
        gradient = bucket.grad_data.view(-1)[start:stop]
        return Piece(number, start, stop, stretch.group, tensor, model, gradient, self._counts(parameter))

    def _counts(self, parameter: torch.nn.Parameter) -> bool:
        once = tensor_parallel.param_is_not_tensor_parallel_duplicate
        groups = {name: getattr(self._optimizer, name, None) for name in ("tp_group", "expert_tp_group")}
        known = {name: groups[name] for name in inspect.signature(once).parameters if name in groups}
        return bool(param_is_not_shared(parameter) and once(parameter, **known))

    # ---- using them

    def begin_update(self) -> None:
        """As Megatron's copy of the model's gradients to those of the main parameters."""
        for piece in self._updated:
            piece.tensor.grad = piece.gradient.to(piece.tensor.device, torch.float32)

    def end_update(self) -> None:
        """As Megatron's copy of the main parameters to the model's; and what the inner optimizer made is noted."""
        state = self.inner.state
        for piece in self._updated:
            piece.tensor.grad = None
            if piece.is_copy:
                piece.model.copy_(piece.tensor)
            if not piece.state and piece.tensor in state:
                piece.state = state[piece.tensor]

    def show_aside(self, unit: int) -> None:
        """Copy what was updated aside of a unit to the model."""
        for piece in self.held[unit]:
            if piece.aside:
                piece.model.copy_(piece.tensor)

    def sums(self, unit: int, *, zeros: bool) -> torch.Tensor:
        """[sum of the squares, number of zeros] of the gradients of a unit that count, float64, on their device."""
        gradients = [piece.gradient for piece in self.held[unit] if piece.counts]
        device = next(iter(self.buckets.values())).grad_data.device
        found = torch.zeros(2, dtype=torch.float64, device=device)
        if gradients:
            norms = [torch.linalg.vector_norm(g.float(), dtype=torch.float64) for g in gradients]
            found[0] = torch.stack(norms).square().sum()
        if gradients and zeros:
            found[1] = sum(g.numel() - torch.count_nonzero(g) for g in gradients)
        return found

    def digest(self, unit: int) -> Digest:
        """Of all that is held of a unit: the same at its owner and its shadows."""
        found = Digest()
        for piece in self.held[unit]:
            found.add(piece.tensor.detach())
            for name in sorted(piece.state):
                if isinstance(piece.state[name], torch.Tensor):
                    found.add(piece.state[name])
        return found

    # ---- changing hands

    def give(self, portions: Sequence[Portion]) -> list[Any]:
        """The tree of some elements that this worker holds; see ``take``."""
        return [self._holder(portion.bucket, a, b).give(a, b) for portion in portions for a, b in self._within(portion)]

    def take(self, portions: Sequence[Portion], tree: Sequence[Any], pieces: Sequence[Piece]) -> None:
        """Give ``pieces`` what another worker's ``give`` of the same portions gave."""
        ranges = [(portion.bucket, a, b) for portion in portions for a, b in self._within(portion)]
        for (bucket, a, b), its in zip(ranges, tree, strict=True):
            for piece in pieces:
                if piece.bucket == bucket and piece.start <= a and b <= piece.stop:
                    piece.take(a, b, its)

    def _within(self, portion: Portion) -> Iterator[tuple[int, int]]:
        parts = {portion.bucket: [(portion.start, portion.stop)]}
        return ((start, stop) for _, start, stop, _ in self._cut(parts))

    def _holder(self, bucket: int, start: int, stop: int) -> Piece:
        for piece in self.overlapping(bucket, start, stop):
            if piece.start <= start and stop <= piece.stop:
                return piece
        raise Disagreement(f"elements {start} to {stop} of bucket {bucket} are to be given, and are not here as one")


def _stretches(bucket: Any, groups: dict[Any, int]) -> list[Stretch]:
    found = []
    for parameter in bucket.params_list:
        start, stop = bucket.param_to_index[parameter]
        found.append(Stretch(start, stop, parameter, groups[parameter]))
    return sorted(found, key=lambda stretch: stretch.start)
