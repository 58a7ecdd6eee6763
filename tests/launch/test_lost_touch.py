"""A launcher that loses the coordinator for a while ends with the run's code all the same."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.harness.processes import free_port
from tests.harness.waiting import eventually, written_lines

from .conftest import Bench
from .test_newcomers import HELD, SCRIPT, let_end
from .test_several_nodes import SECRET


@pytest.mark.slow
def test_a_launcher_that_sleeps_while_the_run_ends_ends_with_the_runs_code(bench: Bench) -> None:
    """Its connection is given up meanwhile; the coordinator is gone, or about to be, when it wakes."""
    options = ["--nnodes", 2, "--nproc-per-node", 2, "--master-port", free_port(), "--log-dir", "logs"]
    options += ["--node-rank"]
    first, second = (bench.start(*options, node, *SCRIPT, environment={**SECRET, **HELD}) for node in (0, 1))
    for launch in (first, second):
        launch.wait_for('"event": "plan"', times=2)
    second.send(signal.SIGSTOP)
    path = bench.folder / "logs" / "events-0.jsonl"

    def events(kind: str) -> list[dict]:
        return [event for event in map(json.loads, written_lines(path)) if event["event"] == kind]

    eventually(lambda: events("witness_gone"), "its connection is given up")
    let_end(bench)
    eventually(lambda: events("stop"), "the run ends")
    assert [event["node"][-1] for event in events("witness_gone")] == ["1"]
    second.send(signal.SIGCONT)
    assert (first.wait(), second.wait()) == (0, 0), first.err + second.err


@pytest.mark.slow
def test_a_worker_that_hangs_while_its_launcher_is_stopped_costs_itself_alone(bench: Bench) -> None:
    """The others go on, to the end; the launcher hears of all that when it runs again."""
    launch = bench.start("--nproc-per-node", 3, "--log-dir", "logs", *SCRIPT, environment=HELD)
    launch.wait_for('"event": "plan"', times=3)
    hangs = bench.workers(count=3)[2]["pid"]
    path = bench.folder / "logs" / "events-0.jsonl"

    def events(kind: str) -> list[dict]:
        return [event for event in map(json.loads, written_lines(path)) if event["event"] == kind]

    launch.send(signal.SIGSTOP)
    eventually(lambda: events("witness_gone"), "the launcher is silent")
    os.kill(hangs, signal.SIGSTOP)
    eventually(lambda: any(event["epoch"] == 2 for event in events("plan")), "the others have a plan without it")
    let_end(bench)
    eventually(lambda: events("stop"), "the run ends")
    launch.send(signal.SIGCONT)
    assert launch.wait() == 0, launch.err
    assert [event["worker"] for event in events("fault")] == [2]
    assert [worker["state"] for worker in bench.workers()] == ["finished", "finished", "killed"]
