"""The group of one column in one epoch: what layer 2 calls.

    open_group(epoch, ...)  -->  all_reduce / reduce_scatter / all_gather  -->  close()
                                        |
                                        '-- EpochRevoked --> close(), and on the group of the next epoch:
                                              pull(buckets)      what is REDUCED anywhere is final: all get it
                                              (the caller runs lost microbatches again into what is LOCAL)
                                              all_reduce(bucket) / reduce_scatter(bucket)   what is LOCAL, and only that

All members must issue the same operations in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from recover_megatron.collectives.chunks import Chunks, even_chunks, frozen, within
from recover_megatron.collectives.epoch import CollectiveMismatch, Epoch, LedgerError, PeerLost
from recover_megatron.collectives.ledger import Bucket, Held, Ledger, Span, from_digest, merge
from recover_megatron.collectives.progress import Executor, Handle, ProgressThread, Task


class Memo[V]:
    """By key; all are forgotten when they weigh more than ``most``.  For any thread: at worst one is made twice."""

    def __init__(self, most: int, weight: Callable[[V], int]) -> None:
        """``weight``: of a value, in the unit of ``most``."""
        self._most = most
        self._weight = weight
        self._known = dict[Hashable, V]()
        self._total = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """What ``make`` gave for ``key``; it must depend on nothing else."""
        known = self._known.get(key)
        if known is None:
            known = make()
            self._total += self._weight(known)
            if self._total > self._most:
                self._known.clear()
                self._total = self._weight(known)
            self._known[key] = known
        return known


Shards = Sequence[Sequence[Span]]
"""By rank the spans that it owns, ascending."""
MAX_DIGEST = 1 << 20
"""Limit of the numbers that one member's digest may have."""


MOST_SPANS = 1 << 16
"""Limit of what a group remembers of chunks that it has cut."""


@dataclass(frozen=True, eq=False)
class BucketCollective:
    """One collective on one bucket, as it is handed in."""

    what: str
    """Its kind; the same at all members."""
    flat: torch.Tensor
    ledger: Ledger
    chunks: Chunks
    """By owner."""
    to: tuple[int, ...]
    """How many members further those are that get each owner's chunk."""
    reduce: bool = False
    final: Sequence[Span] = ()
    """Spans that are finished as they are."""
    epoch_of: Callable[[int], int] | None = None
    """What to mark a finished span with, by its first element; None: this epoch."""


class Group(ABC):
    """What ring and backend groups have in common.

    ``progress``: carries out what is handed in, perhaps for other groups of the epoch, too; its switch is the group's.
    ``device``: that of every bucket; default: the CPU.
    """

    cut_bytes = 1
    """An all-reduce cuts a bucket at multiples of it."""
    _executor: Executor[Any]

    def __init__(self, epoch: Epoch, progress: ProgressThread, device: torch.device | None) -> None:
        self.epoch = epoch.number
        self.members = tuple(epoch.members)
        self.size = len(self.members)
        self.rank = self.members.index(epoch.me)
        self.everybody = tuple(range(1, self.size))
        """How many members further all the others are."""
        self.device = device or torch.device("cpu")
        self._progress = progress
        self._cancel_token = progress.cancel_token
        self._chunks: Memo[tuple[tuple[Span, ...], ...]] = Memo(MOST_SPANS, lambda chunks: sum(map(len, chunks)))

    # ---- collectives

    def all_reduce(self, bucket: Bucket) -> Handle:
        """Sum the LOCAL spans of ``bucket``, in its own type; afterwards all of it is REDUCED everywhere."""
        cut = max(1, self.cut_bytes // bucket.flat.element_size())
        local = bucket.ledger.local
        chunks = self._chunks.get((local, cut), lambda: frozen(even_chunks(local, self.size, cut)))
        return self._reduce(bucket, chunks, self.everybody)

    def reduce_scatter(self, bucket: Bucket, shards: Shards | None = None, *, shadows: Collection[int] = ()) -> Handle:
        """Sum the LOCAL spans; afterwards each member's shard is REDUCED in its own bucket.

        ``shards``: the spans of each rank, disjoint, together the bucket; default: equal ones, in order.  The rest of
        the bucket keeps the member's own gradient.  ``shadows``: the members so many places further get each member's
        finished shard, too (a ring: and all in between).
        """
        numel, local = bucket.ledger.numel, bucket.ledger.local
        key = numel, local, None if shards is None else frozen(shards)
        chunks = self._chunks.get(key, lambda: frozen(within(local, self._shards(numel, shards))))
        return self._reduce(bucket, chunks, tuple(sorted({hops % self.size for hops in shadows} - {0})))

    def all_gather(self, bucket: Bucket, shards: Shards | None = None, *, missing: bool = False) -> Handle:
        """Give every member's shard to all; what a member holds of its own shard counts as finished.

        ``shards``: as for ``reduce_scatter``.  ``missing``: the members' ledgers are equal (all LOCAL, or after a
        ``pull``), and what is REDUCED is not sent again.

        For parameters after the distributed optimizer's step.  After ``EpochRevoked``: ``pull`` on the next epoch; what
        is LOCAL after that was held by nobody alive.  (A member that may be interrupted before it gets here marks its
        own shard in the ledger itself.)
        """
        all_shards = self._shards(bucket.ledger.numel, shards)
        local = within(bucket.ledger.local, all_shards)
        chunks = local if missing else all_shards
        return self._start(
            BucketCollective("all-gather", bucket.flat, bucket.ledger, chunks, self.everybody, final=local[self.rank])
        )

    def pull(self, buckets: Sequence[Bucket]) -> None:
        """Exchange the ledgers and give every member what is REDUCED at any of them.  Blocks.

        Afterwards the ledgers of all members are equal; each span keeps the epoch in which its sum was finished.  The
        values are copied only where they are LOCAL.  Nothing is ever taken back: if this is interrupted, what arrived
        stays REDUCED.  Raises ``EpochRevoked``, ``LedgerError``.
        """
        ledgers = self._exchange_ledgers([bucket.ledger for bucket in buckets])
        handles = []
        for number, bucket in enumerate(buckets):
            fragments = merge([member[number] for member in ledgers])
            partly = [fragment for fragment in fragments if len(fragment.holders) < self.size]
            chunks, epoch_of = share_sources(partly, self.size), _lookup(partly)
            handles.append(
                self._start(
                    BucketCollective("pull", bucket.flat, bucket.ledger, chunks, self.everybody, epoch_of=epoch_of)
                )
            )
        for handle in handles:
            handle.wait()

    # ---- the end

    @property
    def revoked(self) -> bool:
        return self._cancel_token.cancelled

    @property
    def lost(self) -> PeerLost | None:
        """What ended this group where it was a connection of this member's."""
        return self._cancel_token.lost

    def abort(self, reason: str) -> None:
        """End every operation here, and of the groups with the same thread, with ``EpochRevoked``, now and later.

        From any thread; the neighbours notice too.  When a wait has raised, or ``close`` returned, the buckets are the
        caller's again.
        """
        self._cancel_token.cancel(reason)

    def close(self) -> None:
        """Finish what was handed in (or fail it, if revoked) and give everything back."""
        self._progress.close(self._executor)

    @property
    def scratch_peak(self) -> int:
        """The most bytes of scratch that the group ever had, over all buckets."""
        return self._executor.scratch_peak

    # ---- for the subclasses

    def _serve(self, executor: Executor[Any]) -> None:
        """``executor`` carries out what this group is asked for."""
        self._executor = executor
        self._progress.serve(executor)

    def _hand_in(self, task: Task) -> Handle:
        return self._progress.submit(self._executor, task)

    @abstractmethod
    def _start(self, collective: BucketCollective) -> Handle:
        """Hand it in."""

    def _reduce(self, bucket: Bucket, chunks: Chunks, to: tuple[int, ...]) -> Handle:
        if not bucket.flat.is_floating_point():
            raise ValueError(f"gradients must be floating-point, not {bucket.flat.dtype}")
        alone = self.size == 1
        final = chunks[0] if alone else ()
        return self._start(BucketCollective("reduce", bucket.flat, bucket.ledger, chunks, to, not alone, final))

    def _shards(self, numel: int, shards: Shards | None) -> list[list[Span]]:
        if shards is None:
            bounds = [rank * numel // self.size for rank in range(self.size + 1)]
            return [[Span(a, b)] if a < b else [] for a, b in pairwise(bounds)]
        if len(shards) != self.size:
            raise ValueError(f"{len(shards)} shards for {self.size} members")
        at = 0
        for span in sorted(span for shard in shards for span in shard if len(span)):
            if span.start != at:
                raise ValueError(f"the shards overlap or leave a gap at element {min(at, span.start)}")
            at = span.stop
        if at != numel:
            raise ValueError(f"the shards end at element {at}, the bucket has {numel}")
        return [[span for span in shard if len(span)] for shard in shards]

    def _exchange_ledgers(self, ledgers: Sequence[Ledger]) -> list[list[Ledger]]:
        """Every member's ledgers, by rank."""
        digest = [len(ledgers), *(number for ledger in ledgers for number in ledger.digest())]
        everyone = []
        for rank, numbers in enumerate(self.exchange(digest)):
            read, at = [], 1
            while at < len(numbers):
                ledger, used = from_digest(numbers[at:])
                read.append(ledger)
                at += used
            if len(read) != len(ledgers) or numbers[0] != len(read):
                raise CollectiveMismatch(
                    f"worker {self.members[rank]} presents {len(read)} buckets, this worker {len(ledgers)}"
                )
            everyone.append(read)
        return everyone

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Give every member's list of 64-bit integers to all; by rank.  Blocks."""
        if len(numbers) > MAX_DIGEST:
            raise LedgerError(f"a message of {len(numbers)} numbers is over the limit of {MAX_DIGEST}")
        lengths = [row[0] for row in self._exchange_equal([len(numbers)], 1)]
        if not all(0 <= length <= MAX_DIGEST for length in lengths):
            raise LedgerError(f"a member announces a message of {max(lengths)} numbers, the limit is {MAX_DIGEST}")
        rows = self._exchange_equal(numbers, max(lengths))
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def exchange_doubles(self, numbers: Sequence[float]) -> list[list[float]]:
        """As ``exchange``, for equally many float64 numbers of each member, bit for bit, in one round."""
        bits = torch.tensor(numbers, dtype=torch.float64).view(torch.int64).tolist()
        return torch.tensor(self._exchange_equal(bits, len(bits)), dtype=torch.int64).view(torch.float64).tolist()

    def _exchange_equal(self, numbers: Sequence[int], width: int) -> list[list[int]]:
        table = torch.zeros(self.size, width, dtype=torch.int64)
        table[self.rank, : len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        flat = table.view(-1).to(self.device)
        rows = [[Span(rank * width, (rank + 1) * width)] if width else [] for rank in range(self.size)]
        ledger = Ledger(flat.numel())
        self._start(BucketCollective("exchange", flat, ledger, rows, self.everybody, final=rows[self.rank])).wait()
        received: list[list[int]] = flat.view(self.size, width).tolist()
        return received


def share_sources(fragments: Sequence[Held], size: int) -> list[list[Span]]:
    """By rank, what it supplies: each piece comes from the holder with the least so far, the lowest among equals."""
    load = [0] * size
    chunks: list[list[Span]] = [[] for _ in range(size)]
    for fragment in fragments:
        source = min(fragment.holders, key=lambda rank: (load[rank], rank))
        load[source] += len(fragment)
        chunks[source].append(Span(fragment.start, fragment.stop))
    return chunks


def _lookup(fragments: Sequence[Held]) -> Callable[[int], int]:
    starts = [fragment.start for fragment in fragments]
    return lambda element: fragments[bisect_right(starts, element) - 1].epoch
