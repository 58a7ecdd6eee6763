"""Before the first rendezvous of a coordinator: whether it takes over, and whom it waits for then.

    leads --> at the start of a run: nothing to wait for
        '---> in place of a lost coordinator: gathered, once all whom the run counts on have come, or are late

A commit needs the report of all members, so it needs no log: if every survivor of an epoch presents ``done >= t``, t is
committed (it may have been, and it does no harm if it was not); if one does not, it was not. So a lost coordinator
loses no decision, and a decision that a single worker has received is never taken again. Idle members report nothing,
so they are no such survivors (``quorum.can_tell``).
"""

from __future__ import annotations

from recover_megatron.membership.epochs import Epochs
from recover_megatron.membership.lateness import Lateness
from recover_megatron.membership.leadership import Leadership
from recover_megatron.membership.roster import Member, Roster


class TakeOver:
    """What a coordinator does while it is in STANDBY or GATHERING."""

    def __init__(self, roster: Roster, leadership: Leadership, epochs: Epochs, lateness: Lateness) -> None:
        self._roster = roster
        self._leadership = leadership
        self._epochs = epochs
        self._lateness = lateness

    def leads(self, now: float) -> bool:
        """Begin a term, if enough members have come; whether they have."""
        self._epochs.adopt(self._leadership.evidence)
        if not self._leadership.may_lead(now):
            return False
        self._leadership.lead(now)
        return True

    def gathered(self, now: float) -> bool:
        """Whether all whom the run counts on have presented what they hold; who is late is left out.

        One of them may have been told of a commit that the lost coordinator told nobody else: its mates must hear of it
        while they wait for it, or it goes on alone into operations that need them.
        """
        self._epochs.adopt(self._leadership.evidence)
        missing = self._leadership.not_come
        if any(now <= self._leadership.gathers_until(worker, now) for worker in missing):
            return False
        for worker in missing:
            self._roster.exclude(worker, "did not come to the new coordinator", now)
        return True

    def lose_silent(self, now: float) -> None:
        """Lose touch with those that have been silent for too long."""
        for worker in self._lateness.silent(now):
            self.lost_touch(worker, f"silent for {now - worker.heard:.1f} s", now)

    def lost_touch(self, worker: Member, reason: str, now: float) -> None:
        """A worker is not reached that may still be running: it may come again, before there is a term.

        Later, too, where nobody counts on it: what becomes of it is decided when all have come.
        """
        if self._leadership.term == 0 or worker.number not in self._leadership.evidence.target:
            self._roster.unbind(worker)
        else:
            self._roster.exclude(worker, reason, now)
