"""Gradient buckets: the step of --recover sums each of Megatron's buckets over the data-parallel ranks.

start_grad_sync      called by Megatron when a bucket has all its gradients.  They are scaled, and may then be summed
end of the schedule  Megatron's finalize function is delayed until the commit (see `trainer`)
another pass         after a loss: LOCAL segments are unscaled, gradients of the lost microbatches are added to them,
                     and they are scaled again
finish_grad_sync     Megatron calls it after the commit: the bucket is marked as summed

As in stock Megatron, gradients are scaled before the sum, because the sum is computed in their dtype and may overflow.
An average (--ddp-average-in-collective) is also computed as a sum: of gradients divided by the number of ranks
at launch.

With the distributed optimizer the update of --recover gathers the parameters (`sharded_optimizer`).  Megatron's calls
that would gather them do nothing, or, with --overlap-param-gather, wait for that gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config

from recover_megatron.instep.manager import Manager, Overlap, Shards
from recover_megatron.instep.trainer import Gradients
from recover_megatron.integrate import Wrapper
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.parallel_groups import column_of, launched_of
from recover_megatron.workload.grid import Column, ring_order


class Buckets:
    """The buckets of this worker's model chunks, numbered as in ``self.gradients``.

    ``shadows``: number of other workers that hold a copy of each part of a distributed optimizer's state.
    """

    def __init__(self, model: Sequence[Any], manager: Manager, shadows: int) -> None:
        grid = manager.view.grid
        sharded = bool(model[0].ddp_config.use_distributed_optimizer)
        self.instances = int(getattr(model[0].ddp_config, "num_distributed_optimizer_instances", 1)) if sharded else 1
        # In the order of the backward pass: the last chunk first, and inside a chunk Megatron's order.
        pairs = [
            (group, whole)
            for chunk in reversed(model)
            for groups, whole in (
                (chunk.bucket_groups, chunk.dp_cp_group),
                (chunk.expert_parallel_bucket_groups, chunk.expt_dp_group),
            )
            for group in groups
        ]
        self._groups = [group for group, _ in pairs]
        self._number: dict[int, list[int]] = {}
        self._number_of_bucket: dict[int, int] = {}
        self.tail = ring_order(column_of(model[0].dp_cp_group), grid, self.instances)
        """Column over which the tail, the bucket summed last, is summed: the column of the dense parameters."""
        columns: dict[Column, Column] = {}
        parts: list[tuple[Column, torch.Tensor]] = []
        self.parameters: list[tuple[Column, torch.Tensor]] = []
        """(column, flat tensor of the parameters) of each bucket; empty without the distributed optimizer."""
        self._whole: list[Any] = []
        self._factors: list[float] = []
        """Factors by which the gradients of each bucket are multiplied before the sum."""
        for group, whole in pairs:
            summed_over = whole if sharded else group.data_parallel_group
            members = launched_of(summed_over)
            column = ring_order(column_of(summed_over), grid, self.instances)
            columns[column] = members
            for bucket in group.buckets:
                self._number.setdefault(id(group), []).append(len(parts))
                self._number_of_bucket[id(bucket)] = len(parts)
                parts.append((column, bucket.grad_data))
                self._whole.append(whole)
                averaged = getattr(group.ddp_config, "average_in_collective", False)
                self._factors.append(bucket.gradient_scaling_factor / (len(members) if averaged else 1))
                if sharded:
                    self.parameters.append((column, bucket.param_data.view(-1)))
        self._experts = model[0].expt_dp_group
        if sharded and get_model_config(model[0]).expert_model_parallel_size > 1:
            # A stage without experts also has Megatron's optimizer for experts, and takes part in the experts' norm.
            members = launched_of(self._experts)
            columns.setdefault(ring_order(column_of(self._experts), grid, self.instances), members)
        self.overlaps = sharded and bool(model[0].ddp_config.overlap_param_gather)
        """True with --overlap-param-gather: the forward pass waits for each bucket's parameters before it uses them."""
        self.overlap: Overlap | None = None
        self.shards: Shards | None = None
        if sharded:
            self.shards = manager.shards(columns, shadows, self.instances)
        self.gradients = Gradients(parts, self.shards)
        self.rings = tuple(dict.fromkeys([*self.gradients.columns, self.tail]))
        """The different columns over which a step sums its buckets and the tail."""
        self._parts = parts
        self.committed = False
        self._finished: set[int] = set()

    def knows(self, group: Any) -> bool:
        """Return whether ``group`` is one of the bucket groups of this worker's model."""
        return id(group) in self._number

    def number(self, bucket: Any) -> int:
        return self._number_of_bucket[id(bucket)]

    def part(self, number: int) -> tuple[Column, int]:
        """Return (column, number of elements) of the bucket ``number``."""
        column, tensor = self._parts[number]
        return column, tensor.numel()

    def whole(self, optimizer: Any) -> Any:
        """Return the data-parallel group, spanning all optimizer instances, for the parameters of ``optimizer``."""
        buffers = optimizer.buffers
        return self._whole[self.number(buffers[0].buckets[0])] if buffers else self._experts

    def ready(self, group: Any) -> None:
        """Scale the buckets of ``group``, which have all gradients of this pass, and allow the step to sum them."""
        self._finish_group(group)
        for number in self._number[id(group)]:
            self.gradients.ready(number)

    def need(self, group: Any) -> None:
        """Wait until the last update has gathered the parameters of bucket group ``group`` (``Overlap.complete``)."""
        if self.overlap is not None and self.overlap.pending:
            for number in self._number[id(group)]:
                self.overlap.complete(number)

    def begin(self) -> None:
        """Begin a step; does nothing, because Megatron has zeroed the gradients."""

    def new_pass(self, *, again: bool) -> None:
        """Begin a forward and backward pass over the model.

        ``again``: True if the step has already run a pass, whose LOCAL segments are then unscaled.
        """
        for group in self._groups:
            group.per_param_grad_ready_counts = {}
            if again and id(group) in self._finished:
                for bucket in group.buckets:
                    number = self.number(bucket)
                    if self._factors[number] != 1.0:
                        self.gradients.divide_local(number, self._factors[number])
        self._finished.clear()

    def finish_pass(self) -> None:
        """Finish the pass: scale the buckets for which Megatron has not called ``start_grad_sync``."""
        for group in self._groups:
            if id(group) not in self._finished:
                self._finish_group(group)

    def _finish_group(self, group: Any) -> None:
        """Copy gradients from outside the buffer into it, run Megatron's checks if requested, and scale the buckets."""
        self._finished.add(id(group))
        for bucket in group.buckets:
            for param in getattr(bucket, "params_with_extra_main_grads", ()):
                if getattr(param, "main_grad_copy_in_grad_buffer", None) is not None:
                    param.main_grad_copy_in_grad_buffer.copy_(param.main_grad)
        config = group.ddp_config
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            group.check_grads(config.check_for_nan_in_grad, config.check_for_large_grads)
        with torch.no_grad():
            for bucket in group.buckets:  # REDUCED segments are scaled too, but their sums have been saved
                factor = self._factors[self.number(bucket)]
                if factor != 1.0:
                    bucket.grad_data *= factor

    def finish(self, group: Any) -> None:
        """Mark the sum of the bucket group ``group`` as complete for Megatron."""
        if hasattr(group, "_copy_back_extra_main_grads"):
            group._copy_back_extra_main_grads()
        group.grad_reduce_finished = True


def install(known: Callable[[], Buckets | None]) -> None:
    """Wrap Megatron's methods of bucket groups; raises UserError if their signatures are unknown.

    ``known``: function that returns the model's ``Buckets``, or None before they exist.  Bucket groups of other models
    are unchanged.
    """

    def start_grad_sync(buckets: Buckets, group: Any, *unused: Any, **unused_too: Any) -> None:
        if not buckets.committed:
            buckets.ready(group)

    def finish_grad_sync(buckets: Buckets, group: Any, *unused: Any, **unused_too: Any) -> None:
        if buckets.committed:
            buckets.finish(group)

    def start_param_sync(buckets: Buckets, group: Any, force_sync: bool = False, *unused: Any, **too: Any) -> None:
        if force_sync:
            buckets.need(group)

    def finish_param_sync(buckets: Buckets, group: Any, *unused: Any, **unused_too: Any) -> None:
        buckets.need(group)

    def of_ours(act: Callable[..., None], *, gathers: bool = False) -> Wrapper:
        """Return a wrapper that calls ``act`` instead of the original method for bucket groups of the model.

        ``gathers``: True to replace the method only with the distributed optimizer.
        """

        def wrapper(original: Callable[..., None]) -> Callable[..., None]:
            def method(self: Any, *args: Any, **kwargs: Any) -> None:
                buckets = known()
                if buckets is None or not buckets.knows(self) or (gathers and buckets.shards is None):
                    original(self, *args, **kwargs)
                else:
                    act(buckets, self, *args, **kwargs)

            return method

        return wrapper

    group = "_ParamAndGradBucketGroup"
    monkeypatch.wrap(f"{group}.start_param_sync", of_ours(start_param_sync, gathers=True))
    monkeypatch.wrap(f"{group}.finish_param_sync", of_ours(finish_param_sync, gathers=True))
    monkeypatch.wrap(f"{group}.start_grad_sync", of_ours(start_grad_sync))
    monkeypatch.wrap(f"{group}.finish_grad_sync", of_ours(finish_grad_sync))
