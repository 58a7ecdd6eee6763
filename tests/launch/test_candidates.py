"""The launcher's candidate coordinators: killed ones are started again, and none of its processes may cost a worker."""

from __future__ import annotations

import os
import signal

import pytest

from tests.harness.patience import patient
from tests.harness.processes import alive, children, command_line
from tests.harness.waiting import eventually

from .conftest import Bench, Launch
from .test_newcomers import AGREEING, plans, training

TIMES = ["--recover-heartbeat-interval", "0.4", "--recover-heartbeat-timeout", f"{patient(3):g}"]


class Run:
    """Three workers that agree on one step after the other."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.launch: Launch = training(bench, 3, 0, AGREEING, 10, 0.05, *TIMES)

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

    def goes_on(self) -> None:
        """All workers make ten more steps."""
        before = self.last_step()
        eventually(lambda: self.last_step() > before + 10, "all workers go on")

    def last_step(self) -> int:
        return max((event["iteration"] for event in self.events("commit")), default=0)

    def ends(self) -> None:
        """As it should, with all of its workers to the end."""
        self.bench.go()
        self.launch.ends()
        assert self.events("fault") == []
        assert {tuple(members) for members in plans(self.bench, 0)} == {(0, 1, 2)}

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
    run.ends()
    assert len(run.events("lead")) == 4


@pytest.mark.slow
def test_both_candidates_killed_at_once_are_outlived_by_the_run(bench: Bench) -> None:
    run = Run(bench)
    for number in (0, 1):
        os.kill(run.candidate(number), signal.SIGKILL)
    run.launch.wait_for("has its place", times=2)
    run.goes_on()
    run.ends()


@pytest.mark.slow
def test_a_launcher_that_is_stopped_costs_no_worker(bench: Bench) -> None:
    run = Run(bench)
    eventually(lambda: run.events("witness"), "the launcher has come")
    run.launch.send(signal.SIGSTOP)
    eventually(lambda: run.events("witness_gone"), "its connection is given up")
    run.goes_on()
    run.launch.send(signal.SIGCONT)
    leader = run.leader(1)  # a standby hears of it first, perhaps
    eventually(lambda: [e["number"] for e in run.events("witness")].count(leader) > 1, "the launcher comes back")
    run.goes_on()
    run.ends()
