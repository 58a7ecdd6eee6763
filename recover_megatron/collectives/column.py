"""Data parallelism: all workers of the run are one column, each holds the whole model.

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

Hybrid sharding, ``shards`` above 1: so many consecutive workers hold the model between them (``ShardGroup``), and a
column is those with the same shard.

    shards=2       column 0   column 1
    shard group 0  worker 0   worker 1        inside: torch's own FSDP, with any process group
    shard group 1  worker 2   worker 3        a column, the same shard of every whole shard group: a ring's members
    shard group 2  worker 4   -- dead --      worker 4 is in no column: it ends

    whole --(a mate is lost: the session's thread sees it in the revoke)--> the process ends with EXIT_FENCED

A worker whose mate is gone has nothing to add, and may be stuck in a collective that nobody will ever answer: it ends,
and the run goes on with the whole shard groups.  The training loop must see to it that the workers of a shard group
join, or go on, together: ``opened`` is what they ask each other for.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from recover_megatron.collectives.epoch import EpochRevoked, Known, PeerLost, SessionEpoch
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import open_group, open_ring_listener
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.collectives.transport.handshake import RingListener
from recover_megatron.errors import refuse
from recover_megatron.logger import get_logger
from recover_megatron.membership.io.session import Session, connect, is_newcomer, worker_id
from recover_megatron.membership.records import EXIT_FENCED, EXIT_LOST_MAJORITY, CoordinatorLost, Json, Plan
from recover_megatron.membership.wire import find_secret
from recover_megatron.variables import HOST_VARIABLE, REPLACED_VARIABLE

log = get_logger(__name__)

NEWS_SECONDS = 30.0
"""How long to wait for the news of a death after the shard group's communication failed."""


def whole_shard_groups(workers: Collection[int], shards: int) -> list[int]:
    """The numbers of the shard groups of which all workers are among ``workers``, ascending."""
    there = Counter(worker // shards for worker in set(workers))
    return sorted(number for number, count in there.items() if count == shards)


def why_no_shard_groups(shards: int, environ: Mapping[str, str]) -> str:
    """Return why the workers of this launch cannot be shard groups of ``shards``; empty: they can."""
    workers = int(environ.get("WORLD_SIZE", shards))
    if shards > 1 and workers % shards:
        return (
            f"{workers} workers cannot hold whole shard groups of {shards}: start a multiple of that (recover-run "
            "--nproc-per-node, --nnodes) or change the number of shards"
        )
    if shards > 1 and (is_newcomer(environ) or REPLACED_VARIABLE in environ):
        return (
            f"in a run with shard groups of {shards} workers none can be started in place of a lost one, and none can "
            "join: leave out --max-restarts, --recover-spares and --join"
        )
    return ""


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


LOOPBACK = "127.0.0.1"
MOST = 10
"""So many epochs of the same members with nothing done in between end the run."""
NO_DRAIN = "workers of this run's loop cannot leave in order; if their launcher is stopped the others go on"
_PAUSE, _LONGEST_PAUSE = 0.1, 3.0


class Column:
    """This worker's place in the run.  The coordinators must have the default planner, as those of recover-run do."""

    def __init__(
        self,
        session: Session,
        me: int,
        secret: bytes,
        *,
        shards: int = 1,
        host: str = LOOPBACK,
        device: torch.device | None = None,
        timeout: float = 60.0,
    ) -> None:
        """``me``: this worker's id.  ``secret``: the job's, for the ring.  ``host``: as for ``open_group``.

        ``shards``: workers of a shard group.  ``device``: that of the buckets; those of a GPU go through host memory.
        ``timeout``: seconds that members wait for each other with a new epoch's group.
        """
        self.me = me
        self.session = session
        self.shards = shards
        self.shard_group = ShardGroup(session, me, shards)
        self._secret = secret
        self._host = host
        self._device = device or torch.device("cpu")
        self._timeout = timeout
        self._plan: Plan | None = None
        self._ring_listener: RingListener | None = None
        self._group: Group | None = None
        self._failed = False
        self._lost: PeerLost | None = None
        """What this worker's connections failed with in the last epoch."""
        self._reason = ""
        """Why this worker asks for a new epoch though nothing has failed."""
        self._last: Json = None
        self._tries = 0

    @classmethod
    def from_environment(cls, *, shards: int = 1, device: torch.device | None = None, timeout: float = 60.0) -> Column:
        """Make the column of a worker of recover-run, and start its session.  Raises as ``session.connect`` does.

        Where the workers cannot be shard groups the process ends with exit code 2 and a line.  So call it before
        ``init_process_group``: a shard group that is not complete would wait there for its missing workers.
        """
        if why := why_no_shard_groups(shards, os.environ):
            refuse(os.path.basename(sys.argv[0]), [why])
        key, host = find_secret(os.environ).key("column"), os.environ.get(HOST_VARIABLE, LOOPBACK)
        return cls(connect(), worker_id(), key, shards=shards, host=host, device=device, timeout=timeout)

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
    def begins_after(self) -> int:
        """The last iteration that was committed when the epoch began: what all members of it know."""
        return self._plan.committed if self._plan else 0

    @property
    def shard_groups(self) -> list[int]:
        """The numbers of the epoch's whole shard groups, ascending; those of the members where ``shards`` is 1."""
        return whole_shard_groups(self.members, self.shards)

    @property
    def column(self) -> list[int]:
        """The members that hold the same shard as this one, of each whole shard group, ascending: who sums."""
        return [number * self.shards + self.shard_group.shard for number in self.shard_groups]

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
        reason, self._reason = self._complain() or self._reason, ""
        self._close()
        if self._tries:
            time.sleep(min(_PAUSE * 2**self._tries, _LONGEST_PAUSE))  # whatever it is, it may pass
        self._ring_listener = open_ring_listener(self._host)
        self._plan = self.session.join({"ring_listener": self._ring_listener.address, "status": status}, reason)
        if self._plan.data.get("drain") and self.me == min(self._plan.members):
            for node in self._plan.data["drain"]:
                self.session.answer_drain(node, NO_DRAIN)
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
        lost = self._lost or (self._group.lost if self._group is not None else None)
        self._lost = None
        if lost is None:
            return ""
        reason = f"{lost} (with worker {lost.peer})" if lost.peer is not None else str(lost)
        self.session.ask(reason, lost.peer)
        return reason

    def fail(self, lost: PeerLost) -> None:
        """A connection of the caller's to a member broke (``lost.peer``: the worker): a new epoch must be joined."""
        self._failed, self._lost = True, lost

    def renew(self, reason: str) -> None:
        """A new epoch must be joined, for ``reason``, though nothing has failed: it brings new statuses and buckets."""
        self._failed, self._reason = True, reason

    def opened(self, buckets: Sequence[Bucket]) -> bool:
        """Whether ``group`` can be used: False where a new epoch must be joined first.  Raises nothing of the run's."""
        try:
            return not self.over and bool(self.group(buckets))
        except EpochRevoked:
            return False

    def group(self, buckets: Sequence[Bucket]) -> Group:
        """The epoch's group of this worker's column.

        At its first use in the epoch it is opened, and ``buckets`` are pulled.  Every member
        must come with the same buckets at the same iteration.  Raises ``EpochRevoked``.
        """
        if self._group is None:
            assert self._plan is not None, "join first"
            column, told = self.column, self._told()
            ring = f"ring/column/{self._plan.epoch}"
            known = Known({f"{ring}/{rank}": told[member]["ring_listener"] for rank, member in enumerate(column)})
            try:
                self._group = open_group(
                    SessionEpoch(self.session, self._plan, self.me, column), known, name="column", secret=self._secret,
                    host=self._host, ring_listener=self._ring_listener, device=self._device,
                    transport_kind="tcp", timeout=self._timeout,
                )  # fmt: skip
                self._group.pull(buckets)
            except EpochRevoked as over:
                self._failed = True
                if self._group is None and isinstance(lost := over.__cause__, PeerLost):
                    self._lost = PeerLost(str(lost), lost.peer, road=lost.road)
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
