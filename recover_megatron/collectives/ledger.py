"""The ledger of a bucket: which elements are LOCAL, which are REDUCED, and in which epoch.

        LOCAL  --mark(span, epoch)-->  REDUCED(epoch)          never back, until clear() at the next iteration

LOCAL: the bucket holds this worker's own accumulated gradient.  REDUCED(e): it holds the finished sum over the members
of epoch e, bit for bit the same at every member that has it REDUCED.  Spans are element ranges, not segment numbers:
chunks and segments change with the number of members, what is finished does not.

Pure: no I/O, no torch.  The spans are replaced as a whole, so a reader in another thread sees a valid ledger.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from recover_megatron.collectives.errors import LedgerError

MAX_SPANS = 1 << 20
"""Limit of what is accepted in a digest from another member."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Elements ``start`` (included) to ``stop`` (excluded) of a flat bucket."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, order=True)
class Reduced(Span):
    """A finished span: the sum over the members of ``epoch``."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Held(Span):
    """A span that is REDUCED at ``holders`` (ranks, ascending), and LOCAL at every other rank, as a whole."""

    epoch: int
    holders: tuple[int, ...]


_start = attrgetter("start")


class Ledger:
    """State of every element of one bucket of ``numel`` elements; all LOCAL at first."""

    def __init__(self, numel: int, reduced: Iterable[Reduced] = ()) -> None:
        self.numel = numel
        self._reduced: tuple[Reduced, ...] = ()
        for span in reduced:
            self.mark(span, span.epoch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and (self.numel, self._reduced) == (other.numel, other._reduced)

    def __hash__(self) -> int:
        return hash((self.numel, self._reduced))

    def __repr__(self) -> str:
        return f"Ledger({self.numel}, {self._reduced})"

    @property
    def reduced(self) -> tuple[Reduced, ...]:
        """The REDUCED spans, ascending, disjoint; neighbours of the same epoch are one span."""
        return self._reduced

    @property
    def local(self) -> tuple[Span, ...]:
        """The LOCAL spans: the complement of ``reduced``."""
        gaps, at = [], 0
        for span in self._reduced:
            if span.start > at:
                gaps.append(Span(at, span.start))
            at = span.stop
        if at < self.numel:
            gaps.append(Span(at, self.numel))
        return tuple(gaps)

    @property
    def complete(self) -> bool:
        """Whether every element is REDUCED."""
        return not self.local

    def covers(self, span: Span) -> bool:
        """Whether every element of ``span`` is REDUCED."""
        at = span.start
        for reduced in self._reduced:
            if reduced.start <= at < reduced.stop:
                at = reduced.stop
        return at >= span.stop

    def mark(self, span: Span, epoch: int) -> None:
        """LOCAL -> REDUCED(epoch); an element that is already REDUCED is a ``LedgerError``."""
        if not 0 <= span.start <= span.stop <= self.numel:
            raise LedgerError(f"span {span.start}:{span.stop} is not within a bucket of {self.numel} elements")
        if span.start == span.stop:
            return
        known = self._reduced
        at = bisect_left(known, span.start, key=_start)
        before = known[at - 1] if at else None
        after = known[at] if at < len(known) else None
        if (before and before.stop > span.start) or (after and after.start < span.stop):
            raise LedgerError(f"span {span.start}:{span.stop} is REDUCED a second time")
        start, stop, low, high = span.start, span.stop, at, at
        if before and before.stop == start and before.epoch == epoch:
            start, low = before.start, at - 1
        if after and after.start == stop and after.epoch == epoch:
            stop, high = after.stop, at + 1
        self._reduced = (*known[:low], Reduced(start, stop, epoch), *known[high:])

    def clear(self) -> None:
        """All LOCAL again: the next iteration."""
        self._reduced = ()

    def digest(self) -> list[int]:
        """``[numel, number of spans, start, stop, epoch, start, ...]``, for the other members."""
        return [self.numel, len(self._reduced), *(x for s in self._reduced for x in (s.start, s.stop, s.epoch))]


def from_digest(numbers: Sequence[int]) -> tuple[Ledger, int]:
    """The ledger that ``numbers`` begins with, and how many numbers it took; ``LedgerError`` if they make none."""
    if len(numbers) < 2 or not 0 <= numbers[1] <= MAX_SPANS or len(numbers) < 2 + 3 * numbers[1]:
        raise LedgerError("malformed ledger digest")
    used = 2 + 3 * numbers[1]
    triples = [numbers[at : at + 3] for at in range(2, used, 3)]
    if any(start >= stop for start, stop, _ in triples):
        raise LedgerError("malformed ledger digest: an empty span")
    return Ledger(numbers[0], (Reduced(*triple) for triple in triples)), used


def merge(ledgers: Sequence[Ledger]) -> list[Held]:
    """What is REDUCED anywhere, cut so that each rank has each piece entirely REDUCED or entirely LOCAL.

    ``LedgerError`` if two ranks hold the same element from different epochs, or buckets of different sizes.
    """
    if len({ledger.numel for ledger in ledgers}) > 1:
        raise LedgerError(f"the members' buckets differ in size: {[ledger.numel for ledger in ledgers]} elements")
    starts: dict[int, list[tuple[int, int]]] = {}
    stops: dict[int, list[int]] = {}
    for rank, ledger in enumerate(ledgers):
        for span in ledger.reduced:
            starts.setdefault(span.start, []).append((rank, span.epoch))
            stops.setdefault(span.stop, []).append(rank)
    cuts = sorted(starts.keys() | stops.keys())
    active: dict[int, int] = {}
    fragments: list[Held] = []
    for start, stop in pairwise(cuts):
        for rank in stops.get(start, ()):
            del active[rank]
        active.update(starts.get(start, ()))
        epochs = set(active.values())
        if len(epochs) > 1:
            raise LedgerError(f"span {start}:{stop} was finished in different epochs: {dict(sorted(active.items()))}")
        if active:
            fragments.append(Held(start, stop, epochs.pop(), tuple(sorted(active))))
    return fragments
