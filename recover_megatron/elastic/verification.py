"""Whether all workers have the same state: each computes a digest of it, and they exchange these over the step's ring.

own digests --exchange of one number--> all equal: nothing else is sent
                                        else: an exchange of one number for each tensor, which names those that
                                        differ, and the workers whose state is not that of most
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Exchange = Callable[[Sequence[int]], list[list[int]]]
"""Gives every member's list of signed 64-bit integers to all, by rank; blocks (``Group.exchange``)."""

_MOST_NAMES = 5


@dataclass(frozen=True)
class Verdict:
    """The states of the workers differ."""

    odd: tuple[int, ...]
    """The workers whose state is not that of most, ascending; all workers where no state is that of most."""
    most: tuple[int, ...]
    """The workers whose state most have, more than half of all; empty: there is no such state."""
    names: str
    """The tensors in which the states differ, for people: the first few, and how many more."""

    def text(self, step: int) -> str:
        """For people: who differs after ``step``, and what the run does now."""
        odd = ", ".join(map(str, self.odd))
        if not self.most:
            return (
                f"the states of workers {odd} differ after step {step} ({self.names}), and no state is that of most "
                "workers: nobody knows which is right; start again from a checkpoint no newer than the comparison "
                "before"
            )
        most = ", ".join(map(str, self.most))
        return (
            f"the state of worker {odd} after step {step} is not that of workers {most} ({self.names}): worker {odd} "
            "takes over theirs.  A checkpoint that was saved since the comparison before may hold the wrong one"
        )


def compare(exchange: Exchange, workers: Sequence[int], own: Mapping[str, str]) -> Verdict | None:
    """Compare this worker's state (name -> digest) with those of ``workers``, by rank; None: all are equal.

    All workers must call it in the same order among their other collectives.  All get the same verdict, but for the
    names: a worker names no tensor that it does not have.  Raises as ``exchange`` does.
    """
    whole = _number("".join(f"{name}={digest};" for name, digest in own.items()))
    told = [row[0] for row in exchange([whole])]
    (most, count), *_ = Counter(told).most_common()
    if count == len(told):
        return None
    rows = exchange([number for name, digest in own.items() for number in (_number(name), _number(digest))])
    others = [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]
    named = {_number(name): name for name in own}
    numbers = dict.fromkeys(number for row in others for number in row)
    different = [number for number in numbers if len({row.get(number) for row in others}) > 1]
    names = [named.get(number, "what this worker does not have") for number in different]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    majority = 2 * count > len(told)
    return Verdict(
        tuple(worker for worker, its in zip(workers, told, strict=True) if not majority or its != most),
        tuple(worker for worker, its in zip(workers, told, strict=True) if majority and its == most),
        ", ".join(names[:_MOST_NAMES]) + more,
    )


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)
