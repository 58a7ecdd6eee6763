"""Processes of a launch that stand still: workers together, the launcher; or are killed: its candidate coordinators."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.harness.patience import patient
from tests.harness.processes import alive, children, command_line
from tests.harness.waiting import eventually

from .conftest import SECRET, Bench, Launch
from .test_newcomers import AGREEING, HELD, SCRIPT, awaits, plans, training
from .test_newcomers import TIMES as LONGER_TIMES

TIMES = [*LONGER_TIMES, "--recover-hang-timeout", patient(4)]


def stalled(bench, *flags: object):
    """A launch of four workers, of which three stop before they have finished the same iteration."""
    stop = {**HELD, **awaits(0, [[worker, 4, "stop"] for worker in range(3)])}
    launch = training(bench, 4, 0, AGREEING, 10, 0.05, "--recover", *TIMES, *flags, environment=stop)
    pids = [worker["pid"] for worker in bench.workers(count=4)[:3]]
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
    assert re.search(r" for at most \d+ s more \(--recover-stall-timeout\)", said)
    assert "the stall is over after" in launch.err
    assert "is evicted from the run" not in launch.err
    assert [worker["state"] for worker in bench.workers()] == ["finished"] * 4


@pytest.mark.slow
def test_of_workers_that_are_killed_together_none_is_said_to_go_on(bench):
    launch, _ = stalled(bench, "--recover-stall-timeout", patient(1))
    assert launch.wait() == 0, launch.err
    killed = [line for line in launch.err.splitlines() if "was evicted, and killed by SIGKILL" in line]
    assert len(killed) == 3
    assert ["the other worker here continues" in line for line in killed] == [True] * 3
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


SHORT_TIMES = ["--recover-heartbeat-interval", "0.4", "--recover-heartbeat-timeout", f"{patient(3):g}"]


class Run:
    """Three workers that agree on one step after the other."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.launch: Launch = training(bench, 3, 0, AGREEING, 10, 0.05, *SHORT_TIMES)

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
        run.launch.wait_for("has taken its place", times=kills)
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
    run.launch.wait_for("has taken its place", times=2)
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
