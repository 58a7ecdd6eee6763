"""When nobody holds the state any more: what the plan goes back to, and with whom.  And drained nodes.  Pure."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.instep.decision import (
    MOST_CHECKPOINTS,
    NON_PERSISTENT,
    Beyond,
    JoinStatus,
    Rollback,
    Rules,
    merged,
)
from recover_megatron.instep.faults import NoReplica
from recover_megatron.instep.meeting.plan import decide
from recover_megatron.instep.meeting.planner import Planner
from recover_megatron.membership.records import EXIT_NO_REPLICA
from recover_megatron.workload.grid import LaunchGrid, launch_grid
from tests.instep.test_plan import THREE, TWO, orphan

KEPT = ((4, "save"), (2, "save"))


def survivor(position: int | None, **fields: Any) -> JoinStatus:
    """One that the loss of iteration 7 has left, in the first timeline."""
    return orphan(position, **{"checkpoints": KEPT, **fields})


ONLY_FIRST = {0: survivor(0), 2: survivor(0, version=7)}
THERE = {**ONLY_FIRST, 4: JoinStatus(None, 1, ready=True)}
"""With a newcomer in the position that is missing."""


def test_who_is_there_twice_builds_the_position_that_is_missing_and_then_all_go_back() -> None:
    decision = decide(5, ONLY_FIRST, TWO)
    assert (decision.grid, decision.rollback, decision.state_lost) == ({}, None, "")
    (worker,) = decision.rebuild
    assert (decision.rebuild, decision.enough) == ({worker: 1}, 1)
    building = replace(ONLY_FIRST[worker], position=1, ready=False, building=True, version=None)
    waiting = decide(6, {**ONLY_FIRST, worker: building}, TWO)
    assert (waiting.grid, waiting.rollback, waiting.enough, waiting.state_lost) == ({}, None, 1, "")
    built = decide(7, {**ONLY_FIRST, worker: replace(building, ready=True, building=False)}, TWO)
    assert built.rollback == Rollback(4, "save", lost=2)
    assert (built.iteration, built.version, built.timeline, built.at) == (5, 4, (7, 4), 8)
    assert (list(built.grid.values()), built.fresh) == ([(({*ONLY_FIRST} - {worker}).pop(), worker)], (0,))


def test_newcomers_that_have_the_position_are_taken() -> None:
    newcomers = {4: JoinStatus(None, 1, ready=True), 5: JoinStatus(None, 1, ready=True)}
    decision = decide(5, ONLY_FIRST | newcomers, TWO)
    assert decision.rollback == Rollback(4, "save", lost=2)
    assert decision.grid == {0: (0, 4), 1: (2, 5)}


def test_nobody_goes_back_before_those_are_out_of_the_training_who_may_hold_the_state() -> None:
    coming = survivor(1, ready=False, version=None)
    decision = decide(5, {**ONLY_FIRST, 4: JoinStatus(None, 1, ready=True), 3: coming}, TWO)
    assert (decision.grid, decision.rollback, decision.state_lost) == ({}, None, "")
    assert decide(6, {**ONLY_FIRST, 3: survivor(1)}, TWO).rollback is None, "it has come, and holds it"


def test_a_checkpoint_that_somebody_could_not_read_is_not_tried_again() -> None:
    decision = decide(5, {**THERE, 2: replace(THERE[2], unreadable=(4,))}, TWO)
    assert decision.rollback == Rollback(2, "save", lost=4)
    decision = decide(5, {**THERE, 2: replace(THERE[2], unreadable=(4, 2))}, TWO)
    assert decision.state_lost, "there is no other"
    assert decision.enough == 0


def test_what_could_not_be_read_is_not_gone_forward_to_when_that_is_forgotten() -> None:
    """Who could not read it dies in the next iteration."""
    first = decide(5, {**THERE, 2: replace(THERE[2], unreadable=(4,))}, TWO)
    assert first.checkpoints == ((2, "save"),)


def test_checkpoints_of_which_megatron_keeps_the_last_leave_room_for_the_others() -> None:
    often = [(iteration, NON_PERSISTENT) for iteration in range(90, 100)]
    assert merged(often, [(50, "save"), (40, "save")]) == (*reversed(often[-2:]), (50, "save"), (40, "save"))


def test_what_a_worker_holds_of_what_was_left_behind_is_of_no_use() -> None:
    """Both positions are there in iteration 6, but not of one timeline."""
    back = (9, 4)
    now = {"timeline": back, "state_of": 9, "iteration": 7, "version": 6}
    statuses = {0: survivor(0, **now), 1: survivor(1), 3: survivor(1, timeline=back)}
    decision = decide(12, statuses, TWO)
    assert decision.rollback == Rollback(4, "save", lost=2)
    assert decision.timeline == (12, 4)
    both = decide(12, {**statuses, 5: survivor(1, **now)}, TWO)
    assert (both.rollback, both.version, both.timeline, list(both.grid.values())) == (None, 6, back, [(0, 5)])


def test_an_iteration_of_before_does_not_count() -> None:
    """A spare that has not heard of it says iteration 70; the run is at 6, and 5 of it is held."""
    now = {"timeline": (9, 4), "state_of": 9, "iteration": 6, "version": 5}
    decision = decide(12, {0: survivor(0, **now), 1: survivor(1, **now), 2: survivor(0, iteration=70)}, TWO)
    assert (decision.rollback, decision.version, decision.iteration) == (None, 5, 6)


def test_while_a_replica_is_whole_nobody_goes_back_and_who_is_there_twice_builds_the_missing_model() -> None:
    whole = {4: JoinStatus(2, 0, 7, True, total=6), 5: JoinStatus(2, 1, 7, True, total=6)}
    decision = decide(5, {**ONLY_FIRST, **whole}, THREE)
    assert (decision.rollback, decision.grid) == (None, {2: (4, 5)})
    assert list(decision.rebuild.values()) == [1]
    assert (decision.regroup, decision.enough) == (False, 2)


checkpoints = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["save", "load"])), max_size=5).map(tuple)


@given(st.lists(checkpoints, min_size=2, max_size=2), st.lists(st.sets(st.integers(1, 9)), min_size=2, max_size=2))
def test_all_go_back_to_the_newest_that_anybody_knows_and_everybody_could_read(
    known: list[tuple[tuple[int, str], ...]], unreadable: list[set[int]]
) -> None:
    statuses = {
        worker: survivor(worker, version=None, checkpoints=merged(its), unreadable=tuple(bad))
        for worker, (its, bad) in enumerate(zip(known, unreadable, strict=True))
    }
    told = {checkpoint for status in statuses.values() for checkpoint in status.checkpoints}
    readable = sorted(one for one in sorted(told)[-MOST_CHECKPOINTS:] if one[0] not in unreadable[0] | unreadable[1])
    decision = decide(5, statuses, TWO)
    if readable:
        assert decision.rollback is not None
        assert (decision.rollback.iteration, decision.rollback.source) == readable[-1]
        assert decision.timeline == (5, readable[-1][0])
    else:
        assert decision.rollback is None
        assert decision.state_lost


@given(st.builds(survivor, st.none(), checkpoints=checkpoints, unreadable=st.tuples(st.integers(1, 9))))
def test_a_status_is_the_same_after_its_way(status: JoinStatus) -> None:
    assert JoinStatus.from_json(json.loads(json.dumps(status.to_json()))) == status


def test_what_a_rollback_loses_is_told_by_the_next_one_if_it_was_not_carried_out() -> None:
    """Another epoch came before anybody stood where the first one had placed it; nothing was committed since."""
    first = decide(12, ONLY_FIRST | {4: JoinStatus(None, 1, ready=True), 5: JoinStatus(None, 1, ready=True)}, TWO)
    assert first.rollback == Rollback(4, "save", lost=2)
    now = {"timeline": first.timeline, "iteration": 5, "version": None, "state_of": 12, "undone": 7}
    heard = {0: survivor(0, **now), 4: survivor(1, **now)}
    assert decide(13, heard, TWO).rollback == Rollback(4, "save", lost=2)
    still = {worker: replace(status, iteration=7) for worker, status in heard.items()}
    assert decide(13, still, TWO).rollback == Rollback(4, "save", lost=2), "nobody had carried it out"
    late = {7: JoinStatus(None, 1, ready=True)}
    assert decide(13, heard | late, TWO).rollback == Rollback(4, "save", lost=2), "who was not there knows nothing"
    over = {**heard, 4: replace(heard[4], undone=0)}
    assert decide(13, over, TWO).rollback == Rollback(4, "save", lost=0), "one knows that it was: it is told of once"


def played(join: Any, me: int, grid: LaunchGrid, committed: int) -> tuple[Planner, Any]:
    """A planner of worker ``me``, and its session, in which only ``join`` does something."""
    session: Any = SimpleNamespace(
        opened_members=frozenset(), left=frozenset(), note=print, answer_drain=lambda *_: None, committed=committed,
        join=join,
    )  # fmt: skip
    mine: Any = SimpleNamespace(me=me, grid=grid, replica=0, placed=True, lock=threading.Lock(), taken_up=None)
    hooks: Any = SimpleNamespace(checkpoints=lambda: ((), ()), log=lambda *_, **__: None, describe=lambda decision: {})
    edges: Any = SimpleNamespace(look=lambda *_: (), record=lambda *_: None)
    snapshots: Any = SimpleNamespace(join_status=dict, follow=lambda decision: None)
    where: Any = {"node": "a", "domains": (), "device": None, "peer_store": ""}
    return Planner(session, hooks, mine, edges, Rules(), snapshots=snapshots, **where), session


def test_a_rollback_is_undone_until_it_is_committed_whoever_has_logged_its_plan() -> None:
    """Another epoch may come before all have loaded, and what this one goes back to may not be readable."""
    told: list[JoinStatus] = []

    def join(status: Mapping[str, Any], reason: str) -> Any:
        told.append(JoinStatus.from_json(status))
        every = {str(worker): its.to_json() for worker, its in joined.items()}
        return SimpleNamespace(epoch=12, data={"statuses": every}, committed=session.committed)

    planner, session = played(join, me=4, grid=TWO, committed=6)
    joined = ONLY_FIRST | {4: JoinStatus(None, 1, ready=True), 5: JoinStatus(None, 1, ready=True)}
    for _ in range(3):
        decision, _lost = planner.meet(survivor(4), "asked for")
        assert decision.rollback == Rollback(4, "save", lost=2)
        planner.log(decision, None, 0.0)
    session.committed = decision.at
    planner.meet(survivor(4), "asked for")
    assert [status.undone for status in told] == [0, 7, 7, 0]


def test_too_few_to_go_back_wait_for_five_minutes_where_workers_may_come_then_the_run_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = decide(5, {0: survivor(0)}, TWO, Rules(replaced=True))
    assert (short.short, short.enough, short.state_lost) == (True, 0, "")
    assert not decide(5, {0: survivor(0)}, TWO).short, "nobody may come"
    planner, session = played(None, me=0, grid=TWO, committed=6)
    ended: list[int] = []
    planner._edges.tries = 0
    session.give_up = lambda code, message: ended.append(code)
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    for clock[0] in (1000.0, 1299.0):
        planner.give_up_unless_enough(short)
    assert (ended, capsys.readouterr().err.count("waits up to 300 s for other workers")) == ([], 1)
    clock[0] = 1301.0
    with pytest.raises(NoReplica):
        planner.give_up_unless_enough(short)
    assert ended == [EXIT_NO_REPLICA]


def test_an_iteration_whose_step_was_committed_is_lost_too_whatever_of_it_was_still_to_be_done() -> None:
    """An evaluation, a checkpoint, the update: the iteration under way is still 7, whose step is decision 21."""
    there = {**THERE, 2: replace(THERE[2], last_step=(7, 21))}
    before, after = (decide(5, there, TWO, beyond=Beyond(committed)).rollback for committed in (20, 21))
    assert before == Rollback(4, "save", lost=2)
    assert after == Rollback(4, "save", lost=3, committed=True)
    assert (before and before.under_way, after and after.under_way) == (7, 7)
    again = {w: replace(s, timeline=(5, 4), undone=after.next if after else 0) for w, s in there.items()}
    assert decide(6, again, TWO, beyond=Beyond(21)).rollback == Rollback(4, "save", lost=3), "it was not carried out"


def test_a_step_of_what_was_left_behind_is_not_counted_once_more() -> None:
    """Worker 0 has slept through a rollback from iteration 7 to 4."""
    now = {"timeline": (9, 4), "state_of": 9, "iteration": 6, "version": 5, "last_step": (6, 30)}
    statuses = {0: survivor(0, last_step=(7, 21)), 2: survivor(0, **now), 4: JoinStatus(None, 1, ready=True)}
    assert decide(12, statuses, TWO, beyond=Beyond(29)).rollback == Rollback(4, "save", lost=1)


def test_who_came_between_a_rollback_and_its_commit_knows_of_it_too() -> None:
    """It is in the timeline then, and joins the next epoch with what it was told."""
    now = {"timeline": (12, 4), "iteration": 5, "version": None, "state_of": 12, "undone": 7}
    decision = decide(13, {0: survivor(0, **now), 4: JoinStatus(None, 0, ready=True)}, TWO)
    assert (decision.rollback, decision.undone) == (None, 7), "position 1 is missing"
    both = {worker: survivor(worker, **{**now, "undone": decision.undone}) for worker in (0, 1)}
    assert decide(14, both, TWO).rollback == Rollback(4, "save", lost=2)


FOUR = launch_grid(4, tensor=1, context=1, pipeline=1, inner_ranks=1)
NODES = "aabc"
STEP = {
    worker: JoinStatus(worker, 0, at=3, step=True, total=4, ran=(worker,), version=2, node=NODES[worker])
    for worker in range(4)
}
BOUNDARY = {w: replace(s, at=4, step=False, ran=(), total=0, boundary=True, version=3) for w, s in STEP.items()}


def knowing(statuses: dict[int, JoinStatus], *nodes: str) -> dict[int, JoinStatus]:
    return {worker: replace(status, draining=nodes) for worker, status in statuses.items()}


def test_in_a_step_it_changes_nothing_but_what_comes_at_the_boundary() -> None:
    decision = decide(2, STEP, FOUR, drain=["b"])
    assert (decision.draining, sorted(decision.leaving), decision.regroup) == (("b",), [2], True)
    assert list(decision.grid) == [0, 1, 2, 3]
    assert not any(ids for by_rank in decision.rerun.values() for ids in by_rank)


def test_at_the_boundary_who_has_come_knowing_it_has_no_place() -> None:
    decision = decide(3, knowing(BOUNDARY, "b"), FOUR)
    assert (list(decision.grid), decision.spares) == ([0, 1, 3], (2,))
    assert (decision.draining, decision.leaving, decision.regroup) == (("b",), frozenset(), False)


def test_an_order_that_comes_at_the_boundary_waits_for_the_next_one() -> None:
    """Nobody has given away yet what only the node holds."""
    decision = decide(3, knowing(BOUNDARY, "b"), FOUR, drain=["c"])
    assert (list(decision.grid), sorted(decision.leaving), decision.regroup) == ([0, 1, 3], [3], True)
    assert decision.draining == ("b", "c")


def test_a_spare_takes_the_place_in_the_same_epoch_but_none_of_a_drained_node() -> None:
    spares = {4: JoinStatus(None, 0, node="b", ready=True), 5: JoinStatus(None, 0, node="d", ready=True)}
    decision = decide(3, knowing(BOUNDARY | spares, "b"), FOUR)
    assert (decision.grid[2], decision.fresh, decision.spares) == ((5,), (2,), (2, 4))
    assert decision.holders.keys() == {5}
    assert not {2, 4} & {holder for holders in decision.holders.values() for holder in holders}


def test_a_death_may_make_it_impossible_and_then_the_node_stays() -> None:
    left = {worker: status for worker, status in knowing(BOUNDARY, "b").items() if worker == 2}
    decision = decide(4, left, FOUR)
    assert (list(decision.grid), decision.draining) == ([2], ())
    assert "no complete replica would be left" in decision.undrained["b"]


def test_as_many_replicas_are_left_as_are_wanted() -> None:
    rules = Rules(min_replicas=3)
    assert decide(2, STEP, FOUR, rules, drain=["b"]).draining == ("b",)
    refused = decide(2, STEP, FOUR, rules, drain=["a"]).undrained["a"]
    assert "2 of 4 complete replicas would be left, 3 are required" in refused


def met(*epochs: tuple[dict[int, JoinStatus], set[int]]) -> list[bool]:
    """What the planner of worker 0 thinks in each epoch of whether anybody has finished.

    An epoch: with what all join it, and who has left in order before.
    """
    planner, session = played(None, me=0, grid=FOUR, committed=3)
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
    after = {worker: status for worker, status in knowing(BOUNDARY, "b").items() if worker != 2}
    assert met((knowing(STEP, "b"), set()), (after, {2}), (after, {2})) == [False, False, False]
    assert met((after, {2})) == [False], "a newcomer, which never met it"
    last = {worker: status for worker, status in after.items() if worker != 3}
    assert met((knowing(STEP, "b"), set()), (after, {2}), (last, {2, 3})) == [False, False, True]
    assert met((STEP, set()), ({0: BOUNDARY[0]}, {1, 2, 3})) == [False, True]


def test_replicas_leave_when_all_that_have_come_to_the_boundary_know_it_not_some_of_them() -> None:
    """The coordinator has died while it told the plan: who did not get it has given away nothing yet."""
    some = BOUNDARY | knowing({0: BOUNDARY[0], 2: BOUNDARY[2]}, "b")
    decision = decide(3, some, FOUR)
    assert (list(decision.grid), sorted(decision.leaving), decision.regroup) == ([0, 1, 2, 3], [2], True)
    newcomer = {4: JoinStatus(None, 0, node="d", ready=True)}
    assert list(decide(4, knowing(BOUNDARY, "b") | newcomer, FOUR).grid) == [0, 1, 2, 3]
    assert decide(4, knowing(BOUNDARY, "b") | newcomer, FOUR).grid[2] == (4,), "a newcomer need not know it"
