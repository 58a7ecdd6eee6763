"""Broken edges: pairs of live workers, or replicas, that cannot talk to each other although others hear both.

    arrange(replicas, broken) --an order of the ring avoids them--> order, nobody is out
                              '--there is none--> the smallest set that has an end of every broken edge is out

Nodes are numbers: replicas, or workers.  An edge is an unordered pair of them, given in any order.

    a ring of 4, edge 0-1 broken                a ring of 3, edge 1-2 broken: every pair is needed
        0 - 2 - 1 - 3 - (0)                         0 - 1 - (0)         2 is out

Who has to go is a minimum vertex cover, by size; of equal ones that with the most broken edges at its members, of
these that with the highest numbers.  The search for it is exhaustive as long as that is quick (``EFFORT``); then the
best one found counts, which is at least as good as the greedy one.  An order is found, if there is one, up to ``EXACT``
nodes; with more of them surely if nobody misses half of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Edge = tuple[int, int]
"""Two nodes, the lower one first."""
EXACT = 10
"""Up to so many nodes every order is looked at."""
EFFORT = 200_000
"""Of the search for a smallest cover: nodes times steps."""


@dataclass(frozen=True)
class Arrangement:
    """Who is left, in the order of the ring, and who is out."""

    order: tuple[int, ...]
    out: tuple[int, ...] = ()


def edge(one: int, other: int) -> Edge:
    """The edge between two nodes."""
    return (one, other) if one < other else (other, one)


def arrange(nodes: Sequence[int], broken: Collection[Edge], *, mesh: bool = False) -> Arrangement:
    """A ring of all ``nodes``, or of as many as can be, in which no two neighbours have a ``broken`` edge.

    The order is the given one where that has no such neighbours.  ``mesh``: all are connected to all, not in a ring, so
    no order helps.
    """
    relevant = _among(nodes, broken)
    order = (tuple(nodes) if not relevant else None) if mesh else ring_order(nodes, relevant)
    if order is not None:
        return Arrangement(order)
    out = cover(relevant)
    return Arrangement(tuple(node for node in nodes if node not in out), tuple(sorted(out)))


def between(groups: Mapping[int, Iterable[int]], broken: Collection[Edge]) -> set[Edge]:
    """The edges between groups of nodes: broken where that of any two of their members is."""
    group_of = {node: number for number, members in groups.items() for node in members}
    found = {edge(group_of[one], group_of[other]) for one, other in broken if one in group_of and other in group_of}
    return {(one, other) for one, other in found if one != other}


def inside(groups: Mapping[int, Iterable[int]], broken: Collection[Edge]) -> set[int]:
    """The groups with a broken edge between two of their own members."""
    group_of = {node: number for number, members in groups.items() for node in members}
    return {
        group_of[one]
        for one, other in broken
        if one in group_of and other in group_of and group_of[one] == group_of[other]
    }


def ring_order(nodes: Sequence[int], broken: Collection[Edge]) -> tuple[int, ...] | None:
    """An order in which neighbours, the last and the first too, have no broken edge; None: none was found."""
    relevant = _among(nodes, broken)
    if not _gaps(nodes, relevant):
        return tuple(nodes)
    if len(nodes) < 4:  # every pair is a pair of neighbours
        return None
    exchanged = _by_exchange(nodes, relevant)
    return exchanged if exchanged is not None or len(nodes) > EXACT else _by_search(nodes, relevant)


def cover(broken: Collection[Edge]) -> frozenset[int]:
    """The smallest set of nodes that has an end of every edge: of equally small ones that with the most broken edges,
    then that with the highest numbers."""
    nodes = sorted({node for pair in broken for node in pair}, reverse=True)
    at = {node: number for number, node in enumerate(nodes)}
    near = [0] * len(nodes)
    for one, other in broken:
        near[at[one]] |= 1 << at[other]
        near[at[other]] |= 1 << at[one]
    chosen = _Cover(near).search()
    return frozenset(node for number, node in enumerate(nodes) if chosen >> number & 1)


def _among(nodes: Collection[int], broken: Iterable[Edge]) -> set[Edge]:
    here = set(nodes)
    return {edge(one, other) for one, other in broken if one in here and other in here}


# ---- an order


def _gaps(order: Sequence[int], broken: Collection[Edge]) -> list[int]:
    """Where who follows cannot be reached."""
    if len(order) < 2 or not broken:
        return []
    return [at for at, pair in enumerate(pairwise([*order, order[0]])) if edge(*pair) in broken]


def _by_exchange(nodes: Sequence[int], broken: Collection[Edge]) -> tuple[int, ...] | None:
    """Turn a part of the ring round such that a gap closes and none is made, as often as needed.

    Where every two nodes without an edge have as many others between them as there are nodes there is always such a
    part (Ore's theorem is proved this way).
    """
    order, size = list(nodes), len(nodes)
    while gaps := _gaps(order, broken):
        order = order[gaps[0] + 1 :] + order[: gaps[0] + 1]  # the gap is now between the last and the first
        first, last = order[0], order[-1]
        for at in range(1, size - 1):
            if edge(last, order[at - 1]) not in broken and edge(first, order[at]) not in broken:
                order[:at] = reversed(order[:at])
                break
        else:
            return None
    return tuple(order)


def _by_search(nodes: Sequence[int], broken: Collection[Edge]) -> tuple[int, ...] | None:
    """Every order that begins with the first node, the lowest numbers first; no set of nodes is tried twice in vain."""
    hopeless: set[tuple[frozenset[int], int]] = set()

    def complete(order: tuple[int, ...], left: frozenset[int]) -> tuple[int, ...] | None:
        if not left:
            return order if edge(order[-1], order[0]) not in broken else None
        if (left, order[-1]) in hopeless:
            return None
        for node in sorted(left):
            if edge(order[-1], node) not in broken and (found := complete((*order, node), left - {node})) is not None:
                return found
        hopeless.add((left, order[-1]))
        return None

    return complete((nodes[0],), frozenset(nodes[1:]))


# ---- a cover


class _Cover:
    """Branch and bound over sets of nodes as the bits of a number; ``near``: the neighbours of each node.

    Node 0 has the highest number, so of two sets the one that is better at the lowest bit in which they differ wins.
    """

    def __init__(self, near: list[int]) -> None:
        self._near = near
        self._degree = [its.bit_count() for its in near]
        self._best = self._greedy()
        self._best_key = self._key(self._best)

    def _key(self, chosen: int) -> tuple[int, int, list[int]]:
        numbers = _bits(chosen)
        return len(numbers), -sum(self._degree[number] for number in numbers), numbers

    def search(self) -> int:
        stack = [((1 << len(self._near)) - 1, 0)]
        steps = EFFORT // max(1, len(self._near))
        while stack and steps:
            left, chosen = stack.pop()
            steps -= 1
            left, chosen = self._settle_pairs(left, chosen)
            most = max(_bits(left), key=lambda number: (self._near[number] & left).bit_count(), default=None)
            if most is None:
                self._consider(chosen)
            elif chosen.bit_count() + self._pairs(left) <= self._best.bit_count():
                others = left & ~(1 << most)
                stack.append((others & ~self._near[most], chosen | others & self._near[most]))
                stack.append((others, chosen | 1 << most))
        return self._best

    def _greedy(self) -> int:
        """Whoever has the most edges left, again and again."""
        left, chosen, degree = (1 << len(self._near)) - 1, 0, list(self._degree)
        while (most := max(range(len(degree)), key=degree.__getitem__, default=0)) < len(degree) and degree[most]:
            chosen, left = chosen | 1 << most, left & ~(1 << most)
            degree[most] = 0
            for number in _bits(self._near[most] & left):
                degree[number] -= 1
        return chosen

    def _settle_pairs(self, left: int, chosen: int) -> tuple[int, int]:
        """Drop nodes without an edge; of two that have only each other's, one is enough: the better one."""
        for number in _bits(left):
            theirs = self._near[number] & left
            if not left >> number & 1 or theirs.bit_count() > 1:
                continue
            if theirs == 0:
                left &= ~(1 << number)
                continue
            (other,) = _bits(theirs)
            if (self._near[other] & left).bit_count() == 1:
                chosen |= 1 << min(number, other, key=lambda one: (-self._degree[one], one))
                left &= ~(1 << number | 1 << other)
        return left, chosen

    def _pairs(self, left: int) -> int:
        """Edges without a common end: at least so many nodes are needed."""
        count = 0
        for number in _bits(left):
            theirs = self._near[number] & left
            if left >> number & 1 and theirs:
                left &= ~(1 << number) & ~(theirs & -theirs)
                count += 1
        return count

    def _consider(self, chosen: int) -> None:
        if (key := self._key(chosen)) < self._best_key:
            self._best, self._best_key = chosen, key


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
