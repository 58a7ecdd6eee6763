"""Placement against brute force: replicas, those after a rebuild, the fewest changes, nodes' teams; spares ahead."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recover_megatron.workload import Candidate, Placement, Shape, assemble, openings
from recover_megatron.workload.placement import EXACT, Edge, between, build_ahead, cover, edge, inside
from recover_megatron.workload.teams import Counts, Holding, plan_teams

Candidates = dict[int, Candidate]
NodeCounts = tuple[tuple[int, ...], ...]


def shape_of(tp: int, pp: int, *, cross_node: bool = False) -> Shape:
    groups = tuple(tuple(range(stage * tp, (stage + 1) * tp)) for stage in range(pp))
    return Shape(tp * pp, groups, cross_node)


# What can be reached, found out without a formula: replicas are taken out of the nodes one tensor group at a time, in
# every way there is.


def most_standing(candidates: Mapping[int, Candidate], shape: Shape) -> int:
    """The most replicas of those who are ready, each at its own position."""
    nodes = sorted({candidate.node for candidate in candidates.values()})
    counts = [[0] * shape.size for _ in (nodes if not shape.cross_node else nodes[:1])]
    for candidate in candidates.values():
        if candidate.ready and candidate.position is not None:
            counts[0 if shape.cross_node else nodes.index(candidate.node)][candidate.position] += 1
    return _take_standing(tuple(sorted(map(tuple, counts))), 0, shape)


@lru_cache(maxsize=100_000)
def _take_standing(counts: NodeCounts, group: int, shape: Shape) -> int:
    """The most replicas of these workers (by node and position) when the one being taken has its first groups."""
    if group == len(shape.tensor):
        return 1 + _take_standing(counts, 0, shape)
    best = 0
    for node, here in enumerate(counts):
        if all(here[position] for position in shape.tensor[group]) and here not in counts[:node]:
            left = tuple(count - (position in shape.tensor[group]) for position, count in enumerate(here))
            rest = tuple(sorted((*counts[:node], left, *counts[node + 1 :])))
            best = max(best, _take_standing(rest, group + 1, shape))
    return best


def most_rebuilt(candidates: Mapping[int, Candidate], shape: Shape) -> int:
    """The most replicas when everybody may take any position."""
    nodes: dict[str, int] = {}
    for candidate in candidates.values():
        node = "" if shape.cross_node else candidate.node
        nodes[node] = nodes.get(node, 0) + 1
    return _take_any(tuple(sorted(nodes.values())), 0, shape)


@lru_cache(maxsize=100_000)
def _take_any(workers: tuple[int, ...], group: int, shape: Shape) -> int:
    if group == len(shape.tensor):
        return 1 + _take_any(workers, 0, shape)
    best, needed = 0, len(shape.tensor[group])
    for node, count in enumerate(workers):
        if count >= needed and count not in workers[:node]:
            rest = tuple(sorted((*workers[:node], count - needed, *workers[node + 1 :])))
            best = max(best, _take_any(rest, group + 1, shape))
    return best


def changes_that_reach(candidates: Candidates, shape: Shape, replicas: int, changes: int) -> bool:
    """Whether some ``changes`` of the workers can take other positions so that there are so many replicas."""
    for workers in itertools.combinations(candidates, changes):
        for positions in itertools.product(range(shape.size), repeat=changes):
            moved = {w: replace(candidates[w], position=p) for w, p in zip(workers, positions, strict=True)}
            if most_standing({**candidates, **moved}, shape) >= replicas:
                return True
    return False


# The two calls, and what must be true of each.


def checked(whole: list[int], candidates: Candidates, shape: Shape, slots: int) -> Placement:
    """`assemble`, and everything that can be seen in one answer."""
    placement = assemble(whole, candidates, shape, slots)
    assert list(placement.replicas) == [r for r in range(slots) if r not in whole][: len(placement.replicas)]
    placed = [worker for workers in placement.replicas.values() for worker in workers]
    assert sorted([*placed, *placement.spares]) == sorted(candidates)
    assert list(placement.spares) == sorted(placement.spares)
    for workers in placement.replicas.values():
        assert [candidates[worker].position for worker in workers] == list(range(shape.size))
        assert all(candidates[worker].ready for worker in workers)
        for group in shape.tensor:
            assert shape.cross_node or len({candidates[workers[position]].node for position in group}) == 1
    assert set(placement.rebuild) <= set(placement.spares)
    for worker, position in placement.rebuild.items():
        assert not candidates[worker].fixed
        assert candidates[worker].ready or candidates[worker].position is None
        assert position in range(shape.size)
        assert position != candidates[worker].position
    assert len(placement.replicas) == min(slots - len(whole), most_standing(candidates, shape))
    return placement


def rest_of(candidates: Candidates, placement: Placement) -> Candidates:
    return {worker: candidates[worker] for worker in placement.spares}


def rebuilt(candidates: Candidates, placement: Placement) -> Candidates:
    """The candidates that are left, when everybody has built what it should and is ready."""
    rest = rest_of(candidates, placement)
    positions = {worker: placement.rebuild.get(worker, candidate.position) for worker, candidate in rest.items()}
    return {worker: Candidate(positions[worker], candidate.node) for worker, candidate in rest.items()}


def check_both_calls(whole: list[int], candidates: Candidates, shape: Shape, slots: int) -> None:
    """Now as many as stand right; after the rebuild as many as there can be at all, and nothing is left to do."""
    first = checked(whole, candidates, shape, slots)
    second = checked([*whole, *first.replicas], rebuilt(candidates, first), shape, slots)
    assert len(first.replicas) + len(second.replicas) == min(slots - len(whole), most_rebuilt(candidates, shape))
    assert not second.rebuild
    assert bool(first.rebuild) == bool(second.replicas)


# The sweep: a launch grid, and random workers of it killed.


def layouts() -> Iterator[tuple[int, int, int, int]]:
    """(tp, pp, replicas, nodes): up to 24 workers that fill 1 to 4 nodes, each tensor group in one of them."""
    for tp, pp, replicas, nodes in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 2, 3, 4)):
        workers = tp * pp * replicas
        if workers <= 24 and workers % nodes == 0 and (workers // nodes) % tp == 0:
            yield tp, pp, replicas, nodes


def after_kills(
    shape: Shape, replicas: int, per_node: int, dead: set[int], joiners: int = 0
) -> tuple[list[int], Candidates]:
    """The whole replicas, and the candidates: orphans, and joiners on the nodes of the first dead."""
    grid = [range(r * shape.size, (r + 1) * shape.size) for r in range(replicas)]
    whole = [r for r, workers in enumerate(grid) if not dead & set(workers)]
    candidates = {
        worker: Candidate(position, f"node{worker // per_node}")
        for r, workers in enumerate(grid)
        for position, worker in enumerate(workers)
        if r not in whole and worker not in dead
    }
    for number, worker in enumerate(sorted(dead)[:joiners]):
        candidates[replicas * shape.size + number] = Candidate(None, f"node{worker // per_node}")
    return whole, candidates


@pytest.mark.parametrize("cross_node", [False, True])
@pytest.mark.parametrize("layout", list(layouts()), ids=lambda layout: "tp{}-pp{}-dp{}-nodes{}".format(*layout))
def test_after_any_deaths_there_are_as_many_replicas_as_brute_force_finds(layout, cross_node: bool) -> None:
    tp, pp, replicas, nodes = layout
    shape, workers = shape_of(tp, pp, cross_node=cross_node), tp * pp * replicas
    draw = random.Random(str(layout))
    for _ in range(12):
        dead = set(draw.sample(range(workers), draw.randint(1, workers)))
        whole, candidates = after_kills(shape, replicas, workers // nodes, dead, joiners=draw.choice((0, 0, 1, 2, 3)))
        check_both_calls(whole, candidates, shape, replicas)


# Any candidates at all.

SHAPES = [shape_of(tp, pp) for tp, pp in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3), (4, 2))]
SHAPES += [shape_of(2, 2, cross_node=True), Shape(4, ((0, 2), (3, 1))), Shape(6, ((5, 0, 1), (4, 3, 2)))]


@st.composite
def cases(draw: st.DrawFn, shapes=SHAPES, most: int = 16, bound: bool = False):
    """(whole, candidates, shape, slots), the candidates of any position or none; with ``bound`` some cannot move."""
    shape = draw(st.sampled_from(shapes))
    slots = draw(st.integers(0, 8))
    whole = sorted(draw(st.sets(st.integers(0, slots - 1), max_size=3))) if slots else []
    kinds = st.builds(
        Candidate,
        position=st.none() | st.integers(0, shape.size - 1),
        node=st.sampled_from("abc"),
        fixed=st.sampled_from((False, False, bound)),
        ready=st.sampled_from((True, True, not bound)),
    )
    return whole, draw(st.dictionaries(st.integers(0, 99), kinds, max_size=most)), shape, slots


@given(cases())
@settings(deadline=None)
def test_any_candidates_make_as_many_replicas_as_brute_force_finds(case) -> None:
    check_both_calls(*case)


@given(cases([s for s in SHAPES if s.size <= 4], most=6))
@settings(max_examples=400, deadline=None)
def test_no_fewer_changes_would_do(case) -> None:
    whole, candidates, shape, slots = case
    placement = assemble(whole, candidates, shape, slots)
    if not placement.rebuild:
        return  # fewer than none there cannot be
    rest = rest_of(candidates, placement)
    best = min(slots - len(whole) - len(placement.replicas), most_rebuilt(rest, shape))
    assert not changes_that_reach(rest, shape, best, len(placement.rebuild) - 1)


@given(cases(bound=True), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_answer_does_not_depend_on_the_order_of_the_arguments(case, order: random.Random) -> None:
    whole, candidates, shape, slots = case
    shuffled = list(candidates)
    order.shuffle(shuffled)
    first = assemble(whole, candidates, shape, slots)
    second = assemble(set(whole), {worker: candidates[worker] for worker in shuffled}, shape, slots)
    assert first == second
    assert list(first.replicas) == list(second.replicas)
    assert list(first.rebuild) == list(second.rebuild)


@given(cases(bound=True))
@settings(deadline=None)
def test_who_is_bound_stays_and_once_all_have_come_free_nothing_is_lost(case) -> None:
    whole, candidates, shape, slots = case
    most = min(slots - len(whole), most_rebuilt(candidates, shape))
    first = checked(whole, candidates, shape, slots)  # it looks that nobody who is bound is told to move
    rest = rebuilt(candidates, first)
    second = checked([*whole, *first.replicas], rest, shape, slots)
    third = checked([*whole, *first.replicas, *second.replicas], rebuilt(rest, second), shape, slots)
    assert len(first.replicas) + len(second.replicas) + len(third.replicas) == most
    assert not third.rebuild


@given(cases())
@settings(deadline=None)
def test_while_they_are_building_nobody_else_is_told_to(case) -> None:
    whole, candidates, shape, slots = case
    first = assemble(whole, candidates, shape, slots)
    building = rest_of(candidates, first)
    for worker, position in first.rebuild.items():
        building[worker] = Candidate(position, building[worker].node, fixed=True, ready=False)
    again = checked([*whole, *first.replicas], building, shape, slots)
    assert not again.replicas
    assert not again.rebuild


# By hand.

PAIR = shape_of(2, 1)
FOUR = shape_of(2, 2)


WIDE = replace(PAIR, cross_node=True)
NOW_OR_AFTER = {
    "orphans of two broken replicas become one at once: the example of the documentation": (
        [0], {4: (0, "a"), 5: (1, "a"), 8: (0, "a"), 7: (3, "b"), 10: (2, "b"), 11: (3, "b")}, FOUR, 3,
        {1: (4, 5, 10, 7)}, {}, (8, 11),
    ),
    "a tensor group is not put together across nodes": ([], {0: (0, "a"), 3: (1, "b")}, PAIR, 2, {}, {}, (0, 3)),
    "... unless that is allowed": ([], {0: (0, "a"), 3: (1, "b")}, WIDE, 2, {0: (0, 3)}, {}, ()),
    "across nodes only what does not fit within one": (
        [], {1: (1, "b"), 2: (0, "a"), 3: (1, "a"), 4: (0, "c")}, WIDE, 2, {0: (4, 1), 1: (2, 3)}, {}, (),
    ),
    "a spare without a model is rebuilt before anybody moves": (
        [], {1: (0, "a"), 2: (0, "a"), 3: (0, "a"), 9: (None, "a")}, PAIR, 1, {}, {9: 1}, (1, 2, 3, 9),
    ),
    "... and then those that stand where there are too many": (
        [], {1: (0, "a"), 2: (0, "a"), 3: (0, "a"), 9: (None, "a")}, PAIR, 2, {}, {3: 1, 9: 1}, (1, 2, 3, 9),
    ),
    "what is being built is not built twice": (
        [], {1: (0, "a"), 2: (1, "a", True, False), 9: (None, "a")}, PAIR, 1, {}, {}, (1, 2, 9),
    ),
    "a fixed worker is used where it stands and the free one is kept for the rebuild": (
        [], {1: (0, "a"), 2: (0, "a", True), 3: (1, "a"), 4: (0, "a")}, PAIR, 2, {0: (2, 3)}, {4: 1}, (1, 4),
    ),
    "of too many at a position the bound one stays": (
        [], {1: (0, "a"), 2: (0, "a", True, False)}, PAIR, 1, {}, {1: 1}, (1, 2),
    ),
    # Node a has a team of the first group already, and b is as far from either: so it is b that changes.
    "a tensor group moves from the node where that is cheapest": (
        [], {0: (0, "a"), 1: (1, "a"), 10: (0, "b"), 11: (3, "b")}, FOUR, 1, {}, {10: 2}, (0, 1, 10, 11),
    ),
    "no more replicas than slots": (
        [1], {worker: (worker % 2, "a") for worker in range(8)} | {9: (None, "a")}, PAIR, 3,
        {0: (0, 1), 2: (2, 3)}, {}, (4, 5, 6, 7, 9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOW_OR_AFTER)
def test_who_is_put_together_and_who_is_told_to_build(name: str) -> None:
    whole, workers, shape, slots, *answer = NOW_OR_AFTER[name]
    candidates = {worker: Candidate(*its) for worker, its in workers.items()}
    assert assemble(whole, candidates, shape, slots) == Placement(*answer)


@pytest.mark.parametrize(
    ("size", "tensor"),
    [(0, ()), (2, ()), (2, ((0,),)), (2, ((0, 1), ())), (3, ((0, 1), (2,))), (2, ((0, 0),)), (2, ((0, 2),))],
)
def test_malformed_shapes_are_refused(size: int, tensor: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="tensor groups"):
        Shape(size, tensor)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"worker 7 has position 2, outside range\(2\)"):
        assemble([], {7: Candidate(2, "a")}, PAIR, 1)
    with pytest.raises(ValueError, match=r"worker 7 has position -1, outside range\(2\)"):
        assemble([], {7: Candidate(-1, "a")}, PAIR, 1)
    with pytest.raises(ValueError, match=r"outside range\(1\): \[1\]"):
        assemble([0, 1], {}, PAIR, 1)


@given(*(st.integers(0, 9) for _ in range(3)), st.integers(1, 4), st.integers(0, 9), st.integers(0, 4))
def test_a_run_grows_by_whom_neither_missing_replicas_nor_spares_need(
    whole: int, waiting: int, launched: int, size: int, more: int, spares: int
) -> None:
    most = launched + more
    new = openings(whole, waiting, size, launched=launched, most=most, spares=spares)
    assert 0 <= new <= max(0, most - whole)
    if beyond := max(0, whole + new - max(whole, launched)):
        assert waiting - new * size >= spares
    if whole + new < most and whole + new >= launched:
        assert waiting - (new + 1) * size < spares, f"{beyond} are not all that there could be"
    if not more and whole <= launched:
        assert new == launched - whole, "without leave to grow: whatever is missing"


NODES = st.sampled_from("abcd")


def stood(spares: dict[int, Candidate], built: dict[int, int]) -> dict[int, Candidate]:
    return {worker: Candidate(built.get(worker, its.position), its.node) for worker, its in spares.items()}


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.lists(NODES, max_size=9), st.booleans(), st.randoms()
)
def test_spares_are_spread_evenly_and_the_answer_does_not_depend_on_their_order(
    tensor: int, stages: int, replicas: int, where: list[str], cross_node: bool, random: object
) -> None:
    shape = shape_of(tensor, stages, cross_node=cross_node)
    grid = [tuple(range(r * shape.size, (r + 1) * shape.size)) for r in range(replicas)]
    nodes = {worker: "abcd"[worker // tensor % 4] for its in grid for worker in its}
    first = replicas * shape.size
    spares = {first + n: Candidate(None, node) for n, node in enumerate(where)}
    built = build_ahead(spares, grid, nodes, shape)
    shuffled = list(spares)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert built == build_ahead({worker: spares[worker] for worker in shuffled}, grid, nodes, shape)
    assert set(built) <= set(spares)
    assert all(0 <= position < shape.size for position in built.values())
    if tensor == 1 or cross_node:
        assert set(built) == set(spares)
    # Who has built is left alone, and nobody has to be told again.
    assert build_ahead(stood(spares, built), grid, nodes, shape).keys() <= set(spares) - set(built)


def test_the_spares_of_one_node_cover_each_position_once_before_one_twice() -> None:
    grid, nodes = [(0, 1, 2, 3), (4, 5, 6, 7)], dict.fromkeys(range(8), "a")
    spares = {8 + n: Candidate(None, "spare") for n in range(6)}
    built = build_ahead(spares, grid, nodes, shape_of(1, 4))
    assert Counter(built.values()) == {0: 2, 1: 2, 2: 1, 3: 1}


def test_a_position_is_covered_from_another_node_than_its_workers() -> None:
    """Position 0 is on node a, position 1 on node b: a spare on a is lost with the workers of position 0."""
    grid, nodes = [(0, 1), (2, 3)], {0: "a", 2: "a", 1: "b", 3: "b"}
    assert build_ahead({8: Candidate(None, "a"), 9: Candidate(None, "b")}, grid, nodes, shape_of(1, 2)) == {8: 1, 9: 0}


def test_a_spare_node_stands_ready_to_replace_any_lost_node() -> None:
    """TP 4, nodes of 8: of each stage a team."""
    shape, grid = shape_of(4, 2), [tuple(range(8)), tuple(range(8, 16))]
    nodes = {worker: f"n{worker // 8}" for worker in range(16)}
    spares = {16 + n: Candidate(None, "spare") for n in range(8)}
    ready = stood(spares, build_ahead(spares, grid, nodes, shape))
    placement = assemble({0}, ready, shape, 2)  # replica 1 is lost with its node
    assert (placement.replicas, placement.rebuild) == ({1: tuple(range(16, 24))}, {})


def test_what_is_left_of_a_tensor_group_takes_the_place_of_one_of_its_own_node() -> None:
    shape, grid = shape_of(2, 2), [(0, 1, 2, 3)]
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert build_ahead({9: Candidate(None, "b")}, grid, nodes, shape) == {9: 2}
    assert build_ahead({9: Candidate(None, "c")}, grid, nodes, shape) == {}


def test_who_is_not_ready_or_has_a_model_is_left_alone() -> None:
    grid, nodes = [(0,)], {0: "a"}
    spares = {1: Candidate(0, "b"), 2: Candidate(None, "b", ready=False), 3: Candidate(None, "b", fixed=True)}
    assert build_ahead(spares, grid, nodes, shape_of(1, 1)) == {}


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


TENSORS = [
    tuple(tuple(range(group * size, (group + 1) * size)) for group in range(groups))
    for size, groups in ((1, 1), (1, 3), (1, 5), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (2, 4), (2, 5))
]


def changes(node: Holding, tensor, teams: Counts) -> int | None:
    """How many of a node's workers change position for these teams; None if it has not enough that can."""
    wanted = {position: count for group, count in zip(tensor, teams, strict=True) for position in group}
    lacking = sum(max(0, count - node.positioned[position]) for position, count in wanted.items())
    idle = sum(
        min(node.positioned[position] - node.bound[position], max(0, node.positioned[position] - count))
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
def holdings(draw: st.DrawFn, bound: bool = False):
    tensor = draw(st.sampled_from(TENSORS))
    size = len(tensor) * len(tensor[0])
    nodes = []
    for _ in range(draw(st.integers(0, 5))):
        # Hardly more workers than a team or two: nodes must then make way for each other.
        most = draw(st.sampled_from((2, 2, 2, 4))) + len(tensor[0])
        stand = draw(st.lists(st.integers(0, size - 1), min_size=len(tensor[0]) - 1, max_size=most))
        positioned = tuple(stand.count(position) for position in range(size))
        bound_here = tuple(draw(st.integers(0, count)) if bound and count else 0 for count in positioned)
        nodes.append(Holding(positioned, bound_here, draw(st.sampled_from((0, 0, 0, 1, 3)))))
    return nodes, tensor, draw(st.integers(0, 4 if len(tensor) < 4 else 2))


def positioned(*workers: int) -> Holding:
    return Holding(workers, (0,) * len(workers), 0)


THREE_STEPS = [
    positioned(0, 1, 2, 0, 0, 0, 0, 1, 1),
    positioned(1, 0, 1, 1, 0, 1, 0, 0, 0),
    positioned(0, 0, 0, 1, 1, 0, 0, 0, 1),
]
FOUR_STEPS = [
    positioned(0, 0, 1, 0, 0, 0, 0, 0, 1, 1),
    positioned(0, 0, 0, 0, 1, 0, 0, 1, 0, 0),
    positioned(2, 0, 0, 0, 0, 0, 0, 0, 0, 1),
    positioned(0, 0, 0, 1, 0, 0, 0, 1, 0, 0),
    positioned(0, 1, 0, 0, 1, 0, 0, 0, 0, 0),
]


@given(holdings())
@example((THREE_STEPS, ((0, 1, 2), (3, 4, 5), (6, 7, 8)), 1))  # the last group's node is freed by three changes of plan
@example((FOUR_STEPS, ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9)), 1))
@settings(max_examples=200, deadline=None)
def test_no_plan_has_more_teams_or_the_same_with_fewer_changes(case) -> None:
    assert outcome(*case) == best(*case)


@given(holdings(bound=True))
@settings(deadline=None)
def test_with_bound_workers_the_plan_can_be_carried_out(case) -> None:
    count, cost = outcome(*case)
    assert cost >= 0
    assert count <= best(*case)[0]
