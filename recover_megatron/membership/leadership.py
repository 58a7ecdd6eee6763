"""Whether a candidate may lead, may go on leading, and may leave out workers that it does not reach.

It puts to the rule (``quorum``) what the members have presented (``failover``) and whom it reaches (``roster``).
Where there is an arbiter the lease decides instead of the count, for whoever leaves somebody out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recover_megatron.membership.events import AskArbiter, Outbox
from recover_megatron.membership.failover import Evidence, next_term
from recover_megatron.membership.quorum import can_tell, may_go_on
from recover_megatron.membership.records import Formed, Opened, Presentation, to_runs
from recover_megatron.membership.roster import Fate, Member, Roster


@dataclass(frozen=True)
class Contest:
    """An open rendezvous leaves out workers that may still be running."""

    missing: frozenset[int]
    """These workers."""
    quorum: bool
    """Whether the members of the rendezvous may go on without them."""
    known: bool
    """Whether its members can tell what the last epoch has committed; without that there is no quorum."""


class Leadership:
    """This candidate's term, and the right to it.

    ``salt``: 32 random bits, see ``next_term``. ``arbiter``: whether effects ``AskArbiter`` are answered.

    ``own``, where it is asked for, is the last epoch if this coordinator has formed it, else None: then what was
    presented tells which one it is.
    """

    def __init__(self, roster: Roster, out: Outbox, salt: int, arbiter: bool) -> None:
        self.term = 0
        """0: it does not lead yet."""
        self.arbiter = arbiter
        self.evidence = Evidence(roster.world)
        self._roster = roster
        self._out = out
        self._salt = salt
        self._lease_until = 0.0
        self._leased = False  # an epoch was formed by virtue of the lease: losing it ends this coordinator
        self._led_at = 0.0  # when it began to lead

    def presented(self, presentation: Presentation) -> bool:
        """Take in what a member presents; whether that changes the picture of the last epoch and its end."""
        evidence = self.evidence
        before = (evidence.formed, evidence.bases, evidence.dead, evidence.left)
        evidence.add(presentation)
        return before != (evidence.formed, evidence.bases, evidence.dead, evidence.left)

    # -- to lead ------------------------------------------------------------------------------------------------------

    def may_lead(self, now: float) -> bool:
        """Whether enough members have come for this candidate to take over."""
        evidence, reached = self.evidence, self._roster.reached
        if not reached & evidence.target:
            return False
        missing = self._missing(reached, evidence.bases)
        counted = reached & evidence.target & evidence.formed.members
        if not can_tell(counted, self._roster.idle(evidence.formed), missing, own=False):
            return False
        if missing and self.arbiter and evidence.formed.epoch > 0:
            if now >= self._lease_until:
                self._out.do(AskArbiter(evidence.highest_term))
            return now < self._lease_until
        return may_go_on(reached, evidence.bases, self._roster.gone, own=False)

    def lead(self, now: float) -> None:
        """Begin a term."""
        self.term = next_term(self.evidence.highest_term, self._salt)
        self._led_at = now
        formed, reached = self.evidence.formed.epoch, to_runs(self._roster.reached)
        self._out.log("lead", term=self.term, formed=formed, reached=reached)

    @property
    def lead_message(self) -> Mapping[str, Any]:
        """What tells a member who leads."""
        return {"type": "lead", "term": self.term}

    @property
    def not_come(self) -> list[Member]:
        """Those whom the run counts on, by what was presented, and that have no session."""
        workers = (self._roster.workers[n] for n in sorted(self.evidence.target))
        return [w for w in workers if w.fate is Fate.LIVE and w.session is None]

    def gathers_until(self, worker: Member, now: float) -> float:
        """Until when a new coordinator waits for a worker that it does not reach.

        Whose launcher says that it runs may be deaf for a while. Else, where all have heard nothing of the lost
        coordinator for the heartbeat timeout, this one has not either, if it runs, and comes at the same time; unless
        its launcher is late, too, or it has none that could speak for it. Else it is waited for as any silent host is.
        """
        roster, settings = self._roster, self._roster.settings
        here = [w for w in roster.workers.values() if w.session is not None]
        if roster.vouched(worker, now):
            patience = max(settings.hang_timeout, settings.heartbeat_timeout)
        elif all(w.left_silence for w in here) and all(w.node_agent and roster.vouched(w, now) for w in here):
            patience = settings.heartbeat_interval
        else:
            patience = settings.heartbeat_timeout + settings.heartbeat_interval
        return max(self._led_at + patience, worker.awaited_until)

    # -- to go on leading ---------------------------------------------------------------------------------------------

    def has_followers(self, own: Formed | None) -> bool:
        """Whether those attached are all that may be running, or so many that no other candidate may lead the rest."""
        return may_go_on(self._roster.reached, self._bases(own), self._roster.gone, own is not None)

    def lease(self, held_until: float) -> None:
        """The arbiter's word: until when this candidate holds the lease; 0: it does not."""
        self._lease_until = held_until

    def has_lost_lease(self, now: float) -> bool:
        """Whether another candidate may hold the lease by which this one has gone on."""
        return self._leased and now >= self._lease_until

    def excuse(self, pause: float) -> None:
        """This process was kept from running for so long, and waited for nobody meanwhile."""
        self._led_at += pause

    # -- to leave somebody out ----------------------------------------------------------------------------------------

    def next_epoch(self) -> int:
        """A number above those of all epochs that were formed or opened."""
        self.evidence.highest_epoch += 1
        return self.evidence.highest_epoch

    def contest(self, opened: Opened, formed: Formed, own: bool, now: float) -> Contest | None:
        """Whether ``opened`` may follow ``formed``, which was presented or (``own``) formed by this coordinator.

        None: it leaves out nobody but the gone, and may. Asks the arbiter, where there is one and it has not answered.
        """
        bases = self._bases(formed if own else None)
        missing = self._missing(opened.members, bases)
        if not missing:
            return None
        if self.arbiter:
            quorum = now < self._lease_until
            if not quorum:
                self._out.do(AskArbiter(self.term))
        else:
            quorum = may_go_on(opened.members, bases, self._roster.gone, own)
        known = can_tell(opened.members & formed.members, self._roster.idle(formed), missing, own)
        return Contest(missing, quorum and known, known)

    def goes_on_without(self) -> None:
        """An epoch is about to be formed that leaves out somebody who may be running: by the lease, if there is one."""
        self._leased |= self.arbiter

    def _bases(self, own: Formed | None) -> list[frozenset[int]]:
        return self.evidence.bases if own is None else [own.members]

    def _missing(self, reached: frozenset[int], bases: list[frozenset[int]]) -> frozenset[int]:
        return frozenset().union(*bases) - self._roster.gone - reached
