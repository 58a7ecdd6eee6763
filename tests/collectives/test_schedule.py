"""The schedule, run on a model of the ring: every sum is whole, and no member ever waits in a circle."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.collectives.ledger import Span
from recover_megatron.collectives.ring_group import Tuning
from recover_megatron.collectives.schedule import Action, Program, even_chunks, plan, segment_length, segments, within


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    cuts = sorted(draw(st.sets(st.integers(0, 200), max_size=8)))
    return [Span(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]


def members_of(spans: list[Span]) -> list[int]:
    return [element for span in spans for element in range(span.start, span.stop)]


@given(spans(), st.integers(1, 7))
def test_even_chunks_share_every_element_out_once(spans: list[Span], size: int) -> None:
    chunks = even_chunks(spans, size)
    assert [element for chunk in chunks for element in members_of(chunk)] == members_of(spans)
    lengths = [len(members_of(chunk)) for chunk in chunks]
    assert max(lengths) - min(lengths) <= 1


@given(spans(), st.integers(1, 50))
def test_segments_cut_a_chunk_without_loss(spans: list[Span], length: int) -> None:
    cut = segments(spans, length)
    assert members_of(cut) == members_of(spans)
    assert all(0 < len(segment) <= length for segment in cut)


@given(spans(), st.integers(1, 5))
def test_within_keeps_to_the_shards(spans: list[Span], size: int) -> None:
    shards = [Span(rank * 200 // size, (rank + 1) * 200 // size) for rank in range(size)]
    chunks = within(spans, shards)
    assert [element for chunk in chunks for element in members_of(chunk)] == members_of(spans)
    for shard, chunk in zip(shards, chunks, strict=True):
        assert all(shard.start <= span.start and span.stop <= shard.stop for span in chunk)


class Member:
    """A rank of the model: what is in scratch is the list of the ranks that were added, in order."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank = rank
        self.program = program
        self.posted = self.handled = 0
        self.partials: dict[int, list[int]] = {}
        self.bucket: dict[Span, list[int]] = {}
        self.inbox: deque[tuple[Span, list[int]]] = deque()
        self.slots = 0
        self.most_slots = 0


def run_model(
    programs: list[Program], own: list[list[Span]], reduce: bool, slots: int, turn: st.DataObject
) -> list[Member]:
    """Advance one member at a time, in any order; a message occupies one of the receiver's slots until it is dealt
    with, a partial sum until it is sent on.  AssertionError when nobody can move before all are done."""
    members = [Member(rank, program) for rank, program in enumerate(programs)]
    for member in members:
        if not reduce:
            member.bucket.update({span: [member.rank] for span in own[member.rank]})

    def can_send(member: Member) -> bool:
        successor = members[(member.rank + 1) % len(members)]
        sends = member.program.sends
        return (
            member.posted < len(sends)
            and sends[member.posted].after <= member.handled
            and successor.slots < slots
        )  # fmt: skip

    def can_take(member: Member) -> bool:
        return bool(member.inbox)

    while any(m.posted < len(m.program.sends) or m.handled < len(m.program.receives) for m in members):
        moves = [(can_send, m) for m in members if can_send(m)] + [(can_take, m) for m in members if can_take(m)]
        assert moves, "every member waits for another"
        kind, member = turn.draw(st.sampled_from(moves)) if len(moves) > 1 else moves[0]
        if kind is can_send:
            send = member.program.sends[member.posted]
            if not send.partial:
                content = member.bucket[send.span]
            elif send.hop:
                content = member.partials.pop(send.after - 1)
                member.slots -= 1
            else:
                content = [member.rank]
            successor = members[(member.rank + 1) % len(members)]
            successor.inbox.append((send.span, content))
            successor.slots += 1
            successor.most_slots = max(successor.most_slots, successor.slots)
            member.posted += 1
        else:
            span, content = member.inbox.popleft()
            receive = member.program.receives[member.handled]
            assert receive.span == span, "a message met another receive"
            if receive.action is Action.ADD:
                member.partials[member.handled] = [*content, member.rank]
            else:
                finished = content if receive.action is Action.STORE else [*content, member.rank]
                assert span not in member.bucket, "a segment was finished twice"
                member.bucket[span] = finished
                member.slots -= 1
            member.handled += 1
    return members


@given(
    spans=spans(),
    size=st.integers(2, 6),
    length=st.integers(5, 60),
    depth=st.integers(1, 6),
    reduce=st.booleans(),
    hops=st.integers(0, 5),
    data=st.data(),
)
def test_every_segment_is_summed_in_the_documented_order_and_nobody_deadlocks(
    spans: list[Span], size: int, length: int, depth: int, reduce: bool, hops: int, data: st.DataObject
) -> None:
    hops = min(hops, size - 1)
    chunks = even_chunks(spans, size)
    own = [segments(chunk, length) for chunk in chunks]
    programs = [
        plan(rank, chunks, length, reduce=reduce, gather_hops=hops, depth=depth) for rank in range(size)
    ]  # fmt: skip
    slots = Tuning(depth=depth).slots - 1  # one less than the transport has: nothing may depend on looking ahead
    members = run_model(programs, own, reduce, slots, data)
    for owner, cut in enumerate(own):
        order = [(owner + step) % size for step in range(1, size + 1)] if reduce else [owner]
        for span in cut:
            for distance in range(hops + 1):
                assert members[(owner + distance) % size].bucket[span] == order
    total = sum(len(member.bucket) for member in members)
    assert total == sum(map(len, own)) * (hops + 1), "a segment went further than asked"


@given(st.integers(0, 100000), st.integers(2, 64), st.integers(1, 4))
def test_what_a_member_holds_is_at_most_two_chunks_and_two_segments(numel: int, size: int, depth: int) -> None:
    chunks = even_chunks([Span(0, numel)] if numel else [], size)
    length = segment_length(chunks, 4096, 256, depth)
    longest = max(len(members_of(chunk)) for chunk in chunks)
    for rank in (0, size - 1):
        program = plan(rank, chunks, length, reduce=True, gather_hops=size - 1, depth=depth)
        segment = max((len(receive.span) for receive in program.receives), default=0)
        assert program.partials + 2 <= Tuning(depth=depth).slots
        assert Tuning(depth=depth).slots * segment <= 2 * longest + 2 * segment
