"""A gradient bucket with its ledger: which of its elements are LOCAL, which are REDUCED, and in which epoch.

        LOCAL  --mark(span, epoch)-->  REDUCED(epoch)          never back, until clear() at the next iteration

LOCAL: the bucket holds this worker's own accumulated gradient.  REDUCED(e): it holds the finished sum over the members
of epoch e, bit for bit the same at every member that has it REDUCED.  Spans are element ranges, not segment numbers:
chunks and segments change with the number of members, what is finished does not.  A ledger's spans are replaced as a
whole, so a reader in another thread sees a valid ledger.

Between two epochs finished sums are set aside (``Aside``) while lost microbatches are run again into the bucket.
Where they are kept is up to ``Memory``: on their device, or where it is full on the host.
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
"""Limit of what is accepted in a digest from another member."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Elements ``start`` (included) to ``stop`` (excluded) of a flat bucket."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, order=True)
class Reduced(Span):
    """A finished span: the sum over the members of ``epoch``."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Held(Span):
    """A span that is REDUCED at ``holders`` (ranks, ascending), and LOCAL at every other rank, as a whole."""

    epoch: int
    holders: tuple[int, ...]


_start = attrgetter("start")


class Ledger:
    """State of every element of one bucket of ``numel`` elements; all LOCAL at first."""

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
        """The REDUCED spans, ascending, disjoint; neighbours of the same epoch are one span."""
        return self._reduced

    @property
    def local(self) -> tuple[Span, ...]:
        """The LOCAL spans: the complement of ``reduced``."""
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
        """Whether every element is REDUCED."""
        return not self.local

    def covers(self, span: Span) -> bool:
        """Whether every element of ``span`` is REDUCED."""
        at = span.start
        for reduced in self._reduced:
            if reduced.start <= at < reduced.stop:
                at = reduced.stop
        return at >= span.stop

    def mark(self, span: Span, epoch: int) -> None:
        """LOCAL -> REDUCED(epoch); an element that is already REDUCED is a ``LedgerError``."""
        if not 0 <= span.start <= span.stop <= self.numel:
            raise LedgerError(f"span {span.start}:{span.stop} is not within a bucket of {self.numel} elements")
        if span.start == span.stop:
            return
        known = self._reduced
        at = bisect_left(known, span.start, key=_start)
        before = known[at - 1] if at else None
        after = known[at] if at < len(known) else None
        if (before and before.stop > span.start) or (after and after.start < span.stop):
            raise LedgerError(f"span {span.start}:{span.stop} is REDUCED a second time")
        start, stop, low, high = span.start, span.stop, at, at
        if before and before.stop == start and before.epoch == epoch:
            start, low = before.start, at - 1
        if after and after.start == stop and after.epoch == epoch:
            stop, high = after.stop, at + 1
        self._reduced = (*known[:low], Reduced(start, stop, epoch), *known[high:])

    def clear(self) -> None:
        """All LOCAL again: the next iteration."""
        self._reduced = ()

    def digest(self) -> list[int]:
        """``[numel, number of spans, start, stop, epoch, start, ...]``, for the other members."""
        return [self.numel, len(self._reduced), *(x for s in self._reduced for x in (s.start, s.stop, s.epoch))]


def from_digest(numbers: Sequence[int]) -> tuple[Ledger, int]:
    """The ledger that ``numbers`` begins with, and how many numbers it took; ``LedgerError`` if they make none."""
    if len(numbers) < 2 or not 0 <= numbers[1] <= MAX_SPANS or len(numbers) < 2 + 3 * numbers[1]:
        raise LedgerError("malformed ledger digest")
    used = 2 + 3 * numbers[1]
    triples = [numbers[at : at + 3] for at in range(2, used, 3)]
    if any(start >= stop for start, stop, _ in triples):
        raise LedgerError("malformed ledger digest: an empty span")
    return Ledger(numbers[0], (Reduced(*triple) for triple in triples)), used


def merge(ledgers: Sequence[Ledger]) -> list[Held]:
    """What is REDUCED anywhere, cut so that each rank has each piece entirely REDUCED or entirely LOCAL.

    ``LedgerError`` if two ranks hold the same element from different epochs, or buckets of different sizes.
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
            raise LedgerError(f"span {start}:{stop} was finished in different epochs: {dict(sorted(active.items()))}")
        if active:
            fragments.append(Held(start, stop, epochs.pop(), tuple(sorted(active))))
    return fragments


class Memory:
    """Makes the copies of finished sums.  ``copy`` is what is used; the rest says how, and is replaced in tests.

    A recovery comes at a moment that nobody has planned for: up to a whole gradient buffer is copied, and then the
    passes of the re-run need as much memory as any other.  If the copies took it, all survivors would run out of it at
    the same microbatch.  So a copy stays on a GPU only if the most that was ever allocated there and all copies fit
    together.
    """

    def copy(self, values: torch.Tensor, beside: int = 0) -> torch.Tensor:
        """A copy of ``values``, on their device or in host memory; ``beside``: bytes of other copies on the device."""
        if self.has_room(values, beside):
            try:
                return self.on_device(values)
            except torch.OutOfMemoryError:
                pass  # it is in pieces, or another process has taken it
        return self.on_host(values)

    def has_room(self, values: torch.Tensor, beside: int) -> bool:
        """Whether the device of ``values`` holds a copy beside all that an iteration needs, and the other copies."""
        if values.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(values.device)
        ours = free + torch.cuda.memory_reserved(values.device)
        return torch.cuda.max_memory_allocated(values.device) + beside + values.nbytes <= ours

    def on_device(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on their device.  Raises ``torch.OutOfMemoryError``."""
        return values.clone()

    def on_host(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in host memory: pinned, where the host gives that, since it goes back at the speed of the bus then."""
        try:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        except RuntimeError:  # no CUDA, or no more memory that may be pinned
            host = torch.empty(values.shape, dtype=values.dtype)
        return host.copy_(values)


class Bucket:
    """A contiguous tensor that is reduced as a whole, seen as flat, and its ledger.

    Between ``submit`` and the end of ``wait`` of a collective the bucket belongs to the group; otherwise to the caller.
    """

    def __init__(self, tensor: torch.Tensor, ledger: Ledger | None = None) -> None:
        if not tensor.is_contiguous():
            raise ValueError("a bucket must be contiguous in memory")
        self.flat = tensor.detach().view(-1)
        self.ledger = Ledger(self.flat.numel()) if ledger is None else ledger

    @classmethod
    def of_gradients(cls, parameters: Iterable[torch.Tensor], extra: int = 0) -> Self:
        """A bucket that is the memory of the parameters' ``grad``, in order, and ``extra`` elements behind them.

        All parameters must have the first one's type and device.  ``backward`` then accumulates into the bucket, and an
        optimizer steps with it.  (``zero_grad`` must not be called: it would take the gradients out of the bucket.)
        Of a distributed parameter, as ``fully_shard`` makes them, it is this worker's shard.
        """
        tensors = list(parameters)
        shards = [_shard(parameter) for parameter in tensors]
        flat = torch.zeros(sum(s.numel() for s in shards) + extra, dtype=tensors[0].dtype, device=tensors[0].device)
        at = 0
        for parameter, shard in zip(tensors, shards, strict=True):
            # In the parameter's order of memory (channels_last): fused optimizers go through both side by side.
            order = torch.empty_like(shard, device="meta").stride()
            gradient = flat[at : at + shard.numel()].as_strided(shard.shape, order)
            parameter.grad = _laid_out_as(parameter, gradient)
            at += shard.numel()
        return cls(flat)

    def clear(self) -> None:
        """The next iteration: all zero, all LOCAL."""
        self.flat.zero_()
        self.ledger.clear()

    def set_aside(self, memory: Memory | None = None, beside: int = 0) -> Aside:
        """Copy the REDUCED spans (and nothing else) before gradients are accumulated into the bucket once more.

        ``with bucket.set_aside():`` puts them back at the end.  ``memory``: where the copies are kept; by default on
        the bucket's device as far as it has room.  ``beside``: bytes that other buckets have set aside there.
        """
        return Aside(self, memory or Memory(), beside)


def _shard(parameter: Any) -> torch.Tensor:
    """What of ``parameter`` is in this worker's memory."""
    return parameter.to_local() if is_distributed(parameter) else parameter


def _laid_out_as(parameter: Any, shard: torch.Tensor) -> torch.Tensor:
    """The tensor of which ``shard`` is in this worker's memory as ``_shard(parameter)`` is of ``parameter``."""
    if not is_distributed(parameter):
        return shard
    from torch.distributed.tensor import DTensor  # half a second, for those that have it loaded anyway

    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements,
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def is_distributed(parameter: Any) -> bool:
    """Tell if ``parameter`` is a DTensor, of which this process may have a part alone."""
    return hasattr(parameter, "device_mesh")


class Aside:
    """Finished sums of a bucket, kept while lost microbatches are run again into it."""

    def __init__(self, bucket: Bucket, memory: Memory, beside: int) -> None:
        self._bucket = bucket
        self._kept: list[tuple[Span, torch.Tensor]] = []
        self.device_bytes = 0
        """What of the copies is on the bucket's device."""
        for span in bucket.ledger.reduced:
            copy = memory.copy(bucket.flat[span.start : span.stop], beside + self.device_bytes)
            self._kept.append((span, copy))
            if copy.device == bucket.flat.device:
                self.device_bytes += copy.nbytes

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.put_back()

    @property
    def nbytes(self) -> int:
        """What the copies take."""
        return sum(values.nbytes for _, values in self._kept)

    def put_back(self) -> None:
        """Overwrite the REDUCED spans with the finished sums."""
        for span, values in self._kept:
            self._bucket.flat[span.start : span.stop].copy_(values)
