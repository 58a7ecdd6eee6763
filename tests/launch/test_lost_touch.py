"""A launcher that loses the coordinator for a while ends with the run's code all the same."""

from __future__ import annotations

import signal

import pytest

from tests.harness.waiting import eventually

from .conftest import SECRET, Bench
from .test_newcomers import HELD, SCRIPT, training


@pytest.mark.slow
def test_a_launcher_that_sleeps_while_the_run_ends_ends_with_the_runs_code(bench: Bench) -> None:
    """Its connection is given up meanwhile; the coordinator is gone, or about to be, when it wakes."""
    first, second = bench.nodes(2, *SCRIPT, environment={**SECRET, **HELD})
    for launch in (first, second):
        launch.wait_for('"event": "plan"', times=2)
    second.send(signal.SIGSTOP)
    eventually(lambda: bench.events("witness_gone"), "its connection is given up")
    bench.go()
    eventually(lambda: bench.events("stop"), "the run ends")
    assert [event["node"][-1] for event in bench.events("witness_gone")] == ["1"]
    second.send(signal.SIGCONT)
    assert (first.wait(), second.wait()) == (0, 0), first.err + second.err


@pytest.mark.slow
def test_a_worker_that_hangs_while_its_launcher_is_stopped_costs_itself_alone(bench: Bench) -> None:
    """The others go on, to the end; the launcher hears of all that when it runs again."""
    launch = training(bench, 3, 0, *SCRIPT)
    bench.workers(count=3)
    launch.send(signal.SIGSTOP)
    eventually(lambda: bench.events("witness_gone"), "the launcher is silent")
    bench.kill(2, 3, signal.SIGSTOP)
    eventually(lambda: any(plan["epoch"] == 2 for plan in bench.events("plan")), "the others have a plan without it")
    bench.go()
    eventually(lambda: bench.events("stop"), "the run ends")
    launch.send(signal.SIGCONT)
    assert launch.wait() == 0, launch.err
    assert [event["worker"] for event in bench.events("fault")] == [2]
    assert [worker["state"] for worker in bench.workers()] == ["finished", "finished", "killed"]
