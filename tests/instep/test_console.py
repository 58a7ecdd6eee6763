"""The lines in which a run tells people of losses and returns."""

from __future__ import annotations

import re

import pytest

from recover_megatron.instep.decision import Decision, Failure, JoinStatus, LostWorker
from recover_megatron.instep.meeting.edges import news
from recover_megatron.instep.meeting.losses import READY, Failures
from recover_megatron.megatron_hooks.logging import console
from recover_megatron.membership.records import ADMITTED, NEW_COORDINATOR
from recover_megatron.workload.grid import launch_grid
from tests.instep.conftest import Runs
from tests.instep.runs import LAYOUTS, Case, Strike

GRID = launch_grid(8, tensor=1, context=1, pipeline=1, inner_ranks=1)
WHOLE = Decision(1, {replica: (replica,) for replica in range(8)}, (), iteration=1)
LESS = Decision(2, {replica: (replica,) for replica in range(8) if replica != 5}, (), iteration=103, step=True)


def status(worker: int) -> JoinStatus:
    return JoinStatus(worker, node="ab"[worker // 4], device=worker % 4)


def test_a_recovery_is_one_line_with_who_where_what_was_run_again_and_what_is_left() -> None:
    failures = Failures(GRID)
    failures.note(WHOLE, None, {worker: status(worker) for worker in range(8)})
    left = {worker: status(worker) for worker in range(8) if worker != 5}
    failure = failures.note(LESS, WHOLE, left, {"5": {"iteration": 103, "phase": "forward"}})
    assert failure is not None
    assert failure.workers == [5]
    line = console.recovery_line(103, [failure], {0: [5], 3: [13]}, 0.113, console.of_all(LESS, 8))
    assert line == (
        "iteration 103: worker 5 (node b, GPU 1) lost in forward/backward; 2 microbatches run again by replicas 0, 3; "
        "0.11 s; 7 of 8 replicas"
    )


def test_a_phase_of_an_earlier_iteration_is_not_told_as_that_of_the_loss() -> None:
    failures = Failures(GRID)
    failure = failures.note(LESS, WHOLE, {}, {"5": {"iteration": 102, "phase": "forward"}})
    assert failure is not None
    assert failure.lost == (LostWorker(5),)
    line = console.recovery_line(103, [failure], {}, 0.0, console.of_all(LESS, 8))
    assert line == "iteration 103: worker 5 lost; no microbatch had to be run again; 7 of 8 replicas"


def test_many_lost_workers_are_told_by_node() -> None:
    lost = Failure(9, tuple(LostWorker(worker, "ab"[worker // 4], worker % 4) for worker in range(2, 8)), (2, 3, 4))
    line = console.recovery_line(9, [lost], {0: [1]}, 1.0, "5 of 8 replicas")
    assert line == (
        "iteration 9: 6 workers, 2-3 (node a), 4-7 (node b), lost; 1 microbatch run again by replica 0; 1.00 s; "
        "5 of 8 replicas"
    )


def test_the_end_of_a_run_says_who_was_lost_when() -> None:
    failures = Failures(GRID)
    failures.note(WHOLE, None, {})
    failures.note(LESS, WHOLE, {})
    assert "Workers lost: 5 (iteration 103); alive without a place: 0." in failures.why_it_ends(LESS, 8)


def test_a_replica_that_is_back_a_lost_spare_and_a_degraded_run_are_lines_of_their_own() -> None:
    again = Decision(7, WHOLE.grid, (), iteration=140, fresh=(5,))
    places = {5: LostWorker(5, "b", 1)}
    assert console.return_line(140, again, places, {5: 103}, 8) == (
        "iteration 140: replica 5 is back with worker 5 (node b, GPU 1), 37 iterations after its loss; 8 of 8 replicas"
    )
    grown = Decision(7, {**WHOLE.grid, 8: (14,)}, (), iteration=160, fresh=(8,))
    assert console.return_line(160, grown, places, {}, 8) == (
        "iteration 160: replica 8 is new, with worker 14; 9 replicas (8 at the launch)"
    )
    spare = Failure(150, (LostWorker(9, "c", 1),))
    assert console.spares_line(150, spare, 1) == "iteration 150: spare worker 9 (node c, GPU 1) lost; 1 spare is left"
    two = Failure(150, (LostWorker(9), LostWorker(10)))
    assert console.spares_line(150, two, 0) == "iteration 150: spare worker 9, spare worker 10 lost; no spare is left"
    assert console.degraded_line(200, 600, 103, LESS, 8) == (
        "iteration 200: degraded for 10 min: 7 of 8 replicas since iteration 103; no spare is left"
    )


def test_an_epoch_without_a_loss_says_why_it_was_made() -> None:
    next_one = Decision(2, WHOLE.grid, (), iteration=50)
    assert news(WHOLE, next_one, {}, 0, NEW_COORDINATOR) == ["a new coordinator leads; no worker was lost"]
    assert news(WHOLE, next_one, {}, 0, f"worker 9 on b {ADMITTED}") == [
        "worker 9 on b is admitted: it waits for a place"
    ]
    assert news(WHOLE, next_one, {}, 0, f"worker 9 {READY}") == []
    assert news(WHOLE, LESS, {}, 0, "worker 5 on b died: its connection was closed") == []


def test_where_somebody_was_lost_no_line_says_that_nobody_was() -> None:
    """A lost spare has a line of its own (``spares_line``), as a lost worker has."""
    died = "worker 9 on b died: its connection was closed"
    with_spare = Decision(1, WHOLE.grid, (9,), iteration=50)
    assert news(with_spare, Decision(2, WHOLE.grid, (), iteration=50), {}, 0, died) == []
    assert news(with_spare, Decision(2, WHOLE.grid, (9,), iteration=50), {}, 0, "so be it") == [
        "no worker was lost, but a new epoch begins: so be it"
    ]
    for before, after in ((with_spare, Decision(2, WHOLE.grid, (), iteration=50)), (WHOLE, LESS)):
        assert news(before, after, {}, 0, NEW_COORDINATOR) == ["a new coordinator leads"]


@pytest.mark.slow
def test_a_death_in_the_training_is_told_once_beside_the_line_of_its_iteration(runs: Runs) -> None:
    result = runs(Case(LAYOUTS[0], (Strike(3, 0, 3, "backward"),)))
    assert result.ended.codes == [0, 0, 0, -9], result.told()
    told = [line for worker in range(4) for line in result.log(worker).splitlines() if "lost" in line]
    assert len(told) == 1, told
    assert re.fullmatch(
        r"recover: iteration 3: worker 3 \(node node, GPU 3\) lost(?: in [a-z/ ]+)?; 3 microbatches run again by "
        r"replicas 0, 1, 2; \d+\.\d\d s; 3 of 4 replicas",
        told[0],
    )
    assert told[0] in result.log(2)
    assert "iteration        3/" in result.log(2)
