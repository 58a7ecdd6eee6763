"""Megatron-FSDP's gradients: its reduce-scatter inside a shard group stays; the sum over shard groups is the step's.

    backward pass of a microbatch  --reduce-scatter inside the shard group-->  added to this worker's shard (its own)
    last microbatch of a pass      --(stock: all-reduce of the shard over the outer group)-->  here: Gradients.ready
    the step is committed          --finish_grad_sync-->  Megatron attaches the shards to the optimizer

A worker's shard is summed with those of the same position in the other shard groups: one column.  Megatron scales
gradients before its reduce-scatter, by the launch's number of data-parallel ranks, so nothing here is scaled.

Where a strategy shards no gradients (``optim``) the whole bucket is kept, summed up over the microbatches of a pass,
and reduced once, in place, at its end: only the own shard of it is a sum then.  Another pass of the same step begins
with zeros, and what the own shard had is added when it is over.

Shards are padded to equal sizes, and the padding of a communication buffer is memory that nobody has written: it is
zeroed before a shard is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from megatron.core import parallel_state

from recover_megatron.collectives.ledger import Span
from recover_megatron.errors import Disagreement
from recover_megatron.instep.manager import Manager, Overlap
from recover_megatron.instep.trainer import Gradients
from recover_megatron.megatron_hooks.fsdp import version2
from recover_megatron.megatron_hooks.fsdp.outer import OuterBucket
from recover_megatron.megatron_hooks.gradients.microbatches import Accumulated
from recover_megatron.megatron_hooks.groups import column_of
from recover_megatron.workload.grid import Column, ring_order

OUTER_SUM = "outer_fsdp_group_grad_reduce"


class FsdpBuckets:
    """The shards of gradients of this worker's model chunks, by the numbers that ``gradients`` knows them by.

    It has what a step needs of ``buckets.Buckets``.  ``accumulated`` is told of every gradient that is added.
    ``shadows``: how many other shard groups have a copy of each part of an optimizer's state that is spread over them;
    None: each has all of it.
    """

    overlap: Overlap | None = None
    overlaps = False
    """A forward pass gathers parameters inside the shard group, by Megatron; over the shard groups the update does."""
    instances = 1

    def __init__(self, model: Sequence[Any], manager: Manager, accumulated: Accumulated, shadows: int | None) -> None:
        grid = manager.view.grid
        index = model[0].megatron_fsdp_dist_index
        self.tail = ring_order(column_of(index.get_dp_group()), grid)
        """The column of what is summed last: all ranks that run microbatches of their own."""
        self._buffers: list[Any] = []
        self._number: dict[tuple[int, int], int] = {}
        self._shards: list[torch.Tensor] = []
        self._padding: list[list[Span]] = []
        self._before: dict[int, torch.Tensor] = {}
        """Shard -> what earlier passes of this step made of it, where a pass begins with zeros."""
        parts: list[tuple[Column, torch.Tensor]] = []
        self.parameters: list[tuple[Column, torch.Tensor]] = []
        """As ``gradients`` has them of the gradients."""
        self.outer: list[tuple[Any, Column, OuterBucket]] = []
        """(model chunk, column, bucket) of each."""
        columns: dict[Column, Column] = {}
        # The order of the backward pass, as far as it is known before there was one.
        for chunk in reversed(model):
            index, buffer = chunk.megatron_fsdp_dist_index, chunk.param_and_grad_buffer
            pipeline = chunk.module.grad_reduce_pipeline
            for number, group in reversed(list(enumerate(buffer.parameter_groups))):
                if (of_group := group.main_grad_buffer) is None:
                    continue
                outer = index.get_outer_fsdp_group(is_expert_parallel=group.is_expert_param)
                shard = of_group.get_shard_from_local_buffer()
                self._number[id(pipeline), number] = len(parts)
                self._buffers.append(of_group)
                self._shards.append(shard)
                self._padding.append(list(padding(of_group)))
                column = ring_order(column_of(outer), grid)
                columns[column] = column_of(outer)
                parts.append((column, shard))
                if shadows is not None:
                    bucket = OuterBucket(group)
                    self.outer.append((chunk, column, bucket))
                    self.parameters.append((column, bucket.param_data))
            reduce = pipeline._bucket_group_gradient_reduce
            pipeline._bucket_group_gradient_reduce = wraps(reduce)(self._inside_alone(pipeline)(reduce))
            accumulated.watch(chunk, chunk.module.raw_param.values())
        self.shards = None if shadows is None else manager.shards(columns, shadows)
        self.gradients = Gradients(parts, self.shards)
        self.rings = tuple(dict.fromkeys([*self.gradients.columns, self.tail]))
        """The columns over which a step sums."""
        self._parts = parts
        self.committed = False

    def part(self, number: int) -> tuple[Column, int]:
        """(column, elements) of a shard."""
        column, tensor = self._parts[number]
        return column, tensor.numel()

    def begin(self) -> None:
        """A step begins: Megatron has zeroed the gradients."""

    def new_pass(self, *, again: bool) -> None:
        """A pass over the model begins.  ``again``: not the step's first one."""
        self._before.clear()
        if again:
            for number, buffer in enumerate(self._buffers):
                if not buffer.is_data_distributed:
                    self._before[number] = self._shards[number].clone()
                    buffer.data.zero_()

    def settle(self) -> None:
        """The pass is over: every shard holds what is to be summed."""
        for number, before in self._before.items():
            self._shards[number].add_(before)
        self._before.clear()

    def _inside_alone(self, pipeline: Any) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
        """Have Megatron reduce inside the shard group alone, and tell the step of what is complete."""

        def wrapper(original: Callable[..., bool]) -> Callable[..., bool]:
            def _bucket_group_gradient_reduce(
                bucket_group: list[int], async_op: bool = False, outer_fsdp_group_grad_reduce: bool = False
            ) -> bool:
                done = original(bucket_group, async_op, **{OUTER_SUM: False})
                if outer_fsdp_group_grad_reduce:
                    with torch.cuda.stream(pipeline.rs_stream):  # on which Megatron has added the last gradient
                        for of_group in bucket_group:
                            self._ready(self._number[id(pipeline), of_group])
                return done

            return _bucket_group_gradient_reduce

        return wrapper

    def _ready(self, number: int) -> None:
        for span in self._padding[number]:
            self._shards[number][span.start : span.stop] = 0
        self.gradients.ready(number)


class FsdpBuckets2:
    """The same of Megatron-FSDP 2 (`version2`).

    ``accumulated`` is told of every gradient that is added.
    """

    overlap: Overlap | None = None
    overlaps = False
    """A forward pass gathers parameters inside the shard group, by Megatron."""
    instances = 1
    shards = None
    """Each shard group has all of the optimizer's state."""

    def __init__(self, model: Sequence[Any], manager: Manager, accumulated: Accumulated) -> None:
        grid = manager.view.grid
        everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.tail = ring_order(column_of(everyone), grid)
        """The column of what is summed last: all ranks that run microbatches of their own."""
        outer = ring_order(column_of(parallel_state.get_inter_distributed_optimizer_instance_group()), grid)
        # The order of the backward pass, as far as it is known before there was one.
        self._groups = [
            group for chunk in reversed(model) for group in reversed(version2.groups_of(chunk)) if group.requires_grad
        ]
        self._parts: list[tuple[Column, torch.Tensor]] = [(outer, its.main_grad.local_buffer) for its in self._groups]
        self._padding = [list(version2.padding(its.main_grad)) for its in self._groups]
        self._unsettled: set[int] = set()
        """Shards of which this pass has not told that they are complete."""
        for number, group in enumerate(self._groups):
            group.reduce_partial_gradients = self._inside_alone(number)(group.reduce_partial_gradients)
        for chunk in model:
            accumulated.watch(
                chunk, [its.unsharded for group in version2.groups_of(chunk) for its in group.fsdp_parameters]
            )
        self._told = bool(model[0].ddp_config.overlap_grad_reduce)
        """Whether Megatron tells which microbatch is the last one of a pass."""
        self.gradients = Gradients(self._parts, None)
        self.rings = tuple(dict.fromkeys([*self.gradients.columns, self.tail]))
        """The columns over which a step sums."""
        self.committed = False

    def part(self, number: int) -> tuple[Column, int]:
        """(column, elements) of a shard."""
        column, tensor = self._parts[number]
        return column, tensor.numel()

    def begin(self) -> None:
        """A step begins: the shards are zeros, also of who will run no microbatch of it; Megatron zeroes none."""
        for group in self._groups:
            group.main_grad.local_buffer.zero_()
            for index, parameter in enumerate(
                group.fsdp_parameters
            ):  # with a gradient in its place Megatron adds to it
                parameter.sharded.grad = group.main_grad.get_dtensor(index)

    def new_pass(self, *, again: bool) -> None:
        """A pass over the model begins; whether ``again``, for the same step, is all one."""
        self._unsettled = set(range(len(self._groups)))

    def settle(self) -> None:
        """The pass is over: every shard holds what is to be summed."""
        for number in list(self._unsettled):
            self._settle(number)

    def _settle(self, number: int) -> None:
        self._unsettled.discard(number)
        shard = self._parts[number][1]
        for span in self._padding[number]:
            shard[span.start : span.stop] = 0

    def _inside_alone(self, number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Have Megatron reduce inside the shard group alone, and tell the step of what is complete."""

        def wrapper(original: Callable[..., None]) -> Callable[..., None]:
            def reduce_partial_gradients(partial_grad: Any, is_last_microbatch: bool = True) -> None:
                if self._told and number not in self._unsettled:
                    raise Disagreement(
                        f"a part of the gradients of group {number} came after it was told that all were there: "
                        "stopping before this step is reported as good"
                    )
                original(partial_grad, False)
                if self._told and is_last_microbatch:
                    self._settle(number)
                    self.gradients.ready(number)

            return reduce_partial_gradients

        return wrapper


def padding(buffer: Any) -> Iterator[Span]:
    """What of the own shard of one of Megatron-FSDP's buffers belongs to no parameter; offsets in the shard."""
    index = buffer.shard_bucket_index
    end = 0
    for start, stop in sorted(buffer._get_item_local_shard_index(item) for item in buffer.item_index_map):
        if start == stop:
            continue
        start, stop = start - index.local_data_index, stop - index.local_data_index
        if start > end:
            yield Span(end, start)
        end = stop
    if end < index.size:
        yield Span(end, index.size)
