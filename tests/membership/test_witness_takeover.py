"""Whom a coordinator that takes over does not know: those that the one before has left out. A witness may free them."""

from __future__ import annotations

import pytest
from simulation import SETTINGS, PropertyViolated, World
from test_protocol_properties import members_out, world_of

from recover_megatron.membership.witness import Witness


def until_the_next_epoch(world: World) -> frozenset[int]:
    before = len(world.order)
    while len(world.order) == before:
        world.run_fairly(0.5, step=0.25)
    return world.formed[world.order[-1]][1]


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
    assert world.formed[world.order[-1]][1] == {0, 1, newcomer}
    assert world.holders[0].members == {0, 1}
    lose_both_nodes(world)
    assert world.formed[world.order[-1]][1] == {0, 1, newcomer}
    assert left_out in members_out(world)


def test_a_newcomer_waits_where_the_lease_cannot_be_written_and_whoever_was_left_out_goes_on() -> None:
    world, left_out, _ = left_out_by_the_one_before(1)
    world.run_fairly(4.0)
    assert world.formed[world.order[-1]][1] == {0, 1}
    lose_both_nodes(world)
    assert world.formed[world.order[-1]][1] == {left_out}


def test_newcomers_need_no_lease_where_nobody_led_before() -> None:
    world = world_of(3, True, True, nodes=3, slack=0, witness=True)
    world.no_storage = {0, 1, 2}
    newcomer = newcomer_on(world, world.add_node())
    assert until_the_next_epoch(world) == {0, 1, 2, newcomer}


def test_a_coordinator_that_forgets_that_another_one_led_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Witness, "took_over", property(lambda self: False, lambda self, value: None), raising=False)
    world, _, newcomer = left_out_by_the_one_before(1)
    world.run_fairly(2.0)
    assert world.formed[world.order[-1]][1] == {0, 1, newcomer}
    with pytest.raises(PropertyViolated, match="two lineages"):
        lose_both_nodes(world)
