"""Placement: orphans of several broken replicas, and spares, are put together into new replicas.

The workers of a column hold the same parameters, so any live worker of a position can stand there in any replica.  A
worker of another position can, too, once it has built the model of that one and has got the parameters:

    orphans, spares, joiners --assemble--> new replicas, of those who stand where they are needed: they compute at once
                                                                 `----> rebuild: the fewest others that move
                                             |   not ready: counted on, left alone
                                             v
                                        ready at the new position --assemble--> more new replicas

A tensor-parallel group must lie in one node (but with ``cross_node``): T workers of a node, one at each position
of the group, are a **team**, and a replica is one team of each group.  So with everybody ready and free to move, the
most replicas that the live workers of the nodes allow are

    (sum over nodes of live // T) // G              T workers in a team, G teams in a replica

and a new replica of what stands already takes exactly G from that sum: forming it now never costs one later.

Live workers that cannot talk to each other, although others hear both, are not put together: their *edge* is broken
(``cover``, ``seated``, ``free_of``, ``can_join``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from recover_megatron.workload.teams import Counts, Holding, plan_teams

Team = tuple[int, ...]
"""The workers of a tensor group, in the order of its positions."""


@dataclass(frozen=True)
class Shape:
    """What a replica is made of."""

    size: int
    """Workers of a replica: its positions are 0..size-1."""
    tensor: tuple[tuple[int, ...], ...]
    """The positions of each tensor-parallel group."""
    cross_node: bool = False
    """A tensor-parallel group need not lie in one node."""

    def __post_init__(self) -> None:
        """Raises ValueError unless the groups are of one size and have every position exactly once."""
        if self.size < 1 or sorted(p for group in self.tensor for p in group) != list(range(self.size)):
            raise ValueError(f"the tensor groups {self.tensor} do not have each of {self.size} positions once")
        if len({len(group) for group in self.tensor}) > 1 or not all(self.tensor):
            raise ValueError(f"the tensor groups {self.tensor} differ in size, or are empty")


@dataclass(frozen=True)
class Candidate:
    """A live worker that is in no whole replica."""

    position: int | None
    """What its model was built for, or is being built for; None: for nothing yet (a hot spare, a joiner)."""
    node: str
    fixed: bool = False
    """It cannot change position now: its main thread has not come free, or it is just building."""
    ready: bool = True
    """It may be placed now, at its position."""

    @property
    def movable(self) -> bool:
        """Whether it may be told to build another model; who is on its way to its position is left alone."""
        return not self.fixed and (self.ready or self.position is None)


@dataclass(frozen=True)
class Placement:
    replicas: Mapping[int, tuple[int, ...]]
    """The new replicas: id -> workers by position, in the order of the ids."""
    rebuild: Mapping[int, int]
    """Worker -> the position that it should build its model for, so that there can be more; in the order of workers."""
    spares: tuple[int, ...]
    """Workers without a place now, those in ``rebuild`` among them, in order."""


def openings(whole: int, waiting: int, size: int, *, launched: int, most: int, spares: int = 0) -> int:
    """How many new replicas of ``size`` workers a run may get that has ``whole`` ones, by who is ``waiting``.

    Up to the ``launched`` number whoever waits may be used.  Beyond it, up to ``most``, only by those whom neither the
    missing replicas nor the ``spares`` that are to be kept need.
    """
    missing = max(0, launched - whole)
    further = max(0, waiting - missing * size - spares) // size
    return max(0, min(missing + further, most - whole))


def assemble(
    whole: Collection[int], candidates: Mapping[int, Candidate], shape: Shape, slots: int, most: int | None = None
) -> Placement:
    """New replicas of the ``candidates``, beside the ``whole`` ones, and what should be rebuilt for more of them.

    ``whole``: the ids of the complete replicas; they are left alone.  New ones take the lowest free ids of
    range(``slots``), and are as many as can be formed of workers that are ready at their own position; at most ``most``
    of them (default: as many as there are free ids), those counted that come of a rebuild.

    ``rebuild`` brings what is left to as many replicas as it allows, with the fewest changes of position while no
    candidate is bound to its own (``fixed``, or not ready).  On each node those without a model go first, then those
    that stand where there are too many; of equals the ones with the lowest ids keep their position.

    Raises ValueError for a candidate with a position outside of the shape, more whole replicas than ``slots``, or one
    whose id is not in range(``slots``).
    """
    taken = set(whole)
    if foreign := sorted(taken - set(range(slots))):
        raise ValueError(f"whole replicas {foreign}, but there is room for {slots} only")
    for worker, candidate in sorted(candidates.items()):
        if candidate.position is not None and not 0 <= candidate.position < shape.size:
            raise ValueError(f"worker {worker} is at position {candidate.position} of {shape.size}")
    free = [replica for replica in range(slots) if replica not in taken]
    most = len(free) if most is None else min(most, len(free))
    formed = _form(candidates, shape, most)
    replicas = dict(zip(free, formed, strict=False))
    placed = {worker for workers in formed for worker in workers}
    rest = {worker: candidates[worker] for worker in sorted(candidates) if worker not in placed}
    rebuild = _rebuilds(rest, shape, most - len(formed))
    return Placement(replicas, dict(sorted(rebuild.items())), tuple(rest))


def _form(candidates: Mapping[int, Candidate], shape: Shape, most: int) -> list[tuple[int, ...]]:
    """The new replicas, at most ``most``, by their lowest workers."""
    ready: dict[int, list[int]] = defaultdict(list)
    # Workers that cannot move are worth less to the replicas that need a rebuild: use them here, and teams of them.
    for worker in sorted(candidates, key=lambda worker: (candidates[worker].movable, worker)):
        position = candidates[worker].position
        if candidates[worker].ready and position is not None:
            ready[position].append(worker)
    teams = [_teams([ready[p] for p in group], candidates, shape.cross_node) for group in shape.tensor]
    count = min(most, *map(len, teams))
    chosen = [sorted(of_group[:count], key=min) for of_group in teams]
    formed = []
    for teams_of_replica in zip(*chosen, strict=True):
        places = [
            (position, worker)
            for group, team in zip(shape.tensor, teams_of_replica, strict=True)
            for position, worker in zip(group, team, strict=True)
        ]
        formed.append(tuple(worker for _, worker in sorted(places)))
    return formed


def _teams(columns: list[list[int]], candidates: Mapping[int, Candidate], cross_node: bool) -> list[Team]:
    """All teams of a group, the best to use first; ``columns``: who is ready at each of its positions."""
    by_node: dict[str, list[list[int]]] = defaultdict(lambda: [[] for _ in columns])
    for index, column in enumerate(columns):
        for worker in column:
            by_node[candidates[worker].node][index].append(worker)
    teams = [team for here in by_node.values() for team in zip(*here, strict=False)]
    teams.sort(key=lambda team: (sum(candidates[worker].movable for worker in team), min(team)))
    if cross_node:  # after those within a node, which take one from every column: no team is lost by that
        used = {worker for team in teams for worker in team}
        teams += zip(*([worker for worker in column if worker not in used] for column in columns), strict=False)
    return teams


def _rebuilds(rest: Mapping[int, Candidate], shape: Shape, wanted: int) -> dict[int, int]:
    """Worker -> new position, for ``wanted`` more replicas of ``rest`` (in order), or as many as there can be."""
    by_node: dict[str, list[int]] = defaultdict(list)
    for worker, candidate in rest.items():
        if candidate.movable or candidate.position is not None:
            by_node["" if shape.cross_node else candidate.node].append(worker)
    nodes = [workers for workers in by_node.values() if len(workers) >= len(shape.tensor[0])]
    holdings = [_holding([rest[worker] for worker in workers], shape.size) for workers in nodes]
    rebuild: dict[int, int] = {}
    for workers, teams in zip(nodes, plan_teams(holdings, shape.tensor, wanted), strict=True):
        if any(teams):
            rebuild |= _changes({worker: rest[worker] for worker in workers}, shape, teams)
    return rebuild


def _holding(workers: Collection[Candidate], size: int) -> Holding:
    standing = Counter(worker.position for worker in workers)
    bound = Counter(worker.position for worker in workers if not worker.movable)
    return Holding(
        standing=tuple(standing[position] for position in range(size)),
        bound=tuple(bound[position] for position in range(size)),
        unbuilt=standing[None],
    )


def _changes(workers: Mapping[int, Candidate], shape: Shape, teams: Counts) -> dict[int, int]:
    """Worker -> the position that it builds, so that a node of these ``workers`` has these teams of each group."""
    wanted = {position: count for group, count in zip(shape.tensor, teams, strict=True) for position in group}
    standing: dict[int | None, list[int]] = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: (workers[worker].movable, worker)):  # who is bound stays
        standing[workers[worker].position].append(worker)
    surplus = [w for p, here in standing.items() if p is not None for w in here[wanted[p] :] if workers[w].movable]
    missing = [p for p, count in sorted(wanted.items()) for _ in range(count - len(standing[p]))]
    return dict(zip([*standing[None], *sorted(surplus)], missing, strict=False))


Covered = Counter[tuple[int | None, str]]
"""(position, node) -> spares that stand there."""


def build_ahead(
    spares: Mapping[int, Candidate],
    replicas: Collection[Sequence[int]],
    nodes: Mapping[int, str],
    shape: Shape,
) -> dict[int, int]:
    """Worker -> the position that it should build its model for, before anybody is lost; in the order of workers.

    A hole is filled at the next boundary only by a worker that stands ready at its position.  So spares that nobody
    needs now are shared out over the positions:

    alone    a worker that may stand in any replica: positions are as likely to be lost as they have workers elsewhere
             (with its own node it would be lost itself), and each spare that stands there already covers one of them
    teams    a tensor-parallel group lies in one node: as many whole teams as a node's spares make are spread over the
             groups, each in another node where there is one
    the rest of a node takes the place of one of its own workers: where most of them stand

    ``spares``: all live workers without a place; those are told that are ready and have no model.  ``replicas``: the
    workers that have one, by position.  ``nodes``: where those run.
    """
    idle: dict[str, list[int]] = defaultdict(list)
    for worker, spare in sorted(spares.items()):
        if spare.ready and spare.position is None and not spare.fixed:
            idle[spare.node].append(worker)
    width = 1 if shape.cross_node else len(shape.tensor[0])
    groups = [(position,) for group in shape.tensor for position in group] if width == 1 else shape.tensor
    standing = {p: Counter(nodes[workers[p]] for workers in replicas) for group in groups for p in group}
    covered: Covered = Counter((spare.position, spare.node) for spare in spares.values() if spare.position is not None)
    found: dict[int, int] = {}
    for node, workers in sorted(idle.items()):
        while len(workers) >= width:
            team = min(groups, key=lambda group: (_cover(group, node, standing, covered), group))
            for position in team:
                found[workers.pop(0)] = position
                covered[position, node] += 1
        for worker in workers:
            here = [position for position in standing if standing[position][node]]
            if not here:
                break  # of no use to anybody, as long as the others of a team are missing
            best = min(here, key=lambda position: (covered[position, node] - standing[position][node], position))
            found[worker] = best
            covered[best, node] += 1
    return dict(sorted(found.items()))


def _cover(
    group: Sequence[int], node: str, standing: Mapping[int, Counter[str]], covered: Covered
) -> tuple[float, int]:
    """How well a group of positions is covered by spares against losses elsewhere than on ``node``, the least first.

    Of equally well covered ones the one with fewer spares on this node: they would be lost together.
    """
    at_risk = min(sum(standing[position].values()) - standing[position][node] for position in group)
    spares = min(sum(count for (p, _), count in covered.items() if p == position) for position in group)
    return (spares + 1) / (at_risk + 1e-3), sum(covered.get((position, node), 0) for position in group)


Edge = tuple[int, int]
"""Two nodes (workers, or replicas), the lower one first."""
EXACT = 16
"""Among up to so many nodes every set is looked at."""


def edge(one: int, other: int) -> Edge:
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
    """The smallest set of nodes (workers, or replicas) without which no broken edge is left.

    Of equally small sets that with the most broken edges at its members counts, of these that with the highest numbers;
    the order of the edges does not matter.  All sets are looked at where up to ``EXACT`` nodes have broken edges; of
    more the node with the most edges left is taken, again and again, which gives a small one.
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
