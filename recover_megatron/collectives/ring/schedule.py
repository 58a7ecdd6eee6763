"""Schedule of a ring's messages: the order in which a rank sends and receives segments.  All functions are pure.

A bucket is cut into *chunks*; each rank owns one chunk.  A chunk is cut into *segments*.  A segment travels round the
ring of n members, always from rank r to rank r + 1:

    reduce-scatter, hops 0 .. n-2:   rank c + 1 sends its own gradient of a segment of chunk c; each receiver adds its
                                     own gradient and sends the sum; after hop n-2 the sum is complete at rank c
    all-gather, hops n-1 .. 2n-3:    the owner c sends the finished segment to c + 1, which sends it to c + 2, ...

The order of summation, and so every bit of the result, depends only on the members and the spans:

    sum of chunk c = (((g[c+1] + g[c+2]) + g[c+3]) + ... ) + g[c]          indices modulo n

A segment makes one hop after the other, so several segments must be in flight at a time to saturate the network.  The
segments with number k of all chunks form *block* k.  Block k starts ``stride`` hops after block k - 1, and messages
are sent in the order of their *wave*, k * stride + hop:

    wave     0      1      2      3      4      5      6
    block 0  hop 0  hop 1  hop 2  hop 3  hop 4  hop 5            n = 4, stride 2: three blocks in flight
    block 1                hop 0  hop 1  hop 2  hop 3  hop 4
    block 2                              hop 0  hop 1  hop 2

Every rank sends and receives in this order, so a message needs no address.  A send at hop h + 1 depends on the receive
of the same segment at hop h.  Between the two, the rank handles messages of the other blocks.

In the reduce-scatter half, a member keeps a partial sum from its receive until its send.  A message is sent only if the
receiver has room for it.  ``stride`` is so large that a member keeps at most ``most_partials`` partial sums at a time.
If each member has room for one segment more, members cannot block each other (tests/collectives/test_schedule.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from recover_megatron.collectives.chunks import Chunks, even_part
from recover_megatron.collectives.ledger import Span


class Action(Enum):
    """Action that a rank takes on a segment when it has received the segment."""

    ADD = "add"  # add the own gradient to the partial sum in scratch, and send the sum to the successor
    FINISH = "finish"  # this rank owns the segment: add the own gradient, and write the complete sum to the bucket
    STORE = "store"  # the segment is a finished sum: copy it to the bucket


@dataclass(frozen=True, slots=True)
class Send:
    """Message to the successor; ``after``: number of the program's receives that must be processed before the send."""

    span: Span
    hop: int
    after: int
    partial: bool
    """True in the reduce-scatter half: the message is the own gradient (hop 0), or the sum that receive number
    ``after - 1`` has produced."""


@dataclass(frozen=True, slots=True)
class Receive:
    span: Span
    hop: int
    action: Action


@dataclass(frozen=True, slots=True)
class Program:
    """All messages of one rank in one collective: sends and receives, each in chronological order."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]
    partials: int
    """Maximum number of partial sums that the rank keeps at a time, if no neighbour lags."""


def segments(chunk: Sequence[Span], length: int) -> list[Span]:
    """Cut each span of ``chunk`` into segments of at most ``length`` elements.

    The segments of a span are equally long, except its last segment.
    """
    fragments = []
    for span in chunk:
        part = even_part(len(span), -(-len(span) // length)) if len(span) else 1
        fragments += [Span(at, min(at + part, span.stop)) for at in range(span.start, span.stop, part)]
    return fragments


def segment_length(chunks: Chunks, most: int, least: int, depth: int) -> int:
    """Return the maximum number of elements of a segment, such that the longest chunk has ``depth`` segments.

    The result is at least ``least``, at most ``most``, and never larger than the longest chunk, even if this is below
    ``least``.
    """
    longest = max((sum(map(len, chunk)) for chunk in chunks), default=0)
    return max(1, min(most, max(least, -(-longest // depth)), longest))


def most_partials(depth: int) -> int:
    """Return the maximum number of partial sums that a member keeps at a time in any program, if no neighbour lags.

    ``depth``: number of blocks in flight at a time.
    """
    return -(-depth // 2) + 1


def plan(rank: int, chunks: Chunks, length: int, *, reduce: bool, gather_hops: int, depth: int) -> Program:
    """Return the program of ``rank`` in a ring of ``len(chunks)`` members.

    ``length``: maximum number of elements of a segment.  ``reduce``: True: begin with the reduce-scatter half; False:
    the chunks are finished already.  ``gather_hops``: number of hops of a finished segment: 0 for a reduce-scatter, 1
    with one shadow, n - 1 for an all-reduce.  ``depth``: number of blocks in flight at a time.
    """
    size = len(chunks)
    parts = [segments(chunk, length) for chunk in chunks]
    blocks = max(map(len, parts), default=0)
    reduce_hops = size - 1 if reduce else 0
    hops = reduce_hops + gather_hops
    passed_on = max(0, reduce_hops - 1)
    stride = max(1, -(-hops // max(1, min(depth, blocks))), -(-passed_on // most_partials(depth)))
    order = sorted((block * stride + hop, block, hop) for block in range(blocks) for hop in range(hops))

    sends: list[Send] = []
    receives: list[Receive] = []
    receipt: dict[tuple[int, int], int] = {}
    for _, block, hop in order:
        # Rank ``rank - behind`` owns the sent chunk.  In the reduce half a segment starts at the owner's successor, in
        # the gather half at the owner.
        behind = hop + 1 if hop < reduce_hops else hop - reduce_hops
        outgoing, incoming = parts[(rank - behind) % size], parts[(rank - 1 - behind) % size]
        if block < len(outgoing):
            first = hop == 0
            after = 0 if first else receipt[block, hop - 1] + 1
            sends.append(Send(outgoing[block], hop, after, partial=hop < reduce_hops))
        if block < len(incoming):
            receipt[block, hop] = len(receives)
            receives.append(Receive(incoming[block], hop, _action(hop, reduce_hops)))
    return Program(tuple(sends), tuple(receives), min(-(-passed_on // stride), blocks))


def _action(hop: int, reduce_hops: int) -> Action:
    if hop >= reduce_hops:
        return Action.STORE
    return Action.FINISH if hop == reduce_hops - 1 else Action.ADD
