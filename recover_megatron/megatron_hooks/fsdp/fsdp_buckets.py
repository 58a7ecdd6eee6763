"""Megatron-FSDP's gradients: Megatron sums inside each shard group, and ``instep.step`` sums over the shard groups.

    backward pass of a microbatch  --reduce-scatter inside the shard group-->  Megatron adds to this worker's shard
    last microbatch of a pass      --Gradients.ready-->  the step sums the shard (stock Megatron: all-reduce in the
                                                         outer group)
    the step is committed          --finish_grad_sync-->  Megatron attaches the shards to the optimizer

The workers of a column, which have the same position in every shard group, sum their shards.  This module does not
scale gradients: before its reduce-scatter, Megatron divides them by the launch's number of data-parallel ranks, except
with --calculate-per-token-loss.

If --data-parallel-sharding-strategy does not shard gradients (``optim``), each worker accumulates the complete bucket
over the microbatches of a pass.  At the end of the pass Megatron reduces the bucket in place, after which only this
worker's shard is a valid sum.  So a further pass of the same step starts from zeros, and when that pass ends, the
shard's sum over the earlier passes is added.

Shards are padded to equal sizes, and the padding of a communication buffer is uninitialized memory, so the padding is
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
from recover_megatron.megatron_hooks.parallel_groups import column_of
from recover_megatron.workload.grid import Column, ring_order

OUTER_SUM = "outer_fsdp_group_grad_reduce"


class FsdpBuckets:
    """The gradient shards of this worker's model chunks, numbered as in ``gradients``.

    Has the attributes and methods of ``buckets.Buckets`` that a step needs.  ``accumulated`` counts every gradient that
    Megatron adds.  ``shadows``: None if each shard group has the complete optimizer state.  Otherwise the number of
    copies of each part of the state in addition to the owner's copy.
    """

    overlap: Overlap | None = None
    overlaps = False
    """False, because parameters are gathered over shard groups before the next forward pass, not during that pass."""
    instances = 1

    def __init__(self, model: Sequence[Any], manager: Manager, accumulated: Accumulated, shadows: int | None) -> None:
        grid = manager.view.grid
        index = model[0].megatron_fsdp_dist_index
        self.tail = ring_order(column_of(index.get_dp_group()), grid)
        """The column over which a step sums its tail: all data-parallel and context-parallel ranks."""
        self._buffers: list[Any] = []
        self._number: dict[tuple[int, int], int] = {}
        self._shards: list[torch.Tensor] = []
        self._padding: list[list[Span]] = []
        self._before: dict[int, torch.Tensor] = {}
        """Number of a shard that was zeroed before this pass -> the shard's sum over the earlier passes of the step."""
        parts: list[tuple[Column, torch.Tensor]] = []
        self.parameters: list[tuple[Column, torch.Tensor]] = []
        """(column, flat parameters) of each bucket, in the order of ``gradients``; empty if ``shadows`` is None."""
        self.outer: list[tuple[Any, Column, OuterBucket]] = []
        """(model chunk, column, bucket) of each bucket; empty if ``shadows`` is None."""
        columns: dict[Column, Column] = {}
        # Reversed, because the backward pass will produce the gradients in about this order.
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
        """Return (column, number of elements) of a shard."""
        column, tensor = self._parts[number]
        return column, tensor.numel()

    def begin(self) -> None:
        """Do nothing at the start of a step, because Megatron has zeroed the gradients."""

    def new_pass(self, *, again: bool) -> None:
        """Prepare the gradient shards for a pass over the model.  ``again``: False for the first pass of a step."""
        self._before.clear()
        if again:
            for number, buffer in enumerate(self._buffers):
                if not buffer.is_data_distributed:
                    self._before[number] = self._shards[number].clone()
                    buffer.data.zero_()

    def finish_pass(self) -> None:
        """Finish the pass: afterwards every shard holds the values to sum."""
        for number, before in self._before.items():
            self._shards[number].add_(before)
        self._before.clear()

    def _inside_alone(self, pipeline: Any) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
        """Return a decorator that limits Megatron's reduction to the shard group, and marks complete shards ready."""

        def wrapper(original: Callable[..., bool]) -> Callable[..., bool]:
            def _bucket_group_gradient_reduce(
                bucket_group: list[int], async_op: bool = False, outer_fsdp_group_grad_reduce: bool = False
            ) -> bool:
                done = original(bucket_group, async_op, **{OUTER_SUM: False})
                if outer_fsdp_group_grad_reduce:
                    with torch.cuda.stream(pipeline.rs_stream):  # Megatron added the last gradient on this stream
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
    """The gradient shards of this worker's model chunks with Megatron-FSDP 2 (`version2`).

    ``accumulated`` counts every gradient that Megatron adds.
    """

    overlap: Overlap | None = None
    overlaps = False
    """False, because no parameters are gathered over shard groups."""
    instances = 1
    shards = None
    """None, because each shard group has the complete optimizer state."""

    def __init__(self, model: Sequence[Any], manager: Manager, accumulated: Accumulated) -> None:
        grid = manager.view.grid
        everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.tail = ring_order(column_of(everyone), grid)
        """The column over which a step sums its tail: all data-parallel and context-parallel ranks."""
        outer = ring_order(column_of(parallel_state.get_inter_distributed_optimizer_instance_group()), grid)
        # Reversed, because the backward pass will produce the gradients in about this order.
        self._groups = [
            group for chunk in reversed(model) for group in reversed(version2.groups_of(chunk)) if group.requires_grad
        ]
        self._parts: list[tuple[Column, torch.Tensor]] = [(outer, one.main_grad.local_buffer) for one in self._groups]
        self._padding = [list(version2.padding(one.main_grad)) for one in self._groups]
        self._unfinished: set[int] = set()
        """Numbers of the shards that are not complete yet in the current pass."""
        for number, group in enumerate(self._groups):
            group.reduce_partial_gradients = self._inside_alone(number)(group.reduce_partial_gradients)
        for chunk in model:
            accumulated.watch(
                chunk, [one.unsharded for group in version2.groups_of(chunk) for one in group.fsdp_parameters]
            )
        self._marks_last = bool(model[0].ddp_config.overlap_grad_reduce)
        """True if Megatron marks the last microbatch of a pass."""
        self.gradients = Gradients(self._parts, None)
        self.rings = tuple(dict.fromkeys([*self.gradients.columns, self.tail]))
        """The columns over which a step sums."""
        self.committed = False

    def part(self, number: int) -> tuple[Column, int]:
        """Return (column, number of elements) of a shard."""
        column, tensor = self._parts[number]
        return column, tensor.numel()

    def begin(self) -> None:
        """Begin a step: zero the gradient shards (Megatron does not), even if this worker has no microbatches."""
        for group in self._groups:
            group.main_grad.local_buffer.zero_()
            for index, parameter in enumerate(group.fsdp_parameters):  # so that Megatron adds to the zeroed shard
                parameter.sharded.grad = group.main_grad.get_dtensor(index)

    def new_pass(self, *, again: bool) -> None:
        """Mark all shards incomplete at the start of a pass over the model.  ``again`` is ignored."""
        self._unfinished = set(range(len(self._groups)))

    def finish_pass(self) -> None:
        """Finish the pass: afterwards every shard holds the values to sum."""
        for number in list(self._unfinished):
            self._finish_bucket(number)

    def _finish_bucket(self, number: int) -> None:
        self._unfinished.discard(number)
        shard = self._parts[number][1]
        for span in self._padding[number]:
            shard[span.start : span.stop] = 0

    def _inside_alone(self, number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator that limits Megatron's reduction to the shard group, and marks complete shards ready."""

        def wrapper(original: Callable[..., None]) -> Callable[..., None]:
            def reduce_partial_gradients(partial_grad: Any, is_last_microbatch: bool = True) -> None:
                if self._marks_last and number not in self._unfinished:
                    raise Disagreement(
                        f"a gradient of parameter group {number} arrived after the gradient that Megatron had marked "
                        "as the group's last; this worker stops before the step is committed"
                    )
                original(partial_grad, False)
                if self._marks_last and is_last_microbatch:
                    self._finish_bucket(number)
                    self.gradients.ready(number)

            return reduce_partial_gradients

        return wrapper


def padding(buffer: Any) -> Iterator[Span]:
    """Yield the padding ranges in this worker's shard of a Megatron-FSDP buffer, as offsets in the shard."""
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
