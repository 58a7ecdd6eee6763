"""Candidates that join a run after its launch: the nodes of the launch may all be replaced, and it goes on."""

from __future__ import annotations

import pytest
from simulation import SETTINGS, World

from recover_megatron.membership.events import Received, Send
from recover_megatron.membership.follower import Stage
from recover_megatron.membership.records import MOST_ADDED, Presentation, presentation_to_wire

LAUNCHED = 3


def running_world(slack: int | None = None) -> World:
    world = World(LAUNCHED, candidates=LAUNCHED, nodes=LAUNCHED, slack=slack)
    world.run_fairly(4.0)
    assert world.order == [1]
    return world


def join(world: World) -> int:
    """A node joins, with a worker and a candidate; the candidate's number."""
    node = world.add_node()
    world.add_newcomer(node)
    candidate = world.add_candidate(node)
    world.run_fairly(4.0)
    return candidate


def lose(world: World, node: int, silently: bool = False) -> None:
    """A node is lost, with its launcher, its worker and its candidate."""
    candidate = node if node < LAUNCHED else world.added[next(a for a in world.added if a[0] == f"node{node}")]
    for number, where in world.node_of.items():
        if where == node and world.running(f"w{number}"):
            world.kill_worker(number, silently=silently)
    world.dead.add(f"node{node}")
    if not silently:
        world._end_of_file(f"node{node}")
    world.kill_coordinator(candidate)


def known(world: World) -> set[frozenset[tuple[str, int]]]:
    """What those that were launched, and run, were told of candidates that joined."""
    launched = [*(f"w{number}" for number in range(LAUNCHED)), *(f"node{node}" for node in range(LAUNCHED))]
    return {frozenset(world.lists.get(name, ())) for name in launched if world.running(name)}


def goes_on(world: World, workers: set[int]) -> None:
    before = max(world.commits)
    world.run_fairly(3 * SETTINGS.heartbeat_timeout)
    assert max(world.commits) > before
    assert {n for n in world.node_of if world.running(f"w{n}")} == workers
    assert all(world.worker(n).stage is Stage.FOLLOWING for n in workers)


@pytest.mark.parametrize("silently", [False, True])
def test_every_node_of_the_launch_is_replaced_and_the_run_goes_on(silently: bool) -> None:
    world = running_world()
    for node in range(LAUNCHED):
        join(world)
        lose(world, node, silently)
        world.run_fairly(4 * SETTINGS.heartbeat_timeout)
    goes_on(world, {3, 4, 5})
    for node in range(LAUNCHED, 2 * LAUNCHED):  # and those that replaced them, too
        join(world)
        lose(world, node, silently)
        world.run_fairly(4 * SETTINGS.heartbeat_timeout)
    goes_on(world, {6, 7, 8})


def test_without_candidates_that_join_the_run_ends_with_the_last_of_the_launch() -> None:
    world = running_world()
    for node in range(LAUNCHED):
        world.add_newcomer(world.add_node())
        world.run_fairly(4.0)
        lose(world, node)
        world.run_fairly(4 * SETTINGS.heartbeat_timeout)
    world.run_fairly(2 * SETTINGS.stall_timeout)
    assert all(world.worker(n).stage is Stage.OUT for n in (3, 4, 5))


def test_so_many_are_told_and_another_one_when_one_of_them_is_lost() -> None:
    world = running_world()
    for _ in range(MOST_ADDED + 1):
        join(world)
    first, *others = list(world.added)
    assert known(world) == {frozenset((first, *others[:-1]))}
    lose(world, LAUNCHED)
    world.run_fairly(2.0)
    assert known(world) == {frozenset(others)}


def test_candidates_of_launchers_that_fall_silent_make_room_for_others() -> None:
    """Their nodes have lost their power: no connection is closed, and the same coordinator leads on."""
    world = running_world()
    for _ in range(MOST_ADDED):
        join(world)
    for node in range(LAUNCHED, LAUNCHED + MOST_ADDED):
        lose(world, node, silently=True)
        world.run_fairly(4 * SETTINGS.heartbeat_timeout)
    join(world)
    assert known(world) == {frozenset({list(world.added)[-1]})}
    assert len([e for e in world.log if e["event"] == "lead"]) == 1


def test_who_is_turned_away_is_told_of_no_candidates() -> None:
    world = running_world()
    join(world)
    world.kill_worker(2)
    world.run_fairly(2.0)
    coordinator = world.coordinators[0]
    hello = {"type": "attach", "worker": 2, "incarnation": f"{7:032x}", "host": "h", "pid": 1, "done": 0}
    sent = coordinator.handle(Received(999, {**hello, **presentation_to_wire(Presentation())}), world.now)
    assert [effect.message["type"] for effect in sent if isinstance(effect, Send)] == ["fenced"]


def test_each_new_coordinator_is_told_of_them_anew_and_tells_all() -> None:
    world = running_world()
    join(world)
    join(world)
    assert known(world) == {frozenset(world.added)}
    world.kill_coordinator(0)
    world.run_fairly(2 * SETTINGS.heartbeat_timeout)
    assert known(world) == {frozenset(world.added)}
    assert len([e for e in world.log if e["event"] == "lead"]) == 2


def test_members_whose_lists_differ_meet_all_the_same() -> None:
    """The coordinator is lost, with all others of the launch, when only one member was told of a second candidate."""
    world = running_world()
    join(world)
    second = world.add_candidate(world.add_node())
    node = next(name for name, port in world.added if world.added[(name, port)] == second)
    world.run_fairly(1.0)
    world.lists["w0"] = world.members["w0"]._added = tuple(a for a in world.added if a[0] != node)
    for candidate in range(LAUNCHED):
        world.kill_coordinator(candidate)
    world.run_fairly(8 * SETTINGS.heartbeat_timeout)
    goes_on(world, {0, 1, 2, 3})


def test_a_candidate_that_was_followed_and_is_not_told_any_more_is_left_like_any_other() -> None:
    """Its launcher is lost, and the candidate's process is not: it leads on, then is lost, too."""
    world = running_world()
    candidate = join(world)
    join(world)
    for launched in range(LAUNCHED):
        world.kill_coordinator(launched)
    world.run_fairly(4 * SETTINGS.heartbeat_timeout)
    leading = next(k for k, c in world.coordinators.items() if c.leadership.term)
    node = next(name for (name, _), number in world.added.items() if number == leading)
    world.dead.add(node)
    world._end_of_file(node)
    goes_on(world, {0, 1, 2, 3, 4})
    world.kill_coordinator(leading)
    world.run_fairly(6 * SETTINGS.heartbeat_timeout)
    goes_on(world, {0, 1, 2, 3, 4})
    assert leading in (candidate, candidate + 1)


def test_half_of_the_workers_needs_the_lease_of_the_candidate_that_joined() -> None:
    """Two of the launch, two that replaced lost ones; then the first two are lost at once, silently."""
    world = World(4, candidates=2, nodes=2, slack=0)
    world.run_fairly(4.0)
    for number in (2, 3):
        world.kill_worker(number)
    world.dead.add("node1")
    world._end_of_file("node1")
    world.kill_coordinator(1)
    world.run_fairly(4 * SETTINGS.heartbeat_timeout)
    node = world.add_node()
    world.add_newcomer(node)
    world.add_newcomer(node)
    world.add_candidate(node)
    world.run_fairly(6.0)
    assert world.formed[world.order[-1]][1] == {0, 1, 4, 5}
    for number in (0, 1):
        world.kill_worker(number, silently=True)
    world.dead.add("node0")
    world.kill_coordinator(0)
    world.run_fairly(6 * SETTINGS.heartbeat_timeout)
    assert world.holders
    assert world.formed[world.order[-1]][1] == {4, 5}
    goes_on(world, {4, 5})


def test_who_came_after_the_lease_was_taken_may_be_all_that_is_left() -> None:
    """Both of the launch are lost in silence, and the first that came in their place: the other half goes on."""
    world = World(2, candidates=2, nodes=2, slack=0)
    world.run_fairly(4.0)
    for lost, left in ((0, 1), (1, 2), (2, 3)):
        lose(world, lost, silently=True)
        world.run_fairly(6 * SETTINGS.heartbeat_timeout)
        assert world.holders[-1].members == {left}
        join(world)
        world.run_fairly(4.0)
        assert world.holders[-1].members == {left, left + 1}
    goes_on(world, {3, 4})
