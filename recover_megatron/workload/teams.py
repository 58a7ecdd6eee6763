"""Plan of the teams that each node forms, so that the fewest workers change position.

A **team** is the T workers of a tensor-parallel group (`placement`).  A node with n workers has room for n // T teams.
A team costs as many changes as it has positions without a worker:

    positions   0  1 | 2  3        T = 2, G = 2 groups; this node has 5 workers, so room for 2 teams
    positioned  2  1 | 0  1        a team of (0, 1) costs 0; a second team of (0, 1) costs 1 (the worker at 3 changes
    unbuilt     1                  to 1); a team of (2, 3) costs 1 (the worker without a model builds the model of 2)

The choice of each node's teams is a transportation problem, solved by cheapest paths: nodes supply room, groups demand
teams, and the cost of a node's n-th team of a group grows with n.  A group that needs one more team finds

    a node with room:   the node forms the team, and the path ends;
    or a full node:     the node forms the team in place of a team of another group, which then needs one more team.

If each path is the shortest of the cheapest paths, the plan stays the cheapest for its number of teams.  So if all
workers may change position, the result has the most teams and the fewest changes.  A worker that is **bound** to its
position can be used only in teams of one group, so the room of its node differs by group.  An exact solution is then as
hard as bin packing; the paths still give a feasible plan, and usually a good one.

Nodes in the same state are interchangeable, so the search is over states instead of nodes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Counts = tuple[int, ...]
"""Numbers, one for each tensor-parallel group or for each position."""


@dataclass(frozen=True)
class Holding:
    """Numbers of workers on a node."""

    positioned: Counts
    """Number of workers at each position, including workers that build the model of this position now."""
    bound: Counts
    """Number of workers at each position that cannot change position; they are included in ``positioned``."""
    unbuilt: int
    """Number of workers that have no position yet and can take any position."""

    @property
    def movable(self) -> int:
        """Number of workers that may be asked to change or take a position."""
        return self.unbuilt + sum(self.positioned) - sum(self.bound)

    def room(self, team_size: int) -> int:
        """Return the number of teams of ``team_size`` workers for which the node has enough workers."""
        return (self.unbuilt + sum(self.positioned)) // team_size


def plan_teams(nodes: Sequence[Holding], tensor: Sequence[Sequence[int]], wanted: int) -> list[Counts]:
    """Return, for each of ``nodes``, the number of teams that it forms of each group of ``tensor``.

    Over all nodes each group gets ``wanted`` teams, or as many as possible; all groups get the same number.
    """
    team_size = len(tensor[0])
    wanted = min(wanted, sum(node.room(team_size) for node in nodes) // len(tensor))
    plan = _Plan(nodes, tensor)
    for _ in range(wanted):
        complete = list(plan.teams)
        if not all(plan.one_more(group) for group in range(len(tensor))):
            return complete
    return plan.teams


class _State(NamedTuple):
    """State of a node: its ``kind`` (an index into ``_Plan.kinds``), and its planned number of teams of each group."""

    kind: int
    teams: Counts


@dataclass(frozen=True)
class _Path:
    """Path to one more team of the first group.

    A step is a group, the state of the node that forms a team of this group, and the group whose team this node drops
    instead (None: the node has room).  ``cost``: number of workers that change position.
    """

    cost: float = 0
    steps: tuple[tuple[int, _State, int | None], ...] = ()
    groups: tuple[int, ...] = ()

    @property
    def rank(self) -> tuple[float, int]:
        return self.cost, len(self.steps)

    def then(self, cost: int, state: _State, dropped: int | None) -> _Path:
        groups = self.groups if dropped is None else (*self.groups, dropped)
        return _Path(self.cost + cost, (*self.steps, (self.groups[-1], state, dropped)), groups)


_NEVER = _Path(cost=math.inf)


@dataclass
class _Plan:
    """The planned teams of the nodes, and the nodes that can form one more team most cheaply."""

    nodes: Sequence[Holding]
    tensor: Sequence[Sequence[int]]
    teams: list[Counts] = field(init=False)
    """Planned number of teams of each group, for each node."""
    kinds: list[Holding] = field(init=False)
    members: dict[_State, list[int]] = field(default_factory=dict)
    """State -> the nodes in this state, as a heap."""
    offers: dict[tuple[int, int | None], list[tuple[int, _State]]] = field(default_factory=dict)
    """(group, dropped group or None) -> heap of (cost, state).  An entry is skipped if no node has its state now."""

    def __post_init__(self) -> None:
        self.teams = [(0,) * len(self.tensor)] * len(self.nodes)
        kinds = {holding: kind for kind, holding in enumerate(dict.fromkeys(self.nodes))}
        self.kinds = list(kinds)
        for node, holding in enumerate(self.nodes):
            if holding.room(len(self.tensor[0])):
                self._enter(node, _State(kinds[holding], self.teams[node]))

    def one_more(self, group: int) -> bool:
        """Plan one more team of ``group`` in the cheapest way.

        Returns False if that is impossible; the plan is then invalid.
        """
        path = self._cheapest_path(group)
        if path is None:
            return False
        for wants, state, dropped in path.steps:
            if not self.members[state]:  # an earlier step used the last node in this state (only with bound workers)
                return False
            self._enter(heapq.heappop(self.members[state]), _State(state.kind, _changed(state.teams, wants, dropped)))
        return True

    def _cheapest_path(self, group: int) -> _Path | None:
        """Return the cheapest path on which no group is repeated, by Bellman-Ford; None if no path exists.

        Of equally cheap paths returns the shortest.
        """
        direct = self._best_offer(group, None)
        if direct is not None and direct[0] == 0:
            return _Path(groups=(group,)).then(*direct, None)
        reached = latest = {group: _Path(groups=(group,))}
        for _ in self.tensor:
            improved: dict[int, _Path] = {}
            for wants, path in latest.items():
                for dropped in range(len(self.tensor)):
                    offer = None if dropped in path.groups else self._best_offer(wants, dropped)
                    rank = improved.get(dropped, reached.get(dropped, _NEVER)).rank
                    if offer is not None and (path.cost + offer[0], len(path.steps) + 1) < rank:
                        improved[dropped] = path.then(*offer, dropped)
            reached, latest = reached | improved, improved
        ends = [path.then(*offer, None) for g, path in reached.items() if (offer := self._best_offer(g, None))]
        return min(ends, key=lambda path: (path.rank, path.groups), default=None)

    def _best_offer(self, group: int, dropped: int | None) -> tuple[int, _State] | None:
        heap = self.offers.get((group, dropped), [])
        while heap and not self.members[heap[0][1]]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _enter(self, node: int, state: _State) -> None:
        """Change the state of ``node`` to ``state``; add the state's offers if no other node is in it."""
        self.teams[node] = state.teams
        members = self.members.setdefault(state, [])
        heapq.heappush(members, node)
        if len(members) > 1:
            return
        holding, groups = self.kinds[state.kind], range(len(self.tensor))
        unused = holding.movable - sum(self._lacking(holding.bound, group, state.teams[group]) for group in groups)
        takes, costs = self._next_team(holding.bound, state.teams), self._next_team(holding.positioned, state.teams)
        fewer = tuple(count - 1 for count in state.teams)
        gives, saves = self._next_team(holding.bound, fewer), self._next_team(holding.positioned, fewer)
        for group in groups:
            if takes[group] <= unused:
                self._offer(costs[group], state, group, None)
                continue
            for dropped in groups:
                if state.teams[dropped] and dropped != group and takes[group] - gives[dropped] <= unused:
                    self._offer(costs[group] - saves[dropped], state, group, dropped)

    def _offer(self, cost: int, state: _State, group: int, dropped: int | None) -> None:
        heapq.heappush(self.offers.setdefault((group, dropped), []), (cost, state))

    def _next_team(self, have: Counts, teams: Counts) -> Counts:
        """Return, for each group, the number of positions without a worker for one more team of this group.

        ``have``: number of workers at each position; ``teams``: number of teams of each group so far.
        """
        return tuple(sum(have[p] <= teams[group] for p in self.tensor[group]) for group in range(len(teams)))

    def _lacking(self, have: Counts, group: int, teams: int) -> int:
        return sum(max(0, teams - have[position]) for position in self.tensor[group])


def _changed(teams: Counts, more: int, fewer: int | None) -> Counts:
    return tuple(count + (group == more) - (group == fewer) for group, count in enumerate(teams))
