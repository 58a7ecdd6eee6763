"""A training that waits before an iteration goes on wherever others, or newcomers, wait for that iteration."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.instep.decision import Decision
from recover_megatron.instep.rendezvous import Boundary
from tests.harness.waiting import DEADLINE
from tests.instep.pacing import hold

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
    held.thread.start()
    held.thread.join(0.1)
    assert held.answers == []
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
    later.thread.start()
    later.thread.join(0.1)
    assert later.answers == []
    later.assignment.decision = fresh
    later.thread.join(DEADLINE)


def test_nobody_waits_before_a_step_that_others_have_begun() -> None:
    assert Held(ALONE, begun=True).answer() is False


def test_where_replicas_can_be_put_together_all_meet() -> None:
    assert Held(Decision(3, {0: (0,)}, (1,), at=NEXT - 1, regroup=True)).answer() is True
