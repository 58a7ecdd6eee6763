"""Group of one column in one epoch: the interface to layer 2.

    open_group(epoch, ...)  -->  all_reduce / reduce_scatter / all_gather  -->  close()
                                        |
                                        '-- EpochRevoked --> close(), and on the group of the next epoch:
                                              pull(buckets)      spans REDUCED anywhere are final: all members get them
                                              (the caller runs lost microbatches again into the LOCAL spans)
                                              all_reduce(bucket) / reduce_scatter(bucket)   sum only the LOCAL spans

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
    """Cache by key; it is cleared when its weight exceeds ``most``.  For any thread: at worst a value is made twice."""

    def __init__(self, most: int, weight: Callable[[V], int]) -> None:
        """``weight``: weight of a value, in the unit of ``most``."""
        self._most = most
        self._weight = weight
        self._known = dict[Hashable, V]()
        self._total = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of ``make`` for ``key``; it must depend on nothing else."""
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
"""Spans that each rank owns, ascending, by rank."""
MAX_DIGEST = 1 << 20
"""Limit of the length of one member's digest, in numbers."""


MOST_SPANS = 1 << 16
"""Limit of the chunks that a group caches, in spans."""


@dataclass(frozen=True, eq=False)
class BucketCollective:
    """Collective on a bucket, as submitted."""

    what: str
    """Kind of the collective; the same at all members."""
    flat: torch.Tensor
    ledger: Ledger
    chunks: Chunks
    """Spans of the bucket by owner."""
    to: tuple[int, ...]
    """Distances, in ranks, from each owner to the members that get its chunk."""
    reduce: bool = False
    final: Sequence[Span] = ()
    """Spans that are already finished."""
    epoch_of: Callable[[int], int] | None = None
    """Epoch of a finished span, by its first element; None: this epoch."""


class Group(ABC):
    """Common base of ring groups and backend groups.

    ``progress``: thread that carries out the collectives, perhaps also of other groups of the epoch; its cancel token
    is the group's.  ``device``: device of every bucket; default: the CPU.
    """

    cut_bytes = 1
    """Alignment in bytes: an all-reduce cuts a bucket at multiples of it."""
    _executor: Executor[Any]

    def __init__(self, epoch: Epoch, progress: ProgressThread, device: torch.device | None) -> None:
        self.epoch = epoch.number
        self.members = tuple(epoch.members)
        self.size = len(self.members)
        self.rank = self.members.index(epoch.me)
        self.everybody = tuple(range(1, self.size))
        """Distances, in ranks, to all other members."""
        self.device = device or torch.device("cpu")
        self._progress = progress
        self._cancel_token = progress.cancel_token
        self._chunks: Memo[tuple[tuple[Span, ...], ...]] = Memo(MOST_SPANS, lambda chunks: sum(map(len, chunks)))

    # ---- collectives

    def all_reduce(self, bucket: Bucket) -> Handle:
        """Sum the LOCAL spans of ``bucket``, in its dtype; afterwards all of it is REDUCED at every member."""
        cut = max(1, self.cut_bytes // bucket.flat.element_size())
        local = bucket.ledger.local
        chunks = self._chunks.get((local, cut), lambda: frozen(even_chunks(local, self.size, cut)))
        return self._reduce(bucket, chunks, self.everybody)

    def reduce_scatter(self, bucket: Bucket, shards: Shards | None = None, *, shadows: Collection[int] = ()) -> Handle:
        """Sum the LOCAL spans; afterwards each member's shard is REDUCED in its own bucket.

        ``shards``: spans of each rank, disjoint, together the complete bucket; default: equal shards, in order.  The
        rest of the bucket keeps the member's own gradient.  ``shadows``: distances in ranks; the members at these
        distances also get each member's finished shard (in a ring, so do all members in between).
        """
        numel, local = bucket.ledger.numel, bucket.ledger.local
        key = numel, local, None if shards is None else frozen(shards)
        chunks = self._chunks.get(key, lambda: frozen(within(local, self._shards(numel, shards))))
        return self._reduce(bucket, chunks, tuple(sorted({hops % self.size for hops in shadows} - {0})))

    def all_gather(self, bucket: Bucket, shards: Shards | None = None, *, missing: bool = False) -> Handle:
        """Send every member's shard to all members; a member's copy of its own shard counts as finished.

        ``shards``: as for ``reduce_scatter``.  ``missing``: the members' ledgers are equal (all LOCAL, or after a
        ``pull``), and REDUCED spans are not sent again.

        For parameters after the distributed optimizer's step.  After ``EpochRevoked``: call ``pull`` in the next epoch;
        no live member holds the spans that are LOCAL after that.  (A member that may be interrupted before this call
        marks its own shard in the ledger itself.)
        """
        all_shards = self._shards(bucket.ledger.numel, shards)
        local = within(bucket.ledger.local, all_shards)
        chunks = local if missing else all_shards
        return self._start(
            BucketCollective("all-gather", bucket.flat, bucket.ledger, chunks, self.everybody, final=local[self.rank])
        )

    def pull(self, buckets: Sequence[Bucket]) -> None:
        """Exchange the ledgers and send every member all spans that are REDUCED at any member.  Blocks.

        Afterwards the ledgers of all members are equal; each span keeps the epoch in which its sum was finished.  Only
        LOCAL spans are overwritten.  Nothing is ever undone: if this is interrupted, spans that arrived stay REDUCED.
        Raises ``EpochRevoked``, ``LedgerError``.
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
        """Failed connection of this member that ended this group, if any."""
        return self._cancel_token.lost

    def abort(self, reason: str) -> None:
        """End every present and later operation here, and of the groups with the same thread, with ``EpochRevoked``.

        From any thread; the neighbours notice too.  When a wait has raised, or ``close`` has returned, the buckets
        belong to the caller again.
        """
        self._cancel_token.cancel(reason)

    def close(self) -> None:
        """Finish the submitted collectives (or fail them, if revoked) and release all resources."""
        self._progress.close(self._executor)

    @property
    def scratch_peak(self) -> int:
        """Peak of the group's scratch, over all buckets, in bytes."""
        return self._executor.scratch_peak

    # ---- for the subclasses

    def _serve(self, executor: Executor[Any]) -> None:
        """Register ``executor``, which carries out this group's collectives."""
        self._executor = executor
        self._progress.serve(executor)

    def _hand_in(self, task: Task) -> Handle:
        return self._progress.submit(self._executor, task)

    @abstractmethod
    def _start(self, collective: BucketCollective) -> Handle:
        """Submit the collective."""

    def _reduce(self, bucket: Bucket, chunks: Chunks, to: tuple[int, ...]) -> Handle:
        if not bucket.flat.is_floating_point():
            raise ValueError(f"gradients must have a floating-point dtype, not {bucket.flat.dtype}")
        alone = self.size == 1
        final = chunks[0] if alone else ()
        return self._start(BucketCollective("reduce", bucket.flat, bucket.ledger, chunks, to, not alone, final))

    def _shards(self, numel: int, shards: Shards | None) -> list[list[Span]]:
        if shards is None:
            bounds = [rank * numel // self.size for rank in range(self.size + 1)]
            return [[Span(a, b)] if a < b else [] for a, b in pairwise(bounds)]
        if len(shards) != self.size:
            raise ValueError(f"{len(shards)} shards were given for {self.size} members")
        at = 0
        for span in sorted(span for shard in shards for span in shard if len(span)):
            if span.start != at:
                raise ValueError(f"the shards overlap or leave a gap at element {min(at, span.start)}")
            at = span.stop
        if at != numel:
            raise ValueError(f"the shards end at element {at}, but the bucket has {numel} elements")
        return [[span for span in shard if len(span)] for shard in shards]

    def _exchange_ledgers(self, ledgers: Sequence[Ledger]) -> list[list[Ledger]]:
        """Return every member's ledgers, by rank."""
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
                    f"worker {self.members[rank]} sent ledgers of {len(read)} buckets, this worker has {len(ledgers)}"
                )
            everyone.append(read)
        return everyone

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Send every member's list of 64-bit integers to all; return the lists by rank.  Blocks."""
        if len(numbers) > MAX_DIGEST:
            raise LedgerError(f"a message of {len(numbers)} numbers exceeds the limit of {MAX_DIGEST}")
        lengths = [row[0] for row in self._exchange_equal([len(numbers)], 1)]
        if not all(0 <= length <= MAX_DIGEST for length in lengths):
            raise LedgerError(f"a member announced a message of {max(lengths)} numbers; the limit is {MAX_DIGEST}")
        rows = self._exchange_equal(numbers, max(lengths))
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def exchange_doubles(self, numbers: Sequence[float]) -> list[list[float]]:
        """Exchange equally many float64 numbers of each member, bit for bit, in one round; else as ``exchange``."""
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
    """Return the spans that each rank sends: a piece comes from its least loaded holder, the lowest rank on a tie."""
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
