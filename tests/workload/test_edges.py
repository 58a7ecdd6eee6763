"""Broken edges: the smallest set of nodes that covers them is out."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.workload.edges import EXACT, Edge, between, cover, edge, inside


def best_cover(broken: set[Edge]) -> frozenset[int]:
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


@given(st.sets(st.sampled_from(list(combinations(range(7), 2)))), st.randoms())
@settings(max_examples=300, deadline=None)
def test_the_smallest_cover_is_out_in_whatever_order_the_edges_are_told(
    broken: set[Edge], order: random.Random
) -> None:
    told = [pair if order.random() < 0.5 else pair[::-1] for pair in broken]
    order.shuffle(told)
    assert cover(told) == best_cover(broken)


SIZE = 1024


@pytest.mark.parametrize(
    ("broken", "out"),
    [
        ([(2 * n, 2 * n + 1) for n in range(EXACT // 2)], EXACT // 2),
        (combinations(range(EXACT), 2), EXACT - 1),
        ([(2 * n, 2 * n + 1) for n in range(SIZE // 2)], SIZE // 2),
        ([edge(7, n) for n in range(SIZE) if n != 7], 1),
        ([(one, other) for one in range(SIZE // 2) for other in range(SIZE // 2, SIZE)], SIZE // 2),
        ([(one, other) for one in range(300) for other in range(300, SIZE)], 300),
        (combinations(range(SIZE), 2), SIZE - 1),
    ],
    ids=[
        "as many as are looked at all in pairs", "as many as are looked at all, and nobody hears anybody",
        "a thousand in pairs", "one of a thousand hears nobody", "two halves of a thousand",
        "two racks of a thousand", "nobody of a thousand hears anybody",
    ],
)  # fmt: skip
def test_a_cover_of_many_is_a_cover_and_no_larger_than_it_must_be(broken: Iterable[Edge], out: int) -> None:
    edges = set(broken)
    found = cover(edges)
    assert len(found) == out
    assert all(one in found or other in found for one, other in edges)


def test_three_that_are_a_chain_lose_the_one_in_the_middle_and_of_equals_the_highest_is_out() -> None:
    assert cover({(1, 2)}) == {2}
    assert cover({(1, 2), (0, 1)}) == {1}


def test_of_equally_many_those_with_the_most_broken_edges_are_out() -> None:
    # 1-2 and 3-4 need one each; 2 and 3 have a second edge, which either covers.
    assert cover({(1, 2), (2, 3), (3, 4)}) == {2, 3}


def test_edges_of_workers_are_edges_of_their_replicas() -> None:
    replicas = {0: (0, 3), 1: (1, 4), 2: (2, 5)}
    assert between(replicas, {(3, 4), (2, 5), (0, 9)}) == {(0, 1)}
    assert inside(replicas, {(3, 4), (2, 5), (0, 9)}) == {2}
