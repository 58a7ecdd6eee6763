"""Group that sums with the collectives of a library such as NCCL; with Megatron, the default on GPUs.

    computed bucket --> pack --> reduce_scatter --over and believed--> all_gather or transfer --.
                                                                                                |
         handle.finish <-- mark in the ledger <-- copy to the bucket, wait for the copy <--over and believed

An operation is *over* when the device has run it.  An operation that is over is *believed* if the backend then reports
success and the epoch is not revoked (`collectives.nccl.communicator`).  The next operation is enqueued only when the
host knows that the previous one is over; `collectives.device` gives the reason.

A collective runs in one or more *rounds*, each for a part of every chunk.  The operations of a round read the bucket or
a packed copy of it, and write only to scratch memory.  When all operations of a round are believed, the result is
copied to the bucket.  So the part of the bucket that a round sums is completely LOCAL or completely REDUCED.  A failed
operation leaves garbage in scratch memory, where nothing reads it.

A backend's operations need parts of equal length, but the chunks of a bucket, each owned by one rank, may differ in
length.  So each chunk has its own row in scratch memory:

    the bucket      | chunk of rank 0 | chunk of rank 1 | ... |        spans anywhere, chunks of any length

    scratch         | row 0      | row 1      | ... |                  rows of equal length; the unused end of a
                                                                       row is never read

A row is at most as long as the bucket divided by the number of members; longer chunks need several rounds.  So scratch
memory is at most as large as the bucket (plus rounding).
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
"""(contiguous tensor, rank of the member to which it is sent or from which it is received)."""


Operation = Any
"""Enqueued operation.  Only the backend may use its tensors until ``wait(operation)`` or ``quiesce()`` has returned."""


class NativeBackend(Order, ABC):
    """Interface to the operations of a collective library such as NCCL, on parts of equal length.

        reduce_scatter / all_gather / transfer      enqueue, in the same order on all members, without blocking
              |
              '-> Operation --wait--> over and believed: its output may be read
                              '-----> EpochRevoked or PeerLost: its output is garbage, as is all later output

    The caller waits for each operation before it enqueues the next one.  Enqueueing may raise the same errors as
    ``wait``.  Only the group's progress thread calls the methods; any thread may call ``submitted`` (see ``Order``).

    The two tensors of ``reduce_scatter`` and ``all_gather`` are contiguous and have the same dtype.  Either they do not
    overlap, or the smaller tensor is exactly this member's part of the larger tensor (NCCL's rule for "in place").
    """

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        """Sum the ``source`` tensors of all members; write this member's part of the sum to ``output``.

        The parts are equally long, and in rank order.
        """

    @abstractmethod
    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        """Write the ``source`` tensors of all members, in rank order, to ``output``."""

    @abstractmethod
    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        """Send and receive messages concurrently; at most one message to, and one from, each other member.

        For every receive, the same transfer at the sending member must contain a send of equal size and dtype to this
        member.  A member without messages does not call this.
        """

    @abstractmethod
    def wait(self, operation: Operation) -> None:
        """Block the host until ``operation`` is over and believed; called once for each operation, in launch order.

        Raises ``EpochRevoked`` after a revocation.  If a member is dead, some backends raise ``PeerLost``, others block
        until the revocation.
        """

    @abstractmethod
    def quiesce(self) -> None:
        """Wait until no enqueued operation reads or writes a tensor of the caller; called after an error."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""


ALIGNED_BYTES = 128
"""Number of bytes at whose multiples an all-reduce cuts a bucket, because NCCL copies unaligned rows bytewise."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy of ``length`` elements between offset ``bucket`` of the bucket and offset ``scratch`` of scratch memory."""

    bucket: int
    scratch: int
    length: int


@dataclass(frozen=True, slots=True)
class Round:
    """Round of a collective; see the module's docstring.

    ``chunks``: for each rank, the part of its chunk that this round sums or sends.  ``width``: elements per row.
    """

    chunks: Chunks
    width: int

    def in_place(self) -> Span | None:
        """Return the span of the bucket that already has the layout of the rows, so that no copy is needed.

        Returns None if the chunks are not adjacent spans of equal length.
        """
        first = next((chunk[0].start for chunk in self.chunks if chunk), 0)
        for rank, chunk in enumerate(self.chunks):
            if len(chunk) != 1 or chunk[0] != Span(first + rank * self.width, first + (rank + 1) * self.width):
                return None
        return Span(first, first + len(self.chunks) * self.width)

    def copies(self, rank: int, row: int) -> Iterator[Copy]:
        """Yield the copies between the chunk of ``rank`` in the bucket and row number ``row``, one copy per span."""
        at = row * self.width
        for span in self.chunks[rank]:
            yield Copy(span.start, at, len(span))
            at += len(span)


def rounds(chunks: Chunks, longest: int) -> list[Round]:
    """Divide ``chunks`` into rounds with rows of at most ``longest`` elements; return [] if all chunks are empty."""
    width = max(sum(map(len, chunk)) for chunk in chunks)
    if width <= longest:
        return [Round(chunks, width)] if width else []
    return [
        Round([_part(chunk, at, at + longest) for chunk in chunks], min(longest, width - at))
        for at in range(0, width, longest)
    ]


def _part(chunk: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Return the spans of elements ``start`` to ``stop`` (excluded) of a chunk, counted from the chunk's start."""
    found, at = [], 0
    for span in chunk:
        a, b = max(start - at, 0), min(stop - at, len(span))
        if a < b:
            found.append(Span(span.start + a, span.start + b))
        at += len(span)
    return found


def joined(copies: Iterator[Copy]) -> list[Copy]:
    """Merge successive copies that are adjacent both in the bucket and in scratch memory; drop empty copies."""
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
    """Copies and rows of one round of a collective at one member; independent of the ledger, so it is cached."""

    round: Round
    source: Span | None
    """Span of the bucket that the reduce_scatter reads; None: it reads scratch memory, which ``packed`` has filled."""
    packed: tuple[Copy, ...]
    """Copies from the bucket to scratch memory, made before the operations."""
    rows: tuple[tuple[int, int], ...]
    """(owner's rank, row number) of each chunk that this member has after the operations."""
    own: int
    """Number of the row for this member's own chunk."""
    scratch_rows: int
    brought: tuple[Copy, ...]
    """Merged copies from scratch memory to the bucket after the operations, for a bucket without REDUCED elements."""

    def copies(self) -> Iterator[Copy]:
        """Return the copies of ``brought`` before they were merged: one copy per span of each chunk."""
        return (copy for rank, row in self.rows for copy in self.round.copies(rank, row))


def plan_rounds(rank: int, chunks: Chunks, longest: int, *, reduce: bool, to: Collection[int]) -> tuple[Plan, ...]:
    """Plan the rounds of a collective at ``rank``; ``reduce`` and ``to``: as in ``BucketCollective``.

    ``longest``: maximum number of elements of a row.
    """
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
    """Return the copies of ``plan`` to spans of the bucket that are not REDUCED yet, one copy per span."""
    return (copy for copy in plan.copies() if not ledger.covers(Span(copy.bucket, copy.bucket + copy.length)))


@dataclass(eq=False)
class NativeTask(Task):
    """Submitted collective on a bucket, with the plans of its rounds; ``token``: result of ``Order.submitted``."""

    spec: BucketCollective
    rounds: Sequence[Plan]
    epoch: Callable[[int], int] | int
    """Epoch to record for finished spans, or a function: index of a span's first element -> epoch to record."""
    token: object


class Sequential(Executor[NativeTask]):
    """Executor that runs the collectives of a ``NativeGroup`` one after the other, in the order of submission.

    ``hook``: called with ``add`` while a reduce-scatter is in flight.  It is called again when a round's result has
    been copied to the bucket: with ``store`` if the collective sums, with ``gather`` otherwise.
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

    # ---- called by the progress thread

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

    def quiesce(self) -> None:
        self._backend.quiesce()

    def close(self) -> None:
        self._backend.close()
        self._handed_in.clear()

    # ---- one round

    def _operations(self, spec: BucketCollective, plan: Plan, scratch: torch.Tensor) -> Iterator[Operation]:
        """Yield the operations of a round; each is enqueued only when the caller advances the iterator to it."""
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
        """Copy the finished chunks to the bucket and mark them REDUCED; skip spans that are REDUCED already."""
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
    """Group that sums with the collectives of ``backend``; ``open_group`` creates it."""

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
        size = self.size  # a local variable, because a lambda with ``self`` would keep the group alive in a cycle
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
