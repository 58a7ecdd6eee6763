"""A witness tells which nodes are off: who is left goes on, however few they are, and nobody else ever does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from script import play, table
from simulation import SETTINGS, PropertyViolated, World
from test_protocol_properties import MOVES, NODE, Moves, explore, moves_of, world_of

from recover_megatron.membership import witness
from recover_megatron.membership.admission import AddedCandidates
from recover_megatron.membership.events import Outbox, Send, Statement
from recover_megatron.membership.records import JOINED_FROM
from recover_megatron.membership.roster import NodeAgentStatus, Roster
from recover_megatron.membership.sides.member import Member
from recover_megatron.membership.wire import TO_MEMBER
from recover_megatron.membership.witness import Witness, alone
from recover_megatron.network.messages import encode

NODES = frozenset({"a", "b", "c"})
NOBODY: frozenset[int] = frozenset()


def rests(
    off: str = "bc",
    here: Mapping[str, set[int]] | None = None,
    missing: set[int] | None = None,
    gone: set[int] | None = None,
) -> bool:
    """Workers 0 and 1 are left, on node a, of six on three nodes."""
    here = {"a": {0, 1}} if here is None else here
    missing = {2, 3, 4, 5} if missing is None else missing
    return alone(frozenset({0, 1}), frozenset(missing), frozenset(gone or ()), NODES, frozenset(off), here)


def test_whoever_is_left_is_alone_when_every_other_node_is_off() -> None:
    assert rests()
    assert rests(missing={2}, gone={3, 4, 5})
    assert not rests(off="")
    assert not rests(off="b")


def test_a_node_that_is_reached_hides_nobody_by_what_its_launcher_runs() -> None:
    """A worker there that is no member may follow another coordinator."""
    assert not rests(here={"a": {0, 1, 7}})
    assert rests(here={"a": {0, 1, 7}}, gone={7})
    assert rests(off="b", here={"a": {0, 1}, "c": set()})
    assert not rests(off="b", here={"a": {0, 1}, "c": {4}})


def test_a_witness_that_calls_a_node_off_that_is_reached_is_none() -> None:
    assert not rests(off="bc", here={"a": {0, 1}, "c": set()})


def test_of_workers_that_joined_no_node_of_the_launch_tells_anything() -> None:
    assert not rests(missing={2, JOINED_FROM})


def test_a_launcher_is_here_when_it_has_acknowledged_the_rendezvous_that_was_opened_after_the_word_of_the_witness() -> (
    None
):
    """What it runs was told before that, so a worker that it starts later can be in no other side's epoch."""
    out = Outbox()
    roster = Roster(4, SETTINGS, out)
    word = Witness(roster, out, frozenset({"a", "b"}))
    launcher = NodeAgentStatus("a", None, 0.0, running={0, 1})
    roster.node_agents["a"] = launcher
    members, missing = frozenset({0, 1}), frozenset({2, 3})

    def leaves_alone(epoch: int | None) -> bool:
        return word.leaves_alone(members, missing, epoch)

    assert word.hear(Statement(frozenset({"b", "another"}), "b is off")) == {"b"}
    assert not leaves_alone(None)
    roster.bind(launcher, 1, 0.0)
    assert leaves_alone(None)
    launcher.acknowledged = 5
    assert not leaves_alone(5), "it was opened before"
    word.opened()
    assert leaves_alone(5)
    assert not leaves_alone(6)


def until_the_next_epoch(world: World) -> frozenset[int]:
    before = len(world.order)
    while len(world.order) == before:
        world.run_fairly(0.5, step=0.25)
    return world.newest


def thirds() -> World:
    """Two workers and a candidate on each of three nodes; the first leads; a lease, and a witness."""
    return world_of(6, True, True, slack=1, witness=True)


@table("""
a single node of three goes on when the witness says that the others are off, also that of the coordinator that led
    world 6 nodes=3 candidates=3 slack=1 witness=1 runs=4; power_off 1 2; more_commits 40 -> members 0 1; running 0 1
    none_out 0 1
and that of another candidate
    world 6 nodes=3 candidates=3 slack=1 witness=1 runs=4; power_off 0 2; more_commits 40 -> members 2 3; none_out 2 3
and the last one's
    world 6 nodes=3 candidates=3 slack=1 witness=1 runs=4; power_off 0 1; more_commits 40 -> members 4 5; none_out 4 5
without a witness it ends
    world 6 nodes=3 candidates=3 slack=1 runs=4; power_off 0 1; run 40 -> out 11 4 5
a node that is lost but not off, as one behind a cut cable, is no news and the rest ends
    world 6 nodes=3 candidates=3 slack=1 witness=1 runs=4; power_off 0 1; has_power 1; cut 1 from 0; cut 1 from 1
    cut 1 from 2; run 40 -> out 11 4 5
a witness is asked only when members are not reached and the count does not decide
    world 6 nodes=3 candidates=3 slack=1 witness=1 runs=4; power_off 2; run 20 -> members 0 1 2 3; no testimony
""")
def test_the_nodes_that_are_left(script: str) -> None:
    play(script)


def test_launchers_are_told_that_there_is_a_witness_and_workers_need_not_know() -> None:
    """The candidate of one that joins keeps to what follows from that."""
    out = Outbox()
    roster = Roster(1, SETTINGS, out)
    roster.bind(NodeAgentStatus("node0", None, 0.0), 1, 0.0)
    roster.bind(roster.workers[0], 2, 0.0)
    AddedCandidates(roster, out, "/lease", 1, witnessed=True).lead()
    told = {session: effect.message for effect in out.take() if isinstance(effect, Send) for session in effect.sessions}
    assert told[1].witnessed
    assert not told[2].witnessed
    assert TO_MEMBER.parse(encode(told[1])[4:]) == told[1]


def cut_off(world: World, node: int) -> None:
    """The candidates of other nodes are not reached from this one, nor its own from others."""
    for other in range(3):
        if other != node:
            world.blocked |= {(f"node{node}", other), (f"node{other}", node)}


def go_on_without_the_third(world: World) -> None:
    """It is cut off, the others go on, without a word in the lease."""
    world.no_storage = {0}
    cut_off(world, 2)
    assert until_the_next_epoch(world) == {0, 1, 2, 3}


def newcomer_beside(world: World) -> int:
    """It joins on a node of its own that does not reach the third either."""
    node = world.add_node()
    world.blocked |= {(f"node{node}", 2)}
    world.add_newcomer(node)
    world.run_fairly(2.0)
    return max(world.node_of)


def split(world: World) -> None:
    """The third node is left out; then the first loses its power."""
    go_on_without_the_third(world)
    world.power_off(0, 0)


def test_a_node_that_was_left_out_stays_out_as_long_as_anybody_is_left_of_those_that_went_on() -> None:
    world = thirds()
    split(world)
    world.run_fairly(8 * SETTINGS.heartbeat_timeout)
    assert world.newest == {2, 3}
    assert world.out >= {4, 5}


def test_the_lease_names_who_went_on_so_that_a_witness_that_is_wrong_ends_nothing_but_those_that_were_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls_the_silent_off(monkeypatch)
    world = thirds()
    cut_off(world, 2)
    world.run_fairly(8 * SETTINGS.heartbeat_timeout)
    assert world.holders[-1].members == {0, 1, 2, 3}
    assert world.out == {4, 5}


def test_a_newcomer_that_joined_waits_until_the_lease_says_who_went_on() -> None:
    """Then who was left out is refused, although all nodes of the launch that it does not reach are off."""
    world = thirds()
    go_on_without_the_third(world)
    newcomer = newcomer_beside(world)
    assert newcomer not in world.newest
    world.no_storage = set()
    world.run_fairly(2.0)
    assert newcomer in world.newest


def join_and_lose_the_launch(world: World) -> None:
    """Those that go on without the third node take in a newcomer, if they may, and lose all nodes of the launch."""
    go_on_without_the_third(world)
    newcomer_beside(world)
    for lost in (0, 1):
        for w, where in world.node_of.items():
            if where == lost:
                world.kill_worker(w)
        world.power_off(lost)
    world.run_fairly(8 * SETTINGS.heartbeat_timeout)


def test_a_newcomer_that_waits_goes_on_nowhere_and_those_that_were_left_out_do() -> None:
    world = thirds()
    join_and_lose_the_launch(world)
    assert world.newest == {4, 5}
    assert not world.out & {4, 5}


EVENTS = st.lists(
    st.one_of(
        *moves_of("seconds", st.sampled_from([1, 3, 7, 12])),
        *moves_of("cut, heal, join, storage", st.integers(0, 3)),
        *moves_of("cut, power off, power off but for the candidate, replace, freeze, restart", NODE),
        *moves_of("kill, idle", st.integers(0, 5)),
        *moves_of("thaw"),
    ),
    min_size=3,
    max_size=14,
)
"""What befalls whole nodes, at times between which much happens."""


def befall(world: World, event: str, which: int) -> None:
    """One of them."""
    name = f"node{which}"
    match event:
        case "seconds":
            world.run_fairly(which, step=0.5)
        case "cut" if name in world.members:
            cut_off(world, which)
        case "heal":
            world.blocked = {link for link in world.blocked if link[0] != name and link[1] != which}
        case "power off" if len(world.coordinators) > 1:
            world.power_off(which, which)
        case "power off but for the candidate":
            world.power_off(which)
        case "join":  # beside the node: it reaches what that one does
            if len(world.node_of) < 10:
                node = world.add_node()
                world.blocked |= {(f"node{node}", c) for other, c in world.blocked if other == name}
                world.add_newcomer(node)
        case "replace":
            if len(world.node_of) < 10 and name not in world.off:
                world.add_newcomer(which)
        case "kill":
            if world.running(f"w{which}"):
                world.kill_worker(which)
        case "idle":
            world.spares ^= {which}
        case "storage":
            world.no_storage = {which} if which < 3 else set()
        case "freeze":
            world.frozen |= {name, f"c{which}", *(f"w{w}" for w, node in world.node_of.items() if node == which)}
            world.frozen -= world.dead
        case "thaw":
            world.frozen.clear()
        case "restart" if name not in world.off:
            world.start_coordinator(which)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(EVENTS, st.integers(0, 1))
def test_one_lineage_whatever_befalls_the_nodes(events: Moves, slack: int) -> None:
    """The witness tells the truth."""
    world = world_of(6, True, True, slack=slack, witness=True)
    for event, which, _ in events:
        befall(world, event, which)
    world.run_fairly(6 * SETTINGS.heartbeat_timeout)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(MOVES, st.integers(3, 6), st.booleans(), st.sets(st.integers(0, 4)), st.integers(2, 3), st.integers(0, 2))
def test_one_lineage_with_a_witness_that_tells_the_truth_whatever_happens(
    moves: Moves, workers: int, started: bool, spares: set[int], nodes: int, slack: int
) -> None:
    explore(moves, world_of(workers, started, True, spares, nodes, slack, witness=True), to_the_end=False)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(MOVES, st.integers(3, 6), st.sets(st.integers(0, 4)), st.integers(2, 3), st.integers(0, 2))
def test_every_wait_ends_with_a_witness(moves: Moves, workers: int, spares: set[int], nodes: int, slack: int) -> None:
    explore(moves, world_of(workers, True, True, spares, nodes, slack, witness=True), to_the_end=True)


def any_node_will_do(patch: pytest.MonkeyPatch) -> None:
    """One node that is off makes whoever hears of it the only ones."""
    patch.setattr(witness, "alone", lambda members, missing, gone, nodes, off, here: bool(off))


def nobody_hides(patch: pytest.MonkeyPatch) -> None:
    """Whatever the launchers that are reached run."""

    def blind(
        members: frozenset[int],
        missing: frozenset[int],
        gone: frozenset[int],
        nodes: frozenset[str],
        off: frozenset[str],
        here: Mapping[str, set[int]],
    ) -> bool:
        return alone(members, missing, gone, nodes, off, dict.fromkeys(here, ()))

    patch.setattr(witness, "alone", blind)


def lets_all_in(patch: pytest.MonkeyPatch) -> None:
    """Newcomers that joined come in whoever is left out, and whatever the lease says."""
    patch.setattr(Witness, "lets_in", lambda self, number, formed: True)


def calls_the_silent_off(patch: pytest.MonkeyPatch) -> None:
    """As a controller that does not tell a node which it does not reach from one without power."""
    patch.setattr(World, "off_for", lambda self, nodes: nodes)


def hide(world: World) -> None:
    """A worker that is started on the node that is cut off reaches those that go on, and is the last one left."""
    go_on_without_the_third(world)
    world.add_newcomer(2)
    newcomer, is_blocked = max(world.node_of), world.is_blocked
    world.is_blocked = lambda c: c.owner != f"w{newcomer}" and is_blocked(c)  # type: ignore[method-assign]
    while newcomer not in world.newest:
        world.run_fairly(0.5, step=0.25)
    for w in range(4):
        world.kill_worker(w)
    world.run_fairly(1.0)
    world.power_off(0)
    world.power_off(1, 1)
    assert world.newest == {newcomer}


def go_on_after(scenario: Callable[[World], None], world: World) -> None:
    scenario(world)
    world.run_fairly(8 * SETTINGS.heartbeat_timeout)


@pytest.mark.parametrize(
    ("bug", "scenario"),
    [
        (any_node_will_do, split),
        (lets_all_in, join_and_lose_the_launch),
        (nobody_hides, hide),
        (calls_the_silent_off, split),
    ],
)
def test_a_deliberate_bug_in_the_use_of_the_witness_is_caught(
    bug: Callable[[pytest.MonkeyPatch], None], scenario: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on_after(scenario, thirds())
    bug(monkeypatch)
    with pytest.raises(PropertyViolated, match="two lineages"):
        go_on_after(scenario, thirds())


def test_who_is_cut_off_and_believes_all_the_same_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that go on have aborted what they had under way with it, and then lose their nodes."""
    monkeypatch.setattr(Member, "in_touch", lambda self, now: True)
    with pytest.raises(PropertyViolated, match="may have believed what others have aborted"):
        join_and_lose_the_launch(thirds())


def newcomer_on(world: World, node: int) -> int:
    """One that begins to join."""
    world.add_newcomer(node)
    return max(world.node_of)


def left_out_by_the_one_before(*no_storage: int) -> tuple[World, int, int]:
    """Three nodes with a worker and a candidate each; the last worker has died, and one of a fourth node replaces it.

    This one is cut off together with the third node's launcher and candidate. The coordinator of the others goes on
    without it, cannot write that into the lease, and ends. The second candidate hears of members only, and they present
    an epoch that never had the one that was left out. Then another one joins. Returns these two. ``no_storage``:
    candidates that the lease's storage does not answer, beside the first.
    """
    world = world_of(3, True, True, nodes=3, slack=0, witness=True)
    world.kill_worker(2)
    world.run_fairly(3.0)
    fourth = world.add_node()
    left_out = newcomer_on(world, fourth)
    assert until_the_next_epoch(world) == {0, 1, left_out}
    world.no_storage = {0, *no_storage}
    world.blocked = {(f"node{node}", 2) for node in (0, 1)} | {
        (f"node{node}", c) for node in (2, fourth) for c in (0, 1)
    }
    assert until_the_next_epoch(world) == {0, 1}
    world.kill_coordinator(0)
    assert until_the_next_epoch(world) == {0, 1}
    fifth = world.add_node()
    world.blocked.add((f"node{fifth}", 2))
    return world, left_out, newcomer_on(world, fifth)


def lose_both_nodes(world: World) -> None:
    world.power_off(0, 0)
    world.power_off(1, 1)
    world.run_fairly(8 * SETTINGS.heartbeat_timeout)


def test_a_newcomer_comes_in_when_the_lease_names_the_new_coordinators_side() -> None:
    """Then whoever was left out is refused, although all that it knows of is off for certain."""
    world, left_out, newcomer = left_out_by_the_one_before()
    world.run_fairly(2.0)
    assert world.newest == {0, 1, newcomer}
    assert world.holders[0].members == {0, 1}
    lose_both_nodes(world)
    assert world.newest == {0, 1, newcomer}
    assert left_out in world.out


def test_a_newcomer_waits_where_the_lease_cannot_be_written_and_whoever_was_left_out_goes_on() -> None:
    world, left_out, _ = left_out_by_the_one_before(1)
    world.run_fairly(4.0)
    assert world.newest == {0, 1}
    lose_both_nodes(world)
    assert world.newest == {left_out}


def test_newcomers_need_no_lease_where_nobody_led_before() -> None:
    world = world_of(3, True, True, nodes=3, slack=0, witness=True)
    world.no_storage = {0, 1, 2}
    newcomer = newcomer_on(world, world.add_node())
    assert until_the_next_epoch(world) == {0, 1, 2, newcomer}


def test_a_coordinator_that_forgets_that_another_one_led_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Witness, "took_over", property(lambda self: False, lambda self, value: None), raising=False)
    world, _, newcomer = left_out_by_the_one_before(1)
    world.run_fairly(2.0)
    assert world.newest == {0, 1, newcomer}
    with pytest.raises(PropertyViolated, match="two lineages"):
        lose_both_nodes(world)
