"""Exceptions that end workers: what their last words tell of the next one, over the simulated network."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import World
from test_idle_and_ended import committed, stops, world_with

from recover_megatron.membership.exception_reports import MAX_TRACEBACK, ExceptionReport, alike, cut_middle, true_cause
from recover_megatron.membership.follower import Stage
from recover_megatron.membership.records import CoordinatorLost

ERROR = "RuntimeError: the loss is not a number"


def words(
    microbatch: int | None = 5, error: str = ERROR, group: int = 0, iteration: int = 7, **more: Any
) -> dict[str, Any]:
    said = {"iteration": iteration, "error": error, "traceback": "Traceback ...", "group": group, **more}
    return said if microbatch is None else {**said, "microbatch": microbatch}


def end_with(world: World, number: int, said: dict[str, Any]) -> None:
    world._member_effects(f"w{number}", world.worker(number).report_exception(said))
    world.run_fairly(1.0)
    assert world.worker(number).noted
    if world.worker(number).stage is not Stage.OUT:
        world.kill_worker(number)
        world.run_fairly(2.0)


def test_the_last_worker_that_said_why_is_named_when_nobody_is_left() -> None:
    world = world_with(2, set())
    world.kill_worker(1)
    world.run_fairly(3.0)
    end_with(world, 0, words(own=True, error="RuntimeError: uncorrectable ECC error"))
    why = "worker 0 on node0 was the last to say why: RuntimeError: uncorrectable ECC error"
    assert stops(world) == [(10, f"no live worker is left; {why}")]


def test_the_second_replica_that_ends_in_the_same_way_ends_the_run_with_the_true_cause() -> None:
    world = world_with(4, set())
    end_with(world, 3, words(group=1))
    assert stops(world) == []
    end_with(world, 0, words(group=0))
    where = "on worker 3 on node3, then on worker 0 on node0"
    assert stops(world) == [(1, f"microbatch 5 of iteration 7 raises {ERROR} wherever it is run: {where}")]
    events = [record for record in world.log if record["event"] == "exception"]
    assert [(e["worker"], e["host"], e["iteration"], e["microbatch"], e["error"]) for e in events] == [
        (3, "node3", 7, 5, ERROR),
        (0, "node0", 7, 5, ERROR),
    ]
    assert [isinstance(world.worker(w).out, CoordinatorLost) for w in (0, 1, 2)] == [True] * 3


@pytest.mark.parametrize(
    "other", [words(group=1), words(6), words(None), words(iteration=8), words(error="RuntimeError: something else")]
)
def test_the_same_replica_or_another_fault_ends_nobody_else(other: dict[str, Any]) -> None:
    world = world_with(4, set())
    end_with(world, 3, words(group=1))
    end_with(world, 2, other)
    assert stops(world) == []
    before = committed(world, 0)
    world.run_fairly(3.0)
    assert committed(world, 0) > before


def test_a_fault_that_shows_after_the_pass_is_known_by_what_both_replicas_have_tried() -> None:
    world = world_with(4, set())
    end_with(world, 3, words(9, group=3, tried=[1, 5, 9]))
    end_with(world, 0, words(10, group=0, tried=[2, 6, 10]))  # the same error at other work: a fault of its own
    assert stops(world) == []
    end_with(world, 1, words(11, group=1, tried=[3, 5, 7, 9, 11]))
    where = "on worker 3 on node3, then on worker 1 on node1"
    assert stops(world) == [
        (1, f"one of the microbatches 5, 9 of iteration 7 raises {ERROR} wherever it is run: {where}")
    ]


def test_the_third_replica_that_the_same_microbatch_ends_ends_the_run_whatever_the_errors_say() -> None:
    world = world_with(4, set())
    end_with(world, 3, words(9, "KeyError: a", group=3, tried=[1, 5, 9]))
    end_with(world, 0, words(5, "ValueError: b", group=0, tried=[2, 5]))
    assert stops(world) == []
    end_with(world, 1, words(7, "KeyError: c", group=1, tried=[3, 5, 7]))
    ((code, reason),) = stops(world)
    assert code == 1
    assert reason.startswith("microbatch 5 of iteration 7 ends every worker that runs it")
    assert all(error in reason for error in ("KeyError: a", "ValueError: b", "KeyError: c"))


def test_three_replicas_with_no_microbatch_in_common_are_three_faults() -> None:
    world = world_with(4, set())
    end_with(world, 3, words(9, "KeyError: a", group=3, tried=[1, 5, 9]))
    end_with(world, 0, words(5, "ValueError: b", group=0, tried=[2, 5]))
    end_with(world, 1, words(9, "KeyError: c", group=1, tried=[3, 9]))
    assert stops(world) == []


def test_faults_of_hosts_and_devices_say_nothing_about_the_work() -> None:
    world = world_with(4, set())
    for number in (3, 0, 1):
        end_with(world, number, words(group=number, error="OSError: Too many open files", own=True))
    assert stops(world) == []


def test_a_fault_outside_of_microbatches_is_that_of_its_phase() -> None:
    world = world_with(4, set())
    end_with(world, 3, words(None, group=3, phase="eval"))
    end_with(world, 0, words(None, group=0, phase="checkpoint"))
    assert stops(world) == []
    end_with(world, 1, words(None, group=1, phase="checkpoint"))
    where = "on worker 0 on node0, then on worker 1 on node1"
    assert stops(world) == [(1, f"iteration 7 (checkpoint) raises {ERROR} wherever it is run: {where}")]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "Rank 3, device 1: result nan (found NaN in bucket #3)",
            "Rank 12, device 0: result inf (found Inf in bucket #0)",
        ),
        ("no file /scratch/job_17/tmpabcdefgh/x", "no file /scratch/job_9/tmpzyxwvuts/x"),
        ("values 0.125 and 1e-05 at 0x7f3a", "values -3 and 2.5 at 0xbeef"),
        ("shape [1, 2, 3] of node12a", "shape [4] of node7b"),
        ("request 3f2a9c-71b0e4 failed", "request 9911aa-0a failed"),
    ],
)
def test_errors_are_alike_but_for_numbers_and_names_with_numbers(one: str, other: str) -> None:
    assert alike(one) == alike(other)
    assert alike(one) != alike(f"not {other}")


@given(st.text("#0123 .,:[]-naif", max_size=2000))
def test_no_error_takes_long_to_compare(error: str) -> None:
    assert len(alike(error)) <= len(error)


def test_last_words_said_while_no_coordinator_is_reached_are_told_to_the_next_one_once() -> None:
    world = world_with(3, set())
    world.kill_coordinator(0)
    world._member_effects("w2", world.worker(2).report_exception(words()))
    world.run_fairly(2.0)
    assert world.worker(2).noted
    (event,) = [record for record in world.log if record["event"] == "exception"]
    assert (event["candidate"], event["worker"]) == (1, 2)


def test_a_fault_without_a_microbatch_is_told_by_its_iteration() -> None:
    first, second = (ExceptionReport(f"worker {n} on a", n, 7, None, ERROR) for n in (0, 1))
    assert true_cause(second, [first]) == (
        f"iteration 7 raises {ERROR} wherever it is run: on worker 0 on a, then on worker 1 on a"
    )


@given(st.text(max_size=400), st.integers(80, 300))
def test_a_long_text_keeps_its_beginning_and_its_end(text: str, limit: int) -> None:
    short = cut_middle(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        assert len(short) == limit
        assert text.startswith(short[:10])
        assert text.endswith(short[-10:])


def test_the_reason_of_a_stop_is_bounded_however_long_the_words() -> None:
    name = f"worker 1 on {'h' * 256}"
    first, second = (ExceptionReport(name, n, 1 << 53, 1 << 53, "x" * MAX_TRACEBACK) for n in (0, 1))
    cause = true_cause(second, [first])
    assert cause is not None
    assert len(cause) <= 2000
    assert cause.endswith(f"then on {name}")
