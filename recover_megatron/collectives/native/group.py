"""The backend's own collectives behind the interface of a group: for fabrics where the vendor's algorithm is faster.

    reduce_scatter (out of place)  -->  my chunk of the sum, in scratch      the bucket is read only
    all_gather     (out of place)  -->  the whole sum, in scratch            the bucket is read only
    copy to the bucket, then mark all of it REDUCED                          one step of the ledger per bucket

A bucket is thus LOCAL or REDUCED as a whole, at the price of a scratch of one bucket and one chunk.  A collective that
dies or is aborted leaves garbage in scratch, which nobody reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from recover_megatron.collectives.epoch import CancelToken, Epoch
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.ledger import Ledger, Span
from recover_megatron.collectives.native.backend import NativeBackend
from recover_megatron.collectives.ring.progress import Executor, Handle, ProgressThread, Task
from recover_megatron.collectives.ring.schedule import Chunks


class _Task(Task):
    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work = work


class _InOrder(Executor[_Task]):
    """One collective after the other."""

    def __init__(self, backend: NativeBackend) -> None:
        self._backend = backend
        self._tasks: deque[_Task] = deque()

    def add(self, task: _Task) -> None:
        self._tasks.append(task)

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def advance(self) -> None:
        self._tasks[0].work()
        self._tasks.popleft().handle.finish()

    def settle(self) -> None:
        self._backend.settle()

    def close(self) -> None:
        self._backend.close()


class NativeGroup(Group):
    """Use ``open_group``."""

    def __init__(
        self, epoch: Epoch, cancel_token: CancelToken, backend: NativeBackend, *, device: torch.device | None = None
    ) -> None:
        super().__init__(epoch, cancel_token, device or torch.device("cpu"))
        self._backend = backend
        self._progress: ProgressThread[_Task] = ProgressThread(
            _InOrder(backend), cancel_token, f"native group of epoch {self.epoch}"
        )

    def close(self) -> None:
        self._progress.close()

    def _start(
        self,
        what: str,
        flat: torch.Tensor,
        ledger: Ledger,
        chunks: Chunks,
        *,
        reduce: bool,
        gather_hops: int,
        final: Sequence[Span] = (),
        epoch_of: Callable[[int], int] | None = None,
    ) -> Handle:
        del what

        def carry_out() -> None:
            epoch = epoch_of or (lambda _: self.epoch)
            for span in final:
                ledger.mark(span, epoch(span.start))
            width = max(sum(map(len, chunk)) for chunk in chunks)
            if self.size == 1 or not width:
                return
            own = chunks[self.rank : self.rank + 1]
            mine = self._reduced(flat, chunks, width) if reduce else _pack(flat, own, width)
            if not gather_hops:
                _unpack(flat, ledger, [chunks[self.rank]], mine.view(1, width), epoch)
                return
            everything = torch.empty(self.size * width, dtype=flat.dtype, device=flat.device)
            self._backend.wait(self._backend.all_gather(everything, mine))
            _unpack(flat, ledger, chunks, everything.view(self.size, width), epoch)

        token = self._backend.submitted()

        def in_order() -> None:
            with self._backend.scope():
                self._backend.begin(token)
                carry_out()
                self._backend.finish()

        return self._progress.submit(_Task(in_order))

    def _reduced(self, flat: torch.Tensor, chunks: Chunks, width: int) -> torch.Tensor:
        """My chunk of the sum, in new memory."""
        even = [[Span(rank * width, (rank + 1) * width)] for rank in range(self.size)]
        as_it_is = [list(chunk) for chunk in chunks] == even
        source = flat if as_it_is else _pack(flat, chunks, width)
        output = torch.empty(width, dtype=flat.dtype, device=flat.device)
        self._backend.wait(self._backend.reduce_scatter(output, source))
        return output


def _pack(flat: torch.Tensor, chunks: Chunks, width: int) -> torch.Tensor:
    """The chunks in new memory, each padded with zeros to ``width`` elements."""
    packed = torch.zeros(len(chunks), width, dtype=flat.dtype, device=flat.device)
    for row, chunk in zip(packed, chunks, strict=True):
        at = 0
        for span in chunk:
            row[at : at + len(span)].copy_(flat[span.start : span.stop])
            at += len(span)
    return packed.view(-1)


def _unpack(
    flat: torch.Tensor, ledger: Ledger, chunks: Chunks, packed: torch.Tensor, epoch: Callable[[int], int]
) -> None:
    """Write the finished chunks to the bucket and mark them; what is REDUCED already stays."""
    fresh = []
    for row, chunk in zip(packed, chunks, strict=True):
        at = 0
        for span in chunk:
            if not ledger.covers(span):
                flat[span.start : span.stop].copy_(row[at : at + len(span)])
                fresh.append(span)
            at += len(span)
    for span in fresh:
        ledger.mark(span, epoch(span.start))
