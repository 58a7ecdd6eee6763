"""Detection of hung and late workers by their progress marks, and the decision to evict them or to wait.

A worker is *waiting* while its mark says so, after it has reported its step done, or after it has joined a rendezvous.
A worker is *hung*, and holds up the run, if it does not wait and has made no new mark for ``hang_timeout`` (plus the
time that its mark allows) while another worker has been waiting just as long. If all workers wait for each other and
none has made a mark for that long, no single worker is to blame: the epoch is *stuck*. All workers then meet again. If
the next epoch is stuck, too, the workers are evicted that for the second time wait in an operation other than the one
of most replicas (``apart``).

In a rendezvous, workers that have not joined may wait in an operation that the others never reach, so all wait for each
other. If these are at most half of the workers, the time that the mark of such a wait allows does not count.

If workers are stopped in every replica, the other workers of their replicas never reach the point where they would
report a wait. So when no worker at all has made a mark for that long, the workers without any sign of life are hung.

The time that a mark allows (a checkpoint, compilation) counts only while the worker sends heartbeats. Its session has a
separate thread, which runs while the main thread writes or compiles, and falls silent when the process is stopped.

A stall that many replicas share (``Stall``):

    none late --> CALM --late, but no stall--> evicted, at once
                   |  ^
    more than half |  | some are back, and it is no stall any more: workers still late get their full time again
                   v  |
                 STALLED --stall timeout--> all late workers are evicted

If the eviction would cost *more than half* of the replicas, and more than one, a shared resource has stopped: a disk, a
switch, the machine under their hosts. It will return, and the workers with it, so the run waits.

The workers do not become late at the same moment. So workers that have used up half of their time, or were evicted
within the last hang timeout, count in addition to the late ones. If only these make it a stall, it is not reported yet.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from recover_megatron.membership.records import Settings, WorkerId, Workers

STEP_PHASES = ("data", "forward", "reduce-scatter", "agree", "optimizer")
"""Phases in which a worker computes a training step, sums its gradients, or applies them. A worker that stops in the
next step before its next heartbeat was last heard in the optimizer."""
STORAGE_PHASES = ("data", "eval-data", "checkpoint", "rollback")
"""Phases in which a worker without a new mark waits for storage; such a wait is reported like any stall."""


@dataclass
class WorkerProgress:
    """Progress of one worker, as far as it is known. Times by the coordinator's clock."""

    worker: WorkerId
    count: int = -1
    """Number that the worker gave its last mark."""
    marked: float = 0.0
    """Time of the last change of that number."""
    waiting_since: float | None = None
    waits: bool = False
    """True if the last mark since the last plan and the last commit says that the worker waits."""
    allow: float = 0.0
    heard: float | None = None
    """Time of the last message of the worker; None: not known."""
    iteration: int = 0
    phase: str = ""
    microbatch: int | None = None
    place: list[int] | None = None
    """Replica, position and quota, as the worker reports them."""
    goes_back: bool = False
    """True if, as far as the worker knows, state that no worker holds could be loaded from elsewhere."""
    loss: list[Any] | None = None
    """The last finished step and its loss (None: not a finite number), as a worker of the library reports them."""

    def heartbeat(self, message: Mapping[str, Any], now: float, *, may_wait: bool) -> None:
        """Take in a checked message ``heartbeat``.

        ``may_wait``: whether its marks show if it waits; False once it has reported its step or joined a rendezvous.
        """
        self.iteration, self.phase = message["iteration"], message["phase"]
        self.microbatch, self.place = message.get("microbatch"), message.get("place")
        self.goes_back, self.loss = message.get("goes_back", False), message.get("loss")
        if message["count"] == self.count:
            return
        self.count, self.marked, self.allow = message["count"], now, message["allow"]
        self.waits = message["waiting"]
        if not may_wait:
            return
        if not message["waiting"]:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = now

    def excuse(self, pause: float, now: float) -> None:
        """Exclude a pause in which the coordinator did not run, and may have missed progress."""
        self.marked = min(now, self.marked + pause)
        if self.waiting_since is not None:
            self.waiting_since = min(now, self.waiting_since + pause)
        if self.heard is not None:
            self.heard = min(now, self.heard + pause)


@dataclass(frozen=True)
class Judgement:
    """Hung workers, or ``stuck``: all wait for each other."""

    hung: list[WorkerId] = field(default_factory=list)
    stuck: bool = False
    slow: list[WorkerId] = field(default_factory=list)
    """Workers that would be hung if they had not reported that they wait for storage; or all workers, if none waits for
    another."""


def judge(group: Iterable[WorkerProgress], now: float, hang_timeout: float, fresh: float = -math.inf) -> Judgement:
    """Judge the workers of one epoch or of one rendezvous. Inactivity before ``fresh`` counts against no worker."""
    progress = list(group)
    waiting = [p.waiting_since for p in progress if p.waiting_since is not None]
    if not waiting:
        last = max((p.marked for p in progress), default=now)
        slow = [p.worker for p in progress if p.phase in STORAGE_PHASES and now - max(last, fresh) > hang_timeout]
        last = max((p.marked + _allowed(p, now, hang_timeout) for p in progress), default=now)
        if now - max(last, fresh) <= hang_timeout:
            return Judgement(slow=slow)
        hung = [p.worker for p in progress if p.heard is not None and now - p.heard > hang_timeout]
        return Judgement(hung, slow=[worker for worker in slow if worker not in hung])
    if len(waiting) == len(progress):
        last = max(max(p.marked + _allowed(p, now, hang_timeout) for p in progress), *waiting, fresh)
        return Judgement(stuck=now - last > hang_timeout)
    first = max(min(waiting), fresh)
    judgement = Judgement()
    blamed = [p for p in progress if p.waiting_since is None]
    # If most have not come, they may wait in a usual operation: the time that their marks allow counts then.
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
    """Return the workers that wait in another operation than most replicas do, where all wait for each other.

    Positions may wait in different operations, but each position does so in all replicas. Of two equally frequent sets
    of operations the usual one is a step's, before the step is reported. Empty if more than half of the replicas
    differ.
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
    """Return the workers of the one replica for which all others have waited in a step beyond ``settings.grace``.

    Empty if two replicas are late, if fewer than ``min_replicas`` would remain, or while the late one does what others
    do not: writes a checkpoint, compiles. A replica has come when all of its workers wait. A worker that reported a
    wait but has not been heard for the grace (it is stopped) does not count as waiting.
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
    """Return the time that a mark allows; 0 if the worker was silent for so long that its process must be stopped."""
    silent = progress.heard is not None and now - progress.heard > hang_timeout
    return 0.0 if silent else progress.allow


SAY_SECONDS = 10.0
"""Seconds between two reports of a stall."""


def many_share(late: Iterable[WorkerId], replica_of: Mapping[WorkerId, Hashable]) -> bool:
    """Return whether more than half of the replicas, and more than one, have a worker that is ``late``.

    ``replica_of``: the workers of complete replicas; a worker not in it (a spare, an orphan) counts for none.
    """
    affected = {replica_of[worker] for worker in late if worker in replica_of}
    return len(affected) > 1 and 2 * len(affected) > len(set(replica_of.values()))


@dataclass(frozen=True)
class Answer:
    """Decision about the late workers."""

    evict: Workers = frozenset()
    say: bool = False
    """True if the stall must be reported now."""
    over: float | None = None
    """Seconds that a reported stall took that has just ended."""


class Stall:
    """Decision between eviction and waiting, from one look at the run to the next. See the states above."""

    def __init__(self, settings: Settings) -> None:
        self.since: float | None = None
        """Begin of this stall, as seen; None: there is no stall."""
        self.told = False
        """True once the stall is certain and was reported."""
        self.waited: dict[WorkerId, str] = {}
        """Workers that the run waits for -> why."""
        self.lately: dict[WorkerId, float] = {}
        """Workers that were evicted within the last hang timeout -> when."""
        self.until: float | None = None
        """End of the wait for workers that may wait for storage longer than ``stall_timeout``; infinite: no worker
        waits for them, None: there are none."""
        self.fresh = float("-inf")
        """End of the last stall: inactivity before it makes no worker late."""
        self._settings = settings
        self._shared = False
        self._shared_since: float | None = None
        """Time since which the awaited workers are late. A worker that waits for storage may have stalled long
        before."""
        self._say_at = 0.0

    def left(self, now: float) -> float:
        """Return for how many more seconds the run waits during a stall."""
        since = self.since if self._shared_since is None else self._shared_since
        assert since is not None
        return max(0.0, since + self._settings.stall_timeout - now)

    def ends_in(self, now: float) -> float | None:
        """Return after how many seconds the run waits for no worker any more; None: unlimited."""
        left = self.left(now) if self.until is None else max(self.left(now), self.until - now)
        return left if math.isfinite(left) else None

    def excuse(self, pause: float) -> None:
        """Exclude a pause of the coordinator: it did not wait for any worker meanwhile."""
        self.since = None if self.since is None else self.since + pause
        self._shared_since = None if self._shared_since is None else self._shared_since + pause

    def _some_are_back(
        self, away: set[WorkerId], late: Mapping[WorkerId, str], replica_of: Mapping[WorkerId, Hashable]
    ) -> bool:
        """Return whether some awaited workers are back, while others, or workers of the same replicas, are ``late``."""
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

        ``late``: workers that would be evicted -> why; ``suspected``: workers that have used up half of their time.
        ``allowed``: workers that have used up their time in a phase that waits for storage, which may take longer; they
        are reported, too. ``replica_of``: the workers of complete replicas, and those evicted ``lately``.
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
            shared, evict, self.told, self._shared_since = False, frozenset(late), False, None
        elif not shared and late and (self._shared or self._some_are_back({*late, *allowed}, late, replica_of)):
            # Workers that shared the stall, or waited for a peer's storage, come back a moment after the others.
            self.fresh = now if self.told else now - hang / 2
        elif not shared:
            evict = frozenset(late)
            self.lately |= dict.fromkeys(late, now)
        self._shared = shared
        self.waited = {**(late if shared else {}), **allowed}
        if not self.waited:
            over = now - self.since if self.since is not None and self.told else None
            self.since, self.told = None, False
            return Answer(evict, over=over)
        self.since = now if self.since is None else self.since
        certain = bool(allowed) or many_share([*late, *self.lately], replica_of) or now >= self.since + SAY_SECONDS
        say = now >= self._say_at if self.told else certain
        if say:
            self.told, self._say_at = True, now + SAY_SECONDS
        return Answer(evict, say)
