"""Hybrid sharding: a replica is a shard group, so many consecutive workers that hold the model between them.

    shards=2       column 0   column 1
    shard group 0  worker 0   worker 1        inside: torch's own FSDP, with any process group
    shard group 1  worker 2   worker 3        a column, the same shard of every whole shard group: a ring's members
    shard group 2  worker 4   -- dead --      worker 4 is in no column: it ends

    whole --(a mate is lost: the session's thread sees it in the revoke)--> the process ends with EXIT_FENCED

A worker whose mate is gone has nothing to add, and may be stuck in a collective that nobody will ever answer.  So it
ends, whatever its main thread does: that closes its connections, and the run goes on with the whole shard groups.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from recover_megatron.logger import get_logger
from recover_megatron.membership.errors import EXIT_FENCED
from recover_megatron.membership.session import Session

log = get_logger(__name__)

NEWS_SECONDS = 30.0
"""How long to wait for the news of a death after the shard group's communication failed."""


def whole_shard_groups(workers: Collection[int], shards: int) -> list[int]:
    """The numbers of the shard groups of which all workers are among ``workers``, ascending."""
    return [
        number
        for number in sorted({worker // shards for worker in workers})
        if all(number * shards + shard in workers for shard in range(shards))
    ]


class ShardGroup:
    """This worker's shard group: ``number``, its own ``shard`` in it, and its ``mates``."""

    def __init__(self, session: Session, me: int, shards: int, end: Callable[[int], object] = os._exit) -> None:
        """``end``: ends the process with an exit code; replaced in tests."""
        if shards < 1:
            raise ValueError(f"a shard group has at least one worker, not {shards}")
        self.number, self.shard = divmod(me, shards)
        self.mates = frozenset(range(self.number * shards, (self.number + 1) * shards)) - {me}
        self._session = session
        self._end = end
        session.on_revoke(self._revoked)

    def end_if_broken(self) -> None:
        """After the shard group's communication has failed: end the process if a mate is lost, else return.

        A failure may be noticed here before the news of the death; they are waited for.
        """
        self._session.wait_lost(self.mates, NEWS_SECONDS)
        self._revoked(self._session.epoch, "")

    def _revoked(self, epoch: int, reason: str) -> None:
        lost = self.mates - self._session.opened_members - self._session.left
        if epoch and lost:
            names = ", ".join(map(str, sorted(lost)))
            log.info(f"shard group {self.number} is broken (lost: worker {names}): the others go on without it")
            self._end(EXIT_FENCED)
