"""How a backend's collectives of equal parts see a bucket of which each rank owns some spans: pure functions.

    the bucket      | chunk of rank 0 | chunk of rank 1 | ... |        spans anywhere, chunks of any length

    scratch         | row 0      | row 1      | ... |                  rows of one length; the end of a shorter chunk's
                                                                       row is never read

A row is at most an even part of the bucket long: longer chunks go in several rounds, so scratch never takes more than
the bucket (and what rounding up adds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from recover_megatron.collectives.ledger import Ledger, Span
from recover_megatron.collectives.ring.schedule import Chunks

ALIGNED_BYTES = 128
"""Cuts between rows are at multiples of it where the chunks allow it: else NCCL moves bytes one by one."""


@dataclass(frozen=True, slots=True)
class Copy:
    """``length`` elements: from ``bucket`` on in the bucket, from ``scratch`` on in the rows."""

    bucket: int
    scratch: int
    length: int


@dataclass(frozen=True, slots=True)
class Round:
    """What each rank owns, with a row of ``width`` elements for each; ``copies`` are of all rows."""

    chunks: Chunks
    width: int

    @property
    def in_place(self) -> Span | None:
        """The span of the bucket that has the rows one after the other as they must be, if there is one."""
        first = next((chunk[0].start for chunk in self.chunks if chunk), 0)
        for rank, chunk in enumerate(self.chunks):
            if len(chunk) != 1 or chunk[0] != Span(first + rank * self.width, first + (rank + 1) * self.width):
                return None
        return Span(first, first + len(self.chunks) * self.width)

    def copies(self, rank: int, row: int) -> Iterator[Copy]:
        """Those of the chunk of ``rank``, which lies in row number ``row``."""
        at = row * self.width
        for span in self.chunks[rank]:
            yield Copy(span.start, at, len(span))
            at += len(span)


def rounds(chunks: Chunks, longest: int) -> list[Round]:
    """Cut ``chunks`` into rounds with rows of at most ``longest`` elements; none where all chunks are empty."""
    width = max(sum(map(len, chunk)) for chunk in chunks)
    if width <= longest:
        return [Round(chunks, width)] if width else []
    return [
        Round([_part(chunk, at, at + longest) for chunk in chunks], min(longest, width - at))
        for at in range(0, width, longest)
    ]


def _part(chunk: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Elements ``start`` to ``stop`` of a chunk, counted in the chunk."""
    found, at = [], 0
    for span in chunk:
        a, b = max(start - at, 0), min(stop - at, len(span))
        if a < b:
            found.append(Span(span.start + a, span.start + b))
        at += len(span)
    return found


def joined(copies: Iterator[Copy]) -> list[Copy]:
    """The same copies, those that continue each other on both sides made one."""
    result: list[Copy] = []
    for copy in copies:
        last = result[-1] if result else None
        if last and (last.bucket + last.length, last.scratch + last.length) == (copy.bucket, copy.scratch):
            result[-1] = Copy(last.bucket, last.scratch, last.length + copy.length)
        elif copy.length:
            result.append(copy)
    return result


def missing(copies: Iterator[Copy], ledger: Ledger) -> Iterator[Copy]:
    """Those whose elements are not REDUCED yet."""
    if not ledger.reduced:
        return copies
    return (copy for copy in copies if not ledger.covers(Span(copy.bucket, copy.bucket + copy.length)))


def marks(copies: Iterator[Copy], epoch: Callable[[int], int] | int) -> list[tuple[Span, int]]:
    """What to mark, and with which epoch, when ``copies`` were made."""
    if isinstance(epoch, int):
        return [(Span(copy.bucket, copy.bucket + copy.length), epoch) for copy in joined(copies)]
    return [(Span(copy.bucket, copy.bucket + copy.length), epoch(copy.bucket)) for copy in copies]
