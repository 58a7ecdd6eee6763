"""Asynchronous checkpoints: whoever comes or goes while one is written, nobody waits for ever, and none is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recover_megatron.membership.records import EXIT_SAME_FAULT
from tests.instep.conftest import Runs
from tests.instep.logged import checkpoint, saved_arguments
from tests.instep.runs import LAYOUTS, PARAMETERS, QUICK_TO_SEE_A_HANG, Case, Result, Strike, check_steps
from tests.megatron_hooks.tiny import ASYNCHRONOUSLY

pytestmark = pytest.mark.slow

DP4 = LAYOUTS[0]


def saving(case: Case, out: Path, interval: int) -> Case:
    flags = ("--save", str(out / "saved"), "--save-interval", str(interval), *ASYNCHRONOUSLY.split())
    return replace(case, flags=(*case.flags, *flags))


def held(case: Case, out: Path, pattern: str) -> Case:
    """With every checkpoint held up until the coordinator's events have ``pattern``."""
    return case.altered("faulty.held_writers", out / "events-0.jsonl", pattern)


def abandoned(result: Result) -> bool:
    return '"event":"checkpoint abandoned"' in (result.out / "events.jsonl").read_text()


def check_saved(result: Result, iterations: list[int]) -> dict[str, torch.Tensor]:
    """That these are complete and no others, and the last one is told; its tensors."""
    saved = result.out / "saved"
    assert sorted(path.name for path in saved.glob("iter_*")) == [f"iter_{n:07d}" for n in iterations], result.told()
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(iterations[-1])
    return checkpoint(saved, iterations[-1])


def test_a_replica_that_comes_while_a_checkpoint_is_written_costs_neither_that_nor_a_hang(runs: Runs) -> None:
    """It comes while all but one look whether that of iteration 5 is written, and it is when the newcomer is ready."""
    case = Case(DP4, (Strike(0, 0, 2, "backward"),), 12, restarts=1).patient(f"6-:{DP4.replicas}")
    result = runs.check(saving(held(case, runs.out, "is a spare, and ready"), runs.out, 5))
    assert result.replicas[-1] == DP4.replicas
    assert not abandoned(result)
    check_saved(result, [5, 10, 12])


@pytest.mark.parametrize("how", ["enter", "told"])
def test_the_last_checkpoint_is_saved_again_by_who_is_left_if_a_writer_dies_before_it_is_complete(
    runs: Runs, how: str
) -> None:
    case = Case(DP4, ())
    expected = runs(saving(case, runs.out / "whole", 8), "whole")
    case = replace(case, doomed=(1 if how == "enter" else 0,)).altered("faulty.deadly_wait", how)
    result = runs.check(saving(case, runs.out, 8))
    assert abandoned(result)
    mine, its = check_saved(result, [8]), check_saved(expected, [8])
    assert mine.keys() == its.keys()
    assert all(torch.allclose(mine[name].double(), its[name].double(), atol=PARAMETERS) for name in mine)


def test_what_is_saved_again_counts_no_samples_that_were_left_out_since(runs: Runs) -> None:
    """Iteration 8 is left out: it makes no step, but its samples count as consumed."""
    case = Case(DP4, doomed=(1,), model=("--iterations-to-skip", "8"))
    result = runs(saving(case.altered("faulty.deadly_wait", "enter"), runs.out, 7))
    assert list(result.ended.codes) == [0, -9, 0, 0], result.told()
    assert abandoned(result)
    check_saved(result, [7, 8])
    consumed = {n: saved_arguments(runs.out / "saved", n).consumed_train_samples for n in (7, 8)}
    assert consumed == {n: n * DP4.samples for n in (7, 8)}


def test_a_spare_that_comes_while_the_last_checkpoint_is_written_does_not_cost_it(runs: Runs) -> None:
    case = Case(DP4, (Strike(0, 0, 8, "backward"),), restarts=1)
    result = runs.check(saving(held(case, runs.out, "is admitted"), runs.out, 8))
    assert not abandoned(result)
    check_saved(result, [8])


@pytest.mark.parametrize("how", ["write", "copy", "stop"])
def test_a_worker_ends_with_its_writer_and_the_others_save_again(runs: Runs, how: str) -> None:
    case = Case(DP4).with_flags(*QUICK_TO_SEE_A_HANG)
    result = runs(saving(case.altered("faulty.deadly_writers", how), runs.out, 8))
    assert list(result.ended.codes) == [0, 1, 0, 0], result.told()
    told = "WriterStopped: process .* has been stopped" if how == "stop" else "WriterKilled: the process .* by signal 9"
    assert re.search(told, result.log(1)), result.told()
    check_steps(result, runs.reference(case))
    check_saved(result, [8])


def test_a_part_that_cannot_be_written_in_the_background_ends_the_run_with_the_reason(runs: Runs) -> None:
    result = runs(saving(Case(DP4).altered("faulty.deadly_writers", "fail"), runs.out, 8))
    assert set(result.ended.codes) == {EXIT_SAME_FAULT}, result.told()
    (stop,) = [event for event in result.events if event["event"] == "stop"]
    assert "the process that writes checkpoints for this worker ended with exit code 1" in str(stop["reason"])
    assert not list((runs.out / "saved").glob("iter_*"))
    assert not (runs.out / "saved" / "latest_checkpointed_iteration.txt").exists()


def test_a_worker_without_a_part_in_a_checkpoint_is_waited_for_by_nobody(runs: Runs) -> None:
    """Rank 0 writes everything.  That was worker 1, until a newcomer stood before it."""
    case = Case(DP4, (Strike(0, 0, 2, "backward"),), 8, restarts=1).patient(f"5-:{DP4.replicas}")
    case = replace(case, flags=(*case.flags, "--no-ckpt-fully-parallel-save"))
    result = runs.check(saving(case, runs.out, 4))
    assert sorted(result.grid.items()) == [(0, [4]), (1, [1]), (2, [2]), (3, [3])]
    check_saved(result, [4, 8])
