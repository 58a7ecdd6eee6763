"""A worker that goes back to an older state has nothing left of the newer one: what did not exist then is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from recover_megatron.hostdevice.apex_stub import FusedAdam
from recover_megatron.megatron_hooks import trackers
from recover_megatron.megatron_hooks.state import load_groups, plain_groups
from recover_megatron.megatron_hooks.trackers import LogTotals


def stepped(optimizer: FusedAdam, parameter: torch.nn.Parameter, times: int) -> None:
    for _ in range(times):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def test_a_step_count_in_the_groups_is_that_of_the_older_state() -> None:
    """Adam of apex and of Transformer Engine counts there; before its first step there is no count."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedAdam([parameter], lr=0.5)
    before = plain_groups(optimizer.param_groups)
    stepped(optimizer, parameter, 3)
    after = plain_groups(optimizer.param_groups)
    assert optimizer.param_groups[0]["step"] == 3
    load_groups(optimizer.param_groups, before)
    assert "step" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["params"] == [parameter]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    load_groups(optimizer.param_groups, after)
    assert optimizer.param_groups[0]["step"] == 3


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Megatron's log of multi-token prediction counts in."""
    its: dict[str, Any] = {"values": torch.zeros(1)}
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", its)
    monkeypatch.setattr(trackers, "get_timers", lambda: SimpleNamespace(_timers={}))
    return its


def test_what_the_log_counts_from_the_start_of_the_run_leaves_out_what_is_run_again(tracker: dict[str, Any]) -> None:
    log = LogTotals()
    at_the_start = log.tree()
    tracker["cumulative_correct_values"], tracker["cumulative_total_values"] = torch.ones(1), torch.ones(1)
    log.load(at_the_start)
    assert set(tracker) == {"values"}, "Megatron begins to count anew"
