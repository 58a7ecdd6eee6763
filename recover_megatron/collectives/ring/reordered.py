"""A group whose ring goes round its members in another order than the one that its caller counts them in.

The caller's ranks, shards and rows stay those of its own order.  The sum of a shard then travels all the way round,
since who follows its owner in the caller's order need not follow it in the ring: everybody gets what it would have
been given, and more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from recover_megatron.collectives.bucket import Bucket
from recover_megatron.collectives.errors import PeerLost
from recover_megatron.collectives.group import Group, Shards
from recover_megatron.collectives.ring.progress import Handle


class Reordered:
    """``group``: in the order of the ring; ``members``: the same in the caller's.  Otherwise as ``Group``."""

    def __init__(self, group: Group, members: Sequence[int]) -> None:
        self._group = group
        self._place = [list(members).index(member) for member in group.members]
        """By rank in the ring: that in the caller's order."""
        self.epoch = group.epoch
        self.members = tuple(members)
        self.size = group.size
        self.rank = self._place[group.rank]
        self.device = group.device

    def all_reduce(self, bucket: Bucket) -> Handle:
        return self._group.all_reduce(bucket)

    def reduce_scatter(self, bucket: Bucket, shards: Shards | None = None, *, shadows: Collection[int] = ()) -> Handle:
        every = self._group.everybody if shadows else ()
        return self._group.reduce_scatter(bucket, self._turned(shards), shadows=every)

    def all_gather(self, bucket: Bucket, shards: Shards | None = None, *, missing: bool = False) -> Handle:
        return self._group.all_gather(bucket, self._turned(shards), missing=missing)

    def pull(self, buckets: Sequence[Bucket]) -> None:
        self._group.pull(buckets)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._rows(self._group.exchange(numbers))

    def exchange_doubles(self, numbers: Sequence[float]) -> list[list[float]]:
        return self._rows(self._group.exchange_doubles(numbers))

    @property
    def revoked(self) -> bool:
        return self._group.revoked

    @property
    def lost(self) -> PeerLost | None:
        return self._group.lost

    def abort(self, reason: str) -> None:
        self._group.abort(reason)

    def close(self) -> None:
        self._group.close()

    def _turned(self, shards: Shards | None) -> Shards | None:
        if shards is None:
            raise ValueError("a group in another order needs to be told the shards")
        return [shards[place] for place in self._place]

    def _rows[T](self, rows: list[T]) -> list[T]:
        return [rows[self._place.index(rank)] for rank in range(self.size)]
