"""Plain data parallelism: all workers of the run are one column, each holds the whole model.

    while column.committed < iteration:
        try:
            if column.over:                          at the start, and after every death
                column.join(status)                  waits for all live workers; the statuses of all are then known
            else:
                group = column.group([bucket])       what was REDUCED anywhere is final: all have it now
                ...                                  run what the statuses leave to this worker
                group.all_reduce(bucket).wait()
                column.agree(iteration)
        except EpochRevoked:
            pass

The workers meet by the addresses that they join with, so no store is needed: a node may go with all that it hosts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from recover_megatron.collectives.bucket import Bucket
from recover_megatron.collectives.epoch import SessionEpoch
from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import open_group, open_ring_listener
from recover_megatron.collectives.rendezvous import Known
from recover_megatron.collectives.ring.group import Tuning
from recover_megatron.collectives.transport.listener import RingListener
from recover_megatron.membership.auth import find_secret
from recover_megatron.membership.errors import EXIT_LOST_MAJORITY, CoordinatorLost
from recover_megatron.membership.records import Json, Plan
from recover_megatron.membership.session import Session
from recover_megatron.membership.worker import HOST_VARIABLE, connect

LOOPBACK = "127.0.0.1"
MOST = 10
"""So many epochs of the same members with nothing done in between end the run."""
_PAUSE, _LONGEST_PAUSE = 0.1, 3.0


class ElasticDataParallel:
    """This worker's place in it.  The coordinators must have the default planner, as those of recover-run do."""

    def __init__(
        self, session: Session, me: int, secret: bytes, *, host: str = LOOPBACK, tuning: Tuning | None = None
    ) -> None:
        """``me``: this worker's id.  ``secret``: the job's, for the ring.  ``host``: as for ``open_group``."""
        self.me = me
        self.session = session
        self._secret = secret
        self._host = host
        self._tuning = tuning
        self._plan: Plan | None = None
        self._ring_listener: RingListener | None = None
        self._group: Group | None = None
        self._failed = False
        self._lost: PeerLost | None = None
        """What this worker's connections failed with in the last epoch."""
        self._last: Json = None
        self._tries = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ElasticDataParallel:
        """That of a worker of recover-run; starts its session.  Raises as ``membership.worker.connect`` does."""
        key = find_secret(environ).key("column")
        session = connect(environ=environ)
        return cls(session, int(environ["RANK"]), key, host=environ.get(HOST_VARIABLE, LOOPBACK))

    @property
    def over(self) -> bool:
        """Whether a new epoch must be joined: there was none yet, or it was revoked, or a neighbour was lost."""
        lost = self._failed or (self._group is not None and self._group.revoked)
        return self._plan is None or self.session.revoked or lost

    @property
    def committed(self) -> int:
        """The last iteration known to be committed."""
        return self.session.committed

    @property
    def members(self) -> list[int]:
        """Worker ids of the epoch, ascending; empty before the first."""
        return sorted(self._plan.members) if self._plan else []

    @property
    def statuses(self) -> dict[int, Json]:
        """What each member joined the epoch with; empty before the first."""
        return {worker: told["status"] for worker, told in self._told().items()}

    def join(self, status: Json) -> None:
        """Leave the old epoch's group, and join the next epoch: waits for all live workers.

        Afterwards ``committed`` may have reached an iteration that this worker reported: then its step must be applied.
        Raises as ``Session.join`` does, ``CoordinatorLost``, too, where the run does not get any further: two live
        workers cannot talk to each other.
        """
        reason = self._complain()
        self._close()
        if self._tries:
            time.sleep(min(_PAUSE * 2**self._tries, _LONGEST_PAUSE))  # whatever it is, it may pass
        self._ring_listener = open_ring_listener(self._host, self._tuning)
        self._plan = self.session.join({"ring_listener": self._ring_listener.address, "status": status}, reason)
        self._failed = False
        now = self._plan.committed, self.members, self.statuses
        self._tries = self._tries + 1 if now == self._last else 0
        self._last = now
        if self._tries >= MOST:
            why = f"{MOST + 1} epochs in a row brought nothing, and nobody was lost; the last one ended: {reason}"
            self.session.give_up(EXIT_LOST_MAJORITY, why)
            raise CoordinatorLost(why)

    def _complain(self) -> str:
        """Say with whom this worker's connections have failed, if they have; the reason for another epoch."""
        lost = self._lost if self._group is None else self._group.lost
        self._lost = None
        if lost is None:
            return ""
        reason = f"{lost} (with worker {lost.peer})" if lost.peer is not None else str(lost)
        self.session.ask(reason, lost.peer)
        return reason

    def group(self, buckets: Sequence[Bucket]) -> Group:
        """The epoch's group.  At its first use in the epoch it is opened, and ``buckets`` are pulled.

        Every member must come with the same buckets at the same iteration.  Raises ``EpochRevoked``.
        """
        if self._group is None:
            assert self._plan is not None, "join first"
            ring_listeners = [told["ring_listener"] for _, told in sorted(self._told().items())]
            ring = f"ring/column/{self._plan.epoch}"
            known = Known({f"{ring}/{rank}": ring_listener for rank, ring_listener in enumerate(ring_listeners)})
            try:
                self._group = open_group(
                    SessionEpoch(self.session, self._plan, self.me), known, name="column", secret=self._secret,
                    host=self._host, tuning=self._tuning, ring_listener=self._ring_listener,
                )  # fmt: skip
                self._group.pull(buckets)
            except EpochRevoked as over:
                self._failed = True
                if self._group is None and isinstance(lost := over.__cause__, PeerLost):
                    peer = None if lost.peer is None else self.members[lost.peer]
                    self._lost = PeerLost(str(lost), peer, road=lost.road)
                raise
        return self._group

    def agree(self, iteration: int) -> None:
        """Report that all is REDUCED here, and wait until all members have: as ``Session.agree``."""
        self.session.agree(iteration)

    def leave(self) -> None:
        """The run is finished for this worker."""
        self._close()
        self.session.leave()

    def _told(self) -> dict[int, Json]:
        return {int(worker): told for worker, told in self._plan.data["statuses"].items()} if self._plan else {}

    def _close(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._ring_listener is not None:
            self._ring_listener.close()
        self._group = self._ring_listener = None
