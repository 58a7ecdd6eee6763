"""The launcher's candidate coordinators: killed ones are started again, and none of its processes may cost a worker."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.harness.processes import alive, children
from tests.harness.waiting import eventually, written_lines

from .conftest import Bench, Launch

STEPS = """
    import os, pathlib, time
    from recover_megatron.arguments import config_from_argv, parse_addresses
    from recover_megatron.membership import EpochRevoked
    from recover_megatron.membership.worker import connect
    from recover_megatron.membership.records import Settings
    import sys

    config = config_from_argv(sys.argv[1:])
    times = Settings(config.heartbeat_interval, config.heartbeat_timeout, config.hang_timeout)
    session = connect(addresses=parse_addresses(config.coordinator), settings=times)
    at = session.join({}).committed + 1
    print("STARTED", flush=True)
    ready = 1
    while True:
        try:
            time.sleep(0.05)
            # One iteration for all to end after.
            over = pathlib.Path("over").exists() and pathlib.Path("over").read_text()
            if over and at > int(over):
                break
            pathlib.Path(f"at-{os.environ['RANK']}").write_text(str(at))
            session.agree(at)
        except EpochRevoked:
            plan = session.join({})
            assert len(plan.members) == 3, plan
            at = max(at, plan.committed + 1) if plan.committed >= at else at
            continue
        at += 1
    session.leave()
    """
TIMES = ["--recover-heartbeat-interval", "0.4", "--recover-heartbeat-timeout", "2"]


class Run:
    """Three workers that agree on one step after the other."""

    def __init__(self, bench: Bench) -> None:
        self.folder = bench.folder
        script = bench.script(STEPS)
        self.launch: Launch = bench.start("--nproc-per-node", 3, "--log-dir", "logs", script, *TIMES)
        self.launch.wait_for("STARTED", times=3)
        eventually(lambda: min(self.steps()) > 0, "the run has begun")

    def candidate(self, number: int) -> int:
        """The pid of the candidate that runs; 0: none."""
        for pid in children(self.launch.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(word.endswith(f"events-{number}.jsonl") for word in words):
                return pid
        return 0

    def steps(self) -> list[int]:
        """Where each worker is."""
        paths = [self.folder / f"at-{rank}" for rank in range(3)]
        return [int(path.read_text() or 0) if path.exists() else 0 for path in paths]

    def goes_on(self) -> None:
        """All workers make ten more steps."""
        before = max(self.steps())
        eventually(lambda: min(self.steps()) > before + 10, "all workers go on")

    def end(self) -> int:
        over = self.folder / "over.new"
        over.write_text(str(max(self.steps()) + 50))
        over.rename(self.folder / "over")
        return self.launch.wait()

    def events(self, *names: str) -> list[dict]:
        lines = [line for path in self.folder.glob("logs/events-*.jsonl") for line in written_lines(path)]
        return [event for event in map(json.loads, lines) if event["event"] in names]


@pytest.mark.slow
def test_candidates_that_are_killed_are_started_again_and_lead_again(bench: Bench) -> None:
    """First the standby, whose end no worker notices; then each leader after it."""
    run = Run(bench)
    for kills, number in enumerate((1, 0, 1, 0), 1):
        pid = run.candidate(number)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: not alive(pid), "the kill")
        run.launch.wait_for("has its place", times=kills)
        assert f"candidate coordinator {number} (pid {pid}) was killed by SIGKILL" in run.launch.err
        assert run.candidate(number) != pid
        run.goes_on()
    assert run.end() == 0, run.launch.err
    assert run.events("fault") == []
    assert len(run.events("lead")) == 4
    assert not run.launch.left()


@pytest.mark.slow
def test_both_candidates_killed_at_once_are_outlived_by_the_run(bench: Bench) -> None:
    run = Run(bench)
    for number in (0, 1):
        os.kill(run.candidate(number), signal.SIGKILL)
    run.launch.wait_for("has its place", times=2)
    run.goes_on()
    assert run.end() == 0, run.launch.err
    assert run.events("fault") == []


@pytest.mark.slow
def test_a_launcher_that_is_stopped_costs_no_worker(bench: Bench) -> None:
    run = Run(bench)
    run.launch.send(signal.SIGSTOP)
    time.sleep(5.0)
    run.goes_on()
    run.launch.send(signal.SIGCONT)
    eventually(lambda: len(run.events("witness")) > 1, "the launcher comes back")
    run.goes_on()
    assert run.end() == 0, run.launch.err
    assert run.events("fault") == []
