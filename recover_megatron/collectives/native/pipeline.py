"""Carries out the collectives of a backend group: several buckets under way, bounded scratch, whole results.

    handed in --enqueue: pack, reduce_scatter, all_gather or transfer--> under way (at most two)
                 (the host waits for nothing in between)                     |
                                                                             |  over and believed
                     handle.finish <-- mark in the ledger <-- copy to the bucket, and wait for the copy

The collectives read the bucket or a packed copy, and write scratch.  Only when the host knows that all operations of a
round succeeded does it order the copy to the bucket, on a stream of its own, so that it does not queue behind the
operations of the next bucket.  So a bucket is LOCAL or REDUCED as a whole, or its owned chunk is; what died left
garbage in scratch, which nobody reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from recover_megatron.collectives.ledger import Ledger, Span
from recover_megatron.collectives.native.backend import NativeBackend, Operation
from recover_megatron.collectives.native.rows import Copy, Round, joined, marks, missing
from recover_megatron.collectives.ring.progress import Executor, Task
from recover_megatron.collectives.ring.scratch import Scratch
from recover_megatron.collectives.transport.streams import Order

UNDER_WAY = 2
"""Rounds with operations under way, hence with scratch."""
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 200e-6
"""Seconds between two looks at an operation while there is room for another one to be enqueued."""


class NativeTask(Task):
    """One collective on one bucket, in rounds.

    ``hops``: how many successors get a member's chunk.  ``final``: spans that are finished as they are.  ``epoch``:
    what to mark with, or a function of a span's first element.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        ledger: Ledger,
        rounds: Sequence[Round],
        *,
        reduce: bool,
        hops: int,
        final: Sequence[Span],
        epoch: Callable[[int], int] | int,
        token: object,
    ) -> None:
        super().__init__()
        self.flat = flat
        self.ledger = ledger
        self.rounds = rounds
        self.reduce = reduce
        self.hops = hops
        self.final = final
        self.epoch = epoch
        self.token = token
        self.left = len(rounds)


@dataclass(slots=True)
class _UnderWay:
    """A round whose operations are enqueued.  ``rows``: (rank, row of its chunk in scratch) of what they bring."""

    task: NativeTask
    round: Round
    scratch: torch.Tensor
    rows: Sequence[tuple[int, int]]
    operations: list[Operation] = field(default_factory=list)

    def copies(self) -> Iterator[Copy]:
        return (copy for rank, row in self.rows for copy in self.round.copies(rank, row))

    @property
    def done(self) -> bool:
        return all(operation.done for operation in self.operations)


class Pipeline(Executor[NativeTask]):
    """``copies``: the order of the copies to the buckets, apart from that of the backend's operations."""

    def __init__(self, backend: NativeBackend, copies: Order, rank: int, size: int, device: torch.device) -> None:
        self._backend = backend
        self._copies = copies
        self._rank = rank
        self._size = size
        self._scratch = Scratch(device)
        self._handed_in: deque[tuple[NativeTask, Round]] = deque()
        self._under_way: deque[_UnderWay] = deque()
        self._pause = _FIRST_PAUSE

    @property
    def scratch_peak(self) -> int:
        return self._scratch.peak

    # ---- what the progress thread calls

    def add(self, task: NativeTask) -> None:
        for span in task.final:
            task.ledger.mark(span, task.epoch if isinstance(task.epoch, int) else task.epoch(span.start))
        self._handed_in.extend((task, round_) for round_ in task.rounds)
        if not task.rounds:
            task.handle.finish()

    @property
    def busy(self) -> bool:
        return bool(self._handed_in or self._under_way)

    def advance(self) -> float:
        if self._handed_in and len(self._under_way) < UNDER_WAY:
            with self._backend.scope():
                while self._handed_in and len(self._under_way) < UNDER_WAY:
                    self._under_way.append(self._enqueue(*self._handed_in.popleft()))
        if not self._under_way:
            return 0.0
        first = self._under_way[0]
        if self._backend.polled and len(self._under_way) < UNDER_WAY and not first.done:
            # Another bucket may be handed in, and must not find this thread waiting for this one.
            pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
            return pause
        self._pause = _FIRST_PAUSE
        for operation in first.operations:
            self._backend.wait(operation)
        self._keep(self._under_way.popleft())
        return 0.0

    def settle(self) -> None:
        self._backend.settle()
        self._copies.finish()

    def close(self) -> None:
        self._backend.close()
        self._handed_in.clear()
        self._under_way.clear()

    # ---- one round

    def _enqueue(self, task: NativeTask, round_: Round) -> _UnderWay:
        backend, rank, size, width = self._backend, self._rank, self._size, round_.width
        backend.begin(task.token)
        everything = task.hops == size - 1
        source = round_.in_place if task.reduce else None
        all_rows = everything or (task.reduce and source is None)
        ranks = range(size) if everything else [(rank - hop) % size for hop in range(task.hops + 1)]
        rows = [(other, other if all_rows else place) for place, other in enumerate(ranks)]
        scratch = self._scratch.take((size if all_rows else len(rows)) * width, task.flat.dtype)
        row_of = {other: scratch[row * width : (row + 1) * width] for other, row in rows}
        under_way = _UnderWay(task, round_, scratch, rows)
        if task.reduce:
            if source is None:
                self._pack(task, scratch, (c for other in range(size) for c in round_.copies(other, other)))
            packed = scratch if source is None else task.flat[source.start : source.stop]
            under_way.operations.append(backend.reduce_scatter(row_of[rank], packed))
        else:
            self._pack(task, scratch, round_.copies(rank, rank))
        if everything:
            under_way.operations.append(backend.all_gather(scratch, row_of[rank]))
        elif task.hops:
            after = [(row_of[rank], (rank + hop) % size) for hop in range(1, task.hops + 1)]
            before = [(row_of[other], other) for other in ranks if other != rank]
            under_way.operations.append(backend.transfer(after, before))
        return under_way

    @staticmethod
    def _pack(task: NativeTask, scratch: torch.Tensor, copies: Iterator[Copy]) -> None:
        for copy in joined(copies):
            scratch[copy.scratch : copy.scratch + copy.length].copy_(task.flat[copy.bucket : copy.bucket + copy.length])

    def _keep(self, over: _UnderWay) -> None:
        """Write the finished chunks to the bucket and mark them; what is REDUCED already stays."""
        task, scratch = over.task, over.scratch
        fresh = list(missing(over.copies(), task.ledger))
        with self._copies.scope():
            for copy in joined(iter(fresh)):
                task.flat[copy.bucket : copy.bucket + copy.length].copy_(
                    scratch[copy.scratch : copy.scratch + copy.length]
                )
            self._copies.finish()
        for span, epoch in marks(iter(fresh), task.epoch):
            task.ledger.mark(span, epoch)
        self._scratch.give(scratch)
        task.left -= 1
        if not task.left:
            task.handle.finish()
