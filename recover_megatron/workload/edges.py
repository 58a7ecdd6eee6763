"""Broken edges: pairs of live workers, or replicas, that cannot talk to each other although others hear both.

    cover(broken) --> the smallest set of nodes that has an end of every broken edge: these are out

Nodes are numbers: replicas, or workers.  An edge is an unordered pair of them, the lower one first.  Of equally small
sets that with the most broken edges at its members counts, of these that with the highest numbers.  All sets are looked
at where up to ``EXACT`` nodes have broken edges; of more the node with the most edges left is taken, again and again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from recover_megatron.workload.placement import Candidate, Placement

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
    """The smallest set of nodes without which no broken edge is left (beyond ``EXACT`` nodes a small one).

    It is the same for the same edges in any order.
    """
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


def seated(
    whole: Mapping[int, tuple[int, ...]], broken: Collection[Edge]
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[Edge, ...]]]:
    """The replicas that can go on together, and those that cannot, with the edges that are the reason.

    A replica whose own workers cannot talk to each other is none.  Of the others as few are out as can be.
    """
    torn = inside(whole, broken)
    rest = {replica: workers for replica, workers in whole.items() if replica not in torn}
    out = torn | cover(between(rest, broken))
    standing = {worker for workers in whole.values() for worker in workers}
    reasons = {
        replica: tuple(sorted(pair for pair in broken if set(pair) <= standing and set(pair) & set(whole[replica])))
        for replica in sorted(out)
    }
    return {replica: workers for replica, workers in whole.items() if replica not in out}, reasons


def free_of(candidates: Mapping[int, Candidate], working: set[int], broken: Collection[Edge]) -> dict[int, Candidate]:
    """Those of the candidates that can talk to all who work and to each other."""
    cut_off = {pair[1 - at] for pair in broken for at in (0, 1) if pair[at] in working}
    rest = set(candidates) - cut_off
    cut_off |= cover({pair for pair in broken if set(pair) <= rest})
    return {worker: candidate for worker, candidate in candidates.items() if worker not in cut_off}


def can_join(whole: Mapping[int, Sequence[int]], placement: Placement, broken: Collection[Edge]) -> bool:
    """Whether new replicas can be had as they are: all can talk to all, and nobody has to build another model first."""
    grid = {**whole, **placement.replicas}
    return not (placement.rebuild or inside(grid, broken) or between(grid, broken))
