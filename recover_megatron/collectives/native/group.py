"""The backend's own collectives behind the interface of a group: for fabrics where the vendor's algorithm is faster.

    handed in --enqueue: pack, reduce_scatter, all_gather or transfer--> under way (at most two)
                 (the host waits for nothing in between)                     |
                                                                             |  over and believed
                     handle.finish <-- mark in the ledger <-- copy to the bucket, and wait for the copy

Several buckets are under way, with bounded scratch.  The collectives read the bucket or a packed copy, and write
scratch.  Only when the host knows that all operations of a round succeeded does it order the copy to the bucket, on a
stream of its own, so that it does not queue behind the operations of the next bucket.  So a bucket is LOCAL or REDUCED
as a whole, or its owned chunk is; what died left garbage in scratch, which nobody reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from recover_megatron.collectives.epoch import CancelToken, Epoch
from recover_megatron.collectives.group import MOST_SPANS, BucketCollective, Group
from recover_megatron.collectives.ledger import Span
from recover_megatron.collectives.memo import Memo
from recover_megatron.collectives.native.backend import (
    ALIGNED_BYTES,
    NativeBackend,
    Operation,
    Plan,
    joined,
    missing,
    plan_rounds,
)
from recover_megatron.collectives.ring.executor import Scratch
from recover_megatron.collectives.ring.progress import Executor, Handle, ProgressThread, Task
from recover_megatron.collectives.ring.schedule import even_part, frozen
from recover_megatron.collectives.transport.interface import DeviceStream, Order

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
    """Carries out the collectives of a backend group, in the order in which they are handed in.

    ``copies``: the order of the copies to the buckets, apart from that of the backend's operations.
    """

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


class NativeGroup(Group):
    """Use ``open_group``."""

    cut_bytes = ALIGNED_BYTES

    def __init__(
        self, epoch: Epoch, cancel_token: CancelToken, backend: NativeBackend, *, device: torch.device | None = None
    ) -> None:
        super().__init__(epoch, cancel_token, device or torch.device("cpu"))
        self._backend = backend
        copies = DeviceStream(self.device) if self.device.type == "cuda" else Order()
        size = self.size  # without the group itself: no circle may keep its memory
        self._plans: Memo[tuple[Plan, ...]] = Memo(MOST_SPANS, lambda plans: 1 + len(plans) * size)
        self._pipeline = Pipeline(backend, copies, self.rank, self.size, self.device)
        self._progress: ProgressThread[NativeTask] = ProgressThread(
            self._pipeline, cancel_token, f"native group of epoch {self.epoch}"
        )

    @property
    def scratch_peak(self) -> int:
        """The most bytes of scratch that the group ever had, over all buckets."""
        return self._pipeline.scratch_peak

    def close(self) -> None:
        self._progress.close()

    def _start(self, collective: BucketCollective) -> Handle:
        its, flat = collective, collective.flat
        key = flat.numel(), flat.dtype, frozen(its.chunks), its.reduce, its.to
        plans = self._plans.get(key, lambda: self._plan(its))
        return self._progress.submit(NativeTask(its, plans, its.epoch_of or self.epoch, self._backend.submitted()))

    def _plan(self, its: BucketCollective) -> tuple[Plan, ...]:
        if self.size == 1:
            return ()
        longest = even_part(its.flat.numel(), self.size, max(1, self.cut_bytes // its.flat.element_size()))
        return plan_rounds(self.rank, its.chunks, max(1, longest), reduce=its.reduce, to=its.to)
