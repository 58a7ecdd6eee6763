"""Real processes: a spare, a worker that gives up for all, and workers that an exception ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import cluster

from tests.harness.waiting import DEADLINE

pytestmark = pytest.mark.slow

QUICK = {"heartbeat_interval": 0.2, "heartbeat_timeout": 3.0, "hang_timeout": 4.0, "start_timeout": 60.0}


def test_the_work_goes_on_without_a_spare_which_hears_of_commits_revokes_and_the_end(tmp_path: Path) -> None:
    with cluster(tmp_path, **QUICK) as run:
        run.start_coordinators(3)
        run.start_worker(0, iterations=150)
        run.start_worker(1)
        run.start_worker(2, spare=True)
        run.workers[2].wait_for(lambda line: line["event"] == "waiting" and line["committed"] > 20)
        run.workers[1].kill()
        pushed = run.workers[2].event("pushed", epoch=2)
        assert (pushed["dead"], pushed["left"], pushed["opened"]) == ([1], [], [0, 2])
        assert run.workers[2].event("plan", epoch=2)["members"] == [0, 2]
        assert run.workers[0].exit_code() == 0
        assert run.workers[2].exit_code() == 0  # CoordinatorLost, with the code of a finished run
        assert run.coordinators[0].exit_code() == 0
        assert [event["worker"] for event in run.events() if event["event"] == "fault"] == [1]


def test_a_worker_that_gives_up_ends_the_run_for_all_with_its_code(tmp_path: Path) -> None:
    with cluster(tmp_path, **QUICK) as run:
        run.start_coordinators(3, count=2)
        run.start_worker(0)
        run.start_worker(1, give_up_at=5)
        run.start_worker(2)
        assert [process.exit_code() for process in run.workers.values()] == [42, 42, 42]
        assert run.coordinators[0].exit_code() == 42
        assert run.workers[0].event("out")["reason"] == "the disk is full"
        stop = run.wait_event("stop")
        assert (stop["code"], stop["reason"]) == (42, "the disk is full")
        assert run.wait_event("give_up")["worker"] == 1
        assert not [event for event in run.events(1) if event["event"] == "lead"]


def test_an_exception_that_ends_one_worker_is_logged_and_one_that_ends_another_too_ends_the_run(tmp_path: Path) -> None:
    with cluster(tmp_path, **QUICK) as run:
        run.start_coordinators(3)
        run.start_worker(0, raise_at=9, step=0.05)
        run.start_worker(1, raise_at=9, step=0.2)
        run.start_worker(2, step=0.01)
        for number in (0, 1):
            assert run.workers[number].event("last_words")["heard"]
        assert run.workers[2].exit_code() == 1
        assert run.coordinators[0].exit_code() == 1
        events = [event for event in run.events() if event["event"] == "exception"]
        assert sorted(event["worker"] for event in events) == [0, 1]
        for event in events:
            assert (event["iteration"], event["microbatch"]) == (9, 5)
            assert event["error"] == "RuntimeError: the loss is not a number"
            assert event["traceback"].startswith("Traceback (most recent call last)")
            assert event["traceback"].endswith("the end")
            assert len(event["traceback"]) == 16 << 10
        first, second = (f"worker {event['worker']} on {event['host']}" for event in events)
        assert run.wait_event("stop")["reason"] == (
            "microbatch 5 of iteration 9 raises RuntimeError: the loss is not a number wherever it is run: "
            f"on {first}, then on {second}"
        )


def test_last_words_that_nobody_hears_hold_the_worker_for_two_seconds_and_no_longer(tmp_path: Path) -> None:
    # A member without a coordinator gives up after four times that: not within the time of this test.
    with cluster(tmp_path, heartbeat_timeout=DEADLINE, hang_timeout=2 * DEADLINE) as run:
        run.start_coordinators(1)
        run.start_worker(0, raise_at=5, kill_first=run.coordinators[0].pid)
        line = run.workers[0].event("last_words")
        assert not line["heard"]
        assert line["seconds"] >= 2.0
