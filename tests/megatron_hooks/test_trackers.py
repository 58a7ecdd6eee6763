"""What Megatron adds up beside the losses, taken from each worker and given to all, without a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import training

from recover_megatron.instep.grid import launch_grid
from recover_megatron.megatron_hooks import trackers as module
from recover_megatron.megatron_hooks.loops.megatron_lm import MEGATRON_LM
from recover_megatron.megatron_hooks.trackers import Trackers

ARGS = SimpleNamespace(
    num_experts=4,
    moe_router_load_balancing_type=["aux_loss"],
    moe_z_loss_coeff=1e-3,
    num_layers=2,
    mtp_num_layers=1,
    dsa_indexer_loss_coeff=None,
)
LAUNCHED = 4
GRID = launch_grid(LAUNCHED, tensor=1, context=1, pipeline=1, inner_ranks=1)
TAIL = range(LAUNCHED)


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> moe_logging.MoEMetricsTracker:
    """Megatron's trackers, empty."""
    experts = moe_logging.MoEMetricsTracker()
    monkeypatch.setattr(moe_logging, "_MOE_METRICS_TRACKER", experts)
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    monkeypatch.setattr(training, "_seqlen_stats_in_iteration", None)
    replica = SimpleNamespace(get_tensor_and_context_parallel_group=lambda: "within the replica")
    monkeypatch.setattr(module, "parallel_state", replica)
    made = experts.ensure_initialized
    monkeypatch.setattr(experts, "ensure_initialized", lambda name, layers: made(name, layers, "cpu"))
    return experts


def run(experts: moe_logging.MoEMetricsTracker, microbatches: int) -> None:
    """What so many microbatches add, each the same."""
    for _ in range(microbatches):
        experts.record("load_balancing_loss", torch.tensor(1.0), 1, 3)
        experts.record("z_loss", torch.tensor(2.0), 2, 3, avg_group="all replicas")
        its = MTPLossLoggingHelper.tracker
        for name, value in (("loss_values", 3.0), ("correct_values", 4.0), ("total_values", 5.0)):
            its[name] = its.get(name, torch.zeros(1)) + value
        its["avg_group"] = "all replicas"


def test_each_worker_is_given_what_equal_shares_of_the_launch_would_have_given_it(
    megatron: moe_logging.MoEMetricsTracker,
) -> None:
    """Eight microbatches; one of two workers that are left ran five of them, and something before that was lost."""
    trackers = Trackers(ARGS, TAIL, GRID)
    nothing = trackers.read()
    assert nothing.tolist() == [0.0] * trackers.size
    run(megatron, 3)
    trackers.begin()
    assert trackers.read().tolist() == [0.0] * trackers.size
    run(megatron, 5)
    mine = trackers.read()
    trackers.write(mine + 3 / 5 * mine)
    share = 8 / LAUNCHED
    assert megatron.metrics["load_balancing_loss"].values.tolist() == [1.0 * share, 0, 0]
    assert megatron.metrics["z_loss"].values.tolist() == [0, 2.0 * share, 0]
    its = MTPLossLoggingHelper.tracker
    assert its["loss_values"].tolist() == [3.0 * share]
    assert (its["correct_values"].tolist(), its["total_values"].tolist()) == ([4.0 * 8], [5.0 * 8])


def test_the_share_is_that_of_the_launch_in_a_run_that_may_grow(megatron: moe_logging.MoEMetricsTracker) -> None:
    grid = GRID.with_room_for(2 * LAUNCHED)
    tail = grid.column(TAIL)
    assert len(tail) == 2 * LAUNCHED
    trackers = Trackers(ARGS, tail, grid)
    run(megatron, 8)
    trackers.write(trackers.read())
    assert megatron.metrics["load_balancing_loss"].values.tolist() == [8 / LAUNCHED, 0, 0]
    assert MTPLossLoggingHelper.tracker["loss_values"].tolist() == [3.0 * 8 / LAUNCHED]


def test_nothing_is_left_to_be_asked_of_other_replicas(megatron: moe_logging.MoEMetricsTracker) -> None:
    trackers = Trackers(ARGS, TAIL, GRID)
    run(megatron, 1)
    trackers.write(trackers.read())
    assert [entry.needs_dp_avg for entry in megatron.metrics.values()] == [False, False]
    assert [entry.avg_group for entry in megatron.metrics.values()] == [None, "within the replica"]
    assert MTPLossLoggingHelper.tracker["avg_group"] is None


def test_lengths_of_packed_sequences_are_those_of_the_whole_batch(
    megatron: moe_logging.MoEMetricsTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = Trackers(ARGS, TAIL, GRID)
    monkeypatch.setattr(training, "_seqlen_stats_in_iteration", torch.tensor([6.0, 20.0], dtype=torch.float64))
    monkeypatch.setattr(training, "_seqlen_stats_active", True)
    monkeypatch.setattr(training, "consume_seqlen_stats_in_iteration", training.consume_seqlen_stats_in_iteration)
    monkeypatch.setattr(module.parallel_state, "get_context_parallel_world_size", lambda: 2, raising=False)
    module.install(MEGATRON_LM, lambda: True)
    trackers.write(4 * trackers.read())
    assert training.consume_seqlen_stats_in_iteration() == (12.0, 40.0)  # two context-parallel ranks counted the same
    assert training.consume_seqlen_stats_in_iteration() == (None, None)
