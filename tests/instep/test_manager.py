"""The interface of in-step recovery: how narrow it is, and what it adds to the parts behind it."""

from __future__ import annotations

import dataclasses
import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.instep.decision import Decision
from recover_megatron.instep.faults import Orphaned, OtherPosition, StateLost
from recover_megatron.instep.manager import Manager
from recover_megatron.instep.meeting.assignment import Assignment
from recover_megatron.instep.step import Step
from recover_megatron.instep.trainer import Outcome
from recover_megatron.instep.view import View
from recover_megatron.workload.grid import Slot, launch_grid

MOST = 20
"""Public methods and properties: as many as a reader takes in at once; torchft's Manager has 18."""


def public() -> dict[str, Any]:
    return {name: its for name, its in vars(Manager).items() if not name.startswith("_")}


def manager(**parts: Any) -> Any:
    """A manager of these parts alone."""
    made = object.__new__(Manager)
    made._parts = SimpleNamespace(**parts)  # type: ignore[assignment]
    return made


def test_the_interface_is_narrow_and_each_of_it_says_what_it_promises() -> None:
    assert len(public()) <= MOST
    assert [name for name, its in public().items() if not inspect.getdoc(its)] == []
    contract = inspect.getdoc(inspect.getmodule(Manager)) or ""
    told = {"start", "at_boundary", "step", "section", "finish", "mark", "leave", "release", "wait_for_place"}
    assert {name for name in told if f"``{name}``" not in contract and f"{name}  " not in contract} == set()


def test_nobody_changes_a_view() -> None:
    assert dataclasses.is_dataclass(View)
    blank = dict.fromkeys(field.name for field in dataclasses.fields(View))
    with pytest.raises(dataclasses.FrozenInstanceError):
        View(**blank).replica = 3  # type: ignore[misc,arg-type]


class WhilePlansChange:
    """A lock in whose block the second of three plans is in force: the first before it, the third after."""

    def __init__(self, mine: Assignment) -> None:
        self._mine, self._next = mine, iter((1, 2))

    def take_up(self, replica: int) -> None:
        self._mine.stand(replica, 0)
        self._mine.taken_up = Decision(replica, {replica: (7,)}, ())
        self._mine._epoch_groups = f"groups {replica}"  # type: ignore[assignment]

    def __enter__(self) -> None:
        self.take_up(next(self._next))

    def __exit__(self, *unused: object) -> None:
        self.take_up(next(self._next))


def test_a_view_is_of_one_plan_whenever_another_thread_asks_for_it() -> None:
    unused: Any = SimpleNamespace()
    grid = launch_grid(3, tensor=1, context=1, pipeline=1, inner_ranks=1)
    mine = Assignment(unused, 7, grid, unused)
    mine.lock = changing = WhilePlansChange(mine)  # type: ignore[assignment]
    changing.take_up(0)
    found = mine.at_once()
    decision, groups, replica, *_ = found
    assert decision is not None
    assert (decision.epoch, groups, replica) == (1, "groups 1", 1)
    assert mine.slots_of(decision) == ({Slot(1): 7}, {Slot(1)})
    assert mine.slots_of(decision)[1] is mine.slots_of(decision)[1]


@pytest.mark.parametrize(("can_go_back", "raised"), [(True, Orphaned), (False, StateLost)])
def test_a_state_that_is_lost_ends_the_run_only_where_there_is_none_to_go_back_to(
    can_go_back: bool, raised: type[Exception]
) -> None:
    left: list[str] = []

    def lose_state(what: str) -> None:
        raise StateLost(what)

    planner = SimpleNamespace(can_go_back=can_go_back, lose_state=lose_state)
    with pytest.raises(raised, match="of worker 3"):
        manager(planner=planner, orphan=SimpleNamespace(leave=left.append)).lose_state("the state of worker 3")
    assert left == (["the state of worker 3"] if can_go_back else [])


def test_a_worker_that_is_wanted_elsewhere_offers_itself_for_that_position_from_then_on() -> None:
    """Its model is that of the position from the moment on at which it begins to build it."""
    mine = SimpleNamespace(position=0)

    def wait(**offer: Any) -> None:
        raise OtherPosition(2)

    with pytest.raises(OtherPosition):
        manager(assignment=mine, orphan=SimpleNamespace(wait=wait)).wait_for_place()
    assert mine.position == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_place_is_told_of_when_it_was_taken_and_not_where_that_has_failed(fails: bool) -> None:
    did: list[str] = []
    traffic: Any = SimpleNamespace(recovery=None)
    parts = manager(
        orphan=SimpleNamespace(come_back=lambda decision: did.append("place")),
        progress=SimpleNamespace(mark=lambda phase, **_: did.append(phase)),
        hooks=SimpleNamespace(planned=lambda decision: did.append("planned")),
        planner=SimpleNamespace(log=lambda *_: did.append("log")),
    )
    decision: Any = None
    with pytest.raises(TimeoutError) if fails else nullcontext(), parts.take_place(decision, traffic):
        if fails:
            raise TimeoutError
        did.append("groups")
    assert did == (["place", "regroup"] if fails else ["place", "regroup", "groups", "planned", "log"])
    assert traffic.recovery is parts._parts


@pytest.mark.parametrize(("balance", "by_plan", "wanted"), [(True, False, [8]), (True, True, []), (False, False, [])])
def test_quotas_follow_the_paces_of_a_step_unless_its_commit_was_learnt_from_a_plan(
    balance: bool, by_plan: bool, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else workers of one replica would run different ones: not all of them know the paces."""
    balanced: list[int] = []
    monkeypatch.setattr(Step, "__init__", lambda *_: None)
    monkeypatch.setattr(Step, "run", lambda _: Outcome({}, None, by_plan=by_plan))  # type: ignore[arg-type]
    its = manager(show=lambda total: None, rebalance=lambda speeds, total, agree: balanced.append(total))
    unused: Any = None
    its.step(unused, 8, unused, 1.0, (lambda counts: counts) if balance else None)
    assert balanced == wanted
