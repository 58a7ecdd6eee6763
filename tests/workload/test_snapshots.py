"""The keepers of snapshots: outside of the domain that would take it, evenly; how often they are taken."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.workload.domains import Training, domain_losses, on_nodes, replicas_of, stride_of, touched_by
from recover_megatron.workload.shards import Layout
from recover_megatron.workload.snapshots import (
    DOMAIN_SECONDS,
    FIRST_INTERVAL,
    Spread,
    copies,
    interval,
    needed,
    part_of,
)

GPUS = 8


def in_nodes(world: int, gpus: int = GPUS) -> dict[int, tuple[str, ...]]:
    return {worker: (f"node {worker // gpus}",) for worker in range(world)}


def check_spread(kept: Mapping[int, Sequence[int]], domains: Mapping[int, Sequence[str]]) -> None:
    """No domain takes all copies of any part, and nobody keeps much more than others."""
    for lost in {name for its in domains.values() for name in its}:
        assert all(any(lost not in domains[worker] for worker in its) for its in kept.values())
    load = Counter(worker for its in kept.values() for worker in its)
    assert max(load.values()) <= -(-2 * len(kept) // len(domains)) + 1


@pytest.mark.parametrize("pipeline_first", [False, True])
def test_no_node_takes_all_copies_of_a_position(pipeline_first: bool) -> None:
    """All TP, PP, CP over both orders of ranks, 2 to 16 nodes of 8; nobody keeps much more than others."""
    seen = 0
    for tensor, pipeline, context, nodes in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2), (2, 3, 4, 16)):
        world = nodes * GPUS
        if world % (tensor * pipeline * context):
            continue
        replicas = replicas_of(
            world, tensor=tensor, context=context, pipeline=pipeline, inner_ranks=1,
            pipeline_before_data=pipeline_first,
        )  # fmt: skip
        domains = in_nodes(world)
        kept = copies(replicas, domains, "always")
        assert set(kept) == set(range(len(replicas[0])))
        check_spread(kept, domains)
        assert all(giver in {its[position] for its in replicas} for position, (giver, _) in kept.items())
        seen += 1
    assert seen > 80


def test_without_being_told_it_keeps_what_one_node_would_take_and_nothing_else() -> None:
    stages = replicas_of(4, tensor=1, context=1, pipeline=2, inner_ranks=1)
    assert copies(stages, in_nodes(4, 2), "auto") == {0: (0, 2), 1: (3, 1)}, "a node has a stage of both replicas"
    assert copies(stages, in_nodes(4, 1), "auto") == {}, "all positions are on two nodes"
    assert copies(stages, in_nodes(4, 4), "auto") == {}, "nobody is outside of the only node"
    assert copies(stages, {}, "auto") == {}
    assert copies(stages, in_nodes(4, 2), "off") == {}
    assert copies([[0]], in_nodes(1), "always") == {}, "nobody else is there"
    assert copies(stages, in_nodes(4, 4), "always") == {0: (0, 1), 1: (2, 3)}, "who has the state already keeps it"


def test_a_rack_is_a_domain_as_a_node_is() -> None:
    replicas = replicas_of(4, tensor=1, context=1, pipeline=2, inner_ranks=1)
    racks = {worker: (f"node {worker}", f"domain {worker // 2}") for worker in range(4)}
    assert copies(replicas, racks, "auto") == {0: (0, 2), 1: (3, 1)}


@pytest.mark.parametrize("shadows", [0, 1, 2])
@pytest.mark.parametrize("blocks", [False, True])
def test_shards_are_kept_exactly_where_a_node_has_all_their_holders(shadows: int, blocks: bool) -> None:
    """As ``domain_losses`` says it; and then no node takes all copies of any shard, and nobody keeps much more."""
    seen = Counter[bool]()
    for tensor, pipeline, context, inner, nodes in itertools.product((1, 2, 8), (1, 2, 4), (1, 2), (1, 2), (2, 3, 8)):
        world, inside = nodes * GPUS, tensor * pipeline * context
        if world % (inside * inner):
            continue
        sizes: dict[str, int] = {"tensor": tensor, "context": context, "pipeline": pipeline, "inner_ranks": inner}
        training = Training(**sizes, pipeline_before_data=blocks, spread=True, shadows=shadows, experts=inner > 1)
        replicas = replicas_of(world, **sizes, pipeline_before_data=blocks)
        domains = in_nodes(world)
        kept = copies(replicas, domains, "auto", Spread(shadows + 1))
        at_stake = any(loss.lost for loss in domain_losses(training, on_nodes(world, GPUS)))
        assert bool(kept) == at_stake, (training, world)
        seen[at_stake] += 1
        if not kept:
            continue
        assert set(kept) == set(range(len(replicas[0]) + world))
        for worker in range(world):
            assert kept[part_of(worker, range(world), len(replicas[0]))][0] == worker
        check_spread(kept, domains)
    assert seen[True] > 5, seen
    assert seen[False] > 5 or not shadows, "any loss takes a shard"


def test_several_instances_are_placed_by_megatron() -> None:
    replicas = [[worker] for worker in range(4)]
    there = Spread(2, placed=False)
    assert copies(replicas, in_nodes(4, 2), "auto", there), "a node may have both that hold a shard"
    assert copies(replicas, in_nodes(4, 1), "auto", there) == {}


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_the_keeper_shares_as_few_domains_with_the_giver_as_anybody(
    positions: int, number: int, data: st.DataObject
) -> None:
    world = positions * number
    replicas = [list(range(first, world, number)) for first in range(number)]
    names = st.lists(st.sampled_from("abcd"), max_size=3, unique=True)
    domains = {worker: tuple(data.draw(names)) for worker in range(world)}
    kept = copies(replicas, domains, "always")
    assert set(kept) == (set(range(positions)) if world > 1 else set())
    for giver, keeper in kept.values():
        assert giver != keeper
        shared = {worker: len({*domains[giver]} & {*domains[worker]}) for worker in domains if worker != giver}
        assert shared[keeper] == min(shared.values())


@given(st.dictionaries(st.integers(0, 5), st.sampled_from("abc"), min_size=6, max_size=6))
def test_it_keeps_something_just_where_a_domain_has_all_that_hold_a_position(domains: dict[int, str]) -> None:
    replicas = [[0, 1], [2, 3], [4, 5]]
    own = {worker: (name,) for worker, name in domains.items()}
    at_stake = any(len({domains[worker] for worker in column}) == 1 for column in ((0, 2, 4), (1, 3, 5)))
    assert bool(copies(replicas, own, "auto")) == (at_stake and len(set(domains.values())) > 1)


def test_the_interval_is_that_of_young_and_daly() -> None:
    # A state of 0.5 s, 64 nodes: sqrt(2 * 0.5 * 5000 h / 64) = 530 s.
    assert interval(0.5, 5.0, 10.0, 64) == 54
    assert interval(0.5, 5.0, 10.0, 6400) == 6, "more nodes are lost more often"
    assert interval(0.5, 500.0, 10.0, 6400) == 50, "not before the one before has arrived"
    assert interval(5.0, 5.0, 10.0, 64_000_000) == 50, "no more than 1 % of the time"
    assert interval(0.0, 0.0, 10.0, 2) == 1
    assert interval(0.5, 5.0, 0.0, 64) == FIRST_INTERVAL, "nothing is measured"


@given(st.floats(1e-3, 10), st.floats(0.01, 100), st.integers(1, 4096))
def test_another_interval_costs_more(cost: float, iteration: float, domains: int) -> None:
    """What is waited for snapshots and what is run again after losses, per second; unless snapshots take too much."""

    def costs(every: int) -> float:
        return cost / (every * iteration) + every * iteration / 2 * domains / DOMAIN_SECONDS

    chosen = interval(cost, 0.0, iteration, domains)
    assert costs(chosen) <= costs(2 * chosen)
    assert chosen <= 2 or costs(chosen) <= costs(chosen // 2) or cost / (chosen // 2 * iteration) > 0.01


def test_two_of_each_are_kept() -> None:
    assert needed(3, 100) == 600


@pytest.mark.parametrize("spread", [None, Spread(2), Spread(3)])
@pytest.mark.parametrize("blocks", [False, True])
def test_no_node_and_no_rack_has_all_copies_of_anything(spread: Spread | None, blocks: bool) -> None:
    """What a domain would take all holders of is in a snapshot outside of it, too: all TP, PP, CP,
    EP, 2 to 512 nodes of 8, racks of two nodes."""
    seen = Counter[bool]()
    layouts = itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2), (1, 2), (2, 3, 4, 8, 33, 512))
    for tensor, pipeline, context, inner, nodes in layouts:
        world, size = nodes * GPUS, tensor * pipeline * context * inner
        if world % size or (nodes > 32 and size < 128):
            continue
        sizes: dict[str, int] = {"tensor": tensor, "context": context, "pipeline": pipeline, "inner_ranks": inner}
        replicas = replicas_of(world, **sizes, pipeline_before_data=blocks)
        domains = dict(enumerate(on_nodes(world, GPUS, [[f"rack {node // 2}"] for node in range(nodes)])))
        everywhere = set.intersection(*map(set, domains.values()))
        kept = copies(replicas, domains, "auto", spread)
        seen[bool(kept)] += 1
        if kept:
            assert all({*domains[giver]} & {*domains[keeper]} <= everywhere for giver, keeper in kept.values())
            continue
        touched = {worker: its - everywhere for worker, its in touched_by(replicas, domains).items()}
        for column in zip(*replicas, strict=True):
            assert set.intersection(*(set(domains[worker]) for worker in column)) <= everywhere
        ring = tuple(its[0] for its in replicas)
        copies_of = spread.holders if spread else len(ring)
        layout = Layout(ring, ring, copies_of - 1, stride_of(ring, touched, copies_of))
        for unit in layout.units if spread else ():
            assert not frozenset.intersection(*(touched[worker] for worker in layout.holders(unit)))
    assert min(seen[True], seen[False]) > 20, seen
