"""Sections, in which a worker that hears of a death first leaves nobody behind; boundaries where a training is held."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.instep.decision import Decision
from recover_megatron.instep.meeting.rendezvous import Boundary, Sections
from tests.drawn import some
from tests.harness.waiting import DEADLINE
from tests.instep.conftest import Runs
from tests.instep.hsdp import TWO
from tests.instep.pacing import hold
from tests.instep.runs import Case, Layout

NOBODY: Any = SimpleNamespace(check=lambda: None, leave_if_broken=lambda: None)
HOOKS: Any = SimpleNamespace(log=lambda *unused, **unused_too: None)


class Progress:
    at = 0

    def begin(self) -> int:
        self.at += 1
        return self.at

    def agree(self, number: int) -> None:
        raise EpochRevoked(1, "worker 3 died")

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()


def test_who_misses_the_commit_of_the_second_run_returns_what_that_one_returned() -> None:
    """The first run is reported in an epoch that ends; the others commit the second one while this worker waits."""

    def interrupted(mine: bool, members: Sequence[int]) -> bool:
        raise EpochRevoked(2, "worker 2 died")

    def meet(number: int) -> None:
        assignment.decision.at = number

    groups = SimpleNamespace(any=interrupted)
    assignment: Any = SimpleNamespace(
        decision=SimpleNamespace(at=0), live={0, 1, 2}, epoch_groups=groups, committed=lambda number: False
    )
    committed, returned = iter([False, True]), iter(["first", "second"])
    rendezvous: Any = SimpleNamespace(committed_before_the_end=lambda number: next(committed), meet=meet)
    progress: Any = Progress()
    sections = Sections(HOOKS, progress, assignment, NOBODY, rendezvous)
    assert sections.run("asynchronous checkpoint", lambda: next(returned)) == "second"


SHARDED = "--optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4 --use-distributed-optimizer"
TENSOR, STAGES = Layout("tp2-dp2", 2, tensor=2), Layout("pp2-dp2", 2, pipeline=2)
NORM = ("--log-params-norm",)
PARTED = {
    "checkpoint of a model in shards": (TWO, "checkpoint", ("--save-interval", "1")),
    "norm over tensor parallelism": (TENSOR, "parameters' norm", NORM),
    "norm over stages": (STAGES, "parameters' norm", NORM),
    "norm with the distributed optimizer": (
        Layout("tp2-dp2-sharded", 2, tensor=2, flags=SHARDED), "parameters' norm", NORM,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", some("parted sections", list(PARTED), 2))
def test_who_hears_of_a_death_first_leaves_its_mate_of_a_section_waiting_for_nobody(
    runs: Runs, tmp_path: Path, name: str
) -> None:
    """Worker 0 dies; in the other replica the second waits for the first, which never begins that attempt."""
    layout, kind, flags = PARTED[name]
    late, begins = layout.grid.replicas[1]
    saving = ("--save", str(tmp_path / "saved")) if kind == "checkpoint" else ()
    case = Case(layout, flags=(*saving, *flags), doomed=(0,))
    result = runs.check(case.altered("pacing.parted", kind, 0, begins, late))
    assert result.replicas == [2, 2, 2, *[1] * 5], result.replicas
    if saving:
        assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "8"


# ---- a training that waits before an iteration (``pacing.hold``)

NEXT = 7
"""The number of the step that follows."""


class Held:
    """A boundary that waits for two replicas, in a thread; ``decision`` is that of its epoch."""

    def __init__(self, decision: Decision, *, begun: bool = False) -> None:
        self.groups = SimpleNamespace(over=False)
        self.assignment: Any = SimpleNamespace(
            decision=decision, epoch_groups=self.groups, begun_by_others=lambda number: begun
        )
        progress: Any = SimpleNamespace(at=NEXT - 1)
        hooks: Any = SimpleNamespace(iteration=lambda: 3)
        nobody: Any = None
        self.boundary = Boundary(hooks, progress, self.assignment, nobody, 0)
        self.answers: list[bool] = []
        self.thread = threading.Thread(target=lambda: self.answers.append(self.boundary._wanted()), daemon=True)

    def answer(self) -> bool:
        """Whether it wants to meet the others; it must not wait any more."""
        self.thread.start()
        self.thread.join(DEADLINE)
        (answer,) = self.answers
        return answer

    def starts_to_wait(self) -> None:
        self.thread.start()
        self.thread.join(0.1)
        assert self.answers == []


@pytest.fixture(autouse=True)
def holding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Boundary, "_wanted", Boundary._wanted)  # restored at the end
    hold(lambda decision, iteration: len(decision.replicas) < 2)


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Whether an asynchronous checkpoint is under way."""
    said = SimpleNamespace(under_way=False)
    training = SimpleNamespace(async_utils=SimpleNamespace(is_empty_async_queue=lambda: not said.under_way))
    monkeypatch.setitem(sys.modules, "megatron.training", training)  # type: ignore[arg-type]
    return said


ALONE = Decision(3, {0: (0,)}, (1,), at=NEXT - 1)


def test_it_waits_until_what_it_waits_for_is_there() -> None:
    held = Held(ALONE)
    held.starts_to_wait()
    held.assignment.decision = Decision(4, {0: (0,), 1: (1,)}, (), at=NEXT, version=2)
    held.thread.join(DEADLINE)
    assert held.answers == [False]


@pytest.mark.parametrize("under_way", [False, True])
def test_when_the_epoch_is_over_all_meet_at_the_boundary_or_in_the_step_if_a_checkpoint_is_under_way(
    saves: SimpleNamespace, under_way: bool
) -> None:
    held = Held(ALONE)
    held.groups.over, saves.under_way = True, under_way
    assert held.answer() is not under_way


def test_new_replicas_make_the_step_that_others_wait_for_and_no_further_one() -> None:
    fresh = Decision(4, {0: (1,)}, (), at=NEXT, version=2, fresh=(0,))
    assert Held(fresh).answer() is False
    later = Held(Decision(4, {0: (1,)}, (), at=NEXT - 1, version=2, fresh=(0,)))
    later.starts_to_wait()
    later.assignment.decision = fresh
    later.thread.join(DEADLINE)


def test_nobody_waits_before_a_step_that_others_have_begun() -> None:
    assert Held(ALONE, begun=True).answer() is False


def test_where_replicas_can_be_put_together_all_meet() -> None:
    assert Held(Decision(3, {0: (0,)}, (1,), at=NEXT - 1, regroup=True)).answer() is True
