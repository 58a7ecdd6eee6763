"""Data parallelism without Megatron: all workers of the run form one column, and each worker has the complete model.

    while column.committed < iteration:
        try:
            if column.over:                          at the start, and after every death
                column.join(status)                  wait for all live workers; ``column.statuses`` has their statuses
            else:
                group = column.group([bucket])       spans that were REDUCED at one member are REDUCED at all members
                ...                                  run the work that the statuses assign to this worker
                group.all_reduce(bucket).wait()
                column.agree(iteration)
        except EpochRevoked:
            pass

Each worker sends its address when it joins an epoch.  So no key-value store is needed, and any node may be lost.

Hybrid sharding: if ``shards`` is above 1, every ``shards`` consecutive workers share one copy of the model.  They are a
*shard group* (``ShardGroup``).  A column consists of the workers that have the same shard, one of each shard group.

    shards=2       column 0   column 1
    shard group 0  worker 0   worker 1        in a shard group: torch's own FSDP, with any process group
    shard group 1  worker 2   worker 3        in a column: one worker of each complete shard group; they form a ring
    shard group 2  worker 4   -- dead --      worker 4 is in no column: it exits

When a worker dies, the other workers of its shard group have only a part of the model, and may hang in a collective
that never completes.  So the session's thread terminates their processes with EXIT_FENCED, and the run continues with
the complete shard groups.  The workers of a shard group must call ``join`` at the same iterations: the training loop
compares their results of ``Column.opened`` and calls ``join`` on all of them if one result is False.
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
"""Time limit in seconds for the wait for the coordinator's report of a death, after the shard group's communication
has failed."""


def complete_shard_groups(workers: Collection[int], shards: int) -> list[int]:
    """Return the numbers of the shard groups whose workers are all in ``workers``, ascending."""
    there = Counter(worker // shards for worker in set(workers))
    return sorted(number for number, count in there.items() if count == shards)


def shard_group_problem(shards: int, environ: Mapping[str, str]) -> str:
    """Return why workers with this environment cannot form shard groups of ``shards`` workers; "" if they can."""
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
    """Shard group of this worker.  If another worker of the group is lost, this worker's process exits.

    ``number``: number of the group in the run.  ``shard``: index of this worker's shard.  ``mates``: ids of the other
    workers of the group.
    """

    def __init__(self, session: Session, me: int, shards: int, end: Callable[[int], object] = os._exit) -> None:
        """``end``: function that terminates the process with an exit code; tests pass another function."""
        if shards < 1:
            raise ValueError(f"a shard group has at least one worker, not {shards}")
        self.number, self.shard = divmod(me, shards)
        self.mates = frozenset(range(self.number * shards, (self.number + 1) * shards)) - {me}
        self._session = session
        self._end = end
        session.on_revoke(self._revoked)

    def end_if_broken(self) -> None:
        """Exit if a worker of the shard group is lost; call this when the group's communication has failed.

        The communication may fail before the coordinator reports the death, so the call waits up to ``NEWS_SECONDS``
        for the report, and returns if none arrives.
        """
        self._session.wait_lost(self.mates, NEWS_SECONDS)
        self._revoked(self._session.epoch, "")

    def _revoked(self, epoch: int, reason: str) -> None:
        lost = self.mates - self._session.opened_members - self._session.left
        if epoch and lost:
            names = ", ".join(map(str, sorted(lost)))
            log.info(f"shard group {self.number} lost worker {names}: this worker exits, the other groups continue")
            self._end(EXIT_FENCED)


LOOPBACK = "127.0.0.1"
MOST = 10
"""Maximum number of consecutive epochs that have the same members and make no progress; then the run ends."""
NO_DRAIN = "this training loop does not support a drain; stop the node's launcher: the other workers continue"
_PAUSE, _LONGEST_PAUSE = 0.1, 3.0


class Column:
    """Membership and gradient group of this worker in a run without Megatron; see the module's docstring.

    The run's coordinators must use the default planner, as recover-run's coordinators do.
    """

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
        """``me``: this worker's id.  ``secret``: the job's secret, which protects the ring's connections.

        ``shards``: number of workers per shard group; 1: each worker has the complete model.  ``host``: address of
        this machine that the other workers can reach.  ``device``: device of the buckets; GPU buckets go through host
        memory.  ``timeout``: seconds that the members of a new epoch wait for each other when they open the group.
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
        """Failure of a connection, which the next ``join`` reports to the coordinator; None: no failure."""
        self._reason = ""
        """Reason from the last call of ``renew``, which the next ``join`` reports to the coordinator; "" if none."""
        self._last: Json = None
        self._tries = 0

    @classmethod
    def from_environment(cls, *, shards: int = 1, device: torch.device | None = None, timeout: float = 60.0) -> Column:
        """Create the session and the column of this worker, which recover-run must have started.

        If the workers cannot form shard groups, the process prints the reason and exits with code 2.  Call this before
        ``init_process_group``, where an incomplete shard group would wait for workers that never come.  Raises the
        errors of ``session.connect``.
        """
        if why := shard_group_problem(shards, os.environ):
            refuse(os.path.basename(sys.argv[0]), [why])
        key, host = find_secret(os.environ).key("column"), os.environ.get(HOST_VARIABLE, LOOPBACK)
        return cls(connect(), worker_id(), key, shards=shards, host=host, device=device, timeout=timeout)

    @property
    def over(self) -> bool:
        """True if this worker must call ``join``: no epoch, epoch revoked, connection failed, or ``renew`` called."""
        lost = self._failed or (self._group is not None and self._group.revoked)
        return self._plan is None or self.session.revoked or lost

    @property
    def committed(self) -> int:
        """Newest iteration that is committed, as far as this worker knows."""
        return self.session.committed

    @property
    def members(self) -> list[int]:
        """Ids of the epoch's workers, ascending; empty before the first epoch."""
        return sorted(self._plan.members) if self._plan else []

    @property
    def begins_after(self) -> int:
        """Newest iteration that was committed when the epoch began, equal on all members; 0 before the first epoch."""
        return self._plan.committed if self._plan else 0

    @property
    def shard_groups(self) -> list[int]:
        """Numbers of the shard groups whose workers are all members of the epoch, ascending."""
        return complete_shard_groups(self.members, self.shards)

    @property
    def column(self) -> list[int]:
        """Ids of the workers that have the same shard as this worker, one of each complete shard group, ascending."""
        return [number * self.shards + self.shard_group.shard for number in self.shard_groups]

    @property
    def statuses(self) -> dict[int, Json]:
        """Worker id of a member -> status that it passed to ``join``; empty before the first epoch."""
        return {worker: joined["status"] for worker, joined in self._joined().items()}

    def join(self, status: Json) -> None:
        """Close the group of the old epoch, and join the next epoch with ``status``; wait for all live workers.

        If ``agree`` was interrupted, its iteration may be committed nevertheless: then ``committed`` is this iteration
        after ``join``, and the caller must apply the iteration's optimizer step.

        Raises the errors of ``Session.join``, and ``CoordinatorLost`` after more than ``MOST`` epochs without progress:
        then two live workers cannot reach each other.
        """
        reason, self._reason = self._complain() or self._reason, ""
        self._close()
        if self._tries:
            time.sleep(min(_PAUSE * 2**self._tries, _LONGEST_PAUSE))  # a transient fault may pass in this time
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
            why = f"{MOST + 1} epochs in a row made no progress and lost no worker; reason of the last one: {reason}"
            self.session.give_up(EXIT_LOST_MAJORITY, why)
            raise CoordinatorLost(why)

    def _complain(self) -> str:
        """Report a failed connection of this worker to the coordinator; return its error, "" if none has failed."""
        lost = self._lost or (self._group.lost if self._group is not None else None)
        self._lost = None
        if lost is None:
            return ""
        reason = f"{lost} (with worker {lost.peer})" if lost.peer is not None else str(lost)
        self.session.ask(reason, lost.peer)
        return reason

    def fail(self, lost: PeerLost) -> None:
        """Request a new epoch, because the caller's connection to worker ``lost.peer`` broke."""
        self._failed, self._lost = True, lost

    def renew(self, reason: str) -> None:
        """Request a new epoch without a failure, for ``reason``, so that workers can change status and buckets."""
        self._failed, self._reason = True, reason

    def opened(self, buckets: Sequence[Bucket]) -> bool:
        """Open the epoch's group, as ``group`` does; return False if this worker must call ``join`` first."""
        try:
            return not self.over and bool(self.group(buckets))
        except EpochRevoked:
            return False

    def group(self, buckets: Sequence[Bucket]) -> Group:
        """Return the group of this worker's column in the current epoch.

        The first call in an epoch opens the group and calls its ``pull`` for ``buckets``.  All members must make this
        call at the same iteration, with equally many buckets of equal sizes.  Raises ``EpochRevoked``.
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
        """Report that this worker has all sums of ``iteration``; wait until all members have reported this.

        Then the iteration is committed.  Raises the errors of ``Session.agree``.
        """
        self.session.agree(iteration)

    def leave(self) -> None:
        """Close the group and leave the run; call this when the training is finished."""
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
