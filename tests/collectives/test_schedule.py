"""The schedule, run on a model of the ring: every sum is whole, and no member ever waits in a circle.

The model is a state machine: who may send and who may take, with the receivers' slots as the only limit.  One member's
progress through its program is a row of two kinds of steps, and what each needs:

    SEND   the transport moves the next message that is ready: a free slot at the successor
    TAKE   the first message asked for has come and is dealt with; the ring looks at what was sent, and asks for more

A message occupies a slot of its receiver from SEND on: until TAKE, or, if it is a partial sum to pass on, until that
was sent *and* the ring has looked.  When a member that waits looks is the ``Rule``.  Steps of different members, and
SEND and TAKE of one, come in any order: the kernel decides.  (That a freed slot is heard of late needs no step of its
own: the predecessor may always send later.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.collectives.chunks import even_chunks, even_part, within
from recover_megatron.collectives.ledger import Span
from recover_megatron.collectives.ring.executor import LOOKAHEAD, Tuning
from recover_megatron.collectives.ring.schedule import Action, Program, plan, segment_length, segments
from tests.collectives.expected import elements


class Rule(Enum):
    """When a member that waits for a message looks at what it has sent."""

    WHILE_WAITING = "whenever the transport tells that something was sent"
    AFTER_THE_WAIT = "not before the message has come"


class Step(Enum):
    SEND = "send"
    TAKE = "take"


class Place(NamedTuple):
    """How far a member is: messages dealt with, asked for, sent, and seen to be sent."""

    taken: int = 0
    asked: int = 0
    sent: int = 0
    seen: int = 0


Places = tuple[Place, ...]
Move = tuple[int, Step]


@dataclass(frozen=True)
class _Part:
    """What a program says of one member, by the number of messages."""

    ready: tuple[int, ...]
    """By messages taken: how many sends are ready."""
    kept: tuple[int, ...]
    """By messages taken: how many of them were partial sums to pass on."""
    passed: tuple[int, ...]
    """By messages seen to be sent: how many of them were such partial sums."""
    partials: int

    @classmethod
    def of(cls, program: Program) -> _Part:
        ready, count = [], 0
        for taken in range(len(program.receives) + 1):
            while count < len(program.sends) and program.sends[count].after <= taken:
                count += 1
            ready.append(count)
        kept = accumulate((r.action is Action.ADD for r in program.receives), initial=0)
        passed = accumulate((s.partial and s.hop > 0 for s in program.sends), initial=0)
        return cls(tuple(ready), tuple(kept), tuple(passed), program.partials)

    @property
    def receives(self) -> int:
        return len(self.kept) - 1

    @property
    def sends(self) -> int:
        return len(self.passed) - 1


class RingModel:
    """A ring of ``programs`` by rank, each member with ``slots`` for what its predecessor sends."""

    def __init__(self, programs: Sequence[Program], slots: int, rule: Rule = Rule.WHILE_WAITING) -> None:
        self._parts = [_Part.of(program) for program in programs]
        self._slots = slots
        self._rule = rule

    @property
    def start(self) -> Places:
        return tuple(self._ask(rank, Place()) for rank in range(len(self._parts)))

    def over(self, places: Places) -> bool:
        """Whether everybody has taken and sent everything."""
        return all(
            (place.taken, place.sent) == (part.receives, part.sends)
            for place, part in zip(places, self._parts, strict=True)
        )

    def moves(self, places: Places) -> Iterator[Move]:
        """Every step that somebody can take now."""
        for rank, (place, part) in enumerate(zip(places, self._parts, strict=True)):
            successor = (rank + 1) % len(places)
            if place.sent < part.ready[place.taken] and self.used(places, successor) < self._slots:
                yield rank, Step.SEND
            if place.taken < min(place.asked, places[rank - 1].sent):
                yield rank, Step.TAKE

    def after(self, places: Places, move: Move) -> Places:
        """What a step that can be taken makes of ``places``."""
        rank, step = move
        place = places[rank]
        if step is Step.TAKE:
            place = self._ask(rank, place._replace(taken=place.taken + 1, seen=place.sent))
        elif place.asked == place.taken:  # asked for nothing: it waits until this message has gone
            place = self._ask(rank, place._replace(sent=place.sent + 1, seen=place.sent + 1))
        else:
            seen = place.sent + 1 if self._rule is Rule.WHILE_WAITING else place.seen
            place = place._replace(sent=place.sent + 1, seen=seen)
        return (*places[:rank], place, *places[rank + 1 :])

    def used(self, places: Places, rank: int) -> int:
        """Slots of ``rank`` that are occupied."""
        return places[rank - 1].sent - places[rank].taken + self._held(rank, places[rank])

    def _held(self, rank: int, place: Place) -> int:
        part = self._parts[rank]
        return part.kept[place.taken] - part.passed[place.seen]

    def _ask(self, rank: int, place: Place) -> Place:
        part = self._parts[rank]
        while place.asked < part.receives and place.asked - place.taken <= LOOKAHEAD:
            if place.asked - place.taken + self._held(rank, place) > part.partials + LOOKAHEAD:
                break
            place = place._replace(asked=place.asked + 1)
        return place


def deadlock(model: RingModel) -> Places | None:
    """A state that can be reached, is not the end, and from which nobody can move; None if there is none at all."""
    start = model.start
    reached, to_do = {start}, [start]
    while to_do:
        places = to_do.pop()
        stuck = not model.over(places)
        for move in model.moves(places):
            stuck = False
            if (after := model.after(places, move)) not in reached:
                reached.add(after)
                to_do.append(after)
        if stuck:
            return places
    return None


def in_a_row(programs: Sequence[Program]) -> Program:
    """The programs of one member for several collectives, handed in together.

    The first hop of a later one is ready at once; what it passes on waits for its own receipts, which come after all
    receipts of those before it.
    """
    sends, receives = [], []
    for program in programs:
        sends += [replace(s, after=s.after + len(receives)) if s.after else s for s in program.sends]
        receives += program.receives
    return Program(tuple(sends), tuple(receives), max(program.partials for program in programs))


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    cuts = sorted(draw(st.sets(st.integers(0, 200), max_size=8)))
    return [Span(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]


@given(spans(), st.integers(1, 50))
def test_segments_hold_every_element_once_and_none_is_too_long(chunk: list[Span], length: int) -> None:
    cuts = segments(chunk, length)
    assert [element for part in cuts for element in elements([part])] == elements(chunk)
    assert all(0 < len(part) <= length for part in cuts)


@given(spans(), st.integers(1, 7), st.sampled_from([1, 1, 4, 32]))
def test_even_chunks_share_every_element_out_once(spans: list[Span], size: int, cut: int) -> None:
    chunks = even_chunks(spans, size, cut)
    assert [element for chunk in chunks for element in elements(chunk)] == elements(spans)
    lengths = [len(elements(chunk)) for chunk in chunks]
    full = even_part(sum(lengths), size, cut)
    assert full % cut == 0
    assert full < sum(lengths) / size + cut
    whole = sum(lengths) // full if full else 0
    assert lengths[:whole] == [full] * whole
    assert sum(lengths[whole + 1 :]) == 0


@given(spans(), st.integers(1, 5))
def test_within_keeps_to_the_shards(spans: list[Span], size: int) -> None:
    cuts = [Span(at * 200 // (2 * size), (at + 1) * 200 // (2 * size)) for at in range(2 * size)]
    shards = [cuts[rank::size] for rank in range(size)]  # two parts each
    chunks = within(spans, shards)
    assert sorted(element for chunk in chunks for element in elements(chunk)) == elements(spans)
    for shard, chunk in zip(shards, chunks, strict=True):
        assert set(elements(chunk)) <= set(elements(shard))


def walk(model: RingModel, choose: Callable[[list[Move]], Move]) -> list[Move]:
    """Steps in the order chosen until nobody can move; AssertionError if that is not the end."""
    places, taken = model.start, []
    while moves := list(model.moves(places)):
        taken.append(choose(moves))
        places = model.after(places, taken[-1])
    assert model.over(places), f"every member waits for another: {places}"
    return taken


def carry(
    programs: list[Program], moves: list[Move], own: list[list[Span]], reduce: bool
) -> list[dict[Span, list[int]]]:
    """What the messages carry: by rank, for each finished segment the ranks that were added, in order."""
    buckets: list[dict[Span, list[int]]] = [
        {} if reduce else {span: [rank] for span in own[rank]} for rank in range(len(own))
    ]
    partials: list[dict[int, list[int]]] = [{} for _ in own]
    inboxes: list[deque[tuple[Span, list[int]]]] = [deque() for _ in own]
    sent, taken = [0] * len(own), [0] * len(own)
    for rank, step in moves:
        program, bucket = programs[rank], buckets[rank]
        if step is Step.SEND:
            send = program.sends[sent[rank]]
            sent[rank] += 1
            if not send.partial:
                content = bucket[send.span]
            else:
                content = partials[rank].pop(send.after - 1) if send.hop else [rank]
            inboxes[(rank + 1) % len(own)].append((send.span, content))
        else:
            span, content = inboxes[rank].popleft()
            receive = program.receives[taken[rank]]
            assert receive.span == span, "a message met another receive"
            if receive.action is Action.ADD:
                partials[rank][taken[rank]] = [*content, rank]
            else:
                assert span not in bucket, "a segment was finished twice"
                bucket[span] = content if receive.action is Action.STORE else [*content, rank]
            taken[rank] += 1
    return buckets


@given(
    spans=spans(),
    size=st.integers(2, 9),
    length=st.integers(5, 60),
    depth=st.integers(1, 6),
    reduce=st.booleans(),
    hops=st.integers(0, 8),
    random=st.randoms(use_true_random=False),
)
def test_every_segment_is_summed_in_the_documented_order_and_nobody_deadlocks(
    spans: list[Span], size: int, length: int, depth: int, reduce: bool, hops: int, random: Random
) -> None:
    hops = min(hops, size - 1)
    chunks = even_chunks(spans, size)
    own = [segments(chunk, length) for chunk in chunks]
    programs = [
        plan(rank, chunks, length, reduce=reduce, gather_hops=hops, depth=depth) for rank in range(size)
    ]  # fmt: skip
    slots = Tuning(depth=depth).slots
    assert all(program.partials + 1 <= slots for program in programs), "room for all partial sums and one arrival"
    moves = walk(RingModel(programs, slots), random.choice)
    buckets = carry(programs, moves, own, reduce)
    for owner, cut in enumerate(own):
        order = [(owner + step) % size for step in range(1, size + 1)] if reduce else [owner]
        for span in cut:
            for distance in range(hops + 1):
                assert buckets[(owner + distance) % size][span] == order
    total = sum(len(bucket) for bucket in buckets)
    assert total == sum(map(len, own)) * (hops + 1), "a segment went further than asked"


def programs_of(size: int, blocks: int, depth: int, hops: int, *, missing: int = 0, times: int = 1) -> list[Program]:
    """Reductions of ``blocks`` segments a member, the last of ``missing`` members left out, ``times`` in a row."""
    chunks = even_chunks([Span(0, size * blocks - missing)], size)
    return [
        in_a_row([plan(rank, chunks, 1, reduce=True, gather_hops=hops, depth=depth)] * times) for rank in range(size)
    ]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("size", "blocks"),
    [
        (2, 1),
        (2, 3),
        (3, 1),
        (3, 3),
        (4, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(4, 2), (5, 1)]),
    ],
)
def test_no_order_of_events_closes_a_circle_of_waiting(size: int, blocks: int, depth: int) -> None:
    for hops in {0, 1, size - 1}:
        for missing in (0, 1):
            programs = programs_of(size, blocks, depth, hops, missing=missing)
            assert deadlock(RingModel(programs, max(program.partials for program in programs) + 1)) is None


@pytest.mark.slow
def test_no_order_of_events_stops_the_ring_that_once_stopped() -> None:
    """All 230,000 states of it."""
    assert deadlock(RingModel(programs_of(5, 2, depth=2, hops=0), Tuning(depth=2).slots)) is None


@pytest.mark.parametrize(
    ("size", "blocks", "depth", "hops"),
    [(5, 2, 2, 0), (6, 2, 2, 1), (8, 3, 2, 0), (5, 4, 4, 0)],
    ids=["reduce-scatter", "with a shadow", "of eight", "deeper"],
)
def test_a_ring_that_looks_only_after_its_wait_would_stop_for_good(
    size: int, blocks: int, depth: int, hops: int
) -> None:
    """The model sees the deadlock that the ring once had: partial sums that were sent kept their slots.

    A member waits for a message; all its slots hold partial sums that it has passed on; its predecessor, who would send
    that message, waits for a slot; and the predecessor's own slots are full for the same reason.
    """
    programs = programs_of(size, blocks, depth, hops)
    slots = Tuning(depth=depth).slots
    model = RingModel(programs, slots, Rule.AFTER_THE_WAIT)
    stuck = deadlock(model)
    assert stuck is not None
    full = [rank for rank in range(size) if model.used(stuck, rank) == slots]
    assert any(stuck[rank].seen < stuck[rank].sent for rank in full)
    random = Random(1)
    for _ in range(20):
        walk(RingModel(programs, slots), random.choice)


@pytest.mark.parametrize("missing", [0, 3])
def test_collectives_handed_in_together_do_not_block_each_other(missing: int) -> None:
    random = Random(2)
    for size, depth in ((5, 2), (8, 2), (9, 4), (12, 4)):
        for hops in (0, 1, size - 1):
            programs = programs_of(size, 4, depth, hops, missing=missing, times=3)
            for _ in range(3):
                walk(RingModel(programs, Tuning(depth=depth).slots), random.choice)


@given(st.integers(0, 100000), st.integers(2, 64), st.integers(1, 4))
def test_what_a_member_holds_is_at_most_two_chunks_and_two_segments(numel: int, size: int, depth: int) -> None:
    chunks = even_chunks([Span(0, numel)] if numel else [], size)
    length = segment_length(chunks, 4096, 256, depth)
    longest = max(len(elements(chunk)) for chunk in chunks)
    for rank in (0, size - 1):
        program = plan(rank, chunks, length, reduce=True, gather_hops=size - 1, depth=depth)
        segment = max((len(receive.span) for receive in program.receives), default=0)
        assert program.partials + 2 <= Tuning(depth=depth).slots
        assert Tuning(depth=depth).slots * segment <= 2 * longest + 2 * segment
