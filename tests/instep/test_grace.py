"""Replicas that are late: with --recover-grace taken over and back, never counted twice; where most are, waited for.

Workers are stopped (SIGSTOP) at a phase of an iteration.  They go on (SIGCONT) when they are set aside and the others
have come so far as the test says, in the middle of the take-over or after it; or when the coordinator tells of a stall.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from recover_megatron.run_log.steps import read_steps
from tests.drawn import EVERYTHING, some
from tests.harness.patience import patient
from tests.harness.waiting import meanwhile, written_lines
from tests.instep.conftest import Runs
from tests.instep.runs import (
    INTERLEAVED,
    LAYOUTS,
    QUICK_TO_SEE_A_HANG,
    Case,
    Layout,
    Result,
    Strike,
    check_audit,
    check_steps,
    placed,
)

pytestmark = pytest.mark.slow

GRACE = (
    f"--recover-heartbeat-interval 0.05 --recover-heartbeat-timeout {patient(30):g} "
    f"--recover-hang-timeout {patient(60):g} --recover-grace {patient(1.5):g}"
)
DP4, OVERLAP, TP2, PP2, _ = LAYOUTS
VPP = Layout("vpp2-pp2-dp4", 4, pipeline=2, samples=16,
             flags=INTERLEAVED)  # fmt: skip
ADAM = ("--use-distributed-optimizer", *"--optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4".split())


@dataclass(frozen=True)
class Late:
    """A worker that stops in an iteration, and goes on when the coordinator has told ``woken`` for the ``nth`` time
    after it was set aside."""

    layout: Layout
    strike: Strike
    woken: str
    nth: int = 1
    model: tuple[str, ...] = ()
    others: tuple[Strike, ...] = ()
    """Those that are killed besides."""

    def __str__(self) -> str:
        struck = ",".join(strike.spec(self.layout) for strike in (self.strike, *self.others))
        return f"{self.layout.name} {struck} until {self.woken}#{self.nth}{' adam' * bool(self.model)}"


def told_so_far(out: Path) -> list[dict[str, Any]]:
    """The coordinator's events."""
    return [json.loads(line) for line in written_lines(out / "events-0.jsonl")]


def wake(events: list[dict[str, Any]], worker: int) -> None:
    os.kill(next(e["pid"] for e in events if e["event"] == "attached" and e["worker"] == worker), signal.SIGCONT)


def woken(out: Path, late: Late) -> AbstractContextManager[None]:
    """While the block runs the worker is let go on, when it is time."""
    worker = late.strike.worker(late.layout)

    def look() -> bool:
        events = told_so_far(out)
        at = next((n for n, e in enumerate(events) if e["event"] == "aside" and e["worker"] == worker), None)
        if at is None or sum(e["event"] == late.woken for e in events[at:]) < late.nth:
            return False
        wake(events, worker)
        return True

    return meanwhile(look)


def run(runs: Runs, late: Late) -> Result:
    """With training that waits, from two iterations after the last strike on, for all that may come back.

    It is the failure-free run.
    """
    layout, last = late.layout, max(strike.iteration for strike in (late.strike, *late.others))
    spec = ",".join([replace(late.strike, kind="stop").spec(layout), *(each.spec(layout) for each in late.others)])
    whole = layout.replicas - len(late.others)
    # Whoever stops takes its time before: the coordinator must have heard by a heartbeat that it is in a step.
    pace = f"forward@{late.strike.worker(layout)}=0.1"
    doomed = tuple(each.worker(layout) for each in late.others)
    case = Case(layout, iterations=10, model=late.model, doomed=doomed)
    case = case.altered("pacing.slow", pace).patient(f"{last + 2}-:{whole}")
    with woken(runs.out, late):
        return runs.check(case.with_flags(*GRACE.split(), "--recover-inject", spec))


CASES = [
    Late(layout, Strike(replica, position, 3, phase, visit=visit), wake, nth)
    for layout, replica, position in ((DP4, 1, 0), (OVERLAP, 0, 0), (TP2, 1, 1), (PP2, 2, 0), (PP2, 0, 1))
    for phase, visit in (("forward", 2), ("backward", 1), ("reduce-scatter", 1), ("all-gather", 1), ("agree", 1))
    for wake, nth in (("aside", 1), ("plan", 1), ("commit", 1), ("commit", 3))
] + [
    Late(DP4, Strike(2, 0, 3, "data", visit=2), "plan"),
    Late(VPP, Strike(3, 1, 3, "forward", visit=3), "plan"),
    Late(DP4, Strike(1, 0, 3, "forward"), "plan", 2, others=(Strike(0, 0, 3, "recovery", visit=2),)),
    Late(DP4, Strike(1, 0, 3, "forward"), "commit", 1, model=ADAM),
    Late(PP2, Strike(1, 1, 3, "backward"), "aside", 1, model=ADAM),
    Late(DP4, Strike(0, 0, 3, "backward"), "plan", 1, model=ADAM),
]


@pytest.mark.parametrize("late", some("late replicas", CASES, 2), ids=str)
def test_a_late_replicas_work_is_taken_over_it_comes_back_and_nothing_is_counted_twice(runs: Runs, late: Late) -> None:
    result = run(runs, late)
    layout, replica = late.layout, late.strike.replica
    aside, back = (
        Counter(event["worker"] for event in result.events if event["event"] == what) for what in ("aside", "back")
    )
    # The host may keep any other worker from running for as long: then that one's replica is late, too.
    its = layout.grid.replicas[replica]
    assert all(aside[worker] > 0 for worker in its), result.told()
    assert all(back[worker] > 0 for worker in its), result.told()
    assert not back - aside
    assert [e["worker"] for e in result.events if e["event"] == "fault"] == list(result.case.doomed)
    whole = layout.replicas - len(late.others)
    after = [step for step in result.steps if step.iteration > late.strike.iteration and step.replicas == whole]
    assert any(set(its) <= set(placed(result.plans[step.epoch]["grid"])) for step in after), result.replicas


def all_others(layout: Layout, replica: int, iteration: int, phase: str, visit: int = 1) -> tuple[Strike, ...]:
    """The deaths of the first worker of every other replica."""
    return tuple(
        Strike(other, 0, iteration, phase, visit=visit) for other in range(layout.replicas) if other != replica
    )


ALONE = [
    # What was committed last is what it holds: the others die in the iteration in which it was late.
    (Late(DP4, Strike(1, 0, 3, "forward"), "fault", 3, others=all_others(DP4, 1, 3, "recovery", visit=2)), None),
    (Late(PP2, Strike(0, 1, 3, "backward"), "fault", 2, others=all_others(PP2, 0, 3, "recovery", visit=2)), None),
    # They have committed iterations that nobody else has seen.
    (Late(DP4, Strike(1, 0, 3, "forward", visit=2), "fault", 3, others=all_others(DP4, 1, 5, "forward")), 2),
    (Late(TP2, Strike(1, 1, 3, "backward"), "fault", 2, others=all_others(TP2, 1, 5, "backward")), 2),
    (Late(PP2, Strike(2, 0, 3, "agree"), "fault", 2, others=all_others(PP2, 2, 6, "all-gather")), 3),
]


@pytest.mark.parametrize(("late", "lost"), some("replicas left alone", ALONE, 2), ids=str)
def test_a_late_replica_goes_on_when_all_others_are_lost_from_the_newest_state_that_is_left(
    runs: Runs, late: Late, lost: int | None
) -> None:
    """``lost``: iterations that the others have committed without it, and that are run again; None: no rollback."""
    result = run(runs, late)
    backs = result.of_training("rolled back")
    assert [(back["to"], back["tier"]) for back in backs] == [(2, "memory")] * (lost is not None), result.told()
    # What the lost did after their last heartbeat nobody knows.  Their mates live, and may have committed with each
    # other the iteration in which the lost had summed already.
    most = (lost or 0) + any(strike.phase == "all-gather" for strike in late.others)
    assert all(1 <= back["lost"] <= most for back in backs), (backs, result.told())
    assert result.replicas[2] == 1  # in later iterations the mates of the lost may have formed another replica
    superseded = runs.out / "steps.jsonl.1"
    assert superseded.exists() == (lost is not None)
    if lost is not None:
        assert [step.iteration for step in read_steps(superseded)] == list(range(1, 3 + lost))


def test_a_replica_that_is_slow_and_never_stops_is_taken_over_again_and_again(runs: Runs) -> None:
    """Worker 1 takes a second for each microbatch; it hears that it is aside while it computes.

    The others take 0.3 s, or their iterations would all be over before it has heard of it.  They wait for it to come
    back before the last one.
    """
    slow = ",".join(f"forward@{worker}={1 if worker == 1 else 0.3}" for worker in range(4))
    case = Case(DP4, iterations=4).altered("pacing.slow", slow).patient("4-:4")
    result = runs(case.with_flags(*GRACE.split()))
    check_audit(result, case.iterations)
    check_steps(result, runs.reference(case))
    assert list(result.ended.codes) == [0] * 4, result.told()
    events = [event["event"] for event in result.events]
    assert "fault" not in events
    assert events.count("back") >= 1
    for worker in range(4):
        changes = [e["event"] for e in result.events if e["event"] in ("aside", "back") and e["worker"] == worker]
        assert changes == ["aside", "back"] * (len(changes) // 2) + ["aside"] * (len(changes) % 2), result.told()
    assert min(result.replicas) < 4  # in an iteration at least it has counted nothing


# ---- most replicas stop together, as by a disk or a switch that they share
PAIRS = Layout("tp2-dp2", 2, tensor=2)
STALLS = [
    (DP4, (Strike(0, 0, 3, "forward"), Strike(1, 0, 3, "data"), Strike(3, 0, 3, "backward"))),
    (PAIRS, (Strike(0, 1, 3, "backward"), Strike(1, 0, 3, "forward"))),
    (DP4, (Strike(0, 0, 3, "reduce-scatter"), Strike(1, 0, 3, "forward"), Strike(2, 0, 3, "all-gather"))),
    (DP4, (Strike(0, 0, 3, "optimizer"), Strike(1, 0, 3, "agree"), Strike(2, 0, 4, "forward"))),
    (DP4, (Strike(0, 0, 3, "eval"), Strike(1, 0, 3, "eval"), Strike(2, 0, 3, "eval"))),
]


def when_stalled(out: Path, then: Callable[[list[dict[str, Any]]], None]) -> AbstractContextManager[None]:
    """Call ``then`` with the coordinator's events once it tells of a stall, while the block runs."""

    def look() -> bool:
        events = told_so_far(out)
        stalled = any(event["event"] == "stalled" for event in events)
        if stalled:
            then(events)
        return stalled

    return meanwhile(look)


@pytest.mark.parametrize(("layout", "stopped"), STALLS if EVERYTHING else STALLS[:2], ids=lambda part: str(part)[:60])
def test_workers_that_stop_together_are_waited_for_and_nothing_changes_but_rounding(
    runs: Runs, layout: Layout, stopped: tuple[Strike, ...]
) -> None:
    spec = ",".join(replace(strike, kind="stop").spec(layout) for strike in stopped)
    case = Case(layout, evaluated=True).with_flags(*QUICK_TO_SEE_A_HANG, "--recover-inject", spec)

    def go_on(events: list[dict[str, Any]]) -> None:
        for strike in stopped:
            wake(events, strike.worker(layout))

    with when_stalled(runs.out, go_on):
        result = runs.check(case)
    assert result.replicas == [layout.replicas] * case.iterations
    assert not [event for event in result.events if event["event"] == "fault"]
    assert [event for event in result.events if event["event"] == "stall_over"]


def test_a_worker_that_waits_for_its_data_for_longer_than_the_hang_timeout_is_not_put_out(runs: Runs) -> None:
    """Of a shared disk that stalls one worker's reads are the first to be missed: the others have read ahead."""
    case = Case(PAIRS).altered("pacing.blocked", runs.out, 2).with_flags(*QUICK_TO_SEE_A_HANG)
    with when_stalled(runs.out, lambda events: (runs.out / "go").touch()):
        result = runs.check(case)
    assert not [event for event in result.events if event["event"] == "fault"]
    said = next(event["reason"] for event in result.events if event["event"] == "stalled")
    assert "worker 2" in said
    assert "data" in said
