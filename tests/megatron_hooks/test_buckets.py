"""What is done to a gradient bucket on its way to the sum, without a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron.collectives.ledger import Span
from recover_megatron.instep.grid import launch_grid
from recover_megatron.megatron_hooks import buckets as module
from recover_megatron.megatron_hooks.buckets import Buckets

SCALE = 1 / 4


def test_gradients_are_scaled_before_the_sum_and_local_ones_back_for_lost_microbatches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = launch_grid(4, tensor=1, context=1, pipeline=1, inner_ranks=1)
    assignment: Any = SimpleNamespace(grid=grid, me=0)
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
    buckets = Buckets([chunk], assignment, 1)
    buckets.new_pass(again=False)
    buckets.ready(group)
    buckets.settle()
    assert torch.equal(gradients, SCALE * its_own)  # once

    ledger = buckets.gradients._parts[0][1].ledger
    ledger.mark(Span(0, 4), epoch=1)  # and the sum of the first half was finished when somebody died
    finished = gradients[:4].clone()
    (aside,) = buckets.gradients.set_aside()
    buckets.new_pass(again=True)
    assert torch.equal(gradients[4:], its_own[4:])
    gradients += 8  # the lost microbatches
    buckets.settle()
    aside.put_back()
    assert torch.equal(gradients[:4], finished)
    assert torch.equal(gradients[4:], SCALE * (its_own[4:] + 8))

    ledger.mark(Span(4, 8), epoch=2)
    summed = gradients.clone()
    buckets.finish(group)
    assert torch.equal(gradients, summed)
    assert group.grad_reduce_finished
