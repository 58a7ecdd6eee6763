"""What an epoch decides, and the launch grid: pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.errors import Disagreement
from recover_megatron.instep.decision import HELD, Beyond, Decision, JoinStatus, Rollback, Rules
from recover_megatron.instep.meeting.assignment import Quotas
from recover_megatron.instep.meeting.plan import decide
from recover_megatron.workload import assign, quotas
from recover_megatron.workload.grid import LaunchGrid, launch_grid

# ---- the launch grid


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.booleans())
def test_every_worker_has_one_place_and_tensor_ranks_are_neighbours(
    tensor: int, context: int, pipeline: int, inner_ranks: int, replicas: int, pipeline_before_data: bool
) -> None:
    world = tensor * context * pipeline * inner_ranks * replicas
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline, "inner_ranks": inner_ranks}
    grid = launch_grid(world, **sizes, pipeline_before_data=pipeline_before_data)
    assert sorted(worker for replica in grid.replicas for worker in replica) == list(range(world)), grid
    assert grid.world == world
    for worker in range(world):
        replica, position = grid.place(worker)
        assert grid.replicas[replica][position] == worker
        assert grid.inner_rank_of[position] == position // (tensor * context * pipeline)
        assert grid.replicas[replica][position - position % tensor] == worker - position % tensor


@given(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2), st.integers(2, 4), st.integers(0, 9))
def test_places_to_grow_into_have_names_of_their_own_and_columns_reach_into_them(
    tensor: int, pipeline: int, inner_ranks: int, replicas: int, most: int
) -> None:
    sizes = {"tensor": tensor, "context": 1, "pipeline": pipeline, "inner_ranks": inner_ranks}
    launch = launch_grid(tensor * pipeline * inner_ranks * replicas, **sizes)
    grid = launch.with_room_for(most)
    assert (grid.launched, grid.world) == (replicas, launch.world)
    assert len(grid.replicas) == max(replicas, most)
    slots = [slot for its in grid.replicas for slot in its]
    assert sorted(slots) == list(range(len(slots)))
    assert all(grid.place(slot) == launch.place(slot) for slot in range(launch.world))
    for position in range(grid.size):
        column = grid.column([its[position] for its in launch.replicas])
        assert column == tuple(its[position] for its in grid.replicas)
    assert grid.column(range(launch.world)) == tuple(range(len(slots)))
    assert grid.column(launch.replicas[0]) == launch.replicas[0], "what is inside a replica stays there"


def test_the_order_of_ranks_is_megatrons() -> None:
    sizes = {"tensor": 2, "context": 1, "pipeline": 2, "inner_ranks": 1}
    assert launch_grid(8, **sizes).replicas == ((0, 1, 4, 5), (2, 3, 6, 7))  # type: ignore[arg-type]
    spread = launch_grid(8, **sizes, pipeline_before_data=True)  # type: ignore[arg-type]
    assert spread.replicas == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("world", [2, 6, 7])
def test_sizes_that_do_not_fill_the_world_are_refused(world: int) -> None:
    with pytest.raises(ValueError, match="cannot form replicas of"):
        launch_grid(world, tensor=2, context=1, pipeline=2, inner_ranks=1)


# ---- decisions


@dataclass(frozen=True)
class Meeting:
    """What the members of an epoch join with: a launch of which workers were lost, and some are new."""

    grid: LaunchGrid
    statuses: dict[int, JoinStatus]
    whole: dict[int, tuple[int, ...]]
    """The replicas that nobody is gone from, and that know it."""
    begun: dict[int, tuple[int, ...]]
    """What those ran that are in the step."""
    total: int
    rules: Rules

    @property
    def boundary(self) -> bool:
        return any(status.boundary for status in self.statuses.values()) and not self.begun


ITERATION = 7


@st.composite
def meetings(draw: st.DrawFn, boundary: bool | None = None) -> Meeting:
    """The replicas that are whole are in step 7, or before it; at its boundary if ``boundary``, or not, or drawn."""
    replicas, tensor = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    pipeline, inner_ranks = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    size = tensor * pipeline * inner_ranks
    grid = launch_grid(replicas * size, tensor=tensor, context=1, pipeline=pipeline, inner_ranks=inner_ranks)
    total = replicas * inner_ranks * draw(st.integers(1, 4))
    every = list(range(replicas))
    shares = assign(total, inner_ranks, every, quotas(total, every, multiple_of=inner_ranks), replicas)
    dead = draw(st.sets(st.integers(0, grid.world - 1)))
    at_boundary = draw(st.booleans()) if boundary is None else boundary
    late = draw(st.sets(st.integers(0, replicas - 1)))
    digests, nodes = st.sampled_from(["right", "right", "wrong"]), st.sampled_from(["node-a", "node-b"])
    statuses: dict[int, JoinStatus] = {}
    whole, begun = {}, {}
    grid = grid.with_room_for(draw(st.integers(0, 6)))
    for replica, workers in enumerate(grid.replicas[:replicas]):
        lost = bool(dead & set(workers))
        ran = tuple(j for inner_rank in shares[replica] for j in inner_rank)
        present = JoinStatus(replica, at=6, iteration=ITERATION, version=6)
        if at_boundary:
            present = replace(present, at=7, boundary=True)
        elif replica not in late:
            present = replace(present, at=7, step=True, total=total, ran=ran)
        for position, worker in enumerate(workers):
            if worker in dead:
                continue
            status = replace(present, position=position, node=draw(nodes))
            if at_boundary:
                status = replace(status, digest=draw(digests))
            if lost and draw(st.booleans()):  # it has noticed, or not yet
                orphan = {"ready": draw(st.booleans()), "version": draw(st.sampled_from([None, 5, 6, 7]))}
                status = JoinStatus(None, position, 7, iteration=ITERATION, node=status.node, **orphan)
            statuses[worker] = status
        if not lost:
            whole[replica] = tuple(workers)
            if present.step:
                begun[replica] = ran
    for newcomer in range(grid.world, grid.world + draw(st.integers(0, 6))):
        position = draw(st.one_of(st.none(), st.integers(0, size - 1)))
        statuses[newcomer] = JoinStatus(None, position, ready=draw(st.booleans()), node=draw(nodes))
    rules = Rules(cross_node=draw(st.booleans()), spares=draw(st.integers(0, 3)))
    return Meeting(grid, statuses, whole, begun, total, rules)


def decided(meeting: Meeting) -> Decision:
    return decide(3, meeting.statuses, meeting.grid, meeting.rules)


@given(meetings(boundary=False))
def test_each_microbatch_is_in_one_gradient_or_is_run_again_by_one_replica(meeting: Meeting) -> None:
    decision, begun = decided(meeting), meeting.begun
    assert decision.step == bool(begun)
    if begun:
        again = [j for inner_ranks in decision.rerun.values() for inner_rank in inner_ranks for j in inner_rank]
        kept = [j for ran in begun.values() for j in ran]
        assert sorted([*kept, *again]) == list(range(meeting.total))
        assert set(decision.rerun) == set(meeting.whole)
        for inner_ranks in decision.rerun.values():
            assert len(inner_ranks) == meeting.grid.inner_ranks
            assert len({len(inner_rank) for inner_rank in inner_ranks}) == 1, "the lanes of a replica run in lock-step"
    else:
        assert not decision.rerun


@given(meetings(boundary=True))
def test_a_run_grows_by_those_alone_whom_it_does_not_need_for_losses(meeting: Meeting) -> None:
    decision, grid = decided(meeting), meeting.grid
    beyond = [replica for replica in decision.fresh if replica >= grid.launched]
    if meeting.whole and len(decision.grid) > max(len(meeting.whole), grid.launched):
        assert len(decision.spares) >= meeting.rules.spares, "spares that are asked for stay spares"
    if len(grid.replicas) == grid.launched:
        assert not beyond
    if not decision.grid:
        return
    shares = assign(meeting.total, grid.inner_ranks, decision.replicas, counts(decision, meeting), grid.launched)
    ids = sorted(j for inner_ranks in shares.values() for inner_rank in inner_ranks for j in inner_rank)
    assert ids == list(range(meeting.total))


def counts(decision: Decision, meeting: Meeting) -> dict[int, int]:
    return quotas(meeting.total, decision.replicas, multiple_of=meeting.grid.inner_ranks)


@given(meetings())
def test_who_is_in_a_whole_replica_keeps_its_place(meeting: Meeting) -> None:
    grid = decided(meeting).grid
    assert {replica: grid[replica] for replica in meeting.whole} == meeting.whole


@given(meetings())
def test_everybody_has_one_place_that_its_model_is_built_for_or_is_a_spare(meeting: Meeting) -> None:
    decision = decided(meeting)
    assert sorted([*decision.workers, *decision.spares]) == sorted(meeting.statuses)
    assert set(decision.grid) <= set(range(len(meeting.grid.replicas)))
    for workers in decision.grid.values():
        assert [meeting.statuses[worker].position for worker in workers] == list(range(meeting.grid.size))
    for replica in decision.fresh:
        workers = decision.grid[replica]
        assert all(meeting.statuses[worker].ready for worker in workers)
        for group in meeting.grid.tensor_groups:
            nodes = {meeting.statuses[workers[position]].node for position in group}
            assert len(nodes) == 1 or meeting.rules.cross_node


@given(meetings())
def test_new_replicas_begin_at_a_boundary_or_where_none_is_whole(meeting: Meeting) -> None:
    decision = decided(meeting)
    new = set(decision.grid) - set(meeting.whole)
    assert set(decision.fresh) == new
    if meeting.whole and not meeting.boundary:
        assert not new
        assert not decision.holders
    assert not (decision.regroup and (meeting.boundary or not decision.grid))
    at_boundary = {
        worker: replace(status, at=7, boundary=True, step=False, total=0, ran=())
        for worker, status in meeting.statuses.items()
        if status.replica is not None
    }
    then = decide(4, meeting.statuses | at_boundary, meeting.grid, meeting.rules)
    if meeting.whole:
        assert decision.regroup == (bool(then.fresh) and not meeting.boundary), "what is promised comes, and no other"


@given(meetings(boundary=True))
def test_a_state_comes_from_one_of_the_same_column_that_is_whole_and_right(meeting: Meeting) -> None:
    decision, statuses = decided(meeting), meeting.statuses
    if not meeting.whole:
        assert not decision.holders
        return
    fresh = {worker for replica in decision.fresh for worker in decision.grid[replica]}
    assert set(decision.holders) == fresh | set(decision.repaired)
    for receiver, (donor, *_) in decision.holders.items():
        position = statuses[receiver].position
        assert position is not None
        column = [workers[position] for workers in meeting.whole.values()]
        assert donor in column
        counts = Counter(statuses[worker].digest for worker in column)
        assert counts[statuses[donor].digest] == max(counts.values())
        assert donor not in decision.holders, "who gives has nothing to get"
    for worker in decision.repaired:
        assert statuses[worker].digest != statuses[decision.holders[worker][0]].digest


@given(meetings())
def test_committed_steps_are_not_taken_back(meeting: Meeting) -> None:
    decision = decided(meeting)
    if not decision.fresh or meeting.whole:
        return
    assert decision.version in (ITERATION - 1, ITERATION)
    held = [meeting.statuses[worker].version for worker in decision.workers]
    assert set(held) == {decision.version}
    assert not decision.holders, "they hold it themselves"


@given(meetings())
def test_only_spares_are_asked_for_something_else(meeting: Meeting) -> None:
    decision = decided(meeting)
    for worker in decision.rebuild:
        assert worker in decision.spares
        assert meeting.statuses[worker].ready
        assert worker not in decision.mirrors
    for spare, worker in decision.mirrors.items():
        assert spare in decision.spares
        assert len(decision.grid) == 1
        assert meeting.statuses[spare].ready
        assert meeting.statuses[spare].position == meeting.statuses[worker].position


@given(meetings(), st.randoms(use_true_random=False))
def test_the_answer_does_not_depend_on_who_reported_first(meeting: Meeting, source: random.Random) -> None:
    shuffled = list(meeting.statuses.items())
    source.shuffle(shuffled)
    assert decided(replace(meeting, statuses=dict(shuffled))) == decided(meeting)


TWO = launch_grid(4, tensor=2, context=1, pipeline=1, inner_ranks=1)
THREE = launch_grid(6, tensor=2, context=1, pipeline=1, inner_ranks=1)


def in_step(replica: int, at: int, total: int = 0, ran: Sequence[int] = ()) -> JoinStatus:
    return JoinStatus(replica, at=at, step=total > 0, total=total, ran=tuple(ran))


def placed(*statuses: JoinStatus, positions: int = 2) -> dict[int, JoinStatus]:
    """The workers of whole replicas, from worker 0 on, all of one saying the same."""
    every = [replace(status, position=position) for status in statuses for position in range(positions)]
    return dict(enumerate(every))


def orphan(position: int | None, **fields: Any) -> JoinStatus:
    return JoinStatus(None, position, **{"ready": True, "iteration": ITERATION, "version": 6, "at": 7, **fields})


def test_what_a_broken_replica_ran_does_not_count() -> None:
    statuses = placed(in_step(0, 4, 4, (0, 2)), in_step(1, 4, 4, (1, 3)))
    del statuses[2]
    decision = decide(2, statuses, TWO)
    assert decision.grid == {0: (0, 1)}
    assert decision.spares == (3,)
    assert decision.rerun == {0: [[1, 3]]}


def test_a_replica_that_has_not_begun_the_step_gets_more_than_those_that_wait_for_it() -> None:
    three = launch_grid(3, tensor=1, context=1, pipeline=1, inner_ranks=1)
    decision = decide(2, placed(in_step(0, 5, 9, (0, 3, 6)), in_step(1, 4), in_step(2, 4), positions=1), three)
    assert {replica: len(inner_ranks[0]) for replica, inner_ranks in decision.rerun.items()} == {0: 0, 1: 3, 2: 3}


def test_a_decision_that_is_no_step_has_nothing_to_run_again() -> None:
    decision = decide(2, placed(in_step(0, 9), in_step(1, 8, 4, (1, 3))), TWO)
    assert (decision.at, decision.step, decision.rerun) == (9, False, {})


def test_mates_of_whom_one_has_not_heard_of_the_commit_yet_are_one_replica() -> None:
    statuses = placed(in_step(0, 8, 4), in_step(1, 8, 4, (1, 3)))
    statuses[1] = replace(in_step(0, 7, 4, (0, 2)), position=1)
    decision = decide(2, statuses, TWO)
    assert decision.at == 8
    assert decision.rerun == {0: [[0]], 1: [[2]]}


BOTH = placed(in_step(0, 7, 4, (0, 2)), in_step(1, 7, 4, (1, 3)))


@pytest.mark.parametrize(
    "statuses",
    [
        placed(in_step(0, 7, 4, (0, 2)), in_step(1, 7, 4, (1, 2))),
        placed(in_step(0, 7, 4, (0, 2)), in_step(1, 7, 6, (1, 3))),
        BOTH | {1: replace(BOTH[1], ran=(0,))},
        BOTH | {1: replace(BOTH[1], at=6)},
        placed(in_step(0, 9, 4), in_step(1, 9, 4)) | {1: JoinStatus(0, 1, 7)},
        BOTH | {4: BOTH[1]},
    ],
    ids=[
        "counted twice", "another total", "mates ran different ids", "a mate is behind", "a mate is two behind",
        "two in one place",
    ],
)  # fmt: skip
def test_states_that_no_order_of_events_explains_are_refused(statuses: dict[int, JoinStatus]) -> None:
    with pytest.raises(Disagreement):
        decide(2, statuses, TWO)


def test_the_survivors_of_two_broken_replicas_wait_for_the_boundary_and_are_a_replica_from_it_on() -> None:
    survivors = {1: orphan(1), 2: orphan(0)}
    whole = {4: JoinStatus(2, 0, 7, True, total=6, ran=(2, 5)), 5: JoinStatus(2, 1, 7, True, total=6, ran=(2, 5))}
    decision = decide(2, survivors | whole, THREE)
    assert (decision.grid, decision.regroup, decision.spares) == ({2: (4, 5)}, True, (1, 2))
    assert decision.rerun == {2: [[0, 1, 3, 4]]}
    there = {worker: JoinStatus(2, worker - 4, 8, boundary=True, iteration=8, version=7) for worker in (4, 5)}
    decision = decide(3, survivors | there, THREE)
    assert decision.grid == {0: (2, 1), 2: (4, 5)}
    assert (decision.fresh, decision.version, decision.holders) == ((0,), 7, {1: (5,), 2: (4,)})


def test_with_one_replica_left_a_spare_in_each_position_keeps_its_state() -> None:
    whole = {2: JoinStatus(1, 0, 7, True, total=4), 3: JoinStatus(1, 1, 7, True, total=4)}
    assert decide(2, {0: orphan(0)} | whole, TWO).mirrors == {0: 2}
    assert decide(2, {0: orphan(0, ready=False)} | whole, TWO).mirrors == {}
    near, far = (replace(orphan(0), domains=[f"node {node}"]) for node in "ab")
    there = {worker: replace(status, domains=["node a"]) for worker, status in whole.items()}
    spares = {0: near, 1: near, 4: far}  # 1 is told to build the other position
    assert decide(2, spares | there, TWO).mirrors == {4: 2}, "the one that does not go with the same node"
    assert decide(2, {**spares, 4: near} | there, TWO).mirrors == {0: 2}


def test_orphans_begin_again_with_the_newest_state_that_they_hold_between_them() -> None:
    decision = decide(2, {0: orphan(0, version=7), 3: orphan(1, version=7)}, TWO)
    assert (decision.grid, decision.version, decision.at) == ({0: (0, 3)}, 7, 8)
    statuses = {0: orphan(0, version=7), 2: orphan(0), 3: orphan(1)}
    assert decide(2, statuses, TWO).version == 6, "no position 1 of the newer one"
    coming = statuses | {1: JoinStatus(0, 1, 7, iteration=ITERATION)}
    assert decide(2, coming, TWO).grid == {}, "who has not told yet may hold the newer one"
    assert decide(2, coming, TWO).enough > 0
    building = statuses | {1: orphan(1, version=None, ready=False, building=True)}
    assert decide(2, building, TWO).version == 6, "it holds none, and may take an hour"


def test_a_state_from_before_the_last_committed_step_is_of_no_use() -> None:
    decision = decide(2, {0: orphan(0, version=5), 3: orphan(1, version=5)}, TWO)
    assert (decision.grid, decision.version, decision.enough) == ({}, None, 0)


def late(version: int | None, **fields: Any) -> dict[int, JoinStatus]:
    """A replica that was set aside in iteration 7, its decision 7."""
    return {worker: orphan(worker, version=version, aside=True, **fields) for worker in (0, 1)}


def test_a_replica_that_was_aside_makes_the_step_of_the_others_again_if_they_got_no_further() -> None:
    for committed in (6, 7):
        decision = decide(9, late(6), TWO, beyond=Beyond(committed, seen=7))
        assert (decision.grid, decision.version, decision.at, decision.rollback) == ({0: (0, 1)}, 6, 8, None)


@pytest.mark.parametrize(("seen", "lost"), [(7, 1), (8, 1), (10, 3)])
def test_all_go_back_to_what_it_holds_if_they_did(seen: int, lost: int) -> None:
    """And nothing that they agreed on is agreed on again: the next decision is one that nobody has made."""
    decision = decide(9, late(6), TWO, beyond=Beyond(committed=12, seen=seen))
    assert (decision.grid, decision.fresh, decision.version) == ({0: (0, 1)}, (0,), 6)
    assert decision.rollback == Rollback(6, HELD, lost)
    assert (decision.at, decision.iteration, decision.timeline) == (13, 7, (9, 6))


@pytest.mark.parametrize("told", [(0,), (1,), (0, 1)])
def test_the_coordinator_may_be_lost_while_it_tells_of_that(told: tuple[int, ...]) -> None:
    """Those that have the plan are in the new timeline; the others hold a state that this one began with."""
    first = decide(9, late(6), TWO, beyond=Beyond(committed=12, seen=10))
    statuses = late(6)
    for worker in told:  # it has begun to take its place
        after = {"timeline": first.timeline, "state_of": 9, "undone": first.undone, "same_as": first.same_as}
        statuses[worker] = replace(statuses[worker], at=first.at - 1, aside=False, **after)
    second = decide(10, statuses, TWO, beyond=Beyond(committed=12))
    assert (second.grid, second.fresh, second.version) == ({0: (0, 1)}, (0,), 6)
    assert (second.at, second.iteration, second.timeline) == (13, 7, (9, 6))
    assert second.rollback == first.rollback, "it is told of once it is carried out"
    assert (second.undone, second.same_as) == (first.undone, first.same_as)


def test_a_state_of_the_timeline_before_is_of_no_use_where_the_new_one_began_with_something_else() -> None:
    """A replica of it has gone on, or all have loaded a checkpoint of that iteration."""
    there = {"timeline": (9, 6), "state_of": 9, "undone": 10}
    for worker, same_as, version in ((1, -1, 6), (1, 3, 6), (1, 0, 5)):
        statuses = {0: replace(late(6)[0], same_as=same_as, **there), worker: late(version)[worker]}
        assert decide(10, statuses, TWO, beyond=Beyond(committed=12)).grid == {}


def test_that_is_decided_when_all_have_told_and_for_the_newest_state_that_is_kept() -> None:
    beyond = Beyond(committed=12, seen=10)
    coming = {**late(6), 1: JoinStatus(None, 1, 7, iteration=ITERATION)}
    first = decide(9, coming, TWO, beyond=beyond)
    assert (first.grid, first.rollback, first.at, first.enough) == ({}, None, 7, 1)
    newer = decide(9, late(6, checkpoints=((8, "save"),)), TWO, beyond=beyond)
    assert newer.rollback == Rollback(8, "save", 1)
    older = decide(9, late(6, checkpoints=((4, "save"),)), TWO, beyond=beyond)
    assert older.rollback == Rollback(6, HELD, 3)
    nothing = decide(9, late(None), TWO, beyond=beyond)
    assert nothing.enough == 0
    assert "no live worker has seen the last committed iterations" in nothing.state_lost


def test_whoever_lives_waits_for_who_is_aside_before_the_state_is_given_up() -> None:
    left = {3: orphan(1), 2: orphan(0, version=None)}
    for checkpoints in ((), ((4, "save"),)):
        statuses = {worker: replace(status, checkpoints=checkpoints) for worker, status in left.items()}
        waits = decide(9, statuses, TWO, beyond=Beyond(aside=True))
        assert (waits.grid, waits.enough, waits.state_lost, waits.rollback) == ({}, 1, "", None)
        assert bool(decide(9, statuses, TWO).state_lost) == (not checkpoints)


def test_nobody_whole_and_too_few_to_be_is_a_decision_without_replicas() -> None:
    decision = decide(2, {1: JoinStatus(0, 1, 3), 2: JoinStatus(None)}, TWO)
    assert (decision.replicas, decision.spares, decision.enough, decision.state_lost) == ((), (1, 2), 0, "")


def test_a_position_that_nobody_holds_is_a_lost_state() -> None:
    decision = decide(2, {0: orphan(0), 2: orphan(0)}, TWO)
    assert (decision.replicas, decision.rollback, decision.enough) == ((), None, 0)
    assert "no live worker has the state" in decision.state_lost
    assert decide(2, {0: orphan(0)}, TWO).state_lost == "", "one worker is no replica, with any state"


def test_the_state_that_differs_is_replaced_by_that_of_the_others() -> None:
    told = placed(*(JoinStatus(replica, at=7, boundary=True, version=6, digest="right") for replica in range(3)))
    told[3] = replace(told[3], digest="wrong")
    decision = decide(2, told, THREE)
    assert (decision.repaired, decision.holders) == ((3,), {3: (1, 5)})


def test_where_no_majority_says_whose_state_is_right_the_lowest_is_followed_or_the_run_ends() -> None:
    two = {
        worker: JoinStatus(worker // 2, worker % 2, 7, boundary=True, version=6, digest="same") for worker in range(4)
    }
    two[3] = replace(two[3], digest="other")
    decision = decide(5, two, TWO)
    assert (decision.holders, decision.disputed, decision.enough) == ({3: (1,)}, (1, 3), 2)
    strict = decide(5, two, TWO, Rules(strict=True))
    assert strict.enough == 0
    assert "it is unknown which is right; checkpoints saved since the last comparison may be wrong" in strict.state_lost


def test_a_status_is_the_same_after_its_way_through_json() -> None:
    status = JoinStatus(3, 1, 12, True, total=8, ran=(1, 5), version=4, node="here", note="because")
    assert JoinStatus.from_json(status.to_json()) == status
    with pytest.raises(Disagreement, match="cannot read"):
        JoinStatus.from_json({**status.to_json(), "speed": 1})
    with pytest.raises(Disagreement, match="cannot read"):
        JoinStatus.from_json({"replica": 1})


def test_a_run_that_has_grown_deals_microbatches_by_the_replicas_of_its_launch() -> None:
    """Twelve for five replicas of a launch of two, whose own are the even and the odd ones, as in stock Megatron."""
    grid = launch_grid(2, tensor=1, context=1, pipeline=1, inner_ranks=1).with_room_for(5)
    decision = Decision(1, {replica: (replica,) for replica in range(5)}, (), at=3)
    shares = [ids for replica in range(5) for ids in Quotas(grid, least=1).of(decision, replica, 12)]
    assert sorted(j for ids in shares for j in ids) == list(range(12))
    assert [{j % 2 for j in ids} for ids in shares[:2]] == [{0}, {1}]
