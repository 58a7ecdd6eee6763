"""The model's parameters after a sharded update: everybody gets what the primaries have made.

updated --gather--> each part from its primary, over the ring --all have agreed--> complete
   ^                        |
   '---- epoch revoked -----'     pull: what arrived anywhere is final; the rest comes from who is primary now,
                                  the shadow of a lost owner, which has made the same update
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recover_megatron.collectives.bucket import Bucket
from recover_megatron.instep.epoch_groups import EpochGroups
from recover_megatron.instep.gradients import Column, alive
from recover_megatron.instep.shards import Shards


class Parameters:
    """The parameters' buckets, in the order of those of the gradients; ``parts``: (column, flat tensor) of each."""

    def __init__(self, parts: Sequence[tuple[Column, torch.Tensor]], shards: Shards) -> None:
        self._parts = [(column, Bucket(tensor)) for column, tensor in parts]
        self._shards = shards

    def begin(self) -> None:
        """An update begins: nothing has been gathered."""
        for _, bucket in self._parts:
            bucket.ledger.clear()

    def gather(self, epoch_groups: EpochGroups, live: frozenset[int], *, again: bool) -> None:
        """Give every part to all; afterwards the parameters are complete.  Raises ``EpochRevoked``.

        ``again``: somebody may hold parts that an earlier epoch brought; the same at all members.
        """
        if again:
            for column in dict.fromkeys(column for column, _ in self._parts):
                epoch_groups.ring(alive(column, live)).pull([bucket for its, bucket in self._parts if its == column])
        handles = []
        for column, bucket in self._parts:
            spans, _ = self._shards.cut(column, bucket.ledger.numel)
            handles.append(epoch_groups.ring(alive(column, live)).all_gather(bucket, spans, missing=True))
        for handle in handles:
            handle.wait()
