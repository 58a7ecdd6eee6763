"""Shards and their shadows: nothing is owned twice or by nobody, and what must move moves, and nothing else."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.workload.shards import Instances, Layout, chunks, hops, layout_of, lost, moves, owned, primary


def strides(size: int, shadows: int) -> st.SearchStrategy[int]:
    """Those by which no copy comes back to a holder."""
    hops = range(1, min(shadows, size - 1) + 1)
    return st.sampled_from([1, *(n for n in range(2, size) if all(n * hop % size for hop in hops))])


@st.composite
def histories(draw: st.DrawFn) -> tuple[Layout, frozenset[int], Layout, int]:
    """(a layout, who of it lives, the layout for them and newcomers, the elements of a bucket)."""
    shards = draw(st.integers(1, 8))
    guests = list(range(shards, shards + draw(st.integers(0, 3))))  # in places that were not there at launch
    order = draw(st.permutations([*range(shards), *guests]))
    shadows = draw(st.integers(0, 2))
    present = draw(st.sets(st.sampled_from(order), min_size=1))
    homes = [n if n in present else None for n in range(shards)]
    old = layout_of(homes, [n for n in order if n in present], shadows, draw(strides(len(present), shadows)))
    live = draw(st.sets(st.sampled_from(sorted(present)), min_size=1))
    joined = draw(st.sets(st.sampled_from([n for n in order if n not in live] or [0])))
    back = draw(st.sampled_from((0, 100)))  # they were there before, but have missed something; or not
    now = {n: n if n in live else back + n for n in order if n in live | joined}
    there = [now[n] for n in order if n in now]
    stride = draw(strides(len(there), shadows))
    new = layout_of([now.get(n) for n in range(shards)], there, shadows, stride)
    return old, frozenset(live), new, draw(st.integers(0, 96))


def cover(parts: list[tuple[int, int]], numel: int) -> bool:
    """Whether they are all of a bucket, each element once."""
    elements = sorted(itertools.chain.from_iterable(range(start, stop) for start, stop in parts))
    return elements == list(range(numel))


@given(histories())
def test_every_element_is_owned_by_one_unit(history) -> None:
    _, _, layout, numel = history
    assert cover([part for unit in layout.ring for part in layout.parts(unit, numel)], numel)


@given(histories(), st.sets(st.integers(0, 95)))
def test_what_is_missing_of_a_bucket_is_found_at_its_owners_each_element_once(history, missing) -> None:
    _, _, layout, numel = history
    missing = sorted(element for element in missing if element < numel)
    starts = [element for element in missing if element - 1 not in missing]
    stops = [element + 1 for element in missing if element + 1 not in missing]
    found = owned(layout, list(zip(starts, stops, strict=True)), numel)
    for unit, parts in found.items():
        own = set(itertools.chain.from_iterable(range(*part) for part in layout.parts(unit, numel)))
        assert parts == sorted(parts)
        assert all(own.issuperset(range(*part)) for part in parts)
    told = itertools.chain.from_iterable(range(*part) for parts in found.values() for part in parts)
    assert sorted(told) == missing


@given(histories())
def test_units_are_held_by_whom_they_say(history) -> None:
    layout = history[2]
    for unit in layout.ring:
        assert layout.holders(unit)[0] == unit
        assert len(set(layout.holders(unit))) == min(layout.shadows + 1, len(layout.ring))
        assert all((worker in layout.holders(unit)) == (unit in layout.held(worker)) for worker in layout.ring)


@given(histories())
def test_whatever_is_not_lost_is_spoken_for_once(history) -> None:
    layout, live, _, numel = history
    members = [worker for worker in layout.ring if worker in live]
    if lost(layout, live):
        with pytest.raises(ValueError, match="no live worker has the state"):
            chunks(layout, members, live, numel)
        return
    assert cover(list(itertools.chain.from_iterable(chunks(layout, members, live, numel))), numel)


@given(histories())
def test_a_sum_goes_to_all_live_holders_also_past_those_who_hold_nothing(history) -> None:
    layout, live, new, _ = history
    members = new.ring  # newcomers among them
    far = hops(layout, members, live)
    for unit in layout.ring:
        speaker = primary(layout, unit, live)
        if speaker is not None:
            at = members.index(speaker)
            reached = {speaker, *(members[(at + hop) % len(members)] for hop in far)}
            assert set(layout.holders(unit)) & live <= reached
    assert far <= set(range(1, len(members)))


@given(histories())
@settings(max_examples=300)
def test_after_the_moves_all_holders_have_what_they_hold_and_nothing_moved_that_was_there(history) -> None:
    old, live, new, numel = history
    if lost(old, live):
        with pytest.raises(ValueError, match="no live worker has the state"):
            moves(old, new, live, max(numel, len(old.homes), len(old.ring)))
        return
    has: dict[int, set[int]] = {worker: set() for worker in new.ring}
    for worker in live:
        for unit in old.held(worker):
            has[worker] |= {element for part in old.parts(unit, numel) for element in range(*part)}
    before = {worker: set(elements) for worker, elements in has.items()}
    for move in moves(old, new, live, numel):
        elements = set(range(move.start, move.stop))
        assert elements <= before[move.source]
        assert not elements & has[move.target]
        has[move.target] |= elements
    for worker in new.ring:
        for unit in new.held(worker):
            assert {element for part in new.parts(unit, numel) for element in range(*part)} <= has[worker]


THERE = st.lists(st.booleans(), min_size=3, max_size=3)


@given(
    st.integers(1, 4).flatmap(lambda shards: st.tuples(*[st.lists(THERE, min_size=shards, max_size=shards)] * 2)),
    st.integers(0, 5),
)
def test_with_instances_the_same_holds_and_a_loss_moves_nothing(present, width: int) -> None:
    """Three instances; ``present``: of each shard who is there, before and after; who is there twice has come anew."""
    before, after = present
    numel = width * len(before)
    old = Instances(tuple(tuple(i * 3 + k if its[k] else None for k in range(3)) for i, its in enumerate(before)))
    live = frozenset(w for w in old.workers if after[w // 3][w % 3] or w % 3 == 0)
    new = Instances(
        tuple(
            tuple(w if (w := i * 3 + k) in live else 100 + w if its[k] else None for k in range(3))
            for i, its in enumerate(after)
        )
    )
    assert all(unit in old.held(worker) for unit in old.units for worker in old.holders(unit))
    gone = [unit for unit in old.units if not live & set(old.holders(unit))]
    assert lost(old, live) == gone
    if gone:
        return
    members = new.workers
    assert cover(list(itertools.chain.from_iterable(chunks(old, members, live, numel))), numel)
    moved = moves(old, new, live, numel)
    assert {move.target for move in moved} <= set(new.workers) - live
    assert {(move.target, move.start, move.stop) for move in moved} == {
        (worker, *part) for worker in new.workers if worker not in live
        for unit in new.held(worker) for part in new.parts(unit, numel)
    }  # fmt: skip
    assert {holder for unit in old.units for holder in old.without_copies().holders(unit)} <= set(old.workers)


def test_a_loss_moves_one_shard_and_the_shadows_that_follow_from_it() -> None:
    old = layout_of([0, 1, 2, 3], range(4), 1)
    new = layout_of([0, None, 2, 3], [0, 2, 3], 1)
    moved = moves(old, new, frozenset([0, 2, 3]), 12)
    # Worker 2 was the shadow of 1: it gives a third to each of the others, the owners and their shadows alike; and it
    # becomes the shadow of worker 0.
    assert sum(move.stop - move.start for move in moved if move.unit == 2) == 0 + 1
    assert {(move.source, move.target) for move in moved if move.start in range(3, 6)} == {(2, 0), (2, 3)}
    assert sum(move.stop - move.start for move in moved) == 3 + 1 + 1 + 2


def test_a_column_that_has_grown_is_cut_in_equal_parts_and_one_that_has_shrunk_back_as_at_launch() -> None:
    launch, grown = layout_of([0, 1], [0, 1], 1), layout_of([0, 1], [0, 1, 2, 3, 4, 5], 1)
    assert [grown.parts(unit, 12) for unit in grown.ring] == [[(n, n + 2)] for n in range(0, 12, 2)]
    assert layout_of([None, 1], [1, 5], 1).parts(5, 12) == [(6, 12)]
    moved = moves(grown, launch, frozenset([0, 1, 2, 4]), 12)
    assert [launch.parts(unit, 12) for unit in launch.ring] == [[(0, 6)], [(6, 12)]]
    assert {move.source for move in moved} == {0, 1, 2, 4}, "what was of 3 and 5 comes from their shadows"


def test_shards_of_a_bucket_that_is_not_padded_for_it_differ_by_an_element() -> None:
    layout = layout_of([0, 1, 2], range(3), 1)
    assert [layout.parts(unit, 7) for unit in range(3)] == [[(0, 2)], [(2, 4)], [(4, 7)]]


def test_without_shadows_any_loss_is_one_of_state_and_with_one_two_neighbours_are() -> None:
    places = [0, 1, 2, 3]
    assert lost(layout_of(places, places, 0), frozenset([0, 1, 3])) == [2]
    assert lost(layout_of(places, places, 1), frozenset([0, 1, 3])) == []
    assert lost(layout_of(places, places, 1), frozenset([0, 3])) == [1]
    assert lost(layout_of(places, places, 1), frozenset([0, 2])) == []
    assert lost(layout_of(places, places, 2), frozenset([0, 3])) == []


def lines_run(work: Callable[[], object]) -> int:
    """The lines of Python that ``work`` runs: its cost, the same on every machine."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


ASKED: dict[str, Callable[[Layout, Layout, int], object]] = {
    "chunks": lambda _, new, numel: chunks(new, new.ring, frozenset(new.ring), numel),
    "owned": lambda _, new, numel: owned(new, [(0, numel)], numel),
    "hops": lambda _, new, __: hops(new, new.ring, frozenset(new.ring)),
    "moves": lambda old, new, numel: moves(old, new, frozenset(new.ring), numel),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_the_cost_of_a_layout_grows_with_the_workers_and_not_with_their_square(ask: Any) -> None:
    """Every epoch asks for them for each size of bucket, also where a column has a thousand workers."""
    costs = []
    for size in (50, 200):
        old, left = layout_of(range(size), range(size), 1), range(1, size)
        new = layout_of([None, *left], left, 1)
        costs.append(lines_run(lambda old=old, new=new, size=size: ask(old, new, 1000 * size)))
    assert costs[1] < 8 * costs[0], "four times as many workers, whose square is 16 times as large"
