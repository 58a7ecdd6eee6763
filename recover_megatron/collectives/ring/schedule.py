"""Schedule of the segments of a ring: pure functions of (rank, size, spans).

A bucket is cut into one *chunk* per rank, its owner, and each chunk into *segments*.  A segment travels round the ring,
always from rank r to rank r + 1:

    reduce-scatter, hops 0 .. n-2:   the segment of chunk c starts at rank c + 1 as that rank's own gradient; each
                                     receiver adds its own gradient; after hop n-2 the sum is complete at c
    all-gather, hops n-1 .. 2n-3:    the finished segment goes from its owner c to c + 1, c + 2, ...

The members and the spans determine the order of summation, hence the result to the last bit:

    sum of chunk c = (((g[c+1] + g[c+2]) + g[c+3]) + ... ) + g[c]          indices modulo n

Hops of one segment wait for each other, so several segments are in flight at a time.  Segment k of every chunk forms
*block* k; block k starts ``stride`` hops after block k - 1, and messages are ordered by the wave k * stride + hop:

    wave     0      1      2      3      4      5      6
    block 0  hop 0  hop 1  hop 2  hop 3  hop 4  hop 5            n = 4, stride 2: three blocks in flight
    block 1                hop 0  hop 1  hop 2  hop 3  hop 4
    block 2                              hop 0  hop 1  hop 2

Every rank sends in this order and receives in this order, so a message needs no address.  A message of hop h + 1
depends on the receipt of the same segment at hop h, which is at least ``blocks in flight`` messages earlier.

A member holds the partial sums of the blocks that are between two hops of the reduce-scatter half, and nothing is sent
to a member without room for it.  So blocks start late enough that a member holds at most ``most_partials`` at a time:
members with room for one more segment cannot block each other (tests/collectives/test_schedule.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from recover_megatron.collectives.chunks import Chunks, even_part
from recover_megatron.collectives.ledger import Span


class Action(Enum):
    """Action of a rank on a received segment."""

    ADD = "add"  # add the own gradient, keep the partial sum in scratch, pass it on
    FINISH = "finish"  # add the own gradient: this rank owns the complete sum; write it to the bucket
    STORE = "store"  # the segment is a finished sum: copy it to the bucket


@dataclass(frozen=True, slots=True)
class Send:
    """Message to the successor.  ``after``: number of receipts of the same program that must be handled before it."""

    span: Span
    hop: int
    after: int
    partial: bool
    """True for a partial sum: it is in the scratch of receipt ``after - 1``; at hop 0 it is the own gradient."""


@dataclass(frozen=True, slots=True)
class Receive:
    span: Span
    hop: int
    action: Action


@dataclass(frozen=True, slots=True)
class Program:
    """All messages of one rank in one collective, each tuple in wire order."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]
    partials: int
    """Maximum of the partial sums held at a time when no neighbour lags."""


def segments(chunk: Sequence[Span], length: int) -> list[Span]:
    """Cut a chunk into segments of at most ``length`` elements, of equal length except the last one of a span."""
    fragments = []
    for span in chunk:
        part = even_part(len(span), -(-len(span) // length)) if len(span) else 1
        fragments += [Span(at, min(at + part, span.stop)) for at in range(span.start, span.stop, part)]
    return fragments


def segment_length(chunks: Chunks, most: int, least: int, depth: int) -> int:
    """Return the elements of a segment: a chunk is cut into at least ``depth`` segments, each of at most ``most``
    elements; but segments are not made shorter than ``least`` only for the pipeline."""
    longest = max((sum(map(len, chunk)) for chunk in chunks), default=0)
    return max(1, min(most, max(least, -(-longest // depth)), longest))


def most_partials(depth: int) -> int:
    """Return the maximum of a member's partial sums at a time when no neighbour lags, for any program."""
    return -(-depth // 2) + 1


def plan(rank: int, chunks: Chunks, length: int, *, reduce: bool, gather_hops: int, depth: int) -> Program:
    """Return the program of ``rank`` in a ring of ``len(chunks)`` members.

    ``reduce``: begin with the reduce-scatter half.  ``gather_hops``: number of hops that finished segments travel,
    0 (reduce-scatter), 1 (one shadow), .. n - 1 (all-reduce).  ``depth``: blocks in flight at a time.
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
        # Chunk that a rank sends at a hop: the reduce half starts behind the owner, the gather half at the owner.
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
