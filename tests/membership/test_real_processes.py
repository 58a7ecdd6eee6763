"""Real processes, real signals: death, hang, load, fencing, fork."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import HERE, QUICK, Cluster, cluster

from tests.harness.patience import patient
from tests.harness.waiting import DEADLINE

pytestmark = pytest.mark.slow


def test_a_death_is_known_to_all_survivors_in_milliseconds(tmp_path: Path) -> None:
    """8 workers, 7 killed one after the other: by heartbeats alone nobody would know within the time of this test."""
    with cluster(tmp_path, workers=8, heartbeat_timeout=10 * DEADLINE, hang_timeout=20 * DEADLINE) as run:
        for victim in range(7):
            starts = {n: start for n, start in run.said().items() if n > victim}
            run.workers[victim].kill()
            for number, start in starts.items():
                run.workers[number].event("pushed", start=start)
            run.plan_again(starts)


@pytest.mark.parametrize("candidates", [1, 2], ids=["workers", "and the coordinator"])
def test_half_of_all_workers_killed_at_once_does_not_stop_the_run(tmp_path: Path, candidates: int) -> None:
    with cluster(tmp_path, workers=8, candidates=candidates, launcher=candidates == 2, heartbeat_timeout=3.0) as run:
        if candidates == 2:
            run.coordinators[0].kill()
        for victim in (0, 2, 4, 6):
            run.workers[victim].kill()
        run.continue_without(0, 2, 4, 6)


@pytest.mark.parametrize("with_launcher", [False, True])
def test_a_stopped_worker_is_put_out_and_stops_by_itself_when_it_wakes_up(tmp_path: Path, with_launcher: bool) -> None:
    with cluster(tmp_path, **QUICK) as run:
        run.start(3, launcher=with_launcher)
        run.all_commit()
        run.workers[1].kill(signal.SIGSTOP)
        run.continue_without(1)
        if with_launcher:
            assert run.workers[1].exit_code() == -signal.SIGKILL  # by the launcher's hand
            run.wait_event("fault", worker=1, kind="dead")
        else:
            start = run.workers[0].says()
            run.workers[1].kill(signal.SIGCONT)
            assert run.workers[1].exit_code() == 13
            run.workers[0].event("commit", start=start)
            assert not [line for line in run.workers[0].lines[start:] if line["event"] == "pushed"]


def test_a_collective_that_all_wait_in_is_revoked_and_the_one_who_stays_away_is_put_out(tmp_path: Path) -> None:
    with cluster(tmp_path, **QUICK) as run:
        run.start(3, {1: {"never_rejoin": True}}, hang_at=5, hang_waiting=True)
        run.wait_event("stuck", epoch=1)
        run.wait_event("fault", kind="out", worker=1)
        for number in (0, 2):
            plan = run.workers[number].wait_for(lambda line: line["event"] == "plan" and line["members"] == [0, 2])
            assert plan["epoch"] > 1


def test_a_hung_worker_that_others_wait_for_is_put_out_though_its_heartbeats_go_on(tmp_path: Path) -> None:
    with cluster(tmp_path, **QUICK) as run:
        run.start(3, {1: {"hang_at": 5}})
        run.continue_without(1)
        assert run.workers[1].exit_code() == 13


HOLDS = {"hold_at": 5, "hold_seconds": patient(4)}
WRITES = {"checkpoint_at": 10, "checkpoint_seconds": patient(7)}
NO_FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a call that holds the interpreter, and a long checkpoint": (
        {**QUICK, "hang_timeout": 6.0},
        {"its": {0: HOLDS, 1: WRITES}, "world": 3, "launcher": True, "iterations": 30, "step": 0.01},
    ),
    "without a launcher, a hold within the heartbeat timeout": (
        {"heartbeat_timeout": 10.0},
        {"its": {0: {"hold_at": 5, "hold_seconds": 3}}, "world": 2, "iterations": 10, "step": 0.01},
    ),
    "eight busy workers on few cores": ({}, {"world": 8, "iterations": 20, "step": 0.2, "busy": True}),
}


@pytest.mark.parametrize("name", NO_FAULTS)
def test_what_is_no_fault_raises_no_alarm_and_all_leave_in_order(tmp_path: Path, name: str) -> None:
    settings, options = NO_FAULTS[name]
    with cluster(tmp_path, **settings) as run:
        run.start(**options)
        assert set(run.exit_codes()) == {0}
        assert run.coordinators[0].exit_code() == 0
        assert not run.logged("fault", "stuck")
        assert len(run.logged("commit")) == options["iterations"]


def test_children_that_a_worker_forked_do_not_hide_its_death(tmp_path: Path) -> None:
    with cluster(tmp_path) as run:
        run.start(3, {0: {"fork": True}})
        run.workers[0].event("forked")
        run.workers[1].event("commit")
        run.workers[0].kill()
        run.continue_without(0)
        os.killpg(run.workers[0].pid, 0)  # the child still runs
        assert run.wait_event("fault", worker=0)["kind"] == "dead", "by the end of its connection, not by its silence"


def kill_when(run: Cluster, moment: str) -> float:
    """Kill the first coordinator in a given state of the protocol; when."""
    if moment == "in a steady epoch":
        time.sleep(0.2)
    else:  # a rendezvous is open: one worker computes on, so it cannot finish
        run.workers[3].kill(signal.SIGSTOP)
        run.workers[0].kill()
        run.wait_event("revoke", epoch=2)
    killed = run.coordinators[0].kill()
    if moment != "in a steady epoch":
        run.workers[3].kill(signal.SIGCONT)
    return killed


@pytest.mark.parametrize("moment", ["in a steady epoch", "in a rendezvous"])
def test_the_run_outlives_its_coordinator(tmp_path: Path, moment: str) -> None:
    with cluster(tmp_path, workers=4, candidates=3, launcher=True, heartbeat_timeout=3.0) as run:
        starts = run.said()
        killed = kill_when(run, moment)
        if moment != "in a steady epoch":
            del starts[0]
        run.plan_again(starts)
        assert run.leader(since=killed) != 0


def test_coordinators_killed_at_any_moment_of_a_recovery(tmp_path: Path) -> None:
    """A worker dies, and 0 to 8 ms later the coordinator: before, while and after it pushes revoke and plan."""
    with cluster(tmp_path, heartbeat_timeout=3.0) as run:
        run.start(8, candidates=7, launcher=True, step=0.001)
        run.all_commit()
        for number, delay in enumerate((0.0, 0.001, 0.002, 0.004, 0.006, 0.008)):
            starts = {n: start for n, start in run.said().items() if n > number}
            leader = run.leader()
            run.workers[number].kill()
            time.sleep(delay)
            killed = run.coordinators[leader].kill()
            for survivor, start in starts.items():
                run.workers[survivor].wait_for(
                    lambda line, gone=number: line["event"] == "plan" and gone not in line["members"], start=start
                )
            assert run.leader(since=killed) != leader
            run.commit_again(*starts)


def test_workers_without_any_coordinator_stop_by_themselves(tmp_path: Path) -> None:
    with cluster(tmp_path, workers=2, candidates=2, heartbeat_interval=0.2, heartbeat_timeout=3.0) as run:
        for process in run.coordinators:
            process.kill()
        assert run.exit_codes() == [11, 11]


def test_a_stopped_coordinator_that_wakes_up_disturbs_nobody(tmp_path: Path) -> None:
    with cluster(tmp_path, workers=3, candidates=2, **QUICK) as run:
        starts = run.said()
        run.coordinators[0].kill(signal.SIGSTOP)
        for number, process in run.workers.items():
            process.event("plan", start=starts[number])
        run.coordinators[0].kill(signal.SIGCONT)
        run.wait_event("step_down")
        run.commit_again()


def test_a_coordinator_that_dies_while_it_tells_of_a_commit_parts_no_mates(tmp_path: Path) -> None:
    """Who has heard of it begins the next step and needs its mates there: they hear of it from the next coordinator."""
    with cluster(tmp_path, hang_timeout=40.0) as run:
        run.first_coordinator = HERE / "dying_coordinator.py"
        (tmp_path / "meeting").mkdir()
        run.start(4, candidates=2, launcher=True, mates=[0, 1, 2, 3], meeting=str(tmp_path / "meeting"))
        for process in run.workers.values():
            process.event("commit", iteration=8)
        assert run.coordinators[0].exit_code() == -signal.SIGKILL
        assert not run.logged("fault", "stuck", candidate=1)


def test_a_minority_that_keeps_the_coordinator_stops_when_the_others_may_live(tmp_path: Path) -> None:
    with cluster(tmp_path, workers=3, **QUICK) as run:
        for number in (1, 2):
            run.workers[number].kill(signal.SIGSTOP)
        assert run.workers[0].exit_code() == 11
        assert run.coordinators[0].exit_code() == 11


def test_the_smaller_part_that_gets_the_lease_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path, **QUICK) as run:
        run.start_coordinators(3, 1, (), (), "--lease", str(tmp_path / "lease"), "--slack", "1")
        run.start_workers(3)
        for number in (1, 2):
            run.workers[number].kill(signal.SIGSTOP)
        run.continue_without(1, 2)
        for number in (1, 2):
            run.workers[number].kill(signal.SIGCONT)
            assert run.workers[number].exit_code() == 13


def test_the_work_goes_on_without_a_spare_which_hears_of_commits_revokes_and_the_end(tmp_path: Path) -> None:
    with cluster(tmp_path, **QUICK) as run:
        run.start(3, {0: {"iterations": 150}, 2: {"spare": True}})
        run.workers[2].wait_for(lambda line: line["event"] == "waiting" and line["committed"] > 20)
        run.workers[1].kill()
        pushed = run.workers[2].event("pushed", epoch=2)
        assert (pushed["dead"], pushed["left"], pushed["opened"]) == ([1], [], [0, 2])
        assert run.workers[2].event("plan", epoch=2)["members"] == [0, 2]
        assert run.exit_codes(0, 2) == [0, 0]  # the spare's: CoordinatorLost, with the code of a finished run
        assert run.coordinators[0].exit_code() == 0
        assert [event["worker"] for event in run.logged("fault")] == [1]


def test_a_worker_that_gives_up_ends_the_run_for_all_with_its_code(tmp_path: Path) -> None:
    with cluster(tmp_path, **QUICK) as run:
        run.start(3, {1: {"give_up_at": 5}}, candidates=2)
        assert run.exit_codes() == [42, 42, 42]
        assert run.coordinators[0].exit_code() == 42
        assert run.workers[0].event("out")["reason"] == "the disk is full"
        stop = run.wait_event("stop")
        assert (stop["code"], stop["reason"]) == (42, "the disk is full")
        assert run.wait_event("give_up")["worker"] == 1
        assert not run.logged("lead", candidate=1)


def test_gradients_that_are_found_wrong_while_there_is_no_coordinator_are_told_to_the_next(tmp_path: Path) -> None:
    then = tmp_path / "then"
    with cluster(tmp_path, **QUICK) as run:
        run.start(3, {1: {"wrong_at": 5, "then": str(then)}}, candidates=2)
        run.workers[1].event("found")
        for number in (0, 2):  # the new coordinator does not lead without one of them
            run.workers[number].kill(signal.SIGSTOP)
        run.coordinators[0].kill()
        then.touch()
        run.wait_event("attached", candidate=1, worker=1)
        for number in (0, 2):
            run.workers[number].kill(signal.SIGCONT)
        for number in (0, 2):
            line = run.workers[number].wait_for(lambda line: line["event"] == "out" or line.get("iteration", 0) > 4)
            assert "worker 1 has found wrong gradients in iteration 5" in line.get("reason", "")
        assert run.exit_codes() == [1, 1, 1]


def test_an_exception_that_ends_one_worker_is_logged_and_one_that_ends_another_too_ends_the_run(tmp_path: Path) -> None:
    with cluster(tmp_path, **QUICK) as run:
        run.start(3, {0: {"raise_at": 9, "step": 0.05}, 1: {"raise_at": 9, "step": 0.2}, 2: {"step": 0.01}})
        for number in (0, 1):
            assert run.workers[number].event("last_words")["heard"]
        assert run.workers[2].exit_code() == 1
        assert run.coordinators[0].exit_code() == 1
        events = run.logged("exception")
        assert sorted(event["worker"] for event in events) == [0, 1]
        for event in events:
            assert (event["iteration"], event["microbatch"]) == (9, 5)
            assert event["error"] == "RuntimeError: the loss is not a number"
            assert event["traceback"].startswith("Traceback (most recent call last)")
            assert event["traceback"].endswith("the end")
            assert len(event["traceback"]) == 16 << 10
        first, second = (f"worker {event['worker']} on {event['host']}" for event in events)
        assert run.wait_event("stop")["reason"] == (
            f"microbatch 5 of iteration 9 fails wherever it is run, on {first}, then on {second}: "
            "RuntimeError: the loss is not a number"
        )


def test_last_words_that_nobody_hears_hold_the_worker_for_two_seconds_and_no_longer(tmp_path: Path) -> None:
    # A member without a coordinator gives up after four times that: not within the time of this test.
    with cluster(tmp_path, heartbeat_timeout=DEADLINE, hang_timeout=2 * DEADLINE) as run:
        run.start_coordinators(1)
        run.start_worker(0, raise_at=5, kill_first=run.coordinators[0].pid)
        line = run.workers[0].event("last_words")
        assert not line["heard"]
        assert line["seconds"] >= 2.0
