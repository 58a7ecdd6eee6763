"""A stall that many share: whether those who are late are put out, or waited for.

    nobody late --> CALM --late, but no stall--> put out, at once
                     |  ^
      more than half |  | somebody is back, and it is no stall any more: whoever is still late gets its whole time again
                     v  |
                   STALLED --stall timeout--> all that are late are put out

One worker that makes no progress, or is not heard, is broken: it is put out, and the others go on. Where that would
cost *more than half* of the replicas, and more than one, something that they share has stopped: a disk, a switch, the
machine under their hosts. It will come back, and they with it: the run waits.

They do not become late at one moment. So whoever has used up half of its time already counts beside those that are
late, and so does who was put out within the last hang timeout. Where only these make it a stall nothing is said yet:
they make a mark, or become late themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from recover_megatron.membership.records import Settings, WorkerId, Workers

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
        self.fresh = float("-inf")
        """Nobody is late by what was before: the last stall ended then."""
        self._settings = settings
        self._shared = False
        self._say_at = 0.0

    def left(self, now: float) -> float:
        """Seconds for which it will be waited; of a stall."""
        assert self.since is not None
        return max(0.0, self.since + self._settings.stall_timeout - now)

    def excuse(self, pause: float) -> None:
        """The coordinator did not run for so long: it did not wait for anybody meanwhile."""
        self.since = None if self.since is None else self.since + pause

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
        if shared and self.since is not None and self.left(now) <= 0:
            shared, put_out, self.told = False, frozenset(late), False
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
