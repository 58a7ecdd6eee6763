"""What is done to a shard of gradients of Megatron-FSDP on its way to the sum, without a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron.collectives.ledger import Span
from recover_megatron.instep.grid import launch_grid
from recover_megatron.megatron_hooks.fsdp import buckets as module
from recover_megatron.megatron_hooks.fsdp.buckets import FsdpBuckets, padding
from recover_megatron.megatron_hooks.microbatches import Accumulated

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
    monkeypatch.setattr(module, "column_of", lambda group: group)
    pipeline = Pipeline(buffer)
    index = SimpleNamespace(get_dp_group=lambda: (0, 1, 2, 3), get_outer_fsdp_group=lambda is_expert_parallel: (1, 3))
    group = SimpleNamespace(main_grad_buffer=buffer, is_expert_param=False)
    frozen = SimpleNamespace(main_grad_buffer=None)
    chunk: Any = SimpleNamespace(
        megatron_fsdp_dist_index=index,
        param_and_grad_buffer=SimpleNamespace(parameter_groups=[frozen, group]),
        module=SimpleNamespace(grad_reduce_pipeline=pipeline, raw_param={}),
    )
    return FsdpBuckets([chunk], SimpleNamespace(grid=grid), Accumulated(), None), pipeline


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
    buckets.settle()
    assert pipeline.outer == [False] * 3
    assert buffer.data.tolist() == [0, 3, 6, 9, 12, 0]


@pytest.mark.parametrize("sharded", [True, False])
def test_another_pass_adds_to_what_the_shard_has(monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    """Where the whole bucket is kept, whatever else is in it has no part in the next reduce-scatter."""
    buffer = Buffer(sharded=sharded)
    buckets, pipeline = buckets_of(buffer, monkeypatch)
    buckets.new_pass(again=False)
    microbatches(pipeline, 2)
    buckets.settle()
    if not sharded:
        buffer.data[:6] = 7
    buckets.new_pass(again=True)
    if not sharded:
        assert buffer.data.tolist() == [0] * 12
    microbatches(pipeline, 1)
    buckets.settle()
    buckets.settle()
    assert buffer.get_shard_from_local_buffer().tolist() == [0, 3, 6, 9, 12, 0]
