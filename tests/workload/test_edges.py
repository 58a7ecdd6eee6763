"""Broken edges: an order of the ring that avoids them, else the smallest set of nodes that covers them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.workload.edges import EXACT, arrange, between, cover, edge, inside, ring_order

Graph = tuple[list[int], set[tuple[int, int]]]


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> Graph:
    nodes = draw(st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=most))
    pairs = [edge(*pair) for pair in combinations(nodes, 2)]
    return nodes, set(draw(st.lists(st.sampled_from(pairs), unique=True))) if pairs else set()


def goes_round(order: tuple[int, ...], broken: set[tuple[int, int]]) -> bool:
    return len(order) < 2 or not any(edge(*pair) in broken for pair in pairwise([*order, order[0]]))


def best_cover(broken: set[tuple[int, int]]) -> frozenset[int]:
    """By trying all sets."""
    nodes = sorted({node for pair in broken for node in pair})
    degree = {node: sum(node in pair for pair in broken) for node in nodes}
    covers = [
        chosen
        for size in range(len(nodes) + 1)
        for chosen in combinations(nodes, size)
        if all(one in chosen or other in chosen for one, other in broken)
    ]
    return frozenset(min(covers, key=lambda c: (len(c), -sum(degree[n] for n in c), sorted(-n for n in c)), default=()))


@given(graphs())
@settings(max_examples=300, deadline=None)
def test_an_order_is_found_if_there_is_one_and_else_the_smallest_cover_is_out(graph: Graph) -> None:
    nodes, broken = graph
    found = arrange(nodes, broken)
    assert goes_round(found.order, broken)
    assert sorted([*found.order, *found.out]) == sorted(nodes)
    if any(goes_round((nodes[0], *rest), broken) for rest in permutations(nodes[1:])):
        assert not found.out
        assert found.order == tuple(nodes) or not goes_round(tuple(nodes), broken)
    else:
        assert set(found.out) == best_cover(broken)


@given(graphs(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_where_everybody_needs_everybody_no_order_helps(graph: Graph, turned: bool) -> None:
    nodes, broken = graph
    told = {(other, one) for one, other in broken} if turned else broken
    found = arrange(nodes, told, mesh=True)
    assert set(found.out) == best_cover(broken)
    assert found == arrange(nodes, sorted(broken, reverse=True), mesh=True)


@given(st.integers(EXACT + 1, 60), st.integers(0, 1 << 30), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_a_large_ring_in_which_nobody_misses_half_of_the_others_goes_on_whole(count: int, seed: int, most: int) -> None:
    import random

    draw, broken = random.Random(seed), set[tuple[int, int]]()
    for node in range(count):
        broken |= {edge(node, other) for other in draw.sample(range(count), most) if other != node}
    degree = {node: sum(node in pair for pair in broken) for node in range(count)}
    if 2 * max(degree.values()) < count - 1:
        found = arrange(range(count), broken)
        assert not found.out
        assert goes_round(found.order, broken)


SIZE = 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edges", "out"),
    [
        (lambda: {edge(2 * n, 2 * n + 1) for n in range(SIZE // 2)}, 0),
        (lambda: {edge(7, n) for n in range(SIZE) if n != 7}, 1),
        (lambda: {(one, other) for one in range(SIZE // 2) for other in range(SIZE // 2, SIZE)}, SIZE // 2),
        (lambda: {(one, other) for one in range(300) for other in range(300, SIZE)}, 300),
        (lambda: set(combinations(range(SIZE), 2)), SIZE - 1),
    ],
    ids=["a perfect matching", "one that hears nobody", "two halves", "two racks", "nobody hears anybody"],
)
def test_a_thousand_replicas(edges: Callable[[], set[tuple[int, int]]], out: int) -> None:
    broken = edges()
    found = arrange(range(SIZE), broken)
    assert len(found.out) == out
    assert goes_round(found.order, broken)


def test_a_ring_of_three_needs_every_edge_and_the_highest_of_equals_is_out() -> None:
    assert arrange([0, 1, 2], {(1, 2)}).out == (2,)
    assert arrange([0, 1, 2], {(1, 2), (0, 1)}).out == (1,)
    assert arrange([0, 1], {(0, 1)}).order == (0,)
    assert arrange([0, 1, 2, 3], {(0, 1)}).order == (1, 2, 0, 3) or not arrange([0, 1, 2, 3], {(0, 1)}).out


def test_of_equally_many_those_with_the_most_broken_edges_are_out() -> None:
    # 1-2 and 3-4 need one each; 2 and 3 have a second edge, which either covers.
    assert cover({(1, 2), (2, 3), (3, 4)}) == {2, 3}


def test_edges_of_workers_are_edges_of_their_replicas() -> None:
    replicas = {0: (0, 3), 1: (1, 4), 2: (2, 5)}
    assert between(replicas, {(3, 4), (2, 5), (0, 9)}) == {(0, 1)}
    assert inside(replicas, {(3, 4), (2, 5), (0, 9)}) == {2}


def test_rings_of_one_and_none_need_nobody() -> None:
    assert ring_order([], set()) == ()
    assert ring_order([4], {(4, 5)}) == (4,)
