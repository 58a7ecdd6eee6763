"""The plan of the nodes' teams against every plan there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import example, given, settings
from hypothesis import strategies as st

from recover_megatron.workload.teams import Counts, Holding, plan_teams

TENSORS = [
    tuple(tuple(range(group * size, (group + 1) * size)) for group in range(groups))
    for size, groups in ((1, 1), (1, 3), (1, 5), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (2, 4), (2, 5))
]


def changes(node: Holding, tensor, teams: Counts) -> int | None:
    """How many of a node's workers change position for these teams; None if it has not enough that can."""
    wanted = {position: count for group, count in zip(tensor, teams, strict=True) for position in group}
    lacking = sum(max(0, count - node.standing[position]) for position, count in wanted.items())
    idle = sum(
        min(node.standing[position] - node.bound[position], max(0, node.standing[position] - count))
        for position, count in wanted.items()
    )
    return lacking if lacking <= node.unbuilt + idle else None


def plans(node: Holding, tensor, most: int) -> Iterator[tuple[Counts, int]]:
    """All that a node can make, and the changes for it."""
    for teams in itertools.product(range(min(most, node.room(len(tensor[0]))) + 1), repeat=len(tensor)):
        cost = changes(node, tensor, teams)
        if cost is not None:
            yield teams, cost


def best(nodes: list[Holding], tensor, most: int) -> tuple[int, int]:
    """The most teams of each group, at most ``most``, and the fewest changes for them: node after node, every plan."""
    reached = {(0,) * len(tensor): 0}
    for node in nodes:
        further: dict[Counts, int] = {}
        for (before, spent), (teams, cost) in itertools.product(reached.items(), list(plans(node, tensor, most))):
            total = tuple(map(sum, zip(before, teams, strict=True)))
            if max(total) <= most:
                further[total] = min(further.get(total, spent + cost), spent + cost)
        reached = further
    count = max(min(total) for total in reached)
    return count, reached[(count,) * len(tensor)]


def outcome(nodes: list[Holding], tensor, most: int) -> tuple[int, int]:
    """The same two numbers of `plan_teams`; its plan can be carried out."""
    planned = plan_teams(nodes, tensor, most)
    costs = [changes(node, tensor, teams) for node, teams in zip(nodes, planned, strict=True)]
    totals = {sum(column) for column in zip(*planned, strict=True)} or {0}
    assert len(totals) == 1
    return totals.pop(), sum(cost for cost in costs if cost is not None) if None not in costs else -1


@st.composite
def cases(draw: st.DrawFn, bound: bool = False):
    tensor = draw(st.sampled_from(TENSORS))
    size = len(tensor) * len(tensor[0])
    nodes = []
    for _ in range(draw(st.integers(0, 5))):
        # Hardly more workers than a team or two: nodes must then make way for each other.
        most = draw(st.sampled_from((2, 2, 2, 4))) + len(tensor[0])
        stand = draw(st.lists(st.integers(0, size - 1), min_size=len(tensor[0]) - 1, max_size=most))
        standing = tuple(stand.count(position) for position in range(size))
        bound_here = tuple(draw(st.integers(0, count)) if bound and count else 0 for count in standing)
        nodes.append(Holding(standing, bound_here, draw(st.sampled_from((0, 0, 0, 1, 3)))))
    return nodes, tensor, draw(st.integers(0, 4 if len(tensor) < 4 else 2))


def standing(*workers: int) -> Holding:
    return Holding(workers, (0,) * len(workers), 0)


THREE_STEPS = [
    standing(0, 1, 2, 0, 0, 0, 0, 1, 1),
    standing(1, 0, 1, 1, 0, 1, 0, 0, 0),
    standing(0, 0, 0, 1, 1, 0, 0, 0, 1),
]
FOUR_STEPS = [
    standing(0, 0, 1, 0, 0, 0, 0, 0, 1, 1),
    standing(0, 0, 0, 0, 1, 0, 0, 1, 0, 0),
    standing(2, 0, 0, 0, 0, 0, 0, 0, 0, 1),
    standing(0, 0, 0, 1, 0, 0, 0, 1, 0, 0),
    standing(0, 1, 0, 0, 1, 0, 0, 0, 0, 0),
]


@given(cases())
@example((THREE_STEPS, ((0, 1, 2), (3, 4, 5), (6, 7, 8)), 1))  # the last group's node is freed by three changes of plan
@example((FOUR_STEPS, ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9)), 1))
@settings(max_examples=200, deadline=None)
def test_no_plan_has_more_teams_or_the_same_with_fewer_changes(case) -> None:
    assert outcome(*case) == best(*case)


@given(cases(bound=True))
@settings(deadline=None)
def test_with_bound_workers_the_plan_can_be_carried_out(case) -> None:
    count, cost = outcome(*case)
    assert cost >= 0
    assert count <= best(*case)[0]
