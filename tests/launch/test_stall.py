"""Workers that stall together, and a launcher that stands still itself: what is said, who is given up, which code."""

from __future__ import annotations

import os
import signal

import pytest

from tests.harness.patience import patient
from tests.harness.waiting import eventually

from .conftest import SECRET, Bench
from .test_newcomers import AGREEING, HELD, SCRIPT, training

TIMES = ["--recover-heartbeat-interval", 0.5, "--recover-heartbeat-timeout", patient(3)]
TIMES += ["--recover-hang-timeout", patient(4)]


def stalled(bench, *flags: object):
    """A launch of four workers, of which three are stopped in the middle of it."""
    launch = training(bench, 4, 0, AGREEING, 10, 0.05, "--recover", *TIMES, *flags)
    pids = [worker["pid"] for worker in bench.workers(count=4)[:3]]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    launch.wait_for("STALLED")
    bench.go()
    return launch, pids


@pytest.mark.slow
def test_a_stall_is_told_of_on_the_console_and_all_finish(bench):
    launch, pids = stalled(bench)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert launch.wait() == 0, launch.err
    said = next(line for line in launch.err.splitlines() if "STALLED" in line)
    assert "STALLED: worker 0 on " in said
    assert "no progress for" in said
    assert "worker 1 on " in said
    assert "worker 2 on " in said
    assert "s more at most (--recover-stall-timeout)" in said
    assert "the stall is over after" in launch.err
    assert "is out of the run" not in launch.err
    assert [worker["state"] for worker in bench.workers()] == ["finished"] * 4


@pytest.mark.slow
def test_of_workers_that_are_killed_together_none_is_said_to_go_on(bench):
    launch, _ = stalled(bench, "--recover-stall-timeout", patient(1))
    assert launch.wait() == 0, launch.err
    killed = [line for line in launch.err.splitlines() if "was killed by SIGKILL" in line]
    assert len(killed) == 3
    assert ["the other worker here goes on" in line for line in killed] == [True] * 3
    assert sum("more workers are being killed" in line for line in killed) <= 1
    assert [worker["state"] for worker in bench.workers()] == ["killed"] * 3 + ["finished"]


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
    eventually(lambda: bench.events("witness"), "the launcher has come")
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
