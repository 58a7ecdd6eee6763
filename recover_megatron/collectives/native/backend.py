"""The interface between a backend group and the library whose algorithms it uses, and the rounds of its collectives.

    reduce_scatter / all_gather / transfer      enqueue, in one order on all members, without waiting for anything
          |
          '-> Operation --wait--> over and believed: what it wrote may be read
                          '-----> EpochRevoked or PeerLost: it wrote garbage, and so did all later ones

Operations of one member take effect in the order in which they were enqueued: a later one may read what an earlier one
writes before that was waited for.  Only the group's progress thread calls the methods of a backend (``submitted`` is
the exception, see ``Order``).

A backend knows equal parts only.  A bucket of which each rank owns some spans becomes that by pure functions:

    the bucket      | chunk of rank 0 | chunk of rank 1 | ... |        spans anywhere, chunks of any length

    scratch         | row 0      | row 1      | ... |                  rows of one length; the end of a shorter chunk's
                                                                       row is never read

A row is at most an even part of the bucket long: longer chunks go in several rounds, so scratch never takes more than
the bucket (and what rounding up adds).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from recover_megatron.collectives.ledger import Ledger, Span
from recover_megatron.collectives.ring.schedule import Chunks
from recover_megatron.collectives.transport.interface import Order

Message = tuple[torch.Tensor, int]
"""A contiguous tensor, and the rank in the group that it goes to or comes from."""


class Operation(Protocol):
    """What was enqueued.  Its tensors belong to the backend until it was waited for, or ``settle`` returned."""

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return or raise without blocking for long; says nothing of success."""


class NativeBackend(Order, ABC):
    """Enqueued operations of equal parts.  An enqueueing call may raise what ``wait`` raises.

    The tensors of ``reduce_scatter`` and ``all_gather`` are contiguous and of one type.  They do not overlap, or the
    smaller one is exactly the part of the larger one that has this member's number (NCCL's rule for "in place").
    """

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        """``output``: this member's part of the sum of all ``source``, which have as many equal parts as members."""

    @abstractmethod
    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        """``output``: the ``source`` of every member, by rank."""

    @abstractmethod
    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        """Messages to and from single members, all under way together; at most one each way per pair and transfer.

        Every receive must have its send of the same size and type at the other member, in the same transfer of the
        sequence of operations.  A member without messages hands in an empty transfer, or leaves it out.
        """

    @abstractmethod
    def wait(self, operation: Operation) -> None:
        """Block the host until ``operation`` is over and believed; called once for each, in their order.

        Raises ``EpochRevoked`` after a revocation, ``PeerLost`` when a member is gone (a backend may also just block
        until the revocation).
        """

    @abstractmethod
    def settle(self) -> None:
        """After an error: return when no operation reads or writes a tensor of the caller's any more."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


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


@dataclass(frozen=True, slots=True)
class Plan:
    """One round of one collective at one member, with all that does not depend on the ledger."""

    round: Round
    source: Span | None
    """What a reduce_scatter reads in the bucket itself; None: what ``packed`` has brought together in scratch."""
    packed: tuple[Copy, ...]
    """From the bucket to scratch, before."""
    rows: tuple[tuple[int, int], ...]
    """(rank, row of scratch) of the chunks that the round brings; this member's own is among them."""
    own: int
    """This member's row."""
    scratch_rows: int
    brought: tuple[Copy, ...]
    """From scratch to the bucket, after, where none of it is REDUCED yet."""

    def copies(self) -> Iterator[Copy]:
        """Those of ``brought``, by chunk and span."""
        return (copy for rank, row in self.rows for copy in self.round.copies(rank, row))


def plan_rounds(rank: int, chunks: Chunks, longest: int, *, reduce: bool, to: Collection[int]) -> tuple[Plan, ...]:
    """The rounds of a collective at ``rank``; ``to``: the members so many places further get a member's chunk."""
    return tuple(_plan(rank, round_, reduce, to) for round_ in rounds(chunks, longest))


def _plan(rank: int, round_: Round, reduce: bool, to: Collection[int]) -> Plan:
    size = len(round_.chunks)
    everything = len(to) == size - 1
    source = round_.in_place() if reduce else None
    all_rows = everything or (reduce and source is None)
    ranks = range(size) if everything else [rank, *((rank - hops) % size for hops in to)]
    rows = tuple((other, other if all_rows else place) for place, other in enumerate(ranks))
    own = dict(rows)[rank]
    if not reduce:
        packed = joined(round_.copies(rank, own))
    elif source is None:
        packed = joined(copy for other in range(size) for copy in round_.copies(other, other))
    else:
        packed = []
    brought = joined(copy for other, row in rows for copy in round_.copies(other, row))
    return Plan(round_, source, tuple(packed), rows, own, size if all_rows else len(rows), tuple(brought))


def missing(plan: Plan, ledger: Ledger) -> Iterator[Copy]:
    """What a round brings and the ledger does not have REDUCED yet, by chunk and span."""
    return (copy for copy in plan.copies() if not ledger.covers(Span(copy.bucket, copy.bucket + copy.length)))
