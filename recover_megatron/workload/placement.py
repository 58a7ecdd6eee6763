"""Placement: orphans of several broken replicas, and spares, form new replicas.

The workers of a column hold the same parameters, so a live worker can take its position in any replica.  It can take
another position after it has built that position's model and received the parameters:

    orphans, spares, newcomers --assemble--+--> new replicas of workers that are ready at the needed positions
                                           |
                                           '--> rebuild: as few other workers as possible change position; each of them
                                                is ready again after it has built the new model
                                                  '--assemble--> more new replicas

Unless ``cross_node`` is true, all workers of a tensor-parallel group must be on one node.  T workers of a node, one at
each position of the group, are a **team**; a replica has one team of each group.  If all workers are ready and free to
change position, the live workers of the nodes allow at most

    (sum over nodes of live // T) // G              T workers in a team, G teams in a replica

replicas.  A new replica without changes of position lowers that sum by exactly G.  So a replica that is formed now
does not prevent another replica later.

If two live workers cannot connect to each other, but other workers can reach both, the *edge* between the two workers
is broken.  The two workers get no places in the same grid (``cover``, ``compatible_replicas``, ``connectable``,
``can_connect``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from recover_megatron.workload.teams import Counts, Holding, plan_teams

Team = tuple[int, ...]
"""Workers of a tensor-parallel group, in the order of its positions."""


@dataclass(frozen=True)
class Shape:
    """Positions of a replica, and their tensor-parallel groups."""

    size: int
    """Number of workers in a replica: its positions are 0..size-1."""
    tensor: tuple[tuple[int, ...], ...]
    """The positions of each tensor-parallel group."""
    cross_node: bool = False
    """True if a tensor-parallel group may span nodes."""

    def __post_init__(self) -> None:
        """Raise ValueError if the groups differ in size, or a position is not in exactly one group."""
        if self.size < 1 or sorted(p for group in self.tensor for p in group) != list(range(self.size)):
            raise ValueError(f"the tensor groups {self.tensor} do not have each of {self.size} positions once")
        if len({len(group) for group in self.tensor}) > 1 or not all(self.tensor):
            raise ValueError(f"the tensor groups {self.tensor} differ in size, or are empty")


@dataclass(frozen=True)
class Candidate:
    """A live worker that is in no complete replica."""

    position: int | None
    """Position for which this worker has built, or now builds, its model; None if it has no model yet."""
    node: str
    fixed: bool = False
    """True if this worker cannot change position now: its main thread is busy, or builds a model."""
    ready: bool = True
    """True if this worker can get a place at its position now."""

    @property
    def movable(self) -> bool:
        """True if this worker may build the model of another position; false while it changes position."""
        return not self.fixed and (self.ready or self.position is None)


@dataclass(frozen=True)
class Placement:
    replicas: Mapping[int, tuple[int, ...]]
    """New replica's id -> its workers by position; in the order of the ids."""
    rebuild: Mapping[int, int]
    """Worker -> position whose model it should build, so that more replicas can be formed later; ordered by worker."""
    spares: tuple[int, ...]
    """Workers that get no place now, including the workers in ``rebuild``; ascending."""


def openings(whole: int, waiting: int, size: int, *, launched: int, most: int, spares: int = 0) -> int:
    """Return the number of new replicas that a run may form.

    ``whole``: number of complete replicas; ``waiting``: number of workers without a place; ``size``: number of workers
    in a replica; ``launched``: number of replicas at launch; ``most``: greatest number of replicas.  All waiting
    workers may be used until the run has ``launched`` replicas.  For further replicas, ``spares`` workers are kept
    back.
    """
    missing = max(0, launched - whole)
    further = max(0, waiting - missing * size - spares) // size
    return max(0, min(missing + further, most - whole))


def assemble(
    whole: Collection[int], candidates: Mapping[int, Candidate], shape: Shape, slots: int, most: int | None = None
) -> Placement:
    """Form new replicas from ``candidates``; choose the workers that should change position for further replicas.

    ``whole``: the ids of the complete replicas, which do not change.  New replicas take the lowest free ids of
    range(``slots``).  Forms as many replicas as possible from workers that are ready at their present positions.
    ``most``: greatest number of new replicas, including replicas formed after a rebuild (default: the number of free
    ids).

    ``Placement.rebuild`` lets the remaining workers form as many replicas as possible.  It has the fewest changes of
    position, if every candidate may change position (``Candidate.movable``).  On each node, workers without a model
    get positions first.  Then workers leave positions that have too many workers; the workers with the lowest ids stay.

    Raises ValueError if a candidate's position is outside the shape, or the id of a complete replica is not in
    range(``slots``).
    """
    taken = set(whole)
    if foreign := sorted(taken - set(range(slots))):
        raise ValueError(f"ids of complete replicas outside range({slots}): {foreign}")
    for worker, candidate in sorted(candidates.items()):
        if candidate.position is not None and not 0 <= candidate.position < shape.size:
            raise ValueError(f"worker {worker} has position {candidate.position}, outside range({shape.size})")
    free = [replica for replica in range(slots) if replica not in taken]
    most = len(free) if most is None else min(most, len(free))
    formed = _form(candidates, shape, most)
    replicas = dict(zip(free, formed, strict=False))
    placed = {worker for workers in formed for worker in workers}
    rest = {worker: candidates[worker] for worker in sorted(candidates) if worker not in placed}
    rebuild = _rebuilds(rest, shape, most - len(formed))
    return Placement(replicas, dict(sorted(rebuild.items())), tuple(rest))


def _form(candidates: Mapping[int, Candidate], shape: Shape, most: int) -> list[tuple[int, ...]]:
    """Return the new replicas, at most ``most``, ordered by their lowest workers."""
    ready: dict[int, list[int]] = defaultdict(list)
    # Use workers that cannot change position first: they are less useful for a later rebuild.
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
    """Return the teams for the positions of ``columns`` (ready workers of each position), in the order of use."""
    by_node: dict[str, list[list[int]]] = defaultdict(lambda: [[] for _ in columns])
    for index, column in enumerate(columns):
        for worker in column:
            by_node[candidates[worker].node][index].append(worker)
    teams = [team for here in by_node.values() for team in zip(*here, strict=False)]
    teams.sort(key=lambda team: (sum(candidates[worker].movable for worker in team), min(team)))
    # Each team uses one worker of every column, so using teams within nodes first does not lower the number of teams.
    if cross_node:
        used = {worker for team in teams for worker in team}
        teams += zip(*([worker for worker in column if worker not in used] for column in columns), strict=False)
    return teams


def _rebuilds(rest: Mapping[int, Candidate], shape: Shape, wanted: int) -> dict[int, int]:
    """Return worker -> new position.

    After these changes the workers in ``rest`` can form ``wanted`` replicas, or as many as possible.
    """
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
    positioned = Counter(worker.position for worker in workers)
    bound = Counter(worker.position for worker in workers if not worker.movable)
    return Holding(
        positioned=tuple(positioned[position] for position in range(size)),
        bound=tuple(bound[position] for position in range(size)),
        unbuilt=positioned[None],
    )


def _changes(workers: Mapping[int, Candidate], shape: Shape, teams: Counts) -> dict[int, int]:
    """Return worker -> new position, for the workers of one node; ``teams``: number of teams of each group to form."""
    wanted = {position: count for group, count in zip(shape.tensor, teams, strict=True) for position in group}
    positioned: dict[int | None, list[int]] = defaultdict(list)
    # Workers that cannot change position come first, so they stay.
    for worker in sorted(workers, key=lambda worker: (workers[worker].movable, worker)):
        positioned[workers[worker].position].append(worker)
    surplus = [w for p, here in positioned.items() if p is not None for w in here[wanted[p] :] if workers[w].movable]
    missing = [p for p, count in sorted(wanted.items()) for _ in range(count - len(positioned[p]))]
    return dict(zip([*positioned[None], *sorted(surplus)], missing, strict=False))


Covered = Counter[tuple[int | None, str]]
"""(position, node) -> number of spares at this position on this node."""


def build_ahead(
    spares: Mapping[int, Candidate],
    replicas: Collection[Sequence[int]],
    nodes: Mapping[int, str],
    shape: Shape,
) -> dict[int, int]:
    """Return spare -> position whose model it builds before any worker is lost; in the order of worker ids.

    At a boundary a spare can replace a lost worker only if the spare is ready at the position of that worker.  So
    spares that are not needed now are distributed over the positions:

    alone    if one spare can replace one worker: a position with many workers on other nodes, and few spares, comes
             first (workers on the spare's node do not count, because the spare is lost with this node)
    teams    if a tensor-parallel group must be on one node: the spares of a node form as many complete teams as
             possible, for different groups, preferably for groups whose workers are on other nodes
    rest     the remaining spares of a node can replace only workers on the same node: each gets the position at which
             the number of workers minus the number of spares on that node is greatest

    ``spares``: all live workers without a place; the ready spares that have no model get a position.  ``replicas``:
    the workers with a place, by position.  ``nodes``: worker with a place -> its node.
    """
    idle: dict[str, list[int]] = defaultdict(list)
    for worker, spare in sorted(spares.items()):
        if spare.ready and spare.position is None and not spare.fixed:
            idle[spare.node].append(worker)
    width = 1 if shape.cross_node else len(shape.tensor[0])
    groups = [(position,) for group in shape.tensor for position in group] if width == 1 else shape.tensor
    positioned = {p: Counter(nodes[workers[p]] for workers in replicas) for group in groups for p in group}
    covered: Covered = Counter((spare.position, spare.node) for spare in spares.values() if spare.position is not None)
    found: dict[int, int] = {}
    for node, workers in sorted(idle.items()):
        while len(workers) >= width:
            team = min(groups, key=lambda group: (_cover(group, node, positioned, covered), group))
            for position in team:
                found[workers.pop(0)] = position
                covered[position, node] += 1
        for worker in workers:
            here = [position for position in positioned if positioned[position][node]]
            if not here:
                break  # an incomplete team can replace only workers on its node, where no worker has a place
            best = min(here, key=lambda position: (covered[position, node] - positioned[position][node], position))
            found[worker] = best
            covered[best, node] += 1
    return dict(sorted(found.items()))


def _cover(
    group: Sequence[int], node: str, positioned: Mapping[int, Counter[str]], covered: Covered
) -> tuple[float, int]:
    """Return a sort key, which is lowest for the group of positions with the greatest need for another spare.

    This is the group with the fewest spares in proportion to its workers on nodes other than ``node``; of equal groups,
    the group with the fewest spares on ``node``, since spares of one node are lost together.
    """
    at_risk = min(sum(positioned[position].values()) - positioned[position][node] for position in group)
    spares = min(sum(count for (p, _), count in covered.items() if p == position) for position in group)
    return (spares + 1) / (at_risk + 1e-3), sum(covered.get((position, node), 0) for position in group)


Edge = tuple[int, int]
"""Two vertices of a graph (workers or replicas), the lower number first."""
EXACT = 16
"""Greatest number of vertices with broken edges for which ``cover`` tries every set of vertices."""


def edge(one: int, other: int) -> Edge:
    return (one, other) if one < other else (other, one)


def between(groups: Mapping[int, Iterable[int]], broken: Collection[Edge]) -> set[Edge]:
    """Return the pairs of different groups that have a broken edge between their members; ``groups``: id -> members."""
    return {pair for pair in _of_groups(groups, broken) if pair[0] != pair[1]}


def inside(groups: Mapping[int, Iterable[int]], broken: Collection[Edge]) -> set[int]:
    """Return the ids of the groups that have a broken edge between two of their own members."""
    return {one for one, other in _of_groups(groups, broken) if one == other}


def _of_groups(groups: Mapping[int, Iterable[int]], broken: Collection[Edge]) -> set[Edge]:
    group_of = {node: number for number, members in groups.items() for node in members}
    return {edge(group_of[one], group_of[other]) for one, other in broken if {one, other} <= group_of.keys()}


def cover(broken: Collection[Edge]) -> frozenset[int]:
    """Return the smallest set of vertices (workers or replicas) that includes an end of every broken edge.

    Of equally small sets returns the set whose vertices have the most broken edges, then the set with the highest
    numbers; the order of the edges does not matter.  The result is exact if at most ``EXACT`` vertices have broken
    edges.  For more vertices, a greedy search repeatedly adds the vertex with the most remaining edges; the set may
    then be larger than necessary.
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


def compatible_replicas(
    whole: Mapping[int, tuple[int, ...]], broken: Collection[Edge]
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[Edge, ...]]]:
    """Return the replicas that can continue together; and, for each replica left out, its workers' broken edges.

    Leaves out a replica whose own workers cannot connect to each other.  Leaves out as few of the other replicas as
    possible.
    """
    torn = inside(whole, broken)
    rest = {replica: workers for replica, workers in whole.items() if replica not in torn}
    out = torn | cover(between(rest, broken))
    positioned = {worker for workers in whole.values() for worker in workers}
    reasons = {
        replica: tuple(sorted(pair for pair in broken if set(pair) <= positioned and set(pair) & set(whole[replica])))
        for replica in sorted(out)
    }
    return {replica: workers for replica, workers in whole.items() if replica not in out}, reasons


def connectable(
    candidates: Mapping[int, Candidate], working: set[int], broken: Collection[Edge]
) -> dict[int, Candidate]:
    """Return the candidates that can connect to each other and to all workers with a place (``working``)."""
    cut_off = {pair[1 - at] for pair in broken for at in (0, 1) if pair[at] in working}
    rest = set(candidates) - cut_off
    cut_off |= cover({pair for pair in broken if set(pair) <= rest})
    return {worker: candidate for worker, candidate in candidates.items() if worker not in cut_off}


def can_connect(whole: Mapping[int, Sequence[int]], placement: Placement, broken: Collection[Edge]) -> bool:
    """Return whether the new grid can start now.

    Its workers, including the workers of the new replicas, can all connect to each other, and no worker needs to
    build a model first.
    """
    grid = {**whole, **placement.replicas}
    return not (placement.rebuild or inside(grid, broken) or between(grid, broken))
