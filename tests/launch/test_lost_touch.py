"""A launcher that loses the coordinator for a while ends with the run's code all the same."""

from __future__ import annotations

import json
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
