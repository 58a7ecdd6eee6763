"""Members without a part, and how a run is ended: the state machines over the simulated network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from script import play, table
from simulation import SETTINGS, World

from recover_megatron.membership.events import Notify, Say
from recover_megatron.membership.leadership import can_tell
from recover_megatron.membership.member import Member
from recover_megatron.membership.node_agent import NodeAgentClient
from recover_megatron.membership.records import CoordinatorLost


def world_with(workers: int, spares: set[int], candidates: int = 2, nodes: int | None = None, **options: Any) -> World:
    world = World(workers, candidates=candidates, nodes=nodes or workers, **options)
    world.spares = set(spares)
    world.run_fairly(4.0)
    return world


def committed(world: World, number: int) -> int:
    return world.worker(number).committed


@table("""
commits wait for the members that have a part and for no other
    world 3 nodes=3 spares=2 runs=4; act 0; goes_on 3 2 -> done 2 0
where all are idle nothing is committed and nobody is to blame
    world 3 nodes=3 spares=0,1,2 runs=4; run 100 -> no_commits; epochs 1
an idle member is never hung and makes nobody waited for
    world 3 nodes=3 spares=2 runs=4; mark 2 spare waits; busy 0 1; run 100 -> no fault stuck; wake; goes_on 3 0
an idle member that does not join the next rendezvous is put out there, and its launcher ends it
    world 4 nodes=4 spares=3 runs=4; busy 3; kill 0; run 60 -> faults dead:0 out:3 dead:3; members 1 2
a place in the next epoch ends idleness
    world 3 nodes=3 spares=2 runs=4; no_spares; kill 0; run 4 -> members 1 2; busy 2 -> stands 4 1
idle members alone do not go on while those with a part may be running
    world 5 nodes=5 spares=2,3,4 runs=4; cut 2 3 4 from 0; cut 0 1 from 1
    run 3 -> ahead 0 2; run 80 -> epochs 1; led 0; out 11 2 3 4
idle members go on when all the others are known to have died
    world 3 nodes=3 spares=1,2 runs=4; no_spares; kill 0; run 4 -> members 1 2; goes_on 4 1
and when the coordinator has died with them
    world 3 nodes=3 spares=1,2 runs=4; no_spares; crash 0; kill 0; run 4 -> members 1 2; goes_on 4 1
the run is finished when all that had a part have left
    world 3 nodes=3 spares=2 runs=4; finish 0 -> following 2; finish 1; run 3 -> out 0 2; ends 0
""")
def test_idle_members(script: str) -> None:
    play(script)


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


@given(*[st.frozensets(st.integers(0, 4))] * 3, st.booleans())
def test_somebody_with_a_part_can_always_tell(
    reached: frozenset[int], idle: frozenset[int], missing: frozenset[int], own: bool
) -> None:
    assert can_tell(reached, idle, missing, own) == (own or not missing or not reached <= idle)


# -- giving up --------------------------------------------------------------------------------------------------------


def stops(world: World) -> list[tuple[int, str]]:
    return [(record["code"], record["reason"]) for record in world.log if record["event"] == "stop"]


@table("""
a worker that gives up ends the run for all and the first one wins
    world 3 nodes=3 candidates=3 runs=4; end 1 42 the disk is full; end 1 43 again; run 3; end 2 44 me too; run 80
    -> stops 42 the disk is full; out 42 0 1 2; because_of 1 the disk is full; led 0
giving up reaches the next coordinator when the first is lost with it
    world 3 nodes=3 runs=4; end 1 42 the disk is full; crash 0; run 15 -> stops 42 the disk is full
giving up before the first plan ends the run too
    world 2; end 0 7 no data; run 4 -> stops 7 no data; epochs 0
who never comes is not waited for longer than the start of the run would have
    world 3; kill_silently 2; end 0 7 no data; run 30 -> here 0 1; run 35 -> here 1; stops 7 no data
a launcher that never comes does not keep the coordinator
    world 2 nodes=1; freeze node0; run 2; end 0 7 no data; run 8 -> here 1
""")
def test_giving_up(script: str) -> None:
    play(script)


def test_who_comes_late_to_the_start_of_a_run_that_was_given_up_is_told() -> None:
    play("world 3; freeze w2; end 0 7 no data; run 10 -> stops 7 no data; here 0 1; wake; run 5 -> out 7 2; here 1")


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
