"""Collectives of the backend behind the interface of a group: for fabrics where the vendor's algorithm is faster.

    a bucket that is computed --> pack --> reduce_scatter --over and believed--> all_gather or transfer --.
                                                                                                          |
              handle.finish <-- mark in the ledger <-- copy to the bucket, and wait for it <--over and believed

One operation at a time: an operation is enqueued when the host knows that the previous one is over
(`collectives.device` gives the reason).  The collectives read the bucket or a packed copy, and write scratch.  The
host enqueues the copy to the bucket only when all operations of a round have succeeded.  So a bucket (or its owned
chunk) is entirely LOCAL or entirely REDUCED; a failed operation leaves garbage only in scratch, which is never read.

A backend handles equal parts only.  Pure functions map a bucket, of which each rank owns some spans, to equal parts:

    the bucket      | chunk of rank 0 | chunk of rank 1 | ... |        spans anywhere, chunks of any length

    scratch         | row 0      | row 1      | ... |                  rows of one length; the end of a shorter chunk's
                                                                       row is never read

A row is never longer than an even part of the bucket: longer chunks take several rounds.  So scratch never takes more
memory than the bucket (plus rounding).
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
"""Contiguous tensor, and its destination or source rank in the group."""


Operation = Any
"""Enqueued operation.  Its tensors belong to the backend until ``wait`` for it, or ``settle``, has returned."""


class NativeBackend(Order, ABC):
    """Operations of a collective library on equal parts.

        reduce_scatter / all_gather / transfer      enqueue, in the same order on all members, without blocking
              |
              '-> Operation --wait--> over and believed: its output may be read
                              '-----> EpochRevoked or PeerLost: its output is garbage, and so are later ones

    The caller waits for each operation before it enqueues the next one.  An enqueueing call may raise what ``wait``
    raises.  Only the group's progress thread calls the methods (except ``submitted``, see ``Order``).

    The tensors of ``reduce_scatter`` and ``all_gather`` are contiguous and have one dtype.  Either they do not overlap,
    or the smaller one is exactly this member's part of the larger one (NCCL's rule for "in place").
    """

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        """Write this member's part of the sum of all ``source`` to ``output``; one equal part per member."""

    @abstractmethod
    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        """Write the ``source`` of every member, by rank, to ``output``."""

    @abstractmethod
    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        """Exchange messages with single members concurrently; at most one each way per pair and transfer.

        Every receive must match a send of the same size and dtype at the other member, in the same transfer of the
        sequence of operations.  A member without messages skips the call.
        """

    @abstractmethod
    def wait(self, operation: Operation) -> None:
        """Block the host until ``operation`` is over and believed; called once per operation, in order.

        Raises ``EpochRevoked`` after a revocation and ``PeerLost`` if a member is dead (a backend may instead block
        until the revocation).
        """

    @abstractmethod
    def settle(self) -> None:
        """Return when no operation reads or writes a tensor of the caller any more; called after an error."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""


ALIGNED_BYTES = 128
"""Alignment of the cuts between rows, where the chunks allow it: unaligned, NCCL copies byte by byte."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Range of ``length`` elements: at offset ``bucket`` of the bucket, at offset ``scratch`` of the rows."""

    bucket: int
    scratch: int
    length: int


@dataclass(frozen=True, slots=True)
class Round:
    """Chunks of one round: the spans that each rank owns, with a row of ``width`` elements per rank."""

    chunks: Chunks
    width: int

    def in_place(self) -> Span | None:
        """Return the span of the bucket that already contains all rows in order, if one exists."""
        first = next((chunk[0].start for chunk in self.chunks if chunk), 0)
        for rank, chunk in enumerate(self.chunks):
            if len(chunk) != 1 or chunk[0] != Span(first + rank * self.width, first + (rank + 1) * self.width):
                return None
        return Span(first, first + len(self.chunks) * self.width)

    def copies(self, rank: int, row: int) -> Iterator[Copy]:
        """Yield the copies for the chunk of ``rank``, which is in row number ``row``."""
        at = row * self.width
        for span in self.chunks[rank]:
            yield Copy(span.start, at, len(span))
            at += len(span)


def rounds(chunks: Chunks, longest: int) -> list[Round]:
    """Cut ``chunks`` into rounds with rows of at most ``longest`` elements; no round if all chunks are empty."""
    width = max(sum(map(len, chunk)) for chunk in chunks)
    if width <= longest:
        return [Round(chunks, width)] if width else []
    return [
        Round([_part(chunk, at, at + longest) for chunk in chunks], min(longest, width - at))
        for at in range(0, width, longest)
    ]


def _part(chunk: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Return elements ``start`` to ``stop`` of a chunk, counted within the chunk."""
    found, at = [], 0
    for span in chunk:
        a, b = max(start - at, 0), min(stop - at, len(span))
        if a < b:
            found.append(Span(span.start + a, span.start + b))
        at += len(span)
    return found


def joined(copies: Iterator[Copy]) -> list[Copy]:
    """Merge copies that are adjacent both in the bucket and in scratch."""
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
    """Plan of one round of one collective at one member: everything that does not depend on the ledger."""

    round: Round
    source: Span | None
    """Span of the bucket that a reduce_scatter reads; None: it reads the ``packed`` copy in scratch."""
    packed: tuple[Copy, ...]
    """Copies from the bucket to scratch, before the operations."""
    rows: tuple[tuple[int, int], ...]
    """(rank, row of scratch) of the chunks that this member obtains, including its own."""
    own: int
    """Row of this member."""
    scratch_rows: int
    brought: tuple[Copy, ...]
    """Copies from scratch to the bucket, after the operations, if none of the elements is REDUCED yet."""

    def copies(self) -> Iterator[Copy]:
        """Return the copies of ``brought``, separately by chunk and span."""
        return (copy for rank, row in self.rows for copy in self.round.copies(rank, row))


def plan_rounds(rank: int, chunks: Chunks, longest: int, *, reduce: bool, to: Collection[int]) -> tuple[Plan, ...]:
    """Plan the rounds of a collective at ``rank``; ``to``: distances in ranks to the members that get its chunk."""
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
    """Return the copies of a round whose elements are not REDUCED in the ledger yet, by chunk and span."""
    return (copy for copy in plan.copies() if not ledger.covers(Span(copy.bucket, copy.bucket + copy.length)))


@dataclass(eq=False)
class NativeTask(Task):
    """Collective on a bucket, in rounds."""

    spec: BucketCollective
    rounds: Sequence[Plan]
    epoch: Callable[[int], int] | int
    """Epoch for the marks, or a function of a span's first element."""
    token: object


class Sequential(Executor[NativeTask]):
    """Executor that runs the collectives of a backend group one after the other, in the order of submission.

    ``hook``: called with ``add`` while a reduce-scatter is in flight, and with ``store`` (``gather`` if nothing is
    summed) when a round has been copied to the bucket.
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
        for span in task.spec.final:
            task.spec.ledger.mark(span, task.epoch if isinstance(task.epoch, int) else task.epoch(span.start))
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
                scratch = self._scratch.take(plan.scratch_rows * plan.round.width, task.spec.flat.dtype)
                for operation in self._operations(task.spec, plan, scratch):
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

    def _operations(self, spec: BucketCollective, plan: Plan, scratch: torch.Tensor) -> Iterator[Operation]:
        """Yield the operations of a round; each is enqueued when the caller requests it."""
        backend, rank, size, width = self._backend, self._rank, self._size, plan.round.width
        flat, to = spec.flat, spec.to
        own = scratch[plan.own * width : (plan.own + 1) * width]
        for copy in plan.packed:
            scratch[copy.scratch : copy.scratch + copy.length].copy_(flat[copy.bucket : copy.bucket + copy.length])
        if spec.reduce:
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
        """Write the finished chunks to the bucket and mark them; spans that are REDUCED already stay unchanged."""
        flat, ledger, epoch = task.spec.flat, task.spec.ledger, task.epoch
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
            self._hook("store" if task.spec.reduce else "gather", 0)


class NativeGroup(Group):
    """Group over the backend's collectives; create it with ``open_group``."""

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
        size = self.size  # not ``self``: a reference cycle would keep the group's memory
        self._plans: Memo[tuple[Plan, ...]] = Memo(MOST_SPANS, lambda plans: 1 + len(plans) * size)
        self._serve(Sequential(backend, self.rank, size, self.device, hook))

    def _start(self, collective: BucketCollective) -> Handle:
        spec, flat = collective, collective.flat
        key = flat.numel(), flat.dtype, frozen(spec.chunks), spec.reduce, spec.to
        plans = self._plans.get(key, lambda: self._plan(spec))
        return self._hand_in(NativeTask(spec, plans, spec.epoch_of or self.epoch, self._backend.submitted()))

    def _plan(self, spec: BucketCollective) -> tuple[Plan, ...]:
        if self.size == 1:
            return ()
        longest = even_part(spec.flat.numel(), self.size, max(1, self.cut_bytes // spec.flat.element_size()))
        return plan_rounds(self.rank, spec.chunks, max(1, longest), reduce=spec.reduce, to=spec.to)
