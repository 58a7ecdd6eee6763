"""What the launcher says when most of its workers stall together, and when they are given up."""

from __future__ import annotations

import os
import signal

import pytest

from tests.harness.patience import patient

from .test_newcomers import AGREEING, training

TIMES = ["--recover-heartbeat-interval", 0.5, "--recover-heartbeat-timeout", patient(3)]
TIMES += ["--recover-hang-timeout", patient(4)]

pytestmark = pytest.mark.slow


def stalled(bench, *flags: object):
    """A launch of four workers, of which three are stopped in the middle of it."""
    launch = training(bench, 4, 0, AGREEING, 10, 0.05, "--recover", *TIMES, *flags)
    pids = [worker["pid"] for worker in bench.workers(count=4)[:3]]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    launch.wait_for("STALLED")
    bench.go()
    return launch, pids


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


def test_of_workers_that_are_killed_together_none_is_said_to_go_on(bench):
    launch, _ = stalled(bench, "--recover-stall-timeout", patient(1))
    assert launch.wait() == 0, launch.err
    killed = [line for line in launch.err.splitlines() if "was killed by SIGKILL" in line]
    assert len(killed) == 3
    assert ["the other worker here goes on" in line for line in killed] == [True] * 3
    assert sum("more workers are being killed" in line for line in killed) <= 1
    assert [worker["state"] for worker in bench.workers()] == ["killed"] * 3 + ["finished"]
