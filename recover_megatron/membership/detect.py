"""Detection of hung and late workers by their progress marks, and the decision to evict them or to wait.

A worker is *waiting* while its last mark says that it waits, after it has reported a finished step, and after it has
joined a rendezvous. A worker is *hung* if it is not waiting and has made no new mark for ``hang_timeout`` (plus the
time that its mark allows), while another worker has been waiting for as long. If all workers wait for each other and
none has made a mark for that long, the epoch is *stuck*, and all workers join a new rendezvous. If the next epoch is
stuck, too, the coordinator evicts workers that again wait in a different operation than most replicas (``apart``).

In a rendezvous, workers that have not joined may wait in an operation that the joined workers never reach. If all
workers that have not joined wait, and are at most half of the workers, the time that their marks allow does not count.

If every replica has a stopped worker, the other workers do not get as far as reporting a wait. So if no worker has made
a mark for ``hang_timeout``, the workers that have sent no message for that long are hung.

The time that a mark allows (a checkpoint, compilation) counts only while the worker sends heartbeats. A separate thread
of the worker sends them while the main thread writes or compiles, but not while the process is stopped.

A stall that many replicas share (``Stall``):

    none late --> CALM --late, but no stall--> evicted at once
                   |  ^
    more than half |  | some have returned, so the stall is over: workers still late get their full time again
                   v  |
                 STALLED --stall timeout--> all late workers are evicted

If the eviction of all late workers would cost more than one replica and *more than half* of the replicas, these workers
probably wait for a shared resource, such as a disk or a switch. They continue when that resource returns, so the run
waits for them.

The workers do not become late at the same moment. So workers count in addition to the late workers if they have used up
half of the time after which they would be late, or if they were evicted within the last hang timeout. A stall is not
reported while it depends on these additional workers.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from recover_megatron.membership.messages import to_coordinator
from recover_megatron.membership.records import Settings, WorkerId, Workers

STEP_PHASES = ("data", "forward", "reduce-scatter", "agree", "optimizer")
"""Phases in which a worker computes a training step, sums its gradients, or applies them. ``optimizer`` is included
because a worker that stops early in a step may have sent its last heartbeat in the previous step."""
STORAGE_PHASES = ("data", "eval-data", "checkpoint", "rollback")
"""Phases in which a worker that makes no new mark waits for storage. Such a wait is reported like a stall."""


@dataclass
class WorkerProgress:
    """Progress that one worker has last reported. Times are seconds of the coordinator's monotonic clock."""

    worker: WorkerId
    count: int = -1
    """Number of the worker's last mark; -1: none."""
    marked: float = 0.0
    """Time of the last change of ``count``."""
    waiting_since: float | None = None
    waits: bool = False
    """True if the last mark says that the worker waits; a plan and a commit reset it to False."""
    allow: float = 0.0
    heard: float | None = None
    """Time of the worker's last message; None: unknown."""
    iteration: int = 0
    phase: str = ""
    microbatch: int | None = None
    place: tuple[int, int, int] | None = None
    """Replica, position and quota, as the worker reports them; None: it has no place."""
    goes_back: bool = False
    """True if the worker knows a snapshot or checkpoint to load in case no live worker holds some part of the state."""
    loss: tuple[int, float | None] | None = None
    """Step and loss of the last finished step; None: not reported. A loss that is not finite is None."""

    def heartbeat(self, message: to_coordinator.Heartbeat, now: float, *, may_wait: bool) -> None:
        """Record a worker's heartbeat.

        ``may_wait``: True if the worker's marks decide whether it is waiting; False after it has reported its step or
        joined a rendezvous, because it is then waiting whatever its marks say.
        """
        self.iteration, self.phase = message.iteration, message.phase
        self.microbatch, self.place = message.microbatch, message.place
        self.goes_back, self.loss = message.goes_back, message.loss
        if message.count == self.count:
            return
        self.count, self.marked, self.allow = message.count, now, message.allow
        self.waits = message.waiting
        if not may_wait:
            return
        if not message.waiting:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = now

    def excuse(self, pause: float, now: float) -> None:
        """Move the times forward by ``pause``: the seconds for which the coordinator did not run."""
        self.marked = min(now, self.marked + pause)
        if self.waiting_since is not None:
            self.waiting_since = min(now, self.waiting_since + pause)
        if self.heard is not None:
            self.heard = min(now, self.heard + pause)


@dataclass(frozen=True)
class Judgement:
    """Result of ``judge``: the hung workers, or ``stuck`` if all workers wait for each other."""

    hung: list[WorkerId] = field(default_factory=list)
    stuck: bool = False
    slow: list[WorkerId] = field(default_factory=list)
    """Workers that have made no mark for the hang timeout but wait for storage. They are not hung."""


def judge(group: Iterable[WorkerProgress], now: float, hang_timeout: float, fresh: float = -math.inf) -> Judgement:
    """Return which workers of one epoch or rendezvous are hung or slow. Inactivity before ``fresh`` does not count."""
    progress = list(group)
    waiting = [p.waiting_since for p in progress if p.waiting_since is not None]
    if not waiting:
        if not progress or any(now - max(p.marked, fresh) <= hang_timeout for p in progress):
            return Judgement()
        slow = [p.worker for p in progress if p.phase in STORAGE_PHASES]
        last = max(p.marked + _allowed(p, now, hang_timeout) for p in progress)
        if now - max(last, fresh) <= hang_timeout:
            return Judgement(slow=slow)
        hung = [p.worker for p in progress if p.heard is not None and now - p.heard > hang_timeout]
        return Judgement(hung, slow=[worker for worker in slow if worker not in hung])
    if len(waiting) == len(progress):
        last = max(max(p.marked + _allowed(p, now, hang_timeout) for p in progress), *waiting, fresh)
        return Judgement(stuck=now - last > hang_timeout)
    first = max(min(waiting), fresh)
    judgement = Judgement()
    if now - first <= hang_timeout:
        return judgement
    blamed = [p for p in progress if p.waiting_since is None]
    # The time that marks allow does not count if a minority waits, while the other workers have joined or finished.
    all_wait = all(p.waits for p in blamed) and 2 * len(blamed) <= len(progress)
    for p in blamed:
        beyond = now - max(p.marked, first) - hang_timeout
        if beyond > 0:
            if beyond > (0.0 if all_wait else _allowed(p, now, hang_timeout)):
                judgement.hung.append(p.worker)
            elif p.phase in STORAGE_PHASES:
                judgement.slow.append(p.worker)
    return judgement


def apart(group: Iterable[WorkerProgress], replica_of: Mapping[WorkerId, Hashable]) -> Workers:
    """Return the workers that wait in a different operation than most replicas. All workers must be waiting.

    The workers of one replica may wait in different operations, but usually all replicas wait in the same set of
    operations, the *usual* set. If two sets are equally frequent, operations of a step before its report (``agree``)
    are preferred to the report, and the report to operations outside of a step. Return no workers if more than half of
    the replicas differ from the usual set.
    """
    waits: dict[Hashable, dict[tuple[int, int, str], WorkerId]] = {}
    for p in group:
        if p.worker in replica_of:
            waits.setdefault(replica_of[p.worker], {})[p.place[1] if p.place else 0, p.iteration, p.phase] = p.worker
    kinds = Counter(frozenset(where) for where in waits.values())

    def strange(kind: frozenset[tuple[int, int, str]]) -> int:
        return max(2 * (phase not in STEP_PHASES) + (phase == "agree") for _, _, phase in kind)

    usual = min(kinds, key=lambda kind: (-kinds[kind], strange(kind), sorted(kind)), default=frozenset())
    if 2 * (len(waits) - kinds[usual]) > len(waits):
        return Workers()
    return frozenset(worker for own in waits.values() for where, worker in own.items() if where not in usual)


def behind(
    group: Iterable[WorkerProgress], replica_of: Mapping[WorkerId, Hashable], now: float, settings: Settings
) -> Workers:
    """Return the workers of the late replica, if all other replicas have waited for it for over ``settings.grace``.

    A replica is late until all of its workers wait. Return no workers if two replicas are late, if fewer than
    ``min_replicas`` replicas would remain, or while the late replica does work outside of a step (writes a checkpoint,
    compiles). A worker that reported a wait, but has sent nothing for ``settings.grace`` seconds, is stopped and does
    not count as waiting.
    """
    replicas: dict[Hashable, list[WorkerProgress]] = {}
    for p in group:
        if p.worker in replica_of:
            replicas.setdefault(replica_of[p.worker], []).append(p)

    def has_come(p: WorkerProgress) -> bool:
        return p.waiting_since is not None and (p.heard is None or now - p.heard <= settings.grace)

    late = [workers for workers in replicas.values() if not all(map(has_come, workers))]
    if settings.grace <= 0 or len(late) != 1 or len(replicas) - 1 < max(1, settings.min_replicas):
        return frozenset()
    others = [p.waiting_since for p in itertools.chain(*replicas.values()) if p not in late[0]]
    last = max(since for since in others if since is not None)
    at_work = all(
        p.phase in STEP_PHASES and p.allow <= (settings.stall_timeout if p.phase in STORAGE_PHASES else 0)
        for p in late[0]
    )
    return frozenset(p.worker for p in late[0]) if at_work and now - last > settings.grace else frozenset()


def _allowed(progress: WorkerProgress, now: float, hang_timeout: float) -> float:
    """Return the seconds that a mark allows; 0 if the worker's long silence shows that its process is stopped."""
    silent = progress.heard is not None and now - progress.heard > hang_timeout
    return 0.0 if silent else progress.allow


SAY_SECONDS = 10.0
"""Seconds between two reports of a stall."""


def many_share(late: Iterable[WorkerId], replica_of: Mapping[WorkerId, Hashable]) -> bool:
    """Return whether more than half of the replicas, and more than one, have a worker that is ``late``.

    ``replica_of``: worker of a complete replica -> replica; any other worker (a spare, an orphan) does not count.
    """
    affected = {replica_of[worker] for worker in late if worker in replica_of}
    return len(affected) > 1 and 2 * len(affected) > len(set(replica_of.values()))


@dataclass(frozen=True)
class Answer:
    """Decision about the late workers: evict some, report the stall, or wait."""

    evict: Workers = frozenset()
    say: bool = False
    """True if the stall must be reported now."""
    over: float | None = None
    """Duration, in seconds, of a reported stall that has just ended; None: no such stall has ended."""


class Stall:
    """State machine that decides whether late workers are evicted or the run waits for them (see the module)."""

    def __init__(self, settings: Settings) -> None:
        self.since: float | None = None
        """Time at which this coordinator first noticed the stall; None: there is no stall."""
        self.reported = False
        """True once the stall is certain and was reported."""
        self.waited: dict[WorkerId, str] = {}
        """Worker that the run waits for -> why it is late."""
        self.lately: dict[WorkerId, float] = {}
        """Worker that was evicted within the last hang timeout -> time of its eviction."""
        self.until: float | None = None
        """Time until which the run waits for workers whose storage may take longer than ``stall_timeout``. None: there
        are no such workers. Infinite: the wait has no limit, because no other worker waits for these workers."""
        self.fresh = float("-inf")
        """Time at which the last stall ended: inactivity before this time makes no worker late."""
        self._settings = settings
        self._shared = False
        self._shared_since: float | None = None
        """Time since which more than half of the replicas share the stall; None: they do not. The stall timeout counts
        from this time, because a worker that waits for storage may have stalled long before."""
        self._say_at = 0.0

    def left(self, now: float) -> float:
        """Return the remaining seconds of the stall timeout."""
        since = self.since if self._shared_since is None else self._shared_since
        assert since is not None
        return max(0.0, since + self._settings.stall_timeout - now)

    def ends_in(self, now: float) -> float | None:
        """Return the seconds after which the run waits for no stalled worker any more; None: the wait is unlimited."""
        left = self.left(now) if self.until is None else max(self.left(now), self.until - now)
        return left if math.isfinite(left) else None

    def excuse(self, pause: float) -> None:
        """Move the times of the stall forward by ``pause``: the seconds for which the coordinator was paused."""
        self.since = None if self.since is None else self.since + pause
        self._shared_since = None if self._shared_since is None else self._shared_since + pause

    def _some_are_back(
        self, away: set[WorkerId], late: Mapping[WorkerId, str], replica_of: Mapping[WorkerId, Hashable]
    ) -> bool:
        """Return whether an awaited worker is back while a peer of it is late.

        A peer is another awaited worker, or a worker of the same replica.
        """
        back = {replica_of.get(worker) for worker in self.waited.keys() - away}
        peers_late = any(replica_of[worker] in back for worker in late if worker in replica_of)
        return bool(back) and (peers_late or not self.waited.keys().isdisjoint(late))

    def consider(
        self,
        late: Mapping[WorkerId, str],
        allowed: Mapping[WorkerId, str],
        suspected: Iterable[WorkerId],
        replica_of: Mapping[WorkerId, Hashable],
        now: float,
    ) -> Answer:
        """Return the decision about late workers.

        ``late``: worker that would be evicted -> reason. ``suspected``: workers that have used up half of the time
        after which they are late. ``allowed``: worker -> reason, for workers that have used up this time, but wait for
        storage: they are reported, but not evicted. ``replica_of``: worker -> replica, for complete replicas and
        workers evicted ``lately``.
        """
        hang = self._settings.hang_timeout
        self.lately = {worker: at for worker, at in self.lately.items() if now - at <= hang}
        shared = bool(late) and many_share([*late, *allowed, *suspected, *self.lately], replica_of)
        evict = Workers()
        if not shared:
            self._shared_since = None
        elif self._shared_since is None:
            self._shared_since = now
        if shared and self.since is not None and self.left(now) <= 0:
            shared, evict, self.reported, self._shared_since = False, frozenset(late), False, None
        elif not shared and late and (self._shared or self._some_are_back({*late, *allowed}, late, replica_of)):
            # The first stalled workers are back, and others will probably follow. So late workers get more time.
            self.fresh = now if self.reported else now - hang / 2
        elif not shared:
            evict = frozenset(late)
            self.lately |= dict.fromkeys(late, now)
        self._shared = shared
        self.waited = {**(late if shared else {}), **allowed}
        if not self.waited:
            over = now - self.since if self.since is not None and self.reported else None
            self.since, self.reported = None, False
            return Answer(evict, over=over)
        self.since = now if self.since is None else self.since
        certain = bool(allowed) or many_share([*late, *self.lately], replica_of) or now >= self.since + SAY_SECONDS
        say = now >= self._say_at if self.reported else certain
        if say:
            self.reported, self._say_at = True, now + SAY_SECONDS
        return Answer(evict, say)
