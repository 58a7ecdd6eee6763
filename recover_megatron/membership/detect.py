"""Which workers hang or are late, by their progress marks, and whether those are put out or waited for.

A worker is *waiting* while it says so in its mark, has reported its step done, or has joined a rendezvous. A worker
that does not wait and has not made a new mark for ``hang_timeout`` (plus what its mark allows) while another has been
waiting just as long is *hung*: it holds up the run. When all wait for each other and nobody has made a mark for so
long, no single worker is to blame: the epoch is *stuck*. All meet again; where the epoch that follows is stuck, too,
those are put out that wait in something else than most of the replicas do, for the second time (``apart``).

In a rendezvous all wait for each other where those that have not joined wait, too, in an operation that the others do
not come to: if they are at most half of the workers, what the mark of such a wait allows does not count.

Workers that are stopped in every replica keep their mates from coming to where they would say that they wait: when
nobody at all has made a mark for so long, those are hung of whom nothing has been heard either.

What a mark allows (a checkpoint, compilation) holds only while the worker is heard: its session has a thread of its
own, which goes on while the main thread writes or compiles, and falls silent when the process is stopped.

A stall that many share (``Stall``):

    nobody late --> CALM --late, but no stall--> put out, at once
                     |  ^
      more than half |  | somebody is back, and it is no stall any more: whoever is still late gets its whole time again
                     v  |
                   STALLED --stall timeout--> all that are late are put out

Where that would cost *more than half* of the replicas, and more than one, something that they share has stopped: a
disk, a switch, the machine under their hosts. It will come back, and they with it: the run waits.

They do not become late at one moment. So a worker counts beside those that are late when it has used up half of its
time, or was put out within the last hang timeout. Where only these make it a stall nothing is said yet.
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
"""In one of these is who computes a training step, sums its gradients, or applies them: who stops in the next step
before its next heartbeat was last heard in the optimizer."""
STORAGE_PHASES = ("data", "eval-data", "checkpoint", "rollback")
"""A worker in one of these that makes no mark waits for storage: people are told, as of any stall."""


@dataclass
class WorkerProgress:
    """What is known of one worker's progress. Times by the coordinator's clock."""

    worker: WorkerId
    count: int = -1
    """The worker's own number of its last mark."""
    marked: float = 0.0
    """When that number last changed."""
    waiting_since: float | None = None
    waits: bool = False
    """The last mark since the last plan and the last commit says that the worker waits."""
    allow: float = 0.0
    heard: float | None = None
    """When anything was last heard of it; None: not known."""
    iteration: int = 0
    phase: str = ""
    microbatch: int | None = None
    place: list[int] | None = None
    """Replica, position, quota, as it says itself."""
    goes_back: bool = False
    """Whether a state that nobody holds could be had from elsewhere, for all that it knows."""
    loss: list[Any] | None = None
    """The last finished step, and its loss (None: it is not a finite number), as a worker of the library tells them."""

    def heartbeat(self, message: Mapping[str, Any], now: float, *, may_wait: bool) -> None:
        """Take in a checked message ``heartbeat``.

        ``may_wait``: whether its marks tell if it waits; not once it has reported its step or joined a rendezvous.
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
        """The judge was kept from running for so long, and perhaps from hearing of progress."""
        self.marked = min(now, self.marked + pause)
        if self.waiting_since is not None:
            self.waiting_since = min(now, self.waiting_since + pause)
        if self.heard is not None:
            self.heard = min(now, self.heard + pause)


@dataclass(frozen=True)
class Judgement:
    """The hung workers, or ``stuck``: all wait for each other."""

    hung: list[WorkerId] = field(default_factory=list)
    stuck: bool = False
    slow: list[WorkerId] = field(default_factory=list)
    """Workers that would hang, had they not said that they wait for storage; or all do, and none waits for another."""


def judge(group: Iterable[WorkerProgress], now: float, hang_timeout: float, fresh: float = -math.inf) -> Judgement:
    """Judge the workers of one epoch, or of one rendezvous; what was before ``fresh`` is held against nobody."""
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
    # Where most have not come, what they wait in may be the usual: what their marks allow counts then.
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
    """The workers, where all wait for each other, that wait in another operation than most of the replicas do.

    Positions may wait in different operations, but each does so in all replicas. Of two kinds that are equally frequent
    a step's own is the usual one, and not yet having reported it. Nobody where more than half of the replicas differ.
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
    return frozenset(worker for its in waits.values() for where, worker in its.items() if where not in usual)


def behind(
    group: Iterable[WorkerProgress], replica_of: Mapping[WorkerId, Hashable], now: float, settings: Settings
) -> Workers:
    """The workers of the one replica for which all others have waited in a step for longer than ``settings.grace``.

    Nobody where two are late, where fewer than ``min_replicas`` would be left, or while the late one does what others
    do not: writes a checkpoint, compiles.  A replica has come when all of its workers wait, but for those that say so
    and have not been heard since for the grace (they are stopped).
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
    """What a mark allows, unless nothing has been heard of the worker for so long that its process must be stopped."""
    silent = progress.heard is not None and now - progress.heard > hang_timeout
    return 0.0 if silent else progress.allow


SAY_SECONDS = 10.0
"""A stall is told of so often."""


def many_share(late: Iterable[WorkerId], replica_of: Mapping[WorkerId, Hashable]) -> bool:
    """Whether more than half of the replicas, and more than one, have a worker that is ``late``.

    ``replica_of``: the workers of whole replicas; who is not in it (a spare, an orphan) counts for none.
    """
    hit = {replica_of[worker] for worker in late if worker in replica_of}
    return len(hit) > 1 and 2 * len(hit) > len(set(replica_of.values()))


@dataclass(frozen=True)
class Answer:
    """What is to be done about those who are late."""

    put_out: Workers = frozenset()
    say: bool = False
    """Tell of the stall, now."""
    over: float | None = None
    """A stall that was told of has just ended; it took so many seconds."""


class Stall:
    """Decides from one look at the run to the next. It keeps when, and for whom; see above for the states."""

    def __init__(self, settings: Settings) -> None:
        self.since: float | None = None
        """When this stall was seen; None: there is none."""
        self.told = False
        """Whether it is one for certain, so that people were told."""
        self.waited: dict[WorkerId, str] = {}
        """For whom it is waited, and why."""
        self.lately: dict[WorkerId, float] = {}
        """When workers were put out, within the last hang timeout."""
        self.until: float | None = None
        """When those are put out that may wait for storage longer than ``stall_timeout``; infinite: nobody waits for
        them, None: there are none."""
        self.fresh = float("-inf")
        """Nobody is late by what was before: the last stall ended then."""
        self._settings = settings
        self._shared = False
        self._shared_since: float | None = None
        """When those became late for whom it is waited; who waits for storage may have stalled long before."""
        self._say_at = 0.0

    def left(self, now: float) -> float:
        """Seconds for which it will be waited; of a stall."""
        since = self.since if self._shared_since is None else self._shared_since
        assert since is not None
        return max(0.0, since + self._settings.stall_timeout - now)

    def ends_in(self, now: float) -> float | None:
        """After how many seconds nobody will be waited for any more; None: nobody says."""
        left = self.left(now) if self.until is None else max(self.left(now), self.until - now)
        return left if math.isfinite(left) else None

    def excuse(self, pause: float) -> None:
        """The coordinator did not run for so long: it did not wait for anybody meanwhile."""
        self.since = None if self.since is None else self.since + pause
        self._shared_since = None if self._shared_since is None else self._shared_since + pause

    def _some_are_back(
        self, away: set[WorkerId], late: Mapping[WorkerId, str], replica_of: Mapping[WorkerId, Hashable]
    ) -> bool:
        """Whether, of those for whom it was waited, some are back, and others are ``late``, or a mate of theirs is."""
        back = {replica_of.get(worker) for worker in self.waited.keys() - away}
        mates = any(replica_of[worker] in back for worker in late if worker in replica_of)
        return bool(back) and (mates or not self.waited.keys().isdisjoint(late))

    def consider(
        self,
        late: Mapping[WorkerId, str],
        allowed: Mapping[WorkerId, str],
        suspected: Iterable[WorkerId],
        replica_of: Mapping[WorkerId, Hashable],
        now: float,
    ) -> Answer:
        """``late``: who would be put out, and why; ``suspected``: who has used up half of its time.

        ``allowed``: who has used it up in a phase that waits for storage, which may take longer; it is told of, too.
        ``replica_of``: the workers of whole replicas, and those ``lately`` put out.
        """
        hang = self._settings.hang_timeout
        self.lately = {worker: at for worker, at in self.lately.items() if now - at <= hang}
        shared = bool(late) and many_share([*late, *allowed, *suspected, *self.lately], replica_of)
        put_out = Workers()
        if not shared:
            self._shared_since = None
        elif self._shared_since is None:
            self._shared_since = now
        if shared and self.since is not None and self.left(now) <= 0:
            shared, put_out, self.told, self._shared_since = False, frozenset(late), False, None
        elif not shared and late and (self._shared or self._some_are_back({*late, *allowed}, late, replica_of)):
            # Who shared the stall, or waited for a mate's storage, comes back when the others do, but a moment later.
            self.fresh = now if self.told else now - hang / 2
        elif not shared:
            put_out = frozenset(late)
            self.lately |= dict.fromkeys(late, now)
        self._shared = shared
        self.waited = {**(late if shared else {}), **allowed}
        if not self.waited:
            over = now - self.since if self.since is not None and self.told else None
            self.since, self.told = None, False
            return Answer(put_out, over=over)
        self.since = now if self.since is None else self.since
        certain = bool(allowed) or many_share([*late, *self.lately], replica_of) or now >= self.since + SAY_SECONDS
        say = now >= self._say_at if self.told else certain
        if say:
            self.told, self._say_at = True, now + SAY_SECONDS
        return Answer(put_out, say)
