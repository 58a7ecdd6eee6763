"""What is done to a gradient bucket, and to a shard of Megatron-FSDP's, on its way to the sum, without a run."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp

from recover_megatron.collectives.ledger import Span
from recover_megatron.errors import Disagreement
from recover_megatron.megatron_hooks.fsdp import fsdp_buckets as fsdp_buckets
from recover_megatron.megatron_hooks.fsdp.fsdp_buckets import FsdpBuckets, padding
from recover_megatron.megatron_hooks.fsdp.fsdp_state import abandon
from recover_megatron.megatron_hooks.gradients import buckets as module
from recover_megatron.megatron_hooks.gradients import microbatches as passes
from recover_megatron.megatron_hooks.gradients.buckets import Buckets
from recover_megatron.megatron_hooks.gradients.microbatches import Accumulated, whole_pass
from recover_megatron.workload.grid import launch_grid

SCALE = 1 / 4


def test_gradients_are_scaled_before_the_sum_and_local_ones_back_for_lost_microbatches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = launch_grid(4, tensor=1, context=1, pipeline=1, inner_ranks=1)
    manager: Any = SimpleNamespace(view=SimpleNamespace(grid=grid), shards=lambda *_: None)
    monkeypatch.setattr(module, "column_of", lambda group: (0, 1, 2, 3))
    monkeypatch.setattr(module, "launched_of", lambda group: (0, 1, 2, 3))
    gradients = torch.arange(1.0, 9.0)
    its_own = gradients.clone()
    unchecked = SimpleNamespace(check_for_nan_in_grad=False, check_for_large_grads=False)
    bucket = SimpleNamespace(grad_data=gradients, gradient_scaling_factor=SCALE)
    group = SimpleNamespace(buckets=[bucket], data_parallel_group=None, ddp_config=unchecked)
    chunk = SimpleNamespace(
        bucket_groups=[group],
        expert_parallel_bucket_groups=[],
        ddp_config=SimpleNamespace(use_distributed_optimizer=False, overlap_param_gather=False),
        dp_cp_group=None,
        expt_dp_group=None,
    )
    buckets = Buckets([chunk], manager, 1)
    buckets.new_pass(again=False)
    buckets.ready(group)
    buckets.finish_pass()
    assert torch.equal(gradients, SCALE * its_own)  # once

    ledger = buckets.gradients._parts[0][1].ledger
    ledger.mark(Span(0, 4), epoch=1)  # and the sum of the first half was finished when somebody died
    finished = gradients[:4].clone()
    (saved,) = buckets.gradients.save_sums()
    buckets.new_pass(again=True)
    assert torch.equal(gradients[4:], its_own[4:])
    gradients += 8  # the lost microbatches
    buckets.finish_pass()
    saved.restore()
    assert torch.equal(gradients[:4], finished)
    assert torch.equal(gradients[4:], SCALE * (its_own[4:] + 8))

    ledger.mark(Span(4, 8), epoch=2)
    summed = gradients.clone()
    buckets.finish(group)
    assert torch.equal(gradients, summed)
    assert group.grad_reduce_finished


GARBAGE = 1e19


class Buffer:
    """One of Megatron-FSDP's: 12 elements, of which two parameters are 0..5 and 6..10; the second half is ours."""

    def __init__(self, *, sharded: bool) -> None:
        self.is_data_distributed = sharded
        self.data = torch.zeros(6 if sharded else 12)
        self.item_index_map = {0: None, 1: None}
        self.shard_bucket_index = SimpleNamespace(local_data_index=0 if sharded else 6, size=6)

    def _get_item_local_shard_index(self, item: int) -> tuple[int, int]:
        at = self.shard_bucket_index.local_data_index
        return (0, 0) if item == 0 else (at + 1, at + 5)

    def get_shard_from_local_buffer(self) -> torch.Tensor:
        at = self.shard_bucket_index.local_data_index
        return self.data[at : at + 6]


class Pipeline:
    """Adds a microbatch's gradient to the shard, padding and all, as a reduce-scatter of unwritten memory does."""

    rs_stream = None

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.outer: list[bool] = []

    def _bucket_group_gradient_reduce(
        self, bucket_group: list[int], async_op: bool = False, outer_fsdp_group_grad_reduce: bool = False
    ) -> bool:
        self.outer.append(outer_fsdp_group_grad_reduce)
        self._buffer.get_shard_from_local_buffer().add_(torch.tensor([GARBAGE, 1, 2, 3, 4, GARBAGE]))
        return True


def buckets_of(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> tuple[FsdpBuckets, Pipeline]:
    grid = launch_grid(4, tensor=1, context=1, pipeline=1, inner_ranks=2)
    monkeypatch.setattr(fsdp_buckets, "column_of", lambda group: group)
    pipeline = Pipeline(buffer)
    index = SimpleNamespace(get_dp_group=lambda: (0, 1, 2, 3), get_outer_fsdp_group=lambda is_expert_parallel: (1, 3))
    group = SimpleNamespace(main_grad_buffer=buffer, is_expert_param=False)
    frozen = SimpleNamespace(main_grad_buffer=None)
    chunk: Any = SimpleNamespace(
        megatron_fsdp_dist_index=index,
        param_and_grad_buffer=SimpleNamespace(parameter_groups=[frozen, group]),
        module=SimpleNamespace(grad_reduce_pipeline=pipeline, raw_param={}),
    )
    return FsdpBuckets([chunk], SimpleNamespace(view=SimpleNamespace(grid=grid)), Accumulated(), None), pipeline


def microbatches(pipeline: Any, count: int) -> None:
    for number in range(count):
        pipeline._bucket_group_gradient_reduce([1], True, outer_fsdp_group_grad_reduce=number == count - 1)


@pytest.mark.parametrize("sharded", [True, False])
def test_what_belongs_to_no_parameter_is_told_by_its_place_in_the_shard(sharded: bool) -> None:
    assert list(padding(Buffer(sharded=sharded))) == [Span(0, 1), Span(5, 6)]


def test_a_shard_is_summed_by_the_step_alone_and_without_what_belongs_to_no_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = Buffer(sharded=True)
    buckets, pipeline = buckets_of(buffer, monkeypatch)
    assert buckets.gradients.columns == [(1, 3)]
    assert set(buckets.tail) == {0, 1, 2, 3}
    buckets.new_pass(again=False)
    microbatches(pipeline, 3)
    buckets.finish_pass()
    assert pipeline.outer == [False] * 3
    assert buffer.data.tolist() == [0, 3, 6, 9, 12, 0]


@pytest.mark.parametrize("sharded", [True, False])
def test_another_pass_adds_to_what_the_shard_has(monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    """Where the whole bucket is kept, whatever else is in it has no part in the next reduce-scatter."""
    buffer = Buffer(sharded=sharded)
    buckets, pipeline = buckets_of(buffer, monkeypatch)
    buckets.new_pass(again=False)
    microbatches(pipeline, 2)
    buckets.finish_pass()
    if not sharded:
        buffer.data[:6] = 7
    buckets.new_pass(again=True)
    if not sharded:
        assert buffer.data.tolist() == [0] * 12
    microbatches(pipeline, 1)
    buckets.finish_pass()
    buckets.finish_pass()
    assert buffer.get_shard_from_local_buffer().tolist() == [0, 3, 6, 9, 12, 0]


ALLOCATORS = fsdp.TemporaryBucketAllocator, fsdp.StorageResizeBasedBucketAllocator


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_bucket_of_an_interrupted_iteration_keeps_its_memory_and_the_next_one_gets_other(allocator: Any) -> None:
    buckets = allocator()
    held = buckets.allocate(3, 8, torch.float32, torch.device("cpu")).data  # as an operation of gloo's holds it
    held.fill_(1.0)
    abandon(SimpleNamespace(temporary_bucket_allocator=buckets, bucket_index=SimpleNamespace(bucket_id=3)))
    assert held.untyped_storage().nbytes() == 32
    again = buckets.allocate(3, 8, torch.float32, torch.device("cpu")).data
    held.fill_(7.0)  # a late write
    assert again.untyped_storage().data_ptr() != held.untyped_storage().data_ptr()
    buckets.free(3)
    assert held.untyped_storage().nbytes() == 32


UNITS = [SimpleNamespace(fsdp_unit_id=unit, params=[torch.empty(8)], dtype=torch.float32) for unit in (0, 1, 2)]
SMALL = SimpleNamespace(fsdp_unit_id=None, params=[torch.empty(2)], dtype=torch.float32)
"""Megatron-FSDP's parameter groups: of three layers, and of what is in none."""


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("pool", [fsdp.FixedPoolAllocator, fsdp.MaxPoolAllocator])
def test_both_double_buffers_of_an_interrupted_iteration_are_free_and_have_new_memory(
    monkeypatch: pytest.MonkeyPatch, pool: Any, persistent: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    name = f"of-test-{pool.__name__}-{persistent}"
    buckets = pool(name, [*UNITS, SMALL], fallback_to_persistent_buffer=persistent)

    def take(bucket: int) -> torch.Tensor:
        return buckets.allocate(bucket, 8, torch.float32, torch.device("cpu")).data

    held = [take(bucket) for bucket in (0, 1, 3)]  # as operations that are left hold them
    with pytest.raises(AssertionError, match="No buffer found"):
        take(2)
    for bucket in range(4):
        abandon(SimpleNamespace(temporary_bucket_allocator=buckets, bucket_index=SimpleNamespace(bucket_id=bucket)))
    again = [take(bucket).zero_() for bucket in (1, 2, 3)]
    for its in held:
        assert its.untyped_storage().nbytes() == 32
        its.fill_(7.0)  # a late write
    assert [its.sum().item() for its in again] == [0, 0, 0]
    assert sorted(buckets.using_buffer) == [1, 2]
    assert buckets.idle_buffer == []


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_megatron_itself_frees_a_bucket_whoever_holds_it(allocator: Any) -> None:
    """Why ``abandon`` is there."""
    buckets = allocator()
    held = buckets.allocate(3, 8, torch.float32, torch.device("cpu")).data
    buckets.free(3)
    assert held.untyped_storage().nbytes() == 0


class Shared(torch.nn.Module):
    """What several parts of a model may have, experts, what is not trained, and what one part alone has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(2, 2)
        self.experts = torch.nn.Linear(2, 2)
        for param in self.experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        self.norm = torch.nn.LayerNorm(2)
        self.output_layer = torch.nn.Linear(2, 2)


def add_all(*hooks: Callable[..., None]) -> None:
    """As a backward pass does."""
    for hook in hooks:
        hook()


def test_a_microbatch_is_counted_once_however_often_its_backward_pass_adds_to_a_parameter() -> None:
    """Each part of a model may have a backward pass, and a layer may be used twice and computed again."""
    accumulated, chunk = Accumulated(), torch.nn.Module()
    make, backward = accumulated._counting(lambda ddp, param: lambda *unused: None), accumulated._calling(add_all)
    shared, inner = (make(chunk, torch.nn.Parameter(torch.zeros(1))) for _ in range(2))
    before = accumulated.counts([chunk])
    for _ in range(3):
        backward(shared, inner, shared)
    accumulated.check([chunk], before, [3])
    backward(shared)
    accumulated.check([chunk], before, [4])
    with pytest.raises(Disagreement, match="added the gradients of 4 microbatches instead of 3"):
        accumulated.check([chunk], before, [3])


def test_in_megatron_fsdp_a_microbatch_is_counted_by_whichever_dense_parameter_it_has_a_gradient_of() -> None:
    """A model may begin with its vision transformer; and one that is trained again is watched again."""
    accumulated, chunk = Accumulated(), torch.nn.Module()
    vision, language = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    for _ in range(2):
        accumulated.watch(chunk, [vision, language])
    before = accumulated.counts([chunk])
    backward = accumulated._calling(torch.Tensor.backward)
    backward(vision * language)
    for _ in range(2):
        backward(language * 2)
    accumulated.check([chunk], before, [3])
    with pytest.raises(Disagreement, match="added the gradients of 3 microbatches instead of 2"):
        accumulated.check([chunk], before, [2])


def test_what_a_pass_has_kept_that_is_given_up_is_dropped_and_both_streams_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside, waited = object(), list[Any]()
    monkeypatch.setattr(passes, "get_comm_stream", lambda: beside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=waited.append))
    chunk, hidden = Shared(), torch.nn.Sequential(torch.nn.Linear(1, 1))
    chunk.experts._fused_ops = (hidden,)  # type: ignore[assignment]
    layers = [chunk.norm, hidden[0]]
    for layer in layers:
        layer.wgrad_store = SimpleNamespace(context=Queue())  # type: ignore[assignment]
        layer.wgrad_store.context.put("of a microbatch")
    chunk.output_layer.wgrad_store = SimpleNamespace(context=None)  # type: ignore[assignment]
    with whole_pass([chunk]):
        pass
    assert [layer.wgrad_store.context.qsize() for layer in layers] == [1, 1]
    assert waited == []
    with pytest.raises(RuntimeError, match="a mate"), whole_pass([chunk]):
        raise RuntimeError("a mate is dead")
    assert [layer.wgrad_store.context.qsize() for layer in layers] == [0, 0]
    assert waited == [beside]
