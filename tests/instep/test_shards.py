"""The copies of a state that count, and what a worker gives of its parameters to one that misses them.

A worker that has been away holds nothing, whatever the layout says.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.collectives.ledger import Span
from recover_megatron.instep.state import overlap as module
from recover_megatron.instep.state.overlap import Overlap, _requests
from recover_megatron.instep.state.shards import Shards
from recover_megatron.network.peer_store import MOST_BYTES, MOST_PARTS, Range
from recover_megatron.workload.grid import launch_grid, ring_order

COLUMN = (0, 1, 2, 3)


def assignment_of(me: int, occupants: dict[int, int]) -> Any:
    decision = SimpleNamespace(touched=defaultdict(frozenset))
    return SimpleNamespace(me=me, occupants=occupants, staying=occupants, decision=decision)


def shards_of(me: int, occupants: dict[int, int], shadows: int = 1) -> Shards:
    shards = Shards({COLUMN: COLUMN}, shadows, assignment_of(me, occupants))
    shards.take_up({COLUMN: shards.wanted(COLUMN)})
    return shards


def everyone() -> dict[int, int]:
    return {slot: slot for slot in COLUMN}


def test_the_first_live_holder_speaks_for_a_unit_and_sums_go_to_it() -> None:
    occupants = everyone()
    shards = shards_of(2, occupants)
    assert shards.cut(COLUMN, 8) == ([[Span(0, 2)], [Span(2, 4)], [Span(4, 6)], [Span(6, 8)]], {1})
    del occupants[1]
    shards.planned()
    assert shards.speaks_for(COLUMN, 1)
    assert shards.cut(COLUMN, 8) == ([[Span(0, 2)], [Span(2, 6)], [Span(6, 8)]], {1})
    assert shards.stale()
    assert shards.lost() == []
    del occupants[2]
    shards.planned()
    assert shards.lost() == [1]


def test_who_comes_back_to_its_place_holds_nothing() -> None:
    occupants = everyone()
    shards = shards_of(2, occupants)
    del occupants[1]
    shards.planned()
    occupants[1] = 1
    shards.planned()
    assert 1 not in shards.live
    assert shards.speaks_for(COLUMN, 1)
    assert shards.stale()
    assert shards.cut(COLUMN, 8) == ([[Span(0, 2)], [], [Span(2, 6)], [Span(6, 8)]], {1})


def test_who_was_lost_while_the_layout_was_agreed_on_holds_nothing_when_it_comes_back() -> None:
    occupants = everyone()
    shards = shards_of(0, occupants, shadows=2)
    agreed = {COLUMN: shards.wanted(COLUMN)}
    del occupants[3]  # everybody else had all that it was to hold, and said so
    shards.planned()
    shards.take_up(agreed)
    occupants[3] = 3
    shards.planned()
    assert 3 not in shards.live
    assert shards.stale()


def test_a_newcomer_is_told_the_layout_and_has_no_part_in_it() -> None:
    occupants = everyone()
    donor = shards_of(2, occupants)
    del occupants[1]
    donor.planned()
    occupants[1] = 7
    donor.planned()
    newcomer = Shards({COLUMN: COLUMN}, 1, assignment_of(7, occupants))
    assert not newcomer.known
    newcomer.from_json(donor.to_json())
    assert newcomer.held(COLUMN) == ()
    assert newcomer.cut(COLUMN, 8) == donor.cut(COLUMN, 8)
    assert newcomer.stale()


def test_a_sum_passes_a_newcomer_on_its_way_to_the_shadow() -> None:
    occupants = {0: 0, 2: 2, 3: 3}
    shards = shards_of(0, occupants)
    assert shards.cut(COLUMN, 12)[1] == {1}
    occupants[1] = 7
    shards.planned()
    spans, hops = shards.cut(COLUMN, 12)
    assert spans[1] == []
    assert hops == {1, 2}


def test_who_follows_in_the_ring_stands_in_another_replica() -> None:
    grid = launch_grid(8, tensor=1, context=1, pipeline=2, inner_ranks=2)
    column = ring_order((0, 1, 2, 3), grid)
    assert [grid.place(slot)[0] for slot in column] == [0, 1, 0, 1]


def test_with_instances_those_that_hold_one_shard_follow_each_other() -> None:
    grid = launch_grid(4, tensor=1, context=1, pipeline=1, inner_ranks=1)
    assert ring_order(COLUMN, grid, 2) == (0, 2, 1, 3)
    occupants = everyone()
    column = (0, 2, 1, 3)
    shards = Shards({column: COLUMN}, 1, assignment_of(2, occupants), 2)
    shards.take_up({column: shards.wanted(column)})
    assert shards.held(column) == (0,)
    assert shards.cut(column, 8) == ([[Span(0, 4)], [], [Span(4, 8)], []], {1})
    del occupants[0]
    shards.planned()
    assert shards.speaks_for(column, 0)
    assert shards.cut(column, 8) == ([[Span(0, 4)], [Span(4, 8)], []], {1})
    told = Shards({column: COLUMN}, 1, assignment_of(7, occupants), 2)
    told.from_json(shards.to_json())
    assert told.layout(column) == shards.layout(column)
    assert told.held(column) == ()


def test_copies_are_kept_on_another_node_and_stay_there_as_long_as_that_is_so() -> None:
    occupants = everyone()
    assignment = assignment_of(0, occupants)
    assignment.decision.touched = {worker: frozenset({f"node {worker // 2}"}) for worker in (*COLUMN, 7)}
    shards = Shards({COLUMN: COLUMN}, 1, assignment)
    shards.adopt()
    shards.take_up({COLUMN: shards.wanted(COLUMN)})
    assert shards.held(COLUMN) == (0, 2)
    assert shards.cut(COLUMN, 8)[1] == {2}
    del occupants[0], occupants[1]  # a whole node
    shards.planned()
    assert shards.lost() == []
    told = Shards({COLUMN: COLUMN}, 1, assignment)
    told.from_json(shards.to_json())
    assert told.layout(COLUMN) == shards.layout(COLUMN)


def nobody(unit: int) -> None:
    raise AssertionError(f"unit {unit} was lost")


@pytest.fixture
def overlap() -> Overlap:
    buckets = [torch.arange(10, dtype=torch.float32), torch.arange(6, dtype=torch.bfloat16)]
    recovery = SimpleNamespace(comm_config=SimpleNamespace(peer_store=SimpleNamespace(source=None)))
    parts = [((0, 1), bucket) for bucket in buckets]
    return Overlap(parts, cast(Any, None), cast(Any, recovery), nobody)


def test_parts_of_several_buckets_come_one_behind_the_other(overlap: Overlap) -> None:
    overlap.publish(7)
    data = overlap.give(7, [(0, 2, 5), (1, 0, 2)])
    assert data is not None
    assert torch.frombuffer(bytearray(data[:12]), dtype=torch.float32).tolist() == [2, 3, 4]
    assert torch.frombuffer(bytearray(data[12:]), dtype=torch.bfloat16).tolist() == [0, 1]


def test_only_the_update_that_is_asked_about_is_given(overlap: Overlap) -> None:
    assert overlap.give(7, [(0, 0, 1)]) is None
    overlap.publish(7)
    assert overlap.give(6, [(0, 0, 1)]) is None
    assert overlap.give(8, [(0, 0, 1)]) is None
    overlap.withdraw()
    assert overlap.give(7, [(0, 0, 1)]) is None


@pytest.mark.parametrize("part", [(2, 0, 1), (-1, 0, 1), (0, 5, 5), (0, -1, 2), (1, 0, 7)])
def test_what_nobody_of_this_run_asks_for_is_an_error_that_the_board_catches(overlap: Overlap, part: Range) -> None:
    overlap.publish(7)
    with pytest.raises(ValueError, match="no elements"):
        overlap.give(7, [part])


def test_more_than_the_limit_is_not_given(overlap: Overlap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 16)
    overlap.publish(7)
    assert overlap.give(7, [(0, 0, 4)]) is not None
    assert overlap.give(7, [(0, 0, 4), (1, 0, 1)]) is None


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40_000_000)), max_size=5),
    st.sampled_from([(2, 4, 4, 2), (4, 4, 4, 4)]),
)
def test_requests_ask_for_everything_once_and_no_answer_is_over_the_limit(
    sizes: list[tuple[int, int]], each: tuple[int, ...]
) -> None:
    parts = [(bucket, Span(3, 3 + size)) for bucket, size in sizes]
    requests = list(_requests(parts, lambda bucket: each[bucket]))
    for request in requests:
        assert 0 < sum(len(span) * each[bucket] for bucket, span in request) <= MOST_BYTES
        assert 0 < len(request) <= MOST_PARTS
    joined: list[tuple[int, Span]] = []
    for bucket, span in (part for request in requests for part in request):
        if joined and joined[-1][0] == bucket and joined[-1][1].stop == span.start:
            joined[-1] = bucket, Span(joined[-1][1].start, span.stop)
        else:
            joined.append((bucket, span))
    assert joined == parts
