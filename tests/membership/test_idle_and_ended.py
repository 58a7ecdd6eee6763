"""Members without a part, and how a run is ended: the state machines over the simulated network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import SETTINGS, World

from recover_megatron.membership.errors import EXIT_LOST_MAJORITY, CoordinatorLost
from recover_megatron.membership.events import Notify, Say
from recover_megatron.membership.follower import Stage
from recover_megatron.membership.member import Member
from recover_megatron.membership.node_agent_client import NodeAgentClient
from recover_megatron.membership.quorum import can_tell


def world_with(workers: int, spares: set[int], candidates: int = 2, nodes: int | None = None, **options: Any) -> World:
    world = World(workers, candidates=candidates, nodes=nodes or workers, **options)
    world.spares = set(spares)
    world.run_fairly(4.0)
    return world


def committed(world: World, number: int) -> int:
    return world.worker(number).committed


def test_commits_wait_for_the_members_that_have_a_part_and_for_no_other() -> None:
    world = world_with(3, {2})
    before = committed(world, 2)
    assert before > 0
    world.act(0)
    world.run_fairly(3.0)
    assert committed(world, 2) > before
    assert world.worker(2).done == 0


def test_where_all_are_idle_nothing_is_committed_and_nobody_is_to_blame() -> None:
    world = world_with(3, {0, 1, 2})
    world.run_fairly(5 * SETTINGS.hang_timeout)
    assert world.commits == {}
    assert world.order == [1]


def test_an_idle_member_is_never_hung_and_makes_nobody_waited_for() -> None:
    world = world_with(3, {2})
    spare = world.worker(2)
    spare.mark(0, "spare", None, True, 0.0)  # it waits, and will for ever
    for w in (0, 1):
        world.busy.add(w)  # they compute, without a mark
    world.run_fairly(5 * SETTINGS.hang_timeout)
    assert not [record for record in world.log if record["event"] in ("fault", "stuck")]
    world.busy.clear()
    before = committed(world, 0)
    world.run_fairly(3.0)
    assert committed(world, 0) > before


def test_an_idle_member_that_does_not_join_the_next_rendezvous_is_put_out_there() -> None:
    world = world_with(4, {3})
    world.busy.add(3)  # it never gets to its join
    world.kill_worker(0)
    world.run_fairly(3 * SETTINGS.hang_timeout)
    faults = [(record["kind"], record["worker"]) for record in world.log if record["event"] == "fault"]
    assert faults == [("dead", 0), ("out", 3), ("dead", 3)]  # the last by its launcher's hand
    assert world.formed[world.order[-1]][1] == {1, 2}


def test_a_place_in_the_next_epoch_ends_idleness() -> None:
    world = world_with(3, {2})
    world.spares.clear()
    world.kill_worker(0)
    world.run_fairly(4.0)
    assert world.formed[world.order[-1]][1] == {1, 2}
    before = committed(world, 1)
    world.busy.add(2)
    world.run_fairly(4.0)
    assert committed(world, 1) <= before + 1  # it waits for worker 2, which has a part now


@pytest.mark.parametrize("reported_by", [(0, 1), (0,)])
def test_a_new_coordinator_commits_what_all_with_a_part_reported_and_nothing_else(reported_by: tuple[int, ...]) -> None:
    world = world_with(3, {2})
    before = committed(world, 2)
    for w in reported_by:
        world.act(w)
    world.kill_coordinator(0, lose=True)
    world.busy |= {0, 1}
    for _ in range(20):
        for pair in world.deliverable():
            world.deliver(*pair)
        world.advance(0.3)
    world.busy.clear()
    for w in (0, 1, 2):
        world.act(w)  # join
    for _ in range(20):
        for pair in world.deliverable():
            world.deliver(*pair)
        world.advance(0.3)
    (plan,) = [record for record in world.log if record["event"] == "plan" and record["candidate"] == 1]
    assert plan["members"] == [[0, 2]]
    assert plan["committed"] == before + (len(reported_by) == 2)


def test_idle_members_alone_do_not_go_on_while_those_with_a_part_may_be_running() -> None:
    world = world_with(5, {2, 3, 4})
    for node in (2, 3, 4):
        world.blocked.add((f"node{node}", 0))
    for node in (0, 1):
        world.blocked.add((f"node{node}", 1))
    world.run_fairly(3.0)  # the majority is idle, the others commit on for a while
    assert committed(world, 0) > committed(world, 2)
    world.run_fairly(4 * SETTINGS.lost_timeout)
    assert world.order == [1]
    assert {record["candidate"] for record in world.log if record["event"] == "lead"} == {0}
    for w in (2, 3, 4):
        assert isinstance(world.worker(w).out, CoordinatorLost)
        assert world.worker(w).out.code == EXIT_LOST_MAJORITY


@pytest.mark.parametrize("coordinator_too", [False, True])
def test_idle_members_go_on_when_all_the_others_are_known_to_have_died(coordinator_too: bool) -> None:
    world = world_with(3, {1, 2})
    world.spares.clear()
    if coordinator_too:
        world.kill_coordinator(0)
    world.kill_worker(0)
    world.run_fairly(4.0)
    assert world.formed[world.order[-1]][1] == {1, 2}
    before = committed(world, 1)
    world.run_fairly(4.0)
    assert committed(world, 1) > before


@given(*[st.frozensets(st.integers(0, 4))] * 3, st.booleans())
def test_somebody_with_a_part_can_always_tell(
    reached: frozenset[int], idle: frozenset[int], missing: frozenset[int], own: bool
) -> None:
    assert can_tell(reached, idle, missing, own) == (own or not missing or not reached <= idle)


def test_the_run_is_finished_when_all_that_had_a_part_have_left() -> None:
    world = world_with(3, {2})
    for w in (0, 1):
        assert world.worker(2).stage is Stage.FOLLOWING
        world.members_finish = True
        world._member_effects(f"w{w}", world.worker(w).leave())
        world.dead.add(f"w{w}")
        for number, direction in world.deliverable():
            world.deliver(number, direction)
    world.run_fairly(3.0)
    out = world.worker(2).out
    assert isinstance(out, CoordinatorLost)
    assert out.code == 0
    assert [record["code"] for record in world.log if record["event"] == "stop"] == [0]


# -- giving up --------------------------------------------------------------------------------------------------------


def stops(world: World) -> list[tuple[int, str]]:
    return [(record["code"], record["reason"]) for record in world.log if record["event"] == "stop"]


def test_a_worker_that_gives_up_ends_the_run_for_all_and_the_first_one_wins() -> None:
    world = world_with(3, set(), candidates=3)
    world._member_effects("w1", world.worker(1).end_run(42, "the disk is full"))
    world._member_effects("w1", world.worker(1).end_run(43, "again"))
    world.run_fairly(3.0)
    world._member_effects("w2", world.worker(2).end_run(44, "me too"))
    world.run_fairly(4 * SETTINGS.lost_timeout)
    assert stops(world) == [(42, "the disk is full")]
    for w in range(3):
        out = world.worker(w).out
        assert isinstance(out, CoordinatorLost)
        assert (out.code, str(out), out.by) == (42, "the disk is full", 1)
    assert {record["candidate"] for record in world.log if record["event"] == "lead"} == {0}


def test_giving_up_reaches_the_next_coordinator_when_the_first_is_lost_with_it() -> None:
    world = world_with(3, set())
    world._member_effects("w1", world.worker(1).end_run(42, "the disk is full"))
    world.kill_coordinator(0)
    world.run_fairly(3 * SETTINGS.heartbeat_timeout)
    assert stops(world) == [(42, "the disk is full")]


def test_giving_up_before_the_first_plan_ends_the_run_too() -> None:
    world = World(2)
    world._member_effects("w0", world.worker(0).end_run(7, "no data"))
    world.run_fairly(4.0)
    assert stops(world) == [(7, "no data")]
    assert world.formed == {}


def test_who_comes_late_to_the_start_of_a_run_that_was_given_up_is_told() -> None:
    world = World(3)
    world.frozen.add("w2")  # it has not started yet
    world._member_effects("w0", world.worker(0).end_run(7, "no data"))
    world.run_fairly(10.0)
    assert stops(world) == [(7, "no data")]
    assert 0 in world.coordinators
    world.frozen.clear()
    world.run_fairly(5.0)
    out = world.worker(2).out
    assert isinstance(out, CoordinatorLost)
    assert out.code == 7
    assert 0 not in world.coordinators


def test_who_never_comes_is_not_waited_for_longer_than_the_start_of_the_run_would_have() -> None:
    world = World(3)
    world.kill_worker(2, silently=True)
    world.unreported.clear()
    world._member_effects("w0", world.worker(0).end_run(7, "no data"))
    world.run_fairly(SETTINGS.start_timeout / 2)
    assert 0 in world.coordinators
    world.run_fairly(SETTINGS.start_timeout / 2 + 5)
    assert 0 not in world.coordinators
    assert stops(world) == [(7, "no data")]


@pytest.mark.parametrize("given_up", [True, False])
def test_a_launcher_that_comes_after_the_end_of_a_short_run_is_told_how_it_ended(given_up: bool) -> None:
    world = World(2, nodes=1)
    world.frozen.add("node0")
    world.run_fairly(2.0)
    for w in (0, 1):
        member = world.worker(w)
        world.members_finish = True
        world._member_effects(f"w{w}", member.end_run(7, "no data") if given_up else member.leave())
    world.dead |= set() if given_up else {"w0", "w1"}
    while not stops(world):
        world.deliver(*next(pair for pair in world.deliverable() if pair[1] == "up"))
    assert [code for code, _ in stops(world)] == [7 if given_up else 0]
    assert 0 in world.coordinators
    world.frozen.clear()
    world.run_fairly(2.0)
    launcher = world.members["node0"]
    assert isinstance(launcher.out, CoordinatorLost)
    assert (launcher.out.code, launcher.last_epoch) == (7 if given_up else 0, 1)
    assert 0 not in world.coordinators


def test_a_launcher_that_lost_its_connection_just_before_the_end_is_told_when_it_comes_back() -> None:
    world = World(2, nodes=2)
    world.run_fairly(4.0)
    world.frozen.add("node1")
    world.run_fairly(SETTINGS.heartbeat_timeout + 2)
    assert [record["node"] for record in world.log if record["event"] == "witness_gone"] == ["node1"]
    for w in (0, 1):
        world.members_finish = True
        world._member_effects(f"w{w}", world.worker(w).leave())
    world.dead |= {"w0", "w1"}
    world.run_fairly(1.0)
    assert stops(world)
    world.frozen.clear()
    world.run_fairly(2 * SETTINGS.heartbeat_timeout)
    launcher = world.members["node1"]
    assert isinstance(launcher.out, CoordinatorLost)
    assert (launcher.out.code, launcher.out.told) == (0, True)
    assert 0 not in world.coordinators


def test_a_launcher_that_comes_while_the_second_epoch_is_made_knows_that_there_was_a_first() -> None:
    world = World(3, nodes=3)
    world.frozen.add("node0")
    world.run_fairly(4.0)
    assert world.order == [1]
    world.busy |= {0, 1}  # they do not come to the next rendezvous for now
    world.kill_worker(2)
    world.run_fairly(1.0)
    world.frozen.clear()
    world.run_fairly(2.0)
    launcher = world.members["node0"]
    assert isinstance(launcher, NodeAgentClient)
    assert launcher.planned == {0, 1, 2}
    assert launcher.presentation.opened is not None
    assert launcher.presentation.opened.epoch == 2


def test_a_launcher_that_never_comes_does_not_keep_the_coordinator() -> None:
    world = World(2, nodes=1)
    world.frozen.add("node0")
    world.run_fairly(2.0)
    world._member_effects("w0", world.worker(0).end_run(7, "no data"))
    world.run_fairly(SETTINGS.heartbeat_timeout + 3)
    assert 0 not in world.coordinators


def tell_to_stop(world: World, node: int, signal: int) -> None:
    """Somebody tells a launcher to end its workers, and it says so."""
    launcher = world.members[f"node{node}"]
    assert isinstance(launcher, NodeAgentClient)
    world._member_effects(f"node{node}", launcher.stopping(signal))
    for _ in range(20):
        for number, direction in world.deliverable():
            world.deliver(number, direction)


def stop_launcher(world: World, node: int, signal: int) -> None:
    """It is told to end its workers, and it does."""
    tell_to_stop(world, node, signal)
    for worker in [number for number, on in world.node_of.items() if on == node]:
        world.kill_worker(worker)


def test_a_run_whose_launchers_are_told_to_stop_ends_by_their_signal() -> None:
    world = world_with(4, set(), nodes=2)
    stop_launcher(world, 0, 2)
    world.run_fairly(3.0)
    assert stops(world) == []  # the other node goes on
    stop_launcher(world, 1, 15)
    world.run_fairly(3.0)
    assert stops(world) == [(143, "ended by SIGTERM, which the launcher on node1 received")]


@pytest.mark.parametrize(("told", "stop"), [((0, 1), (130, "ended by SIGINT")), ((0,), (10, "before the first plan"))])
def test_a_signal_before_all_workers_have_come_ends_the_run(told: tuple[int, ...], stop: tuple[int, str]) -> None:
    """Of a worker that has not come nobody knows the launcher; both launchers have come."""
    world = World(4, nodes=2, settings=replace(SETTINGS, start_needs_all=True))
    world.frozen.add("w1")
    world.run_fairly(2.0)
    for node in told:
        tell_to_stop(world, node, 2)
    world.kill_worker(0)
    world.run_fairly(3.0)
    assert [(code, reason[: len(stop[1])]) for code, reason in stops(world)] == [stop]


def test_workers_that_die_by_themselves_are_not_taken_for_stopped() -> None:
    world = world_with(4, set(), nodes=2)
    stop_launcher(world, 0, 2)
    world.run_fairly(3.0)
    for worker in [number for number, on in world.node_of.items() if on == 1]:
        world.kill_worker(worker)
    world.run_fairly(3.0)
    assert stops(world) == [(10, "no live worker is left")]


def test_idleness_is_told_once_and_not_before_the_first_plan() -> None:
    member = Member({"worker": 0}, 1, SETTINGS, 0.0)
    assert member.idle() == []
    world = world_with(2, set())
    (said,) = world.worker(0).idle()
    assert said == Say({"type": "idle", "epoch": 1})
    assert world.worker(0).idle() == []


def test_a_revoke_tells_who_is_dead_and_who_has_left_before_anybody_is_notified() -> None:
    world = world_with(3, set())
    world.kill_worker(1)
    seen = []
    original = world._member_effects

    def watch(name: str, effects: list[Any]) -> None:
        for effect in effects:
            if name == "w0" and isinstance(effect, Notify) and effect.kind == "revoke":
                seen.append(world.worker(0).presentation.dead)
        original(name, effects)

    world._member_effects = watch  # type: ignore[method-assign]
    world.run_fairly(2.0)
    assert seen == [{1}]


def test_a_member_that_has_slept_for_longer_than_it_may_be_silent_is_not_in_touch() -> None:
    assert not Member({"worker": 0}, 1, SETTINGS, 0.0).in_touch(0.0)
    world = world_with(2, set())
    member = world.worker(0)
    assert member.in_touch(world.now)
    assert not member.in_touch(world.now + SETTINGS.heartbeat_timeout + SETTINGS.heartbeat_interval)
