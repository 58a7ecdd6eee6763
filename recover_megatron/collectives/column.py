"""Data parallelism without Megatron: all workers of the run form one column, and each holds the complete model.

    while column.committed < iteration:
        try:
            if column.over:                          at the start, and after every death
                column.join(status)                  wait for all live workers; afterwards the statuses of all are known
            else:
                group = column.group([bucket])       now all members have every span that was REDUCED at any member
                ...                                  run the work that the statuses assign to this worker
                group.all_reduce(bucket).wait()
                column.agree(iteration)
        except EpochRevoked:
            pass

Workers connect by the addresses in their join messages.  So no key-value store is needed, and any node may be lost.

Hybrid sharding: if ``shards`` is above 1, ``shards`` consecutive workers share one copy of the model (``ShardGroup``),
and a column consists of the workers with the same shard.

    shards=2       column 0   column 1
    shard group 0  worker 0   worker 1        in a shard group: torch's own FSDP, with any process group
    shard group 1  worker 2   worker 3        in a column: one worker of each complete shard group; they form a ring
    shard group 2  worker 4   -- dead --      worker 4 is in no column: it exits

    complete --(a peer is lost: the session's thread sees it in the revoke)--> the process exits with EXIT_FENCED

A worker that has lost a peer of its shard group cannot contribute, and may hang in a collective that never completes.
So it exits, and the run continues with the complete shard groups.  All workers of a shard group must join a new epoch
together, or continue together: for this the training loop compares their results of ``opened``.
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
"""Time limit in seconds for the report of a peer's death after the shard group's communication has failed."""


def complete_shard_groups(workers: Collection[int], shards: int) -> list[int]:
    """Return the numbers of the shard groups whose workers are all in ``workers``, ascending."""
    there = Counter(worker // shards for worker in set(workers))
    return sorted(number for number, count in there.items() if count == shards)


def shard_group_problem(shards: int, environ: Mapping[str, str]) -> str:
    """Return why the workers of this launch cannot form shard groups of ``shards`` workers; "" if they can."""
    workers = int(environ.get("WORLD_SIZE", shards))
    if shards > 1 and workers % shards:
        return (
            f"{workers} workers cannot form complete shard groups of {shards}: start a multiple of that number "
            "(recover-run --nproc-per-node, --nnodes) or change the number of shards"
        )
    if shards > 1 and (is_newcomer(environ) or REPLACED_VARIABLE in environ):
        return (
            f"a run with shard groups of {shards} workers cannot replace lost workers or accept new ones: leave out "
            "--max-restarts, --recover-spares and --join"
        )
    return ""


class ShardGroup:
    """Shard group of this worker: the group's ``number``, this worker's ``shard``, and the other workers ``mates``."""

    def __init__(self, session: Session, me: int, shards: int, end: Callable[[int], object] = os._exit) -> None:
        """``end``: terminates the process with an exit code; replaced in tests."""
        if shards < 1:
            raise ValueError(f"a shard group has at least one worker, not {shards}")
        self.number, self.shard = divmod(me, shards)
        self.mates = frozenset(range(self.number * shards, (self.number + 1) * shards)) - {me}
        self._session = session
        self._end = end
        session.on_revoke(self._revoked)

    def end_if_broken(self) -> None:
        """Exit if a worker of the shard group is lost, else return; called when the group's communication has failed.

        The failure may come before the report of the death: this method waits up to ``NEWS_SECONDS`` for the report.
        """
        self._session.wait_lost(self.mates, NEWS_SECONDS)
        self._revoked(self._session.epoch, "")

    def _revoked(self, epoch: int, reason: str) -> None:
        lost = self.mates - self._session.opened_members - self._session.left
        if epoch and lost:
            names = ", ".join(map(str, sorted(lost)))
            log.info(f"shard group {self.number} has lost worker {names}: this worker exits, the run continues")
            self._end(EXIT_FENCED)


LOOPBACK = "127.0.0.1"
MOST = 10
"""Number of consecutive epochs with the same members and no progress after which the run ends."""
NO_DRAIN = "this training loop does not support a drain; stop the node's launcher: the other workers continue"
_PAUSE, _LONGEST_PAUSE = 0.1, 3.0


class Column:
    """Column of this worker.  The coordinators must use the default planner, as the coordinators of recover-run do."""

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
        """``me``: this worker's id.  ``secret``: the job's secret, for the ring.  ``host``: as for ``open_group``.

        ``shards``: workers per shard group.  ``device``: device of the buckets; GPU buckets go through host memory.
        ``timeout``: seconds that members wait for each other when they open a new epoch's group.
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
        """Connection failure of this worker in the last epoch, not reported yet; None if there was none."""
        self._reason = ""
        """Reason for which ``renew`` requires a new epoch; "" if there is none."""
        self._last: Json = None
        self._tries = 0

    @classmethod
    def from_environment(cls, *, shards: int = 1, device: torch.device | None = None, timeout: float = 60.0) -> Column:
        """Create the column of a worker that recover-run started, and the worker's session.

        If the workers cannot form shard groups, the process prints a line and exits with code 2.  So call this before
        ``init_process_group``, where an incomplete shard group would wait for its missing workers.  Raises as
        ``session.connect`` does.
        """
        if why := shard_group_problem(shards, os.environ):
            refuse(os.path.basename(sys.argv[0]), [why])
        key, host = find_secret(os.environ).key("column"), os.environ.get(HOST_VARIABLE, LOOPBACK)
        return cls(connect(), worker_id(), key, shards=shards, host=host, device=device, timeout=timeout)

    @property
    def over(self) -> bool:
        """True if this worker must join a new epoch: it has none, or the epoch was revoked, or a connection failed."""
        lost = self._failed or (self._group is not None and self._group.revoked)
        return self._plan is None or self.session.revoked or lost

    @property
    def committed(self) -> int:
        """Last iteration that this worker knows to be committed."""
        return self.session.committed

    @property
    def members(self) -> list[int]:
        """Ids of the epoch's workers, ascending; empty before the first epoch."""
        return sorted(self._plan.members) if self._plan else []

    @property
    def begins_after(self) -> int:
        """Last iteration that was committed when the epoch began: equal on all members; 0 before the first epoch."""
        return self._plan.committed if self._plan else 0

    @property
    def shard_groups(self) -> list[int]:
        """Numbers of the epoch's complete shard groups, ascending; if ``shards`` is 1, the worker ids."""
        return complete_shard_groups(self.members, self.shards)

    @property
    def column(self) -> list[int]:
        """Worker ids of this worker's ring: the worker with this shard in each complete shard group, ascending."""
        return [number * self.shards + self.shard_group.shard for number in self.shard_groups]

    @property
    def statuses(self) -> dict[int, Json]:
        """Member -> status with which it joined the epoch; empty before the first epoch."""
        return {worker: joined["status"] for worker, joined in self._joined().items()}

    def join(self, status: Json) -> None:
        """Close the old epoch's group and join the next epoch with ``status``; wait for all live workers.

        Afterwards ``committed`` may include an iteration for which this worker called ``agree``: then the caller must
        apply the optimizer's step of this iteration.  Raises as ``Session.join`` does, and ``CoordinatorLost`` if many
        epochs in a row make no progress, because two live workers cannot reach each other.
        """
        reason, self._reason = self._complain() or self._reason, ""
        self._close()
        if self._tries:
            time.sleep(min(_PAUSE * 2**self._tries, _LONGEST_PAUSE))  # time for a transient fault to pass
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
            why = f"{MOST + 1} epochs in a row made no progress and lost no worker; the last epoch ended: {reason}"
            self.session.give_up(EXIT_LOST_MAJORITY, why)
            raise CoordinatorLost(why)

    def _complain(self) -> str:
        """Report a failed connection of this worker to the coordinator; return the failure as text, "" if none."""
        lost = self._lost or (self._group.lost if self._group is not None else None)
        self._lost = None
        if lost is None:
            return ""
        reason = f"{lost} (with worker {lost.peer})" if lost.peer is not None else str(lost)
        self.session.ask(reason, lost.peer)
        return reason

    def fail(self, lost: PeerLost) -> None:
        """Require a new epoch, because a connection between the caller and worker ``lost.peer`` broke."""
        self._failed, self._lost = True, lost

    def renew(self, reason: str) -> None:
        """Require a new epoch for ``reason`` without a failure, so that workers can change statuses and buckets."""
        self._failed, self._reason = True, reason

    def opened(self, buckets: Sequence[Bucket]) -> bool:
        """Open ``group``; return False instead of raising ``EpochRevoked`` if this worker must join a new epoch."""
        try:
            return not self.over and bool(self.group(buckets))
        except EpochRevoked:
            return False

    def group(self, buckets: Sequence[Bucket]) -> Group:
        """Return the epoch's group of this worker's column.

        The first call in an epoch opens the group and pulls ``buckets``.  Every member must call it with the same
        buckets at the same iteration.  Raises ``EpochRevoked``.
        """
        if self._group is None:
            assert self._plan is not None, "join first"
            column, joined = self.column, self._joined()
            ring = f"ring/column/{self._plan.epoch}"
            known = Known({f"{ring}/{rank}": joined[member]["ring_listener"] for rank, member in enumerate(column)})
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
                    self._lost = PeerLost(str(lost), lost.peer, unreachable=lost.unreachable)
                raise
        return self._group

    def agree(self, iteration: int) -> None:
        """Report that all spans are REDUCED here, and wait until all members report it, as ``Session.agree`` does."""
        self.session.agree(iteration)

    def leave(self) -> None:
        """Close the group and leave the run, when this worker has finished."""
        self._close()
        self.session.leave()

    def _joined(self) -> dict[int, Json]:
        return {int(worker): joined for worker, joined in self._plan.data["statuses"].items()} if self._plan else {}

    def _close(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._ring_listener is not None:
            self._ring_listener.close()
        self._group = self._ring_listener = None
