"""When, whom and how: the random draws of a chaos run, which the seed alone decides."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Draw(NamedTuple):
    """One strike, before it is known who lives then."""

    after: float
    """Seconds since the strike before (since the start, for the first)."""
    lot: float
    """In [0, 1): which of those who live then."""
    kind: str

    def victim(self, candidates: Sequence[int]) -> int:
        """The one of ``candidates`` (not empty) that the lot falls on; their order does not matter."""
        return sorted(candidates)[int(self.lot * len(candidates))]


def draws(seed: int, mtbf: float, kinds: Sequence[str]) -> Iterator[Draw]:
    """The endless sequence for a seed; the times between strikes are exponentially distributed with mean ``mtbf``.

    Each draw takes the same random numbers whatever became of those before, so the n-th is always the same.
    """
    source = random.Random(seed)
    while True:
        after, lot, kind = source.expovariate(1 / mtbf), source.random(), source.random()
        yield Draw(after, lot, kinds[int(kind * len(kinds))])
