"""What epochs decide of nodes that are to be switched off: pure."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from recover_megatron.instep.decision import JoinStatus, Rules
from recover_megatron.instep.grid import launch_grid
from recover_megatron.instep.plan import decide
from recover_megatron.instep.planner import Planner

GRID = launch_grid(4, tensor=1, context=1, pipeline=1, inner_ranks=1)
NODES = "aabc"
STEP = {
    worker: JoinStatus(worker, 0, at=3, step=True, total=4, ran=(worker,), version=2, node=NODES[worker])
    for worker in range(4)
}
BOUNDARY = {w: replace(s, at=4, step=False, ran=(), total=0, boundary=True, version=3) for w, s in STEP.items()}


def told(statuses: dict[int, JoinStatus], *nodes: str) -> dict[int, JoinStatus]:
    return {worker: replace(status, draining=nodes) for worker, status in statuses.items()}


def test_in_a_step_it_changes_nothing_but_what_comes_at_the_boundary() -> None:
    decision = decide(2, STEP, GRID, drain=["b"])
    assert (decision.draining, sorted(decision.leaving), decision.regroup) == (("b",), [2], True)
    assert list(decision.grid) == [0, 1, 2, 3]
    assert not any(ids for by_rank in decision.rerun.values() for ids in by_rank)


def test_at_the_boundary_who_has_come_knowing_it_has_no_place() -> None:
    decision = decide(3, told(BOUNDARY, "b"), GRID)
    assert (list(decision.grid), decision.spares) == ([0, 1, 3], (2,))
    assert (decision.draining, decision.leaving, decision.regroup) == (("b",), frozenset(), False)


def test_an_order_that_comes_at_the_boundary_waits_for_the_next_one() -> None:
    """Nobody has given away yet what only the node holds."""
    decision = decide(3, told(BOUNDARY, "b"), GRID, drain=["c"])
    assert (list(decision.grid), sorted(decision.leaving), decision.regroup) == ([0, 1, 3], [3], True)
    assert decision.draining == ("b", "c")


def test_a_spare_takes_the_place_in_the_same_epoch_but_none_of_a_drained_node() -> None:
    spares = {4: JoinStatus(None, 0, node="b", ready=True), 5: JoinStatus(None, 0, node="d", ready=True)}
    decision = decide(3, told(BOUNDARY | spares, "b"), GRID)
    assert (decision.grid[2], decision.fresh, decision.spares) == ((5,), (2,), (2, 4))
    assert decision.transfers.keys() == {5}
    assert not {2, 4} & {holder for holders in decision.holders.values() for holder in holders}


def test_a_death_may_make_it_impossible_and_then_the_node_stays() -> None:
    left = {worker: status for worker, status in told(BOUNDARY, "b").items() if worker == 2}
    decision = decide(4, left, GRID)
    assert (list(decision.grid), decision.draining) == ([2], ())
    assert "no whole replica would be left" in decision.undrained["b"]


def test_as_many_replicas_are_left_as_are_wanted() -> None:
    rules = Rules(min_replicas=3)
    assert decide(2, STEP, GRID, rules, drain=["b"]).draining == ("b",)
    assert (
        "2 of 4 whole replicas would be left, 3 are wanted" in decide(2, STEP, GRID, rules, drain=["a"]).undrained["a"]
    )


def met(*epochs: tuple[dict[int, JoinStatus], set[int]]) -> list[bool]:
    """What the planner of worker 0 thinks in each epoch of whether anybody has finished.

    An epoch: with what all join it, and who has left in order before.
    """
    session: Any = SimpleNamespace(opened_members=frozenset(), note=print, answer_drain=lambda *_: None, committed=3)
    mine: Any = SimpleNamespace(me=0, grid=GRID, replica=0, placed=True, lock=threading.Lock(), taken_up=None)
    hooks: Any = SimpleNamespace(checkpoints=lambda: ((), ()))
    edges: Any = SimpleNamespace(look=lambda *_: (), told=lambda *_: None)
    snapshots: Any = SimpleNamespace(told=dict, follow=lambda decision: None)
    where: Any = {"node": "a", "domains": (), "device": None, "peer_store": ""}
    planner = Planner(session, hooks, mine, edges, Rules(), snapshots=snapshots, **where)
    found = []
    for epoch, (statuses, left) in enumerate(epochs, start=2):
        data = {"statuses": {str(worker): status.to_json() for worker, status in statuses.items()}}
        plan = SimpleNamespace(epoch=epoch, data=data, committed=3)
        session.join = partial(lambda its, *_: its, plan)
        session.left = frozenset(left)
        planner.meet(statuses[0], "asked for")
        found.append(planner.finished)
    return found


def test_who_left_since_its_node_was_drained_had_not_finished() -> None:
    """Else a spare takes it for the end of the run when, much later, no replica is whole for a moment."""
    after = {worker: status for worker, status in told(BOUNDARY, "b").items() if worker != 2}
    assert met((told(STEP, "b"), set()), (after, {2}), (after, {2})) == [False, False, False]
    assert met((after, {2})) == [False], "a newcomer, which never met it"
    last = {worker: status for worker, status in after.items() if worker != 3}
    assert met((told(STEP, "b"), set()), (after, {2}), (last, {2, 3})) == [False, False, True]
    assert met((STEP, set()), ({0: BOUNDARY[0]}, {1, 2, 3})) == [False, True]


def test_replicas_leave_when_all_that_have_come_to_the_boundary_know_it_not_some_of_them() -> None:
    """The coordinator has died while it told the plan: who did not get it has given away nothing yet."""
    some = BOUNDARY | told({0: BOUNDARY[0], 2: BOUNDARY[2]}, "b")
    decision = decide(3, some, GRID)
    assert (list(decision.grid), sorted(decision.leaving), decision.regroup) == ([0, 1, 2, 3], [2], True)
    newcomer = {4: JoinStatus(None, 0, node="d", ready=True)}
    assert list(decide(4, told(BOUNDARY, "b") | newcomer, GRID).grid) == [0, 1, 2, 3]
    assert decide(4, told(BOUNDARY, "b") | newcomer, GRID).grid[2] == (4,), "a newcomer need not know it"
