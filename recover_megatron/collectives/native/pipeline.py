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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from recover_megatron.collectives.group import BucketCollective
from recover_megatron.collectives.ledger import Span
from recover_megatron.collectives.native.backend import NativeBackend, Operation
from recover_megatron.collectives.native.rows import Plan, joined, missing
from recover_megatron.collectives.ring.progress import Executor, Task
from recover_megatron.collectives.ring.scratch import Scratch
from recover_megatron.collectives.transport.streams import Order

UNDER_WAY = 2
"""Rounds with operations under way, hence with scratch."""
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 200e-6
"""Seconds between two looks at an operation while there is room for another one to be enqueued."""


@dataclass(eq=False)
class NativeTask(Task):
    """One collective on one bucket, in rounds."""

    its: BucketCollective
    rounds: Sequence[Plan]
    epoch: Callable[[int], int] | int
    """What to mark with, or a function of a span's first element."""
    token: object
    kept: int = 0
    """So many rounds are over, and in the bucket."""


@dataclass(slots=True)
class _UnderWay:
    """A round whose operations are enqueued."""

    task: NativeTask
    plan: Plan
    scratch: torch.Tensor
    operations: Sequence[Operation]

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
        self._handed_in: deque[tuple[NativeTask, Plan]] = deque()
        self._under_way: deque[_UnderWay] = deque()
        self._pause = _FIRST_PAUSE

    @property
    def scratch_peak(self) -> int:
        return self._scratch.peak

    # ---- what the progress thread calls

    def add(self, task: NativeTask) -> None:
        for span in task.its.final:
            task.its.ledger.mark(span, task.epoch if isinstance(task.epoch, int) else task.epoch(span.start))
        self._handed_in.extend((task, plan) for plan in task.rounds)
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
        if len(self._under_way) < UNDER_WAY and not first.done:
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

    def _enqueue(self, task: NativeTask, plan: Plan) -> _UnderWay:
        backend, rank, size, width = self._backend, self._rank, self._size, plan.round.width
        flat, to = task.its.flat, task.its.to
        backend.begin(task.token)
        scratch = self._scratch.take(plan.scratch_rows * width, flat.dtype)
        own = scratch[plan.own * width : (plan.own + 1) * width]
        operations: list[Operation] = []
        for copy in plan.packed:
            scratch[copy.scratch : copy.scratch + copy.length].copy_(flat[copy.bucket : copy.bucket + copy.length])
        if task.its.reduce:
            source = scratch if plan.source is None else flat[plan.source.start : plan.source.stop]
            operations.append(backend.reduce_scatter(own, source))
        if len(to) == size - 1:
            operations.append(backend.all_gather(scratch, own))
        elif to:
            sends = [(own, (rank + hops) % size) for hops in to]
            receives = [(scratch[row * width : (row + 1) * width], other) for other, row in plan.rows if other != rank]
            operations.append(backend.transfer(sends, receives))
        return _UnderWay(task, plan, scratch, operations)

    def _keep(self, over: _UnderWay) -> None:
        """Write the finished chunks to the bucket and mark them; what is REDUCED already stays."""
        task, scratch, epoch = over.task, over.scratch, over.task.epoch
        flat, ledger = task.its.flat, task.its.ledger
        if isinstance(epoch, int):
            copies = joined(missing(over.plan, ledger)) if ledger.reduced else over.plan.brought
            marks = [(Span(copy.bucket, copy.bucket + copy.length), epoch) for copy in copies]
        else:
            copies = list(missing(over.plan, ledger))
            marks = [(Span(copy.bucket, copy.bucket + copy.length), epoch(copy.bucket)) for copy in copies]
        with self._copies.scope():
            for copy in copies:
                flat[copy.bucket : copy.bucket + copy.length].copy_(scratch[copy.scratch : copy.scratch + copy.length])
            self._copies.finish()
        for span, finished in marks:
            ledger.mark(span, finished)
        self._scratch.give(scratch)
        task.kept += 1
        if task.kept == len(task.rounds):
            task.handle.finish()
