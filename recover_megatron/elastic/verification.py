"""Comparison of the workers' states, which must be equal.  The workers exchange digests over the step's ring.

1. Each worker sends one number, a digest of its complete state.  If all numbers are equal, nothing else is sent.
2. Otherwise each worker sends two numbers per value of its state (hash of the name, digest), to find the differences.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Exchange = Callable[[Sequence[int]], list[list[int]]]
"""Function that sends a list of signed 64-bit integers to all members, and returns all lists by rank; may block."""

_MOST_NAMES = 5


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison in which the states of the workers differ."""

    odd: tuple[int, ...]
    """Ids of the workers whose state differs from the majority's, ascending; all workers if there is no majority."""
    most: tuple[int, ...]
    """Ids of the majority: more than half of the workers, with equal states; empty if there is no majority."""
    names: str
    """Names of the first five values that differ, and the number of further values that differ, for messages."""

    def text(self, step: int) -> str:
        """Return a message about the workers that differ after ``step``, and what the run does now."""
        odd = ", ".join(map(str, self.odd))
        if not self.most:
            return (
                f"the states of workers {odd} differ after step {step} ({self.names}), and no state has a majority: "
                "the correct one is unknown; restart from a checkpoint that is not newer than the previous "
                "comparison"
            )
        most = ", ".join(map(str, self.most))
        return (
            f"the state of worker {odd} after step {step} differs from that of workers {most} ({self.names}): worker "
            f"{odd} fetches that state.  A checkpoint saved since the previous comparison may contain the wrong state"
        )


def compare(exchange: Exchange, workers: Sequence[int], own: Mapping[str, str]) -> Verdict | None:
    """Compare the states of all ``workers`` (ids by rank); return None if all are equal.  ``own``: name -> digest.

    Collective: all workers must call it in the same order among their other collectives.  All workers get the
    same result, except for ``names``: a worker cannot name tensors that it does not have.  Raises the errors of
    ``exchange``.
    """
    total = _number("".join(f"{name}={digest};" for name, digest in own.items()))
    digests = [row[0] for row in exchange([total])]
    (most, count), *_ = Counter(digests).most_common()
    if count == len(digests):
        return None
    rows = exchange([number for name, digest in own.items() for number in (_number(name), _number(digest))])
    others = [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]
    named = {_number(name): name for name in own}
    numbers = dict.fromkeys(number for row in others for number in row)
    different = [number for number in numbers if len({row.get(number) for row in others}) > 1]
    names = [named.get(number, "a tensor that this worker does not have") for number in different]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    majority = 2 * count > len(digests)
    return Verdict(
        tuple(worker for worker, found in zip(workers, digests, strict=True) if not majority or found != most),
        tuple(worker for worker, found in zip(workers, digests, strict=True) if majority and found == most),
        ", ".join(names[:_MOST_NAMES]) + more,
    )


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)
