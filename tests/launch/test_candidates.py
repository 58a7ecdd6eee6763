"""The launcher's candidate coordinators: killed ones are started again, and none of its processes may cost a worker."""

from __future__ import annotations

import os
import signal

import pytest

from tests.harness.patience import patient
from tests.harness.processes import alive, children, command_line
from tests.harness.waiting import eventually

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
            # One iteration for all to end after: worker 0 writes it down before it agrees on it, so the others see it
            # when they have.
            if os.environ["RANK"] == "0" and pathlib.Path("over").exists() and not pathlib.Path("last").exists():
                pathlib.Path("last.new").write_text(str(at))
                pathlib.Path("last.new").rename("last")
            if pathlib.Path("last").exists() and at > int(pathlib.Path("last").read_text()):
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
TIMES = ["--recover-heartbeat-interval", "0.4", "--recover-heartbeat-timeout", f"{patient(3):g}"]


class Run:
    """Three workers that agree on one step after the other."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.folder = bench, bench.folder
        script = bench.script(STEPS)
        self.launch: Launch = bench.start("--nproc-per-node", 3, "--log-dir", "logs", script, *TIMES)
        self.launch.wait_for("STARTED", times=3)
        eventually(lambda: min(self.steps()) > 0, "the run has begun")

    def candidate(self, number: int) -> int:
        """The pid of the candidate, once it runs; its command line is empty for a moment when it replaces itself."""
        found: list[int] = []

        def runs() -> bool:
            name = f"events-{number}.jsonl"
            found.extend(pid for pid in children(self.launch.pid) if any(w.endswith(name) for w in command_line(pid)))
            return bool(found)

        eventually(runs, f"candidate {number} runs")
        return found[0]

    def leader(self, times: int) -> int:
        """The candidate that leads, when candidates have led so many ``times``: logs are written beside the run."""
        eventually(lambda: len(self.events("lead")) >= times, f"the log tells who leads for the {times}. time")
        return max((event["mono"], event["number"]) for event in self.events("lead"))[1]

    def steps(self) -> list[int]:
        """Where each worker is."""
        paths = [self.folder / f"at-{rank}" for rank in range(3)]
        return [int(path.read_text() or 0) if path.exists() else 0 for path in paths]

    def goes_on(self) -> None:
        """All workers make ten more steps."""
        before = max(self.steps())
        eventually(lambda: min(self.steps()) > before + 10, "all workers go on")

    def end(self) -> int:
        self.bench.go("over")
        return self.launch.wait()

    def events(self, *names: str) -> list[dict]:
        """Those of these names, each with the ``number`` of the candidate that has logged it."""
        both = {number: self.bench.events(*names, candidate=number) for number in (0, 1)}
        return [{**event, "number": number} for number, events in both.items() for event in events]


@pytest.mark.slow
def test_candidates_that_are_killed_are_started_again_and_lead_again(bench: Bench) -> None:
    """First the standby, whose end no worker notices; then each leader after it."""
    run = Run(bench)
    for kills in range(1, 5):
        number = 1 - run.leader(1) if kills == 1 else run.leader(kills - 1)
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
    eventually(lambda: run.events("witness_gone"), "its connection is given up")
    run.goes_on()
    run.launch.send(signal.SIGCONT)
    leader = run.leader(1)  # a standby hears of it first, perhaps
    eventually(lambda: [e["number"] for e in run.events("witness")].count(leader) > 1, "the launcher comes back")
    run.goes_on()
    assert run.end() == 0, run.launch.err
    assert run.events("fault") == []
