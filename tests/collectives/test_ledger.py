"""The ledger: what is REDUCED stays so, spans are exact, and contradictions are told."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.collectives.epoch import LedgerError
from recover_megatron.collectives.group import share_sources
from recover_megatron.collectives.ledger import Ledger, Memory, Reduced, Span, from_digest, merge
from recover_megatron.instep.trainer import Gradients

NUMEL = 24


@st.composite
def marks(draw: st.DrawFn) -> list[tuple[Span, int]]:
    """Disjoint spans in any order, of a few epochs."""
    cuts = sorted(draw(st.sets(st.integers(0, NUMEL), min_size=2)))
    fragments = [Span(a, b) for a, b in pairwise(cuts)]
    chosen = draw(st.lists(st.sampled_from(fragments), unique=True))
    return [(span, draw(st.integers(1, 3))) for span in chosen]


def elements(ledger: Ledger) -> list[int | None]:
    """The epoch of every element, None where it is LOCAL."""
    states: list[int | None] = [None] * ledger.numel
    for span in ledger.reduced:
        states[span.start : span.stop] = [span.epoch] * len(span)
    return states


@given(marks())
def test_a_ledger_tells_the_state_of_every_element(marks: list[tuple[Span, int]]) -> None:
    ledger, model = Ledger(NUMEL), [None] * NUMEL
    for span, epoch in marks:
        ledger.mark(span, epoch)
        model[span.start : span.stop] = [epoch] * len(span)
        assert elements(ledger) == model
        assert ledger.covers(span)
    assert [i for span in ledger.local for i in range(span.start, span.stop)] == [
        i for i, state in enumerate(model) if state is None
    ]
    assert ledger.complete == (None not in model)
    for before, after in pairwise(ledger.reduced):
        assert before.stop < after.start or before.epoch != after.epoch, "neighbours of one epoch are one span"


@given(marks(), st.integers(0, NUMEL), st.integers(0, NUMEL))
def test_covers_means_every_element(marks: list[tuple[Span, int]], a: int, b: int) -> None:
    ledger = Ledger(NUMEL, (Reduced(span.start, span.stop, epoch) for span, epoch in marks))
    span = Span(min(a, b), max(a, b))
    assert ledger.covers(span) == (None not in elements(ledger)[span.start : span.stop])


@given(marks())
def test_no_element_is_finished_twice(marks: list[tuple[Span, int]]) -> None:
    ledger = Ledger(NUMEL, (Reduced(span.start, span.stop, epoch) for span, epoch in marks))
    for span, _ in marks:
        with pytest.raises(LedgerError):
            ledger.mark(Span(max(0, span.start - 1), span.start + 1), 9)
    before = ledger.digest()
    with pytest.raises(LedgerError):
        ledger.mark(Span(0, NUMEL + 1), 1)
    assert ledger.digest() == before


@given(marks())
def test_a_digest_gives_back_the_ledger(marks: list[tuple[Span, int]]) -> None:
    ledger = Ledger(NUMEL, (Reduced(span.start, span.stop, epoch) for span, epoch in marks))
    assert from_digest([*ledger.digest(), 7, 7]) == (ledger, len(ledger.digest()))


@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [5],
        [5, 1],
        [5, -1],
        [5, 1, 0, 6, 1],
        [5, 2, 0, 3, 1, 2, 4, 1],
        [5, 1, 3, 3, 1],
        [5, 1 << 40],
        [5, 1, -1, 2, 1],
    ],
)
def test_a_damaged_digest_is_refused(numbers: list[int]) -> None:
    with pytest.raises(LedgerError):
        from_digest(numbers)


@given(st.lists(st.tuples(st.sets(st.integers(0, 3)), st.integers(1, 3)), max_size=8))
def test_merge_finds_what_is_reduced_anywhere_and_who_holds_it(history: list[tuple[set[int], int]]) -> None:
    """Ledgers as runs make them: each piece is finished in one epoch, at any set of members."""
    width = 3
    ledgers = [Ledger(NUMEL) for _ in range(4)]
    for at, (holders, epoch) in enumerate(history):
        for rank in holders:
            ledgers[rank].mark(Span(at * width, (at + 1) * width), epoch)
    held = [None] * NUMEL
    for fragment in merge(ledgers):
        for element in range(fragment.start, fragment.stop):
            held[element] = (fragment.epoch, fragment.holders)
    for element in range(NUMEL):
        states = {rank: elements(ledger)[element] for rank, ledger in enumerate(ledgers)}
        holders = tuple(rank for rank, state in states.items() if state is not None)
        assert held[element] == ((states[holders[0]], holders) if holders else None)


@pytest.mark.parametrize(
    ("ledgers", "told"),
    [([Ledger(4, [Reduced(0, 3, 1)]), Ledger(4, [Reduced(2, 4, 2)])], "different epochs"),
     ([Ledger(4), Ledger(5)], "differ in size")],
)  # fmt: skip
def test_segments_finished_in_two_epochs_and_buckets_of_two_sizes_contradict(ledgers: list[Ledger], told: str) -> None:
    with pytest.raises(LedgerError, match=told):
        merge(ledgers)


def test_the_holders_share_the_supplying() -> None:
    fragments = merge([Ledger(40, [Reduced(0, 40, 1)]), Ledger(40, [Reduced(0, 40, 1)]), Ledger(40)])
    assert share_sources(fragments, 3) == [[Span(0, 40)], [], []]
    striped = [Reduced(at, at + 4, 1 + at // 4 % 2) for at in range(0, 40, 4)]
    fragments = merge([Ledger(40, striped), Ledger(40, striped), Ledger(40)])
    assert [sum(map(len, chunk)) for chunk in share_sources(fragments, 3)] == [20, 20, 0]


COLUMN = (0, 1)


class Full(Memory):
    """A device with room for ``left`` bytes of copies, which says so only by refusing."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.to_host: list[torch.Tensor] = []

    def on_device(self, values: torch.Tensor) -> torch.Tensor:
        if values.nbytes > self.left:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
        self.left -= values.nbytes
        return super().on_device(values)

    def on_host(self, values: torch.Tensor) -> torch.Tensor:
        self.to_host.append(super().on_host(values))
        return self.to_host[-1]


@pytest.mark.parametrize("left", [0, 40, 1000])
def test_what_the_device_has_no_room_for_is_kept_on_the_host_and_comes_back(left: int) -> None:
    flats = [torch.arange(10.0), torch.arange(100.0, 110.0), torch.arange(200.0, 210.0)]
    memory = Full(left)
    gradients = Gradients([(COLUMN, flat) for flat in flats], memory=memory)
    finished = ((0, 10), (2, 8), (0, 10))
    for (_, bucket), (start, stop) in zip(gradients._parts, finished, strict=True):
        bucket.ledger.mark(range(start, stop), 1)
    expected = [flat.clone() for flat in flats]
    kept = gradients.save_sums()
    assert len(memory.to_host) == {0: 3, 40: 2, 1000: 0}[left]
    assert sum(aside.nbytes for aside in kept) == 4 * 26
    for flat in flats:
        flat.add_(1.0)  # the lost microbatches
    for aside in kept:
        aside.restore()
    for flat, before, (start, stop) in zip(flats, expected, finished, strict=True):
        assert torch.equal(flat[start:stop], before[start:stop])
    assert flats[1][:2].tolist() == [101.0, 102.0], "what was not finished has the lost microbatches"


@pytest.mark.parametrize(("free", "beside", "room"), [(59, 0, False), (60, 0, True), (60, 1, False)])
def test_a_copy_stays_on_a_gpu_only_beside_the_most_that_was_ever_allocated_and_other_copies(
    monkeypatch: pytest.MonkeyPatch, free: int, beside: int, room: bool
) -> None:
    """The re-run's passes need that once more; the allocator would give it away now."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 200))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 120)
    values: Any = SimpleNamespace(device=torch.device("cuda", 0), nbytes=40)
    assert Memory().has_room(values, beside) is room


def test_memory_that_cannot_be_pinned_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def no_pins(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", no_pins)
    assert Memory().on_host(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
