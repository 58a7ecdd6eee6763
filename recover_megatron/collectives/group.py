"""Group of one column in one epoch: the collectives on gradient buckets that in-step recovery (layer 2) calls.

    open_group(epoch, ...)  -->  all_reduce / reduce_scatter / all_gather  -->  close()
                                        |
                                        '-- EpochRevoked --> close(), and on the group of the next epoch:
                                              pull(buckets)      send all members the spans that are REDUCED at a member
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
    """Cache of values by key.  When the total weight of its values exceeds ``most``, the cache is emptied.

    Any thread may use the cache.  If two threads request a missing value at the same time, both may create the value.
    """

    def __init__(self, most: int, weight: Callable[[V], int]) -> None:
        """``most``: maximum total weight.  ``weight``: function that returns the weight of a value."""
        self._most = most
        self._weight = weight
        self._known = dict[Hashable, V]()
        self._total = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the cached value for ``key``; if none is cached, cache and return ``make()``.

        The result of ``make`` must depend on ``key`` only.
        """
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
"""Division of a bucket: ``shards[rank]`` is the ascending list of the spans that ``rank`` owns."""
MAX_DIGEST = 1 << 20
"""Maximum number of integers that one member may send in one call of ``Group.exchange``."""


MOST_SPANS = 1 << 16
"""Maximum total number of spans in the chunks that one group caches."""


@dataclass(frozen=True, eq=False)
class BucketCollective:
    """Parameters of a collective on a bucket, as submitted to the progress thread."""

    what: str
    """Kind of the collective, for example "reduce"; equal at all members."""
    flat: torch.Tensor
    ledger: Ledger
    chunks: Chunks
    """Spans that each rank owns, by rank; the collective leaves all other spans of the bucket unchanged."""
    to: tuple[int, ...]
    """Receivers of a chunk: distance d means the member whose rank is d above the owner's rank, modulo the size."""
    reduce: bool = False
    final: Sequence[Span] = ()
    """Spans of this member whose values need no sum; they are marked REDUCED when the collective begins."""
    epoch_of: Callable[[int], int] | None = None
    """Function: index of a finished span's first element -> epoch to record for the span.  None: the group's epoch."""


class Group(ABC):
    """Base class of the groups that sum over a ring (``RingGroup``) or with a library such as NCCL (``NativeGroup``).

    ``progress``: thread that runs the collectives of this group; several groups of the epoch may share it.  Cancelling
    the thread's token cancels the group.  ``device``: device of all buckets; None: the CPU.
    """

    cut_bytes = 1
    """Alignment in bytes: an all-reduce cuts a bucket only at multiples of this number."""
    _executor: Executor[Any]

    def __init__(self, epoch: Epoch, progress: ProgressThread, device: torch.device | None) -> None:
        self.epoch = epoch.number
        self.members = tuple(epoch.members)
        self.size = len(self.members)
        self.rank = self.members.index(epoch.me)
        self.everybody = tuple(range(1, self.size))
        """Distances in ranks from a member to all other members: 1 to ``size`` - 1."""
        self.device = device or torch.device("cpu")
        self._progress = progress
        self._cancel_token = progress.cancel_token
        self._chunks: Memo[tuple[tuple[Span, ...], ...]] = Memo(MOST_SPANS, lambda chunks: sum(map(len, chunks)))

    # ---- collectives

    def all_reduce(self, bucket: Bucket) -> Handle:
        """Sum the LOCAL spans of ``bucket`` over all members, in the bucket's dtype.

        When the handle of a member is finished, the complete bucket is REDUCED at that member.
        """
        cut = max(1, self.cut_bytes // bucket.flat.element_size())
        local = bucket.ledger.local
        chunks = self._chunks.get((local, cut), lambda: frozen(even_chunks(local, self.size, cut)))
        return self._reduce(bucket, chunks, self.everybody)

    def reduce_scatter(self, bucket: Bucket, shards: Shards | None = None, *, shadows: Collection[int] = ()) -> Handle:
        """Sum the LOCAL spans over all members.  Afterwards each member's own shard of the bucket is REDUCED.

        All other elements of the bucket keep the member's own gradient.  ``shards``: for each rank, the spans of its
        shard; the shards are disjoint and together cover the bucket.  None: equal shards, in rank order.

        ``shadows``: additional receivers of a finished shard, as distances in ranks from the shard's owner.  In a ring,
        all members between the owner and a receiver also get the shard.
        """
        numel, local = bucket.ledger.numel, bucket.ledger.local
        key = numel, local, None if shards is None else frozen(shards)
        chunks = self._chunks.get(key, lambda: frozen(within(local, self._shards(numel, shards))))
        return self._reduce(bucket, chunks, tuple(sorted({hops % self.size for hops in shadows} - {0})))

    def all_gather(self, bucket: Bucket, shards: Shards | None = None, *, missing: bool = False) -> Handle:
        """Send every member's shard to all members, for example parameters after the distributed optimizer's step.

        Each member's own shard counts as finished, and is marked REDUCED.  ``shards``: as for ``reduce_scatter``.
        ``missing``: if True, send only LOCAL spans; then the ledgers of all members must be equal (for example after
        ``pull``).

        After ``EpochRevoked`` call ``pull`` in the next epoch.  If a span is still LOCAL after that, no live member has
        the span's values.  A member that may be interrupted before this call must first mark its own shard REDUCED.
        """
        all_shards = self._shards(bucket.ledger.numel, shards)
        local = within(bucket.ledger.local, all_shards)
        chunks = local if missing else all_shards
        return self._start(
            BucketCollective("all-gather", bucket.flat, bucket.ledger, chunks, self.everybody, final=local[self.rank])
        )

    def pull(self, buckets: Sequence[Bucket]) -> None:
        """Exchange the ledgers, then send every span that is REDUCED at some member to all members.  Blocks.

        Only LOCAL spans are overwritten.  Afterwards the ledgers of all members are equal.  A received span is marked
        with the epoch in which its sum was finished.  If the call is interrupted, spans that have arrived stay REDUCED.
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
        """Connection failure that cancelled the group; None if it is live or was cancelled for another reason."""
        return self._cancel_token.lost

    def abort(self, reason: str) -> None:
        """Cancel the token of the group's progress thread, for ``reason``; any thread may call this.

        All present and later operations of this group, and of all groups that share the thread, raise ``EpochRevoked``.
        The operations of the neighbours fail, too.  The caller may use a bucket again when ``Handle.wait`` has raised,
        or ``close`` has returned.
        """
        self._cancel_token.cancel(reason)

    def close(self) -> None:
        """Wait for the submitted collectives (they fail if the epoch is revoked), then release all resources."""
        self._progress.close(self._executor)

    @property
    def scratch_peak(self) -> int:
        """Peak size in bytes of the group's scratch memory, over all buckets."""
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
        """Submit the collective to the progress thread."""

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
        """Send this member's ledgers to all members; return the ledgers of each member, by rank."""
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
        """Send this member's list of 64-bit integers to all members; return the lists of all members by rank.  Blocks.

        The lists may differ in length.
        """
        if len(numbers) > MAX_DIGEST:
            raise LedgerError(f"this worker cannot send {len(numbers)} numbers at a time: the limit is {MAX_DIGEST}")
        lengths = [row[0] for row in self._exchange_equal([len(numbers)], 1)]
        if not all(0 <= length <= MAX_DIGEST for length in lengths):
            raise LedgerError(f"a member announced an invalid message: {max(lengths)} numbers, limit {MAX_DIGEST}")
        rows = self._exchange_equal(numbers, max(lengths))
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def exchange_doubles(self, numbers: Sequence[float]) -> list[list[float]]:
        """Like ``exchange`` for float64 numbers, which arrive bit for bit; all members must send equally many."""
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
    """Choose a sender for each of ``fragments``; return for each rank the spans that the rank sends.

    The sender is the holder that has the fewest elements to send so far; on a tie, the holder with the lowest rank.
    """
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
