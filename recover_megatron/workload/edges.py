"""Broken edges: pairs of live workers, or replicas, that cannot talk to each other although others hear both.

    cover(broken) --> the smallest set of nodes that has an end of every broken edge: these are out

Nodes are numbers: replicas, or workers.  An edge is an unordered pair of them, the lower one first.  Of equally small
sets that with the most broken edges at its members counts, of these that with the highest numbers.  All sets are looked
at where up to ``EXACT`` nodes have broken edges; of more the node with the most edges left is taken, again and again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations

Edge = tuple[int, int]
"""Two nodes, the lower one first."""
EXACT = 16
"""Among up to so many nodes every set is looked at."""


def edge(one: int, other: int) -> Edge:
    """The edge between two nodes."""
    return (one, other) if one < other else (other, one)


def between(groups: Mapping[int, Iterable[int]], broken: Collection[Edge]) -> set[Edge]:
    """The edges between groups of nodes: broken where that of any two of their members is."""
    return {pair for pair in _of_groups(groups, broken) if pair[0] != pair[1]}


def inside(groups: Mapping[int, Iterable[int]], broken: Collection[Edge]) -> set[int]:
    """The groups with a broken edge between two of their own members."""
    return {one for one, other in _of_groups(groups, broken) if one == other}


def _of_groups(groups: Mapping[int, Iterable[int]], broken: Collection[Edge]) -> set[Edge]:
    group_of = {node: number for number, members in groups.items() for node in members}
    return {edge(group_of[one], group_of[other]) for one, other in broken if {one, other} <= group_of.keys()}


def cover(broken: Collection[Edge]) -> frozenset[int]:
    """Who is out such that no broken edge is left; the same set for the same edges in any order."""
    near: defaultdict[int, set[int]] = defaultdict(set)
    for one, other in broken:
        near[one].add(other)
        near[other].add(one)
    nodes = sorted(near, reverse=True)
    if len(nodes) > EXACT:
        return _greedy(near)
    for size in range(len(nodes)):
        covers = [out for out in combinations(nodes, size) if all(one in out or other in out for one, other in broken)]
        if covers:
            return frozenset(max(covers, key=lambda out: sum(len(near[node]) for node in out)))
    return frozenset()


def _greedy(near: Mapping[int, set[int]]) -> frozenset[int]:
    left, out = {node: set(others) for node, others in near.items()}, set[int]()
    while any(left.values()):
        most = max(left, key=lambda node: (len(left[node]), node))
        out.add(most)
        for other in left.pop(most):
            left[other].remove(most)
    return frozenset(out)
