"""Placement: orphans of several broken replicas, and spares, form new replicas.

The workers of a column hold the same parameters, so any live worker of a position can take it in any replica.  A worker
of another position can, too, once it has built that position's model and received the parameters:

    orphans, spares, joiners --assemble--> new replicas, of workers in the needed positions: they compute at once
                                                                 `----> rebuild: the fewest others that change position
                                             |   not ready: counted, left alone
                                             v
                                        ready at the new position --assemble--> more new replicas

A tensor-parallel group must be on one node (unless ``cross_node``): T workers of a node, one at each position of the
group, are a **team**, and a replica is one team of each group.  So with all workers ready and free to change position,
the most replicas that the live workers of the nodes allow are

    (sum over nodes of live // T) // G              T workers in a team, G teams in a replica

and a new replica formed without changes of position takes exactly G from that sum: forming it now never costs one
later.

Live workers that cannot connect to each other, although others reach both, are not put together: their *edge* is broken
(``cover``, ``compatible_replicas``, ``connectable``, ``can_connect``).
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
    """Composition of a replica."""

    size: int
    """Number of workers in a replica: its positions are 0..size-1."""
    tensor: tuple[tuple[int, ...], ...]
    """The positions of each tensor-parallel group."""
    cross_node: bool = False
    """True if a tensor-parallel group may span nodes."""

    def __post_init__(self) -> None:
        """Raise ValueError unless the groups have one size and every position exactly once."""
        if self.size < 1 or sorted(p for group in self.tensor for p in group) != list(range(self.size)):
            raise ValueError(f"the tensor groups {self.tensor} do not have each of {self.size} positions once")
        if len({len(group) for group in self.tensor}) > 1 or not all(self.tensor):
            raise ValueError(f"the tensor groups {self.tensor} differ in size, or are empty")


@dataclass(frozen=True)
class Candidate:
    """A live worker that is in no complete replica."""

    position: int | None
    """The position for which its model was built, or is being built; None: no model yet (a spare, a newcomer)."""
    node: str
    fixed: bool = False
    """True if it cannot change position now: its main thread is still busy, or builds a model."""
    ready: bool = True
    """True if it may be placed now, at its position."""

    @property
    def movable(self) -> bool:
        """True if it may build another model; a worker on its way to its position is left alone."""
        return not self.fixed and (self.ready or self.position is None)


@dataclass(frozen=True)
class Placement:
    replicas: Mapping[int, tuple[int, ...]]
    """The new replicas: id -> workers by position, in the order of the ids."""
    rebuild: Mapping[int, int]
    """Worker -> position for which it should build its model, for more replicas later; in the order of workers."""
    spares: tuple[int, ...]
    """Workers without a place now, including those in ``rebuild``, in order."""


def openings(whole: int, waiting: int, size: int, *, launched: int, most: int, spares: int = 0) -> int:
    """Return the number of new replicas of ``size`` workers for a run with ``whole`` ones and ``waiting`` workers.

    Up to the ``launched`` number all waiting workers may be used.  Beyond it, up to ``most``, only workers that are
    needed neither for missing replicas nor as ``spares``.
    """
    missing = max(0, launched - whole)
    further = max(0, waiting - missing * size - spares) // size
    return max(0, min(missing + further, most - whole))


def assemble(
    whole: Collection[int], candidates: Mapping[int, Candidate], shape: Shape, slots: int, most: int | None = None
) -> Placement:
    """Form new replicas of the ``candidates``, in addition to the ``whole`` ones; and find rebuilds for more of them.

    ``whole``: the ids of the complete replicas; they are left alone.  New ones take the lowest free ids of
    range(``slots``).  As many are formed as possible of workers that are ready at their own position, at most ``most``
    (default: as many as there are free ids), which counts those after a rebuild, too.

    ``rebuild`` leads the remaining workers to as many replicas as possible, with the fewest changes of position as long
    as no candidate is bound to its own (``fixed``, or not ready).  On each node workers without a model change first,
    then those at positions with a surplus; among equals the ones with the lowest ids keep their position.

    Raises ValueError if a candidate's position is outside of the shape, there are more whole replicas than ``slots``,
    or the id of one is not in range(``slots``).
    """
    taken = set(whole)
    if foreign := sorted(taken - set(range(slots))):
        raise ValueError(f"ids of whole replicas out of range({slots}): {foreign}")
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
    """Return the new replicas, at most ``most``, ordered by their lowest workers."""
    ready: dict[int, list[int]] = defaultdict(list)
    # Workers that cannot move are of less use for replicas that need a rebuild: use them, and teams of them, first.
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
    """Return all teams of a group, the best to use first; ``columns``: ready workers at each of its positions."""
    by_node: dict[str, list[list[int]]] = defaultdict(lambda: [[] for _ in columns])
    for index, column in enumerate(columns):
        for worker in column:
            by_node[candidates[worker].node][index].append(worker)
    teams = [team for here in by_node.values() for team in zip(*here, strict=False)]
    teams.sort(key=lambda team: (sum(candidates[worker].movable for worker in team), min(team)))
    if cross_node:  # after those within a node, which take one from every column: that costs no team
        used = {worker for team in teams for worker in team}
        teams += zip(*([worker for worker in column if worker not in used] for column in columns), strict=False)
    return teams


def _rebuilds(rest: Mapping[int, Candidate], shape: Shape, wanted: int) -> dict[int, int]:
    """Return worker -> new position, for ``wanted`` more replicas of ``rest`` (in order), or as many as possible."""
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
    """Return worker -> position to build, so that a node of these ``workers`` has these teams of each group."""
    wanted = {position: count for group, count in zip(shape.tensor, teams, strict=True) for position in group}
    standing: dict[int | None, list[int]] = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: (workers[worker].movable, worker)):  # bound workers stay
        standing[workers[worker].position].append(worker)
    surplus = [w for p, here in standing.items() if p is not None for w in here[wanted[p] :] if workers[w].movable]
    missing = [p for p, count in sorted(wanted.items()) for _ in range(count - len(standing[p]))]
    return dict(zip([*standing[None], *sorted(surplus)], missing, strict=False))


Covered = Counter[tuple[int | None, str]]
"""(position, node) -> number of spares in it."""


def build_ahead(
    spares: Mapping[int, Candidate],
    replicas: Collection[Sequence[int]],
    nodes: Mapping[int, str],
    shape: Shape,
) -> dict[int, int]:
    """Return worker -> position to build its model for, before any worker is lost; in the order of workers.

    A hole is filled at the next boundary only by a worker that is ready at its position.  So spares that are not needed
    now are distributed over the positions:

    alone    a worker that may be in any replica: the risk of a position is its number of workers on other nodes (a loss
             of its own node would take it, too), and each spare at the position already covers one of them
    teams    a tensor-parallel group is on one node: a node's spares form as many complete teams as possible, which are
             spread over the groups, each on another node if there is one
    the rest of a node covers the node's own workers: at the position with most of them

    ``spares``: all live workers without a place; those that are ready and have no model get a position.  ``replicas``:
    the workers with a place, by position.  ``nodes``: node of each of those.
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
                break  # of no use as long as the others of a team are missing
            best = min(here, key=lambda position: (covered[position, node] - standing[position][node], position))
            found[worker] = best
            covered[best, node] += 1
    return dict(sorted(found.items()))


def _cover(
    group: Sequence[int], node: str, standing: Mapping[int, Counter[str]], covered: Covered
) -> tuple[float, int]:
    """Return how well spares cover a group of positions against losses on nodes other than ``node``, the least first.

    Among equally covered groups the one with fewer spares on this node is first: they would be lost together.
    """
    at_risk = min(sum(standing[position].values()) - standing[position][node] for position in group)
    spares = min(sum(count for (p, _), count in covered.items() if p == position) for position in group)
    return (spares + 1) / (at_risk + 1e-3), sum(covered.get((position, node), 0) for position in group)


Edge = tuple[int, int]
"""Two nodes of a graph (workers, or replicas), the lower one first."""
EXACT = 16
"""Number of nodes up to which every set is tried."""


def edge(one: int, other: int) -> Edge:
    return (one, other) if one < other else (other, one)


def between(groups: Mapping[int, Iterable[int]], broken: Collection[Edge]) -> set[Edge]:
    """Return edges between groups of nodes: broken if the edge of any two of their members is."""
    return {pair for pair in _of_groups(groups, broken) if pair[0] != pair[1]}


def inside(groups: Mapping[int, Iterable[int]], broken: Collection[Edge]) -> set[int]:
    """Return the groups with a broken edge between two of their own members."""
    return {one for one, other in _of_groups(groups, broken) if one == other}


def _of_groups(groups: Mapping[int, Iterable[int]], broken: Collection[Edge]) -> set[Edge]:
    group_of = {node: number for number, members in groups.items() for node in members}
    return {edge(group_of[one], group_of[other]) for one, other in broken if {one, other} <= group_of.keys()}


def cover(broken: Collection[Edge]) -> frozenset[int]:
    """Return the smallest set of nodes (workers, or replicas) without which no broken edge is left.

    Among equally small sets, the one with the most broken edges at its members, then the one with the highest numbers;
    the order of the edges does not matter.  With up to ``EXACT`` nodes at broken edges all sets are tried; with more,
    the node with the most remaining edges is taken repeatedly, which gives a small set.
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
    """Return the replicas that can continue together, and those that cannot, with the edges that are the reason.

    A replica whose own workers cannot connect to each other is out.  As few of the others as possible are out.
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


def connectable(
    candidates: Mapping[int, Candidate], working: set[int], broken: Collection[Edge]
) -> dict[int, Candidate]:
    """Return the candidates that can connect to all workers with a place and to each other."""
    cut_off = {pair[1 - at] for pair in broken for at in (0, 1) if pair[at] in working}
    rest = set(candidates) - cut_off
    cut_off |= cover({pair for pair in broken if set(pair) <= rest})
    return {worker: candidate for worker, candidate in candidates.items() if worker not in cut_off}


def can_connect(whole: Mapping[int, Sequence[int]], placement: Placement, broken: Collection[Edge]) -> bool:
    """Return whether new replicas can join as they are: all can connect, and no worker must build a model first."""
    grid = {**whole, **placement.replicas}
    return not (placement.rebuild or inside(grid, broken) or between(grid, broken))
