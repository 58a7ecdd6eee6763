"""Number of teams of each tensor-parallel group for each node, so that the fewest workers change position.

A node with n workers has room for n // T **teams** (`placement`).  A team costs as many changes as it has positions
without a worker:

    positions   0  1 | 2  3        T = 2, G = 2; this node has 5 workers, so room for 2 teams
    standing    2  1 | 0  1        a team of (0, 1) costs nothing, a second one costs 1 (the worker at 3 moves to 1),
    unbuilt     1                  one of (2, 3) costs 1 (the worker without a model builds for 2)

The choice of each node's teams is a transportation problem, solved by cheapest paths: nodes supply room, groups demand
teams, and the cost of a node's n-th team of a group grows with n.  A group that needs one more team finds

    a node with room:   the node forms the team, and the path ends;
    or a full node:     the node forms the team in place of one of another group, which then needs one more.

With the cheapest path, and among those one with the fewest steps, the plan stays the cheapest for the teams that it
has.  So the result is exact, both in the number of teams and in the changes, as long as all workers may change
position.  A worker that is **bound** to its position makes room differ by group (it is of use only in the teams of its
own group), and to pack that exactly is as hard as bin packing; the same paths are then a good greedy rule that passes
through feasible plans only.

Nodes in the same state are interchangeable, so the search is over states, not nodes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Counts = tuple[int, ...]
"""A number for each tensor-parallel group."""


@dataclass(frozen=True)
class Holding:
    """The workers of a node."""

    standing: Counts
    """Number of workers in each position, now or soon without a request."""
    bound: Counts
    """Number of these, by position, that cannot change position."""
    unbuilt: int
    """Workers without a position that can take any."""

    @property
    def movable(self) -> int:
        """Number of workers that may be asked to change or take a position."""
        return self.unbuilt + sum(self.standing) - sum(self.bound)

    def room(self, team_size: int) -> int:
        """Return the number of teams for which the workers suffice."""
        return (self.unbuilt + sum(self.standing)) // team_size


def plan_teams(nodes: Sequence[Holding], tensor: Sequence[Sequence[int]], wanted: int) -> list[Counts]:
    """Return the number of teams of each group of ``tensor`` on each of ``nodes``: ``wanted`` in all, or fewer."""
    team_size = len(tensor[0])
    wanted = min(wanted, sum(node.room(team_size) for node in nodes) // len(tensor))
    plan = _Plan(nodes, tensor)
    for _ in range(wanted):
        complete = list(plan.teams)
        if not all(plan.one_more(group) for group in range(len(tensor))):
            return complete
    return plan.teams


class _State(NamedTuple):
    """A kind of node (the index of its holding), and its planned teams."""

    kind: int
    teams: Counts


@dataclass(frozen=True)
class _Path:
    """Path to one more team of the first group: each step is a group, the node's state, and the dropped group."""

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
    """The planned teams of the nodes, and the cheapest ways to plan more."""

    nodes: Sequence[Holding]
    tensor: Sequence[Sequence[int]]
    teams: list[Counts] = field(init=False)
    """The plan, by node."""
    kinds: list[Holding] = field(init=False)
    members: dict[_State, list[int]] = field(default_factory=dict)
    """The nodes in each state, a heap."""
    offers: dict[tuple[int, int | None], list[tuple[int, _State]]] = field(default_factory=dict)
    """(group, dropped group or None) -> a heap of (cost, state).  Offers of states without a node are skipped."""

    def __post_init__(self) -> None:
        self.teams = [(0,) * len(self.tensor)] * len(self.nodes)
        kinds = {holding: kind for kind, holding in enumerate(dict.fromkeys(self.nodes))}
        self.kinds = list(kinds)
        for node, holding in enumerate(self.nodes):
            if holding.room(len(self.tensor[0])):
                self._enter(node, _State(kinds[holding], self.teams[node]))

    def one_more(self, group: int) -> bool:
        """Plan one more team of ``group`` in the cheapest way; False: there is none, and the plan is void."""
        path = self._cheapest_path(group)
        if path is None:
            return False
        for wants, state, dropped in path.steps:
            if not self.members[state]:  # used up by an earlier step: only where workers are bound
                return False
            self._enter(heapq.heappop(self.members[state]), _State(state.kind, _changed(state.teams, wants, dropped)))
        return True

    def _cheapest_path(self, group: int) -> _Path | None:
        """Return the path least in cost, then in steps, with no group twice: rounds of Bellman and Ford."""
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
        """Move ``node`` to ``state``; if it is the only node there, add its offers."""
        self.teams[node] = state.teams
        members = self.members.setdefault(state, [])
        heapq.heappush(members, node)
        if len(members) > 1:
            return
        holding, groups = self.kinds[state.kind], range(len(self.tensor))
        unused = holding.movable - sum(self._lacking(holding.bound, group, state.teams[group]) for group in groups)
        takes, costs = self._next_team(holding.bound, state.teams), self._next_team(holding.standing, state.teams)
        fewer = tuple(count - 1 for count in state.teams)
        gives, saves = self._next_team(holding.bound, fewer), self._next_team(holding.standing, fewer)
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
        """Return, by group, the positions missing for one team more than ``teams``; ``have``: workers by position."""
        return tuple(sum(have[p] <= teams[group] for p in self.tensor[group]) for group in range(len(teams)))

    def _lacking(self, have: Counts, group: int, teams: int) -> int:
        return sum(max(0, teams - have[position]) for position in self.tensor[group])


def _changed(teams: Counts, more: int, fewer: int | None) -> Counts:
    return tuple(count + (group == more) - (group == fewer) for group, count in enumerate(teams))
