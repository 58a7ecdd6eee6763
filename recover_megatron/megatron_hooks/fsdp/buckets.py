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
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from megatron.core import parallel_state

from recover_megatron.collectives.ledger import Span
from recover_megatron.instep.assignment import Assignment
from recover_megatron.instep.faults import Disagreement
from recover_megatron.instep.gradients import Column, Gradients
from recover_megatron.instep.overlap import Overlap
from recover_megatron.instep.shards import Shards, ring_order
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.fsdp import version2
from recover_megatron.megatron_hooks.groups import column_of
from recover_megatron.megatron_hooks.microbatches import Accumulated
from recover_megatron.megatron_hooks.optimizer.keeping import Keeping
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragment, ShardFragments

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

    def __init__(
        self, model: Sequence[Any], assignment: Assignment, accumulated: Accumulated, shadows: int | None
    ) -> None:
        grid = assignment.grid
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
        self.shards = None if shadows is None else Shards(columns, shadows, assignment)
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

    def __init__(self, model: Sequence[Any], assignment: Assignment, accumulated: Accumulated) -> None:
        grid = assignment.grid
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


@dataclass(eq=False)
class OuterBucket:
    """This worker's shard of one of Megatron-FSDP's parameter groups, as `shard_fragments` knows buckets."""

    group: Any
    param_to_index: dict[Any, tuple[int, int]] = field(init=False)
    """Parameter -> the elements of the shard that are its own; without those that have none here."""

    def __post_init__(self) -> None:
        its = self.group.main_grad_buffer
        ranges = {p: its._get_item_local_shard_index(item) for item, p in enumerate(self.group.params)}
        first = its.shard_bucket_index.local_data_index
        self.param_to_index = {p: (a - first, b - first) for p, (a, b) in ranges.items() if a < b}

    @property
    def params_list(self) -> list[Any]:
        return list(self.param_to_index)

    @property
    def param_data(self) -> torch.Tensor:
        shard: torch.Tensor = self.group.model_weight_buffer.get_shard_from_local_buffer()
        return shard

    @property
    def grad_data(self) -> torch.Tensor:
        shard: torch.Tensor = self.group.main_grad_buffer.get_shard_from_local_buffer()
        return shard

    @property
    def main(self) -> torch.Tensor:
        """The 32-bit parameters that Megatron's own optimizer would update, flat; without memory once released."""
        shard: torch.Tensor = self.group.main_weight_buffer.get_shard_from_local_buffer()
        return shard

    def release(self) -> None:
        """Give up the memory of ``main``, for good."""
        self.group.main_weight_buffer.data.untyped_storage().resize_(0)


LAUNCH = -1
"""The unit under which all that Megatron has is held, until it is cut."""
MAIN, MOMENTS = "main", ("exp_avg", "exp_avg_sq")


class InShardGroups(Keeping):
    """--outer-dp-sharding-strategy optim: the optimizer's state is spread over the shard groups, too, and has shadows.

        worker's shard of a buffer   |--------------- inner shard ---------------|    equal in its column of K workers
        main parameters, moments     |== unit 0 ==|== unit 1 ==| .. |= unit K-1 =|    each at its owner and its shadows

    Megatron is built as for ``no_shard`` (`state`): a shard group has all gradients and the model's parameters, as with
    ``optim``, too.  What it keeps of the state, main parameters and moments, is given up once the pieces
    (`optimizer.shard_fragments`) have memory of their own; for a checkpoint each worker has all that its column shares
    again, as long as it is written.  So what is saved is what Megatron saves with ``no_shard``.  (Megatron 0.19.2
    itself trains something else with this flag: `hostdevice.flags.outer_sharding`.)

    ``parts``: (model chunk, column, bucket) of each bucket, by its number.
    """

    has_all = True

    def __init__(self, parts: Sequence[tuple[Any, Column, OuterBucket]]) -> None:
        self._parts = parts
        self._chunks = list({id(chunk): chunk for chunk, _, _ in parts}.values())
        self._optimizers: list[Any] = []
        self._params: dict[int, list[list[Any]]] = {}
        """Optimizer -> the parameters of each of its groups, as Megatron made them."""
        self._lent: dict[int, list[dict[str, torch.Tensor]]] = {}

    @property
    def tells_norms(self) -> Column:
        return self._parts[0][1]

    def norm_group(self) -> Any:
        return self._optimizers[0].get_grad_stats_parallel_group()

    def fragments(self, one: Any, groups: dict[Any, int], shadow_device: torch.device | None) -> ShardFragments:
        self._optimizers.append(one)
        self._params[id(one.optimizer)] = [list(group["params"]) for group in one.optimizer.param_groups]
        buckets = {n: bucket for n, (chunk, _, bucket) in enumerate(self._parts) if chunk in one.model_chunks}
        return ShardFragments(one, buckets, {p.orig_param: n for p, n in groups.items()}, shadow_device)

    def adopt(self, fragments: ShardFragments, unit: int, parts: dict[int, Sequence[tuple[int, int]]]) -> None:
        for chunk in self._chunks:
            chunk.param_and_grad_buffer.copy_main_weights_to_model_weights()
        state = fragments.inner.state
        for number, bucket in fragments.buckets.items():
            for its in self._whole(fragments, bucket):
                a, b = bucket.param_to_index[its.orig_param]
                values = {name: _flat(value) for name, value in state.get(its, {}).items()}
                fragments.borrow(LAUNCH, number, its.orig_param, bucket.main[a:b], values)

    def adopted(self) -> None:
        for _, _, bucket in self._parts:
            bucket.release()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Without the gathering of parameters in the shard group, with which Megatron ends its step."""
        with ExitStack() as replaced:
            for chunk in self._chunks:
                replaced.enter_context(monkeypatch.replaced(chunk, start_param_sync=lambda *_, **__: None))
            yield

    def gathered(self) -> None:
        for chunk in self._chunks:
            chunk.start_param_sync()

    # ---- checkpoints

    def loading(
        self, one: Any, fragments: ShardFragments, held: dict[int, list[ShardFragment]]
    ) -> AbstractContextManager[None]:
        raise ValueError("with --use-megatron-fsdp no checkpoint is loaded in place")  # see `layout.no_way_back`

    def lend(self, fragments: ShardFragments, *, moments: bool) -> list[tuple[Column, torch.Tensor]]:
        lent: list[dict[str, torch.Tensor]] = []
        found: list[tuple[Column, torch.Tensor]] = []
        names = MOMENTS if moments else ()
        for number, bucket in fragments.buckets.items():
            # New memory each time: where a checkpoint is interrupted, others may still write to what it had.
            its = {name: torch.zeros_like(bucket.param_data, dtype=torch.float32) for name in (MAIN, *names)}
            for fragment in fragments.overlapping(number, 0, bucket.param_data.numel()):
                place = slice(fragment.start, fragment.stop)
                its[MAIN][place].copy_(fragment.tensor)
                for name in names:
                    if name in fragment.state:
                        its[name][place].copy_(fragment.state[name])
            lent.append(its)
            found += [(self._parts[number][1], tensor) for tensor in its.values()]
        self._lent[id(fragments)] = lent
        return found

    @contextmanager
    def show(self, fragments: ShardFragments) -> Iterator[None]:
        inner = fragments.inner
        held = {fragment.tensor: fragment.state for fragment in fragments}
        groups = [group["params"] for group in inner.param_groups]
        other = next((_without_moments(state) for state in held.values() if state), None)
        before, main = dict(inner.state), list[tuple[Any, torch.Tensor]]()
        try:
            for group, params in zip(inner.param_groups, self._params[id(inner)], strict=True):
                group["params"] = params
            inner.state.clear()
            for bucket, lent in zip(fragments.buckets.values(), self._lent[id(fragments)], strict=True):
                for its in self._whole(fragments, bucket):
                    a, b = bucket.param_to_index[its.orig_param]
                    main.append((its, its._local_tensor))
                    its._local_tensor = lent[MAIN][a:b].view(its._local_tensor.shape)
                    if other is not None:
                        whole = {name: _like(its, lent[name][a:b]) for name in MOMENTS if name in lent}
                        inner.state[its] = whole | other
            yield
        finally:
            for its, without_memory in main:
                its._local_tensor = without_memory
            inner.state.clear()
            inner.state.update(before)
            for group, params in zip(inner.param_groups, groups, strict=True):
                group["params"] = params
            self._lent.pop(id(fragments), None)

    def _whole(self, fragments: ShardFragments, bucket: OuterBucket) -> Iterator[Any]:
        """Megatron's own parameters of the optimizer that have elements in a bucket."""
        every = (its for group in self._params[id(fragments.inner)] for its in group)
        return (its for its in every if its.orig_param in bucket.param_to_index)


def _flat(value: Any) -> Any:
    local = getattr(value, "_local_tensor", value)
    return local.view(-1) if isinstance(local, torch.Tensor) and local.dim() else local


def _like(parameter: Any, flat: torch.Tensor) -> torch.Tensor:
    """A distributed tensor as ``parameter`` is one, whose part here is ``flat``."""
    whole = torch.zeros_like(parameter.data)
    whole._local_tensor = flat.view(whole._local_tensor.shape)
    return whole


def _without_moments(state: dict[str, Any]) -> dict[str, Any]:
    """How many updates there were, where the optimizer counts them by parameter."""
    return {name: value for name, value in state.items() if name not in MOMENTS}
