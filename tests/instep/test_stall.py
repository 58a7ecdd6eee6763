"""Most replicas stop together, as by a disk or a switch that they share: the run waits, and goes on whole."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drawn import EVERYTHING
from tests.harness.waiting import meanwhile, written_lines
from tests.instep.conftest import Runs
from tests.instep.runs import LAYOUTS, QUICK_TO_SEE_A_HANG, Case, Layout, Strike

pytestmark = pytest.mark.slow

DP4 = LAYOUTS[0]
TP2 = Layout("tp2-dp2", 2, tensor=2)
STALLS = [
    (DP4, (Strike(0, 0, 3, "forward"), Strike(1, 0, 3, "data"), Strike(3, 0, 3, "backward"))),
    (TP2, (Strike(0, 1, 3, "backward"), Strike(1, 0, 3, "forward"))),
    (DP4, (Strike(0, 0, 3, "reduce-scatter"), Strike(1, 0, 3, "forward"), Strike(2, 0, 3, "all-gather"))),
    (DP4, (Strike(0, 0, 3, "optimizer"), Strike(1, 0, 3, "agree"), Strike(2, 0, 4, "forward"))),
    (DP4, (Strike(0, 0, 3, "eval"), Strike(1, 0, 3, "eval"), Strike(2, 0, 3, "eval"))),
]


def when_stalled(out: Path, then: Callable[[list[dict[str, Any]]], None]) -> AbstractContextManager[None]:
    """Call ``then`` with the coordinator's events once it tells of a stall, while the block runs."""

    def look() -> bool:
        events = [json.loads(line) for line in written_lines(out / "events-0.jsonl")]
        stalled = any(event["event"] == "stalled" for event in events)
        if stalled:
            then(events)
        return stalled

    return meanwhile(look)


@pytest.mark.parametrize(("layout", "stopped"), STALLS if EVERYTHING else STALLS[:2], ids=lambda part: str(part)[:60])
def test_workers_that_stop_together_are_waited_for_and_nothing_changes_but_rounding(
    runs: Runs, tmp_path: Path, layout: Layout, stopped: tuple[Strike, ...]
) -> None:
    spec = ",".join(replace(strike, kind="stop").spec(layout) for strike in stopped)
    case = Case(layout, evaluated=True).with_flags(*QUICK_TO_SEE_A_HANG, "--recover-inject", spec)

    def go_on(events: list[dict[str, Any]]) -> None:
        pids = {event["worker"]: event["pid"] for event in events if event["event"] == "attached"}
        for strike in stopped:
            os.kill(pids[strike.worker(layout)], signal.SIGCONT)

    with when_stalled(tmp_path, go_on):
        result = runs.check(case)
    assert result.replicas == [layout.replicas] * case.iterations
    assert not [event for event in result.events if event["event"] == "fault"]
    assert [event for event in result.events if event["event"] == "stall_over"]


def test_a_worker_that_waits_for_its_data_for_longer_than_the_hang_timeout_is_not_put_out(
    runs: Runs, tmp_path: Path
) -> None:
    """Of a shared disk that stalls one worker's reads are the first to be missed: the others have read ahead."""
    case = Case(TP2).with_flags(*QUICK_TO_SEE_A_HANG)
    with when_stalled(tmp_path, lambda events: (tmp_path / "go").touch()):
        result = runs.check(case.altered("pacing.blocked", tmp_path, 2))
    assert not [event for event in result.events if event["event"] == "fault"]
    said = next(event["reason"] for event in result.events if event["event"] == "stalled")
    assert "worker 2" in said
    assert "data" in said
