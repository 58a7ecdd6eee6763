"""Candidates that join a run after its launch: the nodes of the launch may all be replaced, and it goes on."""

from __future__ import annotations

import pytest
from script import Script, play, table
from simulation import SETTINGS

from recover_megatron.membership.events import Received, Send
from recover_megatron.membership.follower import Stage
from recover_megatron.membership.records import Presentation, presentation_to_wire


@pytest.mark.parametrize("silently", ["", "silently"])
def test_every_node_of_the_launch_is_replaced_and_the_run_goes_on(silently: str) -> None:
    """And those that replaced them, too."""
    one_after_the_other = [f"joins; lose {node} {silently}; run 20" for node in range(6)]
    first, second = "; ".join(one_after_the_other[:3]), "; ".join(one_after_the_other[3:])
    world = "world 3 candidates=3 nodes=3 runs=4"
    play(f"{world}; {first} -> goes_on 15; running 3 4 5; {second} -> goes_on 15; running 6 7 8")


@table("""
so many are told, and another one when one of them is lost
    world 3 candidates=3 nodes=3 runs=4; joins; joins; joins; joins -> know 0 1 2; lose 3; run 2 -> know 1 2 3
candidates of launchers that fall silent make room for others: their nodes are off, and no connection is closed
    world 3 candidates=3 nodes=3 runs=4; joins; joins; joins; lose 3 silently; run 20; lose 4 silently; run 20
    lose 5 silently; run 20; joins -> know 3; led 0
each new coordinator is told of them anew, and tells all
    world 3 candidates=3 nodes=3 runs=4; joins; joins -> know 0 1; crash 0; run 10 -> know 0 1; led 0 1
half of the workers needs the lease of the candidate that joined: the other half is lost at once, silently
    world 4 candidates=2 nodes=2 slack=0 runs=4; lose 1; run 20; joins; newcomers 2; run 2 -> members 0 1 4 5
    lose 0 silently; run 30 -> holders 4 5; members 4 5; goes_on 15; running 4 5
who came after the lease was taken may be all that is left: the other half goes on
    world 2 candidates=2 nodes=2 slack=0 runs=4
    lose 0 silently; run 30 -> holders 1; joins; run 4 -> holders 1 2
    lose 1 silently; run 30 -> holders 2; joins; run 4 -> holders 2 3
    lose 2 silently; run 30 -> holders 3; joins; run 4 -> holders 3 4; goes_on 15; running 3 4
""")
def test_candidates_that_join(script: str) -> None:
    play(script)


def test_without_candidates_that_join_the_run_ends_with_the_last_of_the_launch() -> None:
    world = running_world()
    for node in range(3):
        world.it.add_newcomer(world.it.add_node())
        world.run("4")
        world.lose(str(node))
        world.run("20")
    world.run("80")
    assert all(world.it.worker(n).stage is Stage.OUT for n in (3, 4, 5))


def running_world(joining: int = 0) -> Script:
    played = Script(SETTINGS)
    played.world("3", "candidates=3", "nodes=3", "runs=4")
    for _ in range(joining):
        played.joins()
    return played


def test_who_is_turned_away_is_told_of_no_candidates() -> None:
    world = running_world(1).it
    world.kill_worker(2)
    world.run_fairly(2.0)
    coordinator = world.coordinators[0]
    hello = {"type": "attach", "worker": 2, "incarnation": f"{7:032x}", "host": "h", "pid": 1, "done": 0}
    sent = coordinator.handle(Received(999, {**hello, **presentation_to_wire(Presentation())}), world.now)
    assert [effect.message["type"] for effect in sent if isinstance(effect, Send)] == ["fenced"]


def test_members_whose_lists_differ_meet_all_the_same() -> None:
    """The coordinator is lost, with all others of the launch, when only one member was told of a second candidate."""
    played = running_world(1)
    world = played.it
    second = world.add_candidate(world.add_node())
    node = next(name for name, port in world.added if world.added[(name, port)] == second)
    world.run_fairly(1.0)
    world.lists["w0"] = world.members["w0"]._added = tuple(a for a in world.added if a[0] != node)
    for candidate in range(3):
        world.kill_coordinator(candidate)
    world.run_fairly(8 * SETTINGS.heartbeat_timeout)
    played.goes_on("15", "0", "1", "2", "3")


def test_a_candidate_that_was_followed_and_is_not_told_any_more_is_left_like_any_other() -> None:
    """Its launcher is lost, and the candidate's process is not: it leads on, then is lost, too."""
    played = running_world(2)
    world = played.it
    for launched in range(3):
        world.kill_coordinator(launched)
    world.run_fairly(4 * SETTINGS.heartbeat_timeout)
    leading = next(k for k, c in world.coordinators.items() if c.leadership.term)
    node = next(name for (name, _), number in world.added.items() if number == leading)
    world.dead.add(node)
    world._end_of_file(node)
    played.goes_on("15", "0", "1", "2", "3", "4")
    world.kill_coordinator(leading)
    world.run_fairly(6 * SETTINGS.heartbeat_timeout)
    played.goes_on("15", "0", "1", "2", "3", "4")
    assert leading in world.added.values()
