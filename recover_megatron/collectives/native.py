"""The backend's own collectives behind the interface of a group: for fabrics where the vendor's algorithm is faster.

    a bucket that is computed --> pack --> reduce_scatter --over and believed--> all_gather or transfer --.
                                                                                                          |
              handle.finish <-- mark in the ledger <-- copy to the bucket, and wait for it <--over and believed

One operation at a time: an operation is enqueued when the host knows that the one before is over (`collectives.device`
says why).  The collectives read the bucket or a packed copy, and write scratch.  Only when all operations of a round
have succeeded does the host order the copy to the bucket.  So a bucket is LOCAL or REDUCED as a whole, or its owned
chunk is; what died left garbage in scratch, which nobody reads.

A backend knows equal parts only.  A bucket of which each rank owns some spans becomes that by pure functions:

    the bucket      | chunk of rank 0 | chunk of rank 1 | ... |        spans anywhere, chunks of any length

    scratch         | row 0      | row 1      | ... |                  rows of one length; the end of a shorter chunk's
                                                                       row is never read

A row is at most an even part of the bucket long: longer chunks go in several rounds, so scratch never takes more than
the bucket (and what rounding up adds).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recover_megatron.collectives.chunks import Chunks, even_part, frozen
from recover_megatron.collectives.device import Order
from recover_megatron.collectives.epoch import Epoch
from recover_megatron.collectives.group import MOST_SPANS, BucketCollective, Group, Memo
from recover_megatron.collectives.ledger import Ledger, Span
from recover_megatron.collectives.progress import Executor, Handle, Hook, ProgressThread, Task
from recover_megatron.collectives.transport.interface import Scratch

Message = tuple[torch.Tensor, int]
"""A contiguous tensor, and the rank in the group that it goes to or comes from."""


Operation = Any
"""What was enqueued.  Its tensors belong to the backend until it was waited for, or ``settle`` returned."""


class NativeBackend(Order, ABC):
    """Operations of equal parts of the library whose algorithms are used.

        reduce_scatter / all_gather / transfer      enqueue, in one order on all members, without waiting for them
              |
              '-> Operation --wait--> over and believed: what it wrote may be read
                              '-----> EpochRevoked or PeerLost: it wrote garbage, and so did all later ones

    Each is waited for before the next one is enqueued.  An enqueueing call may raise what ``wait`` raises.  Only the
    group's progress thread calls the methods (``submitted`` is the exception, see ``Order``).

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
        sequence of operations.  A member without messages leaves it out.
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


@dataclass(eq=False)
class NativeTask(Task):
    """One collective on one bucket, in rounds."""

    its: BucketCollective
    rounds: Sequence[Plan]
    epoch: Callable[[int], int] | int
    """What to mark with, or a function of a span's first element."""
    token: object


class Sequential(Executor[NativeTask]):
    """Carries out the collectives of a backend group one after the other, in the order in which they are handed in.

    ``hook``: told ``add`` while a reduce-scatter is under way, ``store`` (``gather`` where nothing is summed) when a
    round is in the bucket.
    """

    def __init__(self, backend: NativeBackend, rank: int, size: int, device: torch.device, hook: Hook | None) -> None:
        self._backend = backend
        self._hook = hook
        self._rank = rank
        self._size = size
        self._scratch = Scratch(device)
        self._handed_in: deque[NativeTask] = deque()

    @property
    def scratch_peak(self) -> int:
        return self._scratch.peak

    # ---- what the progress thread calls

    def add(self, task: NativeTask) -> None:
        for span in task.its.final:
            task.its.ledger.mark(span, task.epoch if isinstance(task.epoch, int) else task.epoch(span.start))
        if task.rounds:
            self._handed_in.append(task)
        else:
            task.handle.finish()

    @property
    def busy(self) -> bool:
        return bool(self._handed_in)

    def advance(self) -> None:
        task = self._handed_in[0]
        self._backend.begin(task.token)
        for plan in task.rounds:
            with self._backend.scope():
                scratch = self._scratch.take(plan.scratch_rows * plan.round.width, task.its.flat.dtype)
                for operation in self._operations(task.its, plan, scratch):
                    self._backend.wait(operation)
                self._keep(task, plan, scratch)
            self._scratch.give(scratch)
        self._handed_in.popleft()
        task.handle.finish()

    def settle(self) -> None:
        self._backend.settle()

    def close(self) -> None:
        self._backend.close()
        self._handed_in.clear()

    # ---- one round

    def _operations(self, its: BucketCollective, plan: Plan, scratch: torch.Tensor) -> Iterator[Operation]:
        """Those of a round; each is enqueued when it is asked for."""
        backend, rank, size, width = self._backend, self._rank, self._size, plan.round.width
        flat, to = its.flat, its.to
        own = scratch[plan.own * width : (plan.own + 1) * width]
        for copy in plan.packed:
            scratch[copy.scratch : copy.scratch + copy.length].copy_(flat[copy.bucket : copy.bucket + copy.length])
        if its.reduce:
            source = scratch if plan.source is None else flat[plan.source.start : plan.source.stop]
            operation = backend.reduce_scatter(own, source)
            if self._hook:
                self._hook("add", 0)
            yield operation
        if len(to) == size - 1:
            yield backend.all_gather(scratch, own)
        elif to:
            sends = [(own, (rank + hops) % size) for hops in to]
            receives = [(scratch[row * width : (row + 1) * width], other) for other, row in plan.rows if other != rank]
            yield backend.transfer(sends, receives)

    def _keep(self, task: NativeTask, plan: Plan, scratch: torch.Tensor) -> None:
        """Write the finished chunks to the bucket and mark them; what is REDUCED already stays."""
        flat, ledger, epoch = task.its.flat, task.its.ledger, task.epoch
        if isinstance(epoch, int):
            copies = joined(missing(plan, ledger)) if ledger.reduced else plan.brought
            marks = [(Span(copy.bucket, copy.bucket + copy.length), epoch) for copy in copies]
        else:
            copies = list(missing(plan, ledger))
            marks = [(Span(copy.bucket, copy.bucket + copy.length), epoch(copy.bucket)) for copy in copies]
        for copy in copies:
            flat[copy.bucket : copy.bucket + copy.length].copy_(scratch[copy.scratch : copy.scratch + copy.length])
        self._backend.finish()
        for span, finished in marks:
            ledger.mark(span, finished)
        if self._hook:
            self._hook("store" if task.its.reduce else "gather", 0)


class NativeGroup(Group):
    """Use ``open_group``."""

    cut_bytes = ALIGNED_BYTES

    def __init__(
        self,
        epoch: Epoch,
        progress: ProgressThread,
        backend: NativeBackend,
        *,
        device: torch.device | None = None,
        hook: Hook | None = None,
    ) -> None:
        super().__init__(epoch, progress, device)
        self._backend = backend
        size = self.size  # without the group itself: no circle may keep its memory
        self._plans: Memo[tuple[Plan, ...]] = Memo(MOST_SPANS, lambda plans: 1 + len(plans) * size)
        self._serve(Sequential(backend, self.rank, size, self.device, hook))

    def _start(self, collective: BucketCollective) -> Handle:
        its, flat = collective, collective.flat
        key = flat.numel(), flat.dtype, frozen(its.chunks), its.reduce, its.to
        plans = self._plans.get(key, lambda: self._plan(its))
        return self._hand_in(NativeTask(its, plans, its.epoch_of or self.epoch, self._backend.submitted()))

    def _plan(self, its: BucketCollective) -> tuple[Plan, ...]:
        if self.size == 1:
            return ()
        longest = even_part(its.flat.numel(), self.size, max(1, self.cut_bytes // its.flat.element_size()))
        return plan_rounds(self.rank, its.chunks, max(1, longest), reduce=its.reduce, to=its.to)
