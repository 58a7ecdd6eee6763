"""Placement against brute force: replicas without a rebuild, replicas after it, and the fewest changes for that."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.workload import Candidate, Placement, Shape, assemble, openings

Candidates = dict[int, Candidate]
Counts = tuple[tuple[int, ...], ...]


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
def _take_standing(counts: Counts, group: int, shape: Shape) -> int:
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


def test_orphans_of_two_broken_replicas_become_one_at_once() -> None:
    orphans = {4: Candidate(0, "a"), 5: Candidate(1, "a"), 10: Candidate(2, "b"), 11: Candidate(3, "b")}
    assert assemble([0], orphans, FOUR, 3) == Placement({1: (4, 5, 10, 11)}, {}, ())


def test_the_example_of_the_documentation() -> None:
    on_a = {4: Candidate(0, "a"), 5: Candidate(1, "a"), 8: Candidate(0, "a")}
    on_b = {7: Candidate(3, "b"), 10: Candidate(2, "b"), 11: Candidate(3, "b")}
    assert assemble([0], on_a | on_b, FOUR, 3) == Placement({1: (4, 5, 10, 7)}, {}, (8, 11))


def test_a_tensor_group_is_not_put_together_across_nodes_unless_that_is_allowed() -> None:
    halves = {0: Candidate(0, "a"), 3: Candidate(1, "b")}
    assert assemble([], halves, PAIR, 2) == Placement({}, {}, (0, 3))
    assert assemble([], halves, replace(PAIR, cross_node=True), 2) == Placement({0: (0, 3)}, {}, ())


def test_across_nodes_only_what_does_not_fit_within_one() -> None:
    workers = {1: Candidate(1, "b"), 2: Candidate(0, "a"), 3: Candidate(1, "a"), 4: Candidate(0, "c")}
    placement = assemble([], workers, replace(PAIR, cross_node=True), 2)
    assert sorted(placement.replicas.values()) == [(2, 3), (4, 1)]


def test_a_spare_without_a_model_is_rebuilt_before_anybody_moves() -> None:
    workers = {1: Candidate(0, "a"), 2: Candidate(0, "a"), 3: Candidate(0, "a"), 9: Candidate(None, "a")}
    assert assemble([], workers, PAIR, 1).rebuild == {9: 1}
    assert assemble([], workers, PAIR, 2).rebuild == {3: 1, 9: 1}


def test_what_is_being_built_is_not_built_twice() -> None:
    coming = {1: Candidate(0, "a"), 2: Candidate(1, "a", fixed=True, ready=False), 9: Candidate(None, "a")}
    assert assemble([], coming, PAIR, 1) == Placement({}, {}, (1, 2, 9))


def test_a_fixed_worker_is_used_where_it_stands_and_the_free_one_is_kept_for_the_rebuild() -> None:
    workers = {
        1: Candidate(0, "a"),
        2: Candidate(0, "a", fixed=True),
        3: Candidate(1, "a"),
        4: Candidate(0, "a"),
    }
    assert assemble([], workers, PAIR, 2) == Placement({0: (2, 3)}, {4: 1}, (1, 4))


def test_of_too_many_at_a_position_the_bound_one_stays() -> None:
    workers = {1: Candidate(0, "a"), 2: Candidate(0, "a", fixed=True, ready=False)}
    assert assemble([], workers, PAIR, 1) == Placement({}, {1: 1}, (1, 2))


def test_a_tensor_group_moves_from_the_node_where_that_is_cheapest() -> None:
    """Node a has a team of the first group already, and b is as far from either: so it is b that changes."""
    workers = {
        **{worker: Candidate(position, "a") for worker, position in enumerate((0, 1))},
        **{worker: Candidate(position, "b") for worker, position in enumerate((0, 3), start=10)},
    }
    assert assemble([], workers, FOUR, 1).rebuild == {10: 2}


def test_no_more_replicas_than_slots() -> None:
    workers = {worker: Candidate(worker % 2, "a") for worker in range(8)} | {9: Candidate(None, "a")}
    assert assemble([1], workers, PAIR, 3) == Placement({0: (0, 1), 2: (2, 3)}, {}, (4, 5, 6, 7, 9))


@pytest.mark.parametrize(
    ("size", "tensor"),
    [(0, ()), (2, ()), (2, ((0,),)), (2, ((0, 1), ())), (3, ((0, 1), (2,))), (2, ((0, 0),)), (2, ((0, 2),))],
)
def test_malformed_shapes_are_refused(size: int, tensor: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="tensor groups"):
        Shape(size, tensor)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="worker 7 is at position 2 of 2"):
        assemble([], {7: Candidate(2, "a")}, PAIR, 1)
    with pytest.raises(ValueError, match="worker 7 is at position -1 of 2"):
        assemble([], {7: Candidate(-1, "a")}, PAIR, 1)
    with pytest.raises(ValueError, match="room for 1 only"):
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
