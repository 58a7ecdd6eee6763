"""What a worker gives of its parameters to one that misses them, and what it refuses (the rest: test_sharded.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.collectives.ledger import Span
from recover_megatron.instep import overlap as module
from recover_megatron.instep.overlap import MOST_PARTS, Overlap, _requests
from recover_megatron.network.peer_store import MOST_BYTES


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
    data = overlap.give([7, 0, 2, 5, 1, 0, 2])
    assert data is not None
    assert torch.frombuffer(bytearray(data[:12]), dtype=torch.float32).tolist() == [2, 3, 4]
    assert torch.frombuffer(bytearray(data[12:]), dtype=torch.bfloat16).tolist() == [0, 1]


def test_only_the_update_that_is_asked_about_is_given(overlap: Overlap) -> None:
    assert overlap.give([7, 0, 0, 1]) is None
    overlap.publish(7)
    assert overlap.give([6, 0, 0, 1]) is None
    assert overlap.give([8, 0, 0, 1]) is None
    overlap.withdraw()
    assert overlap.give([7, 0, 0, 1]) is None


@pytest.mark.parametrize("what", [[], [7, 0], [7, 2, 0, 1], [7, -1, 0, 1], [7, 0, 5, 5], [7, 0, -1, 2], [7, 1, 0, 7]])
def test_what_nobody_of_this_run_asks_for_is_an_error_that_the_board_catches(overlap: Overlap, what: list[int]) -> None:
    overlap.publish(7)
    with pytest.raises((ValueError, TypeError)):
        overlap.give(what)


def test_more_than_the_limit_is_not_given(overlap: Overlap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 16)
    overlap.publish(7)
    assert overlap.give([7, 0, 0, 4]) is not None
    assert overlap.give([7, 0, 0, 4, 1, 0, 1]) is None


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
