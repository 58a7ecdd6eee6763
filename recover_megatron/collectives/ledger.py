"""Gradient bucket with its ledger, which records the state of each element: LOCAL, or REDUCED in an epoch.

        LOCAL  --mark(span, epoch)-->  REDUCED(epoch)  --clear(), at the next iteration-->  LOCAL

LOCAL: the element is this worker's own accumulated gradient.  REDUCED(e): the element is the finished sum over the
members of epoch e; its bits are equal at all members that have this sum.  A ledger records ranges of elements (*spans*)
and not chunks or segments, because these change with the number of members.  A ledger replaces its tuple of spans
atomically, so a reader in another thread always sees a valid ledger.

After a loss, lost microbatches are run again and accumulate into the bucket.  ``SavedSums`` saves the finished sums
before this and copies them back afterwards.  ``Memory`` puts the saved sums on their device, or on the host if the
device is full.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from types import TracebackType
from typing import Any, Self

import torch

from recover_megatron.collectives.epoch import LedgerError

MAX_SPANS = 1 << 20
"""Maximum number of spans in a ledger that another member sends; ``from_digest`` refuses more."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Elements ``start`` (included) to ``stop`` (excluded) of a flat bucket."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, order=True)
class Reduced(Span):
    """Span of finished sums over the members of ``epoch``."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Held(Span):
    """Span that is completely REDUCED in ``epoch`` at ``holders`` (ascending ranks), and LOCAL at all other ranks."""

    epoch: int
    holders: tuple[int, ...]


_start = attrgetter("start")


class Ledger:
    """State, LOCAL or REDUCED, of each of the ``numel`` elements of a bucket; ``reduced``: initial REDUCED spans."""

    def __init__(self, numel: int, reduced: Iterable[Reduced] = ()) -> None:
        self.numel = numel
        self._reduced: tuple[Reduced, ...] = ()
        for span in reduced:
            self.mark(span, span.epoch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and (self.numel, self._reduced) == (other.numel, other._reduced)

    def __hash__(self) -> int:
        return hash((self.numel, self._reduced))

    def __repr__(self) -> str:
        return f"Ledger({self.numel}, {self._reduced})"

    @property
    def reduced(self) -> tuple[Reduced, ...]:
        """REDUCED spans, ascending and disjoint; adjacent spans of the same epoch are merged."""
        return self._reduced

    @property
    def local(self) -> tuple[Span, ...]:
        """LOCAL spans, ascending: all elements that are not in ``reduced``."""
        gaps, at = [], 0
        for span in self._reduced:
            if span.start > at:
                gaps.append(Span(at, span.start))
            at = span.stop
        if at < self.numel:
            gaps.append(Span(at, self.numel))
        return tuple(gaps)

    @property
    def complete(self) -> bool:
        """True if every element is REDUCED."""
        return not self.local

    def covers(self, span: Span) -> bool:
        """Return whether every element of ``span`` is REDUCED."""
        at = span.start
        for reduced in self._reduced:
            if reduced.start <= at < reduced.stop:
                at = reduced.stop
        return at >= span.stop

    def mark(self, span: Span, epoch: int) -> None:
        """Mark ``span`` REDUCED in ``epoch``.  Raises ``LedgerError`` if an element of it is REDUCED already."""
        if not 0 <= span.start <= span.stop <= self.numel:
            raise LedgerError(f"span {span.start}:{span.stop} is not within a bucket of {self.numel} elements")
        if span.start == span.stop:
            return
        known = self._reduced
        at = bisect_left(known, span.start, key=_start)
        before = known[at - 1] if at else None
        after = known[at] if at < len(known) else None
        if (before and before.stop > span.start) or (after and after.start < span.stop):
            raise LedgerError(f"span {span.start}:{span.stop} contains elements that are REDUCED already")
        start, stop, low, high = span.start, span.stop, at, at
        if before and before.stop == start and before.epoch == epoch:
            start, low = before.start, at - 1
        if after and after.start == stop and after.epoch == epoch:
            stop, high = after.stop, at + 1
        self._reduced = (*known[:low], Reduced(start, stop, epoch), *known[high:])

    def clear(self) -> None:
        """Mark all elements LOCAL, for the next iteration."""
        self._reduced = ()

    def digest(self) -> list[int]:
        """Return the ledger as numbers to send: ``[numel, number of spans, start, stop, epoch, start, ...]``."""
        return [self.numel, len(self._reduced), *(x for s in self._reduced for x in (s.start, s.stop, s.epoch))]


def from_digest(numbers: Sequence[int]) -> tuple[Ledger, int]:
    """Read a ledger's ``digest`` at the start of ``numbers``; return the ledger and the digest's length.

    Raises ``LedgerError`` if the digest is malformed.
    """
    if len(numbers) < 2 or not 0 <= numbers[1] <= MAX_SPANS or len(numbers) < 2 + 3 * numbers[1]:
        raise LedgerError("malformed ledger digest")
    used = 2 + 3 * numbers[1]
    triples = [numbers[at : at + 3] for at in range(2, used, 3)]
    if any(start >= stop for start, stop, _ in triples):
        raise LedgerError("malformed ledger digest: an empty span")
    return Ledger(numbers[0], (Reduced(*triple) for triple in triples)), used


def merge(ledgers: Sequence[Ledger]) -> list[Held]:
    """Return the spans that are REDUCED at one or more ranks; ``ledgers``: the ledger of each rank for one bucket.

    Spans are cut so that each returned span is, at each rank, either completely REDUCED or completely LOCAL.  Raises
    ``LedgerError`` if an element is REDUCED in different epochs at two ranks, or the buckets differ in size.
    """
    if len({ledger.numel for ledger in ledgers}) > 1:
        raise LedgerError(f"the members' buckets differ in size: {[ledger.numel for ledger in ledgers]} elements")
    starts: dict[int, list[tuple[int, int]]] = {}
    stops: dict[int, list[int]] = {}
    for rank, ledger in enumerate(ledgers):
        for span in ledger.reduced:
            starts.setdefault(span.start, []).append((rank, span.epoch))
            stops.setdefault(span.stop, []).append(rank)
    cuts = sorted(starts.keys() | stops.keys())
    active: dict[int, int] = {}
    fragments: list[Held] = []
    for start, stop in pairwise(cuts):
        for rank in stops.get(start, ()):
            del active[rank]
        active.update(starts.get(start, ()))
        epochs = set(active.values())
        if len(epochs) > 1:
            raise LedgerError(f"span {start}:{stop} has different epochs (rank: epoch): {dict(sorted(active.items()))}")
        if active:
            fragments.append(Held(start, stop, epochs.pop(), tuple(sorted(active))))
    return fragments


class Memory:
    """Allocator of the copies of finished sums.  Callers use only ``copy``; tests replace the other methods.

    A recovery may copy a complete gradient buffer.  After that, lost microbatches are run again and need as much memory
    as usual.  If the copies took this memory, all survivors would run out of memory.  So a copy stays on a GPU only if
    the GPU's memory has room for all copies in addition to the peak allocation so far.
    """

    def copy(self, values: torch.Tensor, beside: int = 0) -> torch.Tensor:
        """Return a copy of ``values`` on their device if the device has room, else on the host.

        ``beside``: size in bytes of other copies for which the device must have room, too.
        """
        if self.has_room(values, beside):
            try:
                return self.on_device(values)
            except torch.OutOfMemoryError:
                pass  # the device's memory is fragmented, or another process has allocated it
        return self.on_host(values)

    def has_room(self, values: torch.Tensor, beside: int) -> bool:
        """Return whether the device of ``values`` has room for a copy of ``values`` and ``beside`` bytes more.

        The room is the memory that other processes leave free, minus the peak allocation of this process so far.
        """
        if values.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(values.device)
        ours = free + torch.cuda.memory_reserved(values.device)
        return torch.cuda.max_memory_allocated(values.device) + beside + values.nbytes <= ours

    def on_device(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``values`` on the same device.  Raises ``torch.OutOfMemoryError``."""
        return values.clone()

    def on_host(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``values`` in host memory.  It is pinned if possible, so that copying back is faster."""
        try:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        except RuntimeError:  # no CUDA, or the limit of pinned memory is reached
            host = torch.empty(values.shape, dtype=values.dtype)
        return host.copy_(values)


class Bucket:
    """Contiguous tensor that is reduced as one unit, its flat view ``flat``, and its ledger.

    From the submission of a collective until ``Handle.wait`` returns, only the group may access the bucket.
    """

    def __init__(self, tensor: torch.Tensor, ledger: Ledger | None = None) -> None:
        if not tensor.is_contiguous():
            raise ValueError("a bucket must be contiguous in memory")
        self.flat = tensor.detach().view(-1)
        self.ledger = Ledger(self.flat.numel()) if ledger is None else ledger

    @classmethod
    def of_gradients(cls, parameters: Iterable[torch.Tensor], extra: int = 0) -> Self:
        """Create a bucket that contains the ``grad`` of all ``parameters``, in order, and then ``extra`` elements.

        All parameters must have the same dtype and device.  ``backward`` accumulates into the bucket, and the optimizer
        reads the gradients from it.  Call ``Bucket.clear`` in place of ``zero_grad``, which would detach the gradients
        from the bucket.  For a distributed parameter (``fully_shard``) the bucket contains the gradient of this
        worker's shard.
        """
        tensors = list(parameters)
        shards = [_shard(parameter) for parameter in tensors]
        flat = torch.zeros(sum(s.numel() for s in shards) + extra, dtype=tensors[0].dtype, device=tensors[0].device)
        at = 0
        for parameter, shard in zip(tensors, shards, strict=True):
            # The gradient needs the parameter's memory format (channels_last): fused optimizers read both linearly.
            order = torch.empty_like(shard, device="meta").stride()
            gradient = flat[at : at + shard.numel()].as_strided(shard.shape, order)
            parameter.grad = _laid_out_as(parameter, gradient)
            at += shard.numel()
        return cls(flat)

    def clear(self) -> None:
        """Zero all elements and mark them LOCAL, for the next iteration."""
        self.flat.zero_()
        self.ledger.clear()

    def save_sums(self, memory: Memory | None = None, beside: int = 0) -> SavedSums:
        """Copy the REDUCED spans; call this before gradients are accumulated into the bucket again.

        ``with bucket.save_sums():`` copies the saved values back at exit.  ``memory``: allocator of the copies.
        ``beside``: size in bytes of other buckets' saved sums for which the bucket's device must have room, too.
        """
        return SavedSums(self, memory or Memory(), beside)


def _shard(parameter: Any) -> torch.Tensor:
    """Return this worker's shard of ``parameter``, or ``parameter`` itself if it is not distributed."""
    return parameter.to_local() if is_distributed(parameter) else parameter


def _laid_out_as(parameter: Any, shard: torch.Tensor) -> torch.Tensor:
    """Return ``shard``; if ``parameter`` is a DTensor, return a DTensor with equal placements and this local shard."""
    if not is_distributed(parameter):
        return shard
    from torch.distributed.tensor import DTensor  # imported only here, because a first import takes 0.5 s

    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements,
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def is_distributed(parameter: Any) -> bool:
    """Return whether ``parameter`` is a DTensor; then this process may hold only a shard of it."""
    return hasattr(parameter, "device_mesh")


class SavedSums:
    """Copies of a bucket's finished sums, kept while lost microbatches are run again and accumulate into the bucket."""

    def __init__(self, bucket: Bucket, memory: Memory, beside: int) -> None:
        self._bucket = bucket
        self._kept: list[tuple[Span, torch.Tensor]] = []
        self.device_bytes = 0
        """Total size in bytes of the copies on the bucket's device."""
        for span in bucket.ledger.reduced:
            copy = memory.copy(bucket.flat[span.start : span.stop], beside + self.device_bytes)
            self._kept.append((span, copy))
            if copy.device == bucket.flat.device:
                self.device_bytes += copy.nbytes

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.restore()

    @property
    def nbytes(self) -> int:
        """Size of all copies in bytes."""
        return sum(values.nbytes for _, values in self._kept)

    def restore(self) -> None:
        """Copy the saved sums back to the REDUCED spans of the bucket."""
        for span, values in self._kept:
            self._bucket.flat[span.start : span.stop].copy_(values)
