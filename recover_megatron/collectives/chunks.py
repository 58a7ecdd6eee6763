"""Division of a bucket into chunks: in a collective, each member of a group owns one chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recover_megatron.collectives.ledger import Span

Chunks = Sequence[Sequence[Span]]
"""Division of a bucket: ``chunks[rank]`` is the list of the spans that ``rank`` owns."""


def frozen(chunks: Chunks) -> tuple[tuple[Span, ...], ...]:
    return tuple(map(tuple, chunks))


def even_part(total: int, size: int, cut: int = 1) -> int:
    """Return the length of a part if ``total`` elements are cut evenly into ``size`` parts, at multiples of ``cut``."""
    return -(-total // (size * cut)) * cut


def even_chunks(spans: Sequence[Span], size: int, cut: int = 1) -> list[list[Span]]:
    """Divide the elements of ``spans``, in order, into ``size`` equal chunks; the last ones may be shorter or empty.

    Every chunk begins at a multiple of ``cut`` elements, counted from the first element of ``spans``.
    """
    part = even_part(sum(map(len, spans)), size, cut)
    chunks: list[list[Span]] = [[] for _ in range(size)]
    rank, room = 0, part
    for span in spans:
        start = span.start
        while start < span.stop:
            if not room:
                rank, room = rank + 1, part
            stop = min(span.stop, start + room)
            chunks[rank].append(Span(start, stop))
            room -= stop - start
            start = stop
    return chunks


def within(spans: Sequence[Span], shards: Chunks) -> list[list[Span]]:
    """Return for each rank the parts of ``spans`` that lie in the rank's shard.  All sequences are ascending."""
    return [list(_overlaps(spans, shard)) for shard in shards]


def _overlaps(spans: Sequence[Span], others: Sequence[Span]) -> Iterator[Span]:
    """Yield the intersections of two ascending sequences of disjoint spans."""
    one = other = 0
    while one < len(spans) and other < len(others):
        a, b = spans[one], others[other]
        start, stop = max(a.start, b.start), min(a.stop, b.stop)
        if start < stop:
            yield Span(start, stop)
        if a.stop <= b.stop:
            one += 1
        else:
            other += 1
