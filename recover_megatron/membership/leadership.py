"""Rules by which a candidate may lead, may continue to lead, and may leave out workers that it does not reach.

``gone``: workers known to have ended (their kernel closed the connection, or a node agent saw the process end) or to
have left normally. Unreachable workers are not gone: they may be running on the other side of a partition.

The rule for a coordinator that wants to form a new epoch of the workers that it reaches:

* If only gone workers are missing, the coordinator may form the epoch, however few workers remain.
* If this coordinator formed the last epoch, it needs at least half of that epoch's members that are not gone (its own
  vote breaks a tie).
* If a lost coordinator formed that epoch, this one needs more than half of these members, and more than half of every
  rendezvous that any member presents as opened after that epoch, since such a rendezvous may have been formed unseen.
* With a lease (``lease``, on shared storage) one rule holds in both cases: more than half of the epoch's members may
  continue, where gone members count as missing. Fewer members may continue only with the lease, if no more than half
  are missing and at least one remains (``permission``). Still fewer may not, except in one more case (``witness``).

* Members without a part in the last epoch (*idle*) do not know what it committed, since no commit waited for them. So
  if a missing worker may be running, idle members alone never continue under a new coordinator, lease or not. The
  exception: all members were idle (no replica was complete, and spares had to rebuild one), so nothing was committed.

Why two sides can never both continue: let M be the last epoch that both know, A the side that formed it, B the other.
A and B are disjoint, as a member follows one coordinator at a time and only ever a higher term. A has at least half
of those members of M that are not gone, B has more than half. Both cannot be true, unless B knows deaths on A's side
that happened after A continued. Only a node agent could report such a death, and a side that leaves a worker out
continues only after the node agents of its own members have acknowledged the new rendezvous. A node agent that later
turns to B presents that rendezvous, so B needs a majority of it, too.

*Newcomers* are added to an epoch's members, and count in its majority, but never replace earlier members. Until a
rendezvous counts on them, they are in no set of which a side needs a majority. Until they hold a plan, they do not know
what was committed, and newcomers alone never continue. The argument above holds unchanged, because a member of M that
is in a later epoch has joined that epoch, so the member presents it.

With the lease one side can never have *enough* while another side has a *claim*, whatever deaths each side knows: the
first would need more than half of the epoch's members, and the second would miss no more than half. Later deaths on the
other side are reported by a node agent, as above. Of two claims the lease grants the second only if a member of the
first has followed the second's coordinator since, and is in the second. The first side can then continue without that
member only by another claim, which is refused (``lease.may_take``). The lease uses no time, so no pause and no clock
affects it.

The Promela model (tests/formal/) explores this exhaustively, with a lease and without, for a run without newcomers; the
simulation (tests/membership) includes newcomers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from recover_megatron.membership.events import AskForLease, Outbox, Verdict
from recover_megatron.membership.messages import to_member
from recover_megatron.membership.records import (
    EXIT_LOST_MAJORITY,
    Evidence,
    Formed,
    Opened,
    Presentation,
    RunOver,
    Workers,
    next_term,
    to_runs,
)
from recover_megatron.membership.roster import Fate, Member, Roster
from recover_megatron.membership.witness import Witness


def majority(reached: Workers, members: Workers, gone: Workers, tie: bool) -> bool:
    """Return whether ``reached`` has more than half of the ``members`` that are not ``gone``.

    With ``tie``, half of these members is enough.
    If all members are gone, none can be running on another side, so any set is a majority.
    """
    living = members - gone
    votes = 2 * len(reached & living)
    return votes >= len(living) if tie or not living else votes > len(living)


def may_go_on(reached: Workers, bases: Iterable[Workers], gone: Workers, own: bool) -> bool:
    """Return whether the workers ``reached`` may continue a run that has no lease.

    ``bases``: sets of workers; a majority of each is needed. ``own``: True if this coordinator formed the last epoch.
    """
    return bool(reached) and all(majority(reached, base, gone, tie=own) for base in bases)


class Permission(Enum):
    """Permission for the reached workers to continue although some missing workers may be running."""

    ENOUGH = "enough"
    """The reached workers may continue."""
    CLAIM = "claim"
    """The reached workers may continue if they get the lease."""
    TOO_FEW = "too few"
    """The reached workers may not continue, because the missing workers may do so."""


def permission(reached: Workers, bases: Iterable[Workers], gone: Workers, slack: int) -> Permission:
    """Return the permission of the workers ``reached`` to continue a run that has a lease.

    ``slack``: two halves that differ by at most this number of workers can each get the lease, because one node may
    have more live workers than another. All candidates of a run use the same number.
    """
    answer = Permission.ENOUGH
    for base in bases:
        living = base - gone
        here, missing, all_votes = reached & living, living - reached, len(base) + slack
        if not missing or 2 * len(here) > all_votes:
            continue
        if not here or 2 * len(missing) > all_votes:
            return Permission.TOO_FEW
        answer = Permission.CLAIM
    return answer if reached else Permission.TOO_FEW


def can_tell(reached: Workers, idle: Workers, missing: Workers, own: bool) -> bool:
    """Return whether this coordinator knows the last commit of the last epoch, or no missing worker may be running.

    The commit is known if this coordinator formed the epoch (``own``), or if a member of ``reached`` has a part in the
    epoch, because such a member has reported every iteration that may have been committed. ``idle``: members without a
    part in the epoch, if other members have one. ``missing``: unreached members that are not gone.
    """
    return own or not missing or bool(reached - idle)


_LEAP, _LEAPS, _STRIDE = 1 << 16, 1 << 12, 1 << 8
"""Parts of the leap of epoch numbers in ``Leadership.next_epoch``. A leap is longer than the number of epochs that any
side forms, and the leaps of two coordinators end at different numbers."""


@dataclass(frozen=True)
class Contest:
    """Open rendezvous that leaves out workers that may still be running."""

    missing: Workers
    """Left-out workers that may still be running."""
    permission: Permission
    """Permission for the members of the rendezvous to continue without the missing workers."""
    known: bool
    """True if the members of the rendezvous know the last commit; otherwise they may not continue."""


class Leadership:
    """Term of this candidate, and its right to lead.

    ``salt``: 32 random bits, see ``next_term``. ``slack``: see ``permission``; None: no lease. Parameter ``own`` of the
    methods: the last epoch if this coordinator has formed it; None: it has not, and the members' presentations count.
    """

    def __init__(self, roster: Roster, out: Outbox, salt: int, slack: int | None, witness: Witness) -> None:
        self.term = 0
        """Term of this candidate; 0 until it leads."""
        self.slack = slack
        self.evidence = Evidence(roster.world)
        self.witness = witness
        self._roster = roster
        self._out = out
        self._salt = salt
        self._claim: AskForLease | None = None  # the last claim whose answer a rendezvous needs
        self._record: AskForLease | None = None  # the last claim that only records members of a formed epoch
        self._claimed_at = 0.0
        self._verdict: Verdict | None = None  # the answer to ``_claim``; None: no answer yet
        self._wait_reported = False  # True if the wait for ``_claim`` was reported
        self._led_at = 0.0  # time at which this candidate began to lead
        self._leapt = False  # True if the epoch number has leapt (``next_epoch``)

    def presented(self, presentation: Presentation) -> bool:
        """Record a member's presentation. Return whether it adds an epoch, or a worker that died or left normally."""
        evidence = self.evidence
        before = (evidence.formed, evidence.bases, evidence.dead, evidence.left)
        evidence.add(presentation)
        return before != (evidence.formed, evidence.bases, evidence.dead, evidence.left)

    # -- take over ----------------------------------------------------------------------------------------------------

    def may_lead(self, now: float) -> bool:
        """Return whether enough members are attached for this candidate to take over."""
        evidence, reached = self.evidence, self._roster.reached
        if not reached & evidence.target:
            return False
        missing = self._missing(reached, evidence.bases)
        counted = reached & evidence.target & evidence.formed.members
        if not can_tell(counted, self._roster.blind(evidence.formed), missing, own=False):
            return False
        may = self._permission(reached, None)
        return may is Permission.ENOUGH or (may is Permission.CLAIM and evidence.formed.epoch > 0 and self._moved(now))

    @property
    def lacks_members(self) -> bool:
        """True if this candidate may not lead because too few members of a run that has begun are attached to it."""
        evidence, reached = self.evidence, self._roster.reached
        began = self.term == 0 and evidence.formed.epoch > 0 and bool(reached & evidence.target)
        return began and self._permission(reached, None) is Permission.TOO_FEW

    def _moved(self, now: float) -> bool:
        """Return whether complete nodes have attached to this candidate: launchers, and most of their workers.

        Without this rule a worker that has only lost its own connection could split the run.
        """
        roster = self._roster
        here = [w for w in roster.workers.values() if w.session is not None]
        if not all(w.node_agent and roster.vouched(w, now) for w in here):
            return False
        running = {n for w in here for n in roster.node_agents[w.node_agent].running} & self.evidence.target
        return 2 * len(running & roster.reached) > len(running)

    def lead(self, now: float) -> None:
        self.witness.took_over = self.evidence.highest_term > 0
        self.term = next_term(self.evidence.highest_term, self._salt)
        self._led_at = now
        formed, reached = self.evidence.formed.epoch, to_runs(self._roster.reached)
        self._out.log("lead", term=self.term, formed=formed, reached=reached)

    @property
    def not_come(self) -> list[Member]:
        """Live workers that have no session, and on which the run counts according to the members' presentations."""
        workers = (self._roster.workers[n] for n in sorted(self.evidence.target))
        return [w for w in workers if w.fate is Fate.LIVE and w.session is None]

    def gathers_until(self, worker: Member, now: float) -> float:
        """Return the time until which a new coordinator waits for a worker that it does not reach.

        The wait is long if the worker's launcher vouches for it, because a running worker may not answer for a while.
        The wait is short if all attached workers left the lost coordinator because of its silence, and their launchers
        vouch for them, because a running worker would have left it at the same time. In other cases the wait is a
        little longer than the heartbeat timeout.
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

    # -- continue to lead ---------------------------------------------------------------------------------------------

    def has_followers(self, own: Formed | None) -> bool:
        """Return whether so many members are attached that no other candidate may lead the other members."""
        return self._permission(self._roster.reached, own) is Permission.ENOUGH

    def excuse(self, pause: float) -> None:
        """Shift the deadlines by a pause of this process, in seconds."""
        self._led_at += pause
        self._claimed_at += pause
        self.witness.excuse(pause)

    # -- leave workers out --------------------------------------------------------------------------------------------

    def next_epoch(self) -> int:
        """Return a number above the numbers of all epochs that this coordinator knows.

        When a witness has reported nodes off, workers that knew newer epochs may be lost. Then the number leaps once,
        so that it is above the numbers of those epochs, too.
        """
        if self.witness.off and not self._leapt:
            self._leapt = True
            self.evidence.highest_epoch += _LEAP + self._salt % _LEAPS * _STRIDE
        self.evidence.highest_epoch += 1
        return self.evidence.highest_epoch

    def contest(self, opened: Opened, formed: Formed, own: bool) -> Contest | None:
        """Return whether the members of ``opened`` may continue after epoch ``formed``, as a ``Contest``.

        None: they may, because only gone workers are left out. ``own``: True if this coordinator has formed ``formed``.
        """
        bases = self._bases(formed if own else None)
        missing = self._missing(opened.members, bases)
        if not missing:
            return None
        known = can_tell(opened.members & formed.members, self._roster.blind(formed), missing, own)
        may = self._permission(opened.members, formed if own else None, opened.epoch) if known else Permission.TOO_FEW
        return Contest(missing, may, known)

    def has_lease(self, opened: Opened, now: float) -> bool:
        """Request the lease for the members of ``opened``, which all follow this term. Return whether it is granted.

        Raises RunOver if the lease is refused, or there is no answer for ``stall_timeout``.
        """
        patience = self._roster.settings.stall_timeout
        if self._claim is None or (self._claim.term, self._claim.epoch) != (opened.term, opened.epoch):
            self._claim = AskForLease(opened.term, opened.epoch, opened.members)
            self._claimed_at, self._verdict, self._wait_reported = now, None, False
            self._ask(self._claim)
        verdict = self._verdict
        if verdict is None or verdict.granted is None:
            why = verdict.reason if verdict else "the storage does not answer"
            if now > self._claimed_at + patience:
                raise RunOver(EXIT_LOST_MAJORITY, f"the lease could not be requested within {patience:g} s: {why}")
            if now > self._claimed_at + self._roster.settings.heartbeat_interval and not self._wait_reported:
                self._wait_reported = True
                text = f"the run waits at most {patience:g} s for the lease: lost workers may continue the run: {why}"
                self._out.log("lease", epoch=opened.epoch, granted=None, reason=why)
                self._out.send(self._roster.node_agent_sessions, to_member.Tell(text[:2000]))
            return False
        if not verdict.granted:
            raise RunOver(EXIT_LOST_MAJORITY, f"the other workers have continued, so this side stops: {verdict.reason}")
        return True

    def formed(self, formed: Formed) -> None:
        """Ask for the lease after this coordinator has formed an epoch, so that the lease names all members.

        The lease must name newcomers. For ``Witness.lets_in`` it must also exclude left-out workers, which could
        otherwise get the lease with the help of the witness.
        """
        claimed = self._claim is not None and (self._claim.term, self._claim.epoch) == (formed.term, formed.epoch)
        if self.slack is not None and not claimed:
            record = self.witness.has_to_record()
            claim = AskForLease(formed.term, formed.epoch, formed.members, renew=not record)
            self._record = claim if record else None
            self._ask(claim)

    def _ask(self, claim: AskForLease) -> None:
        self.witness.asks(claim)
        self._out.do(claim)

    def lease(self, verdict: Verdict) -> None:
        """Record the answer to a claim."""
        for asked in (self._record, self._claim):
            if asked is not None and verdict.granted and (asked.term, asked.epoch) == (verdict.term, verdict.epoch):
                self.witness.granted(asked)
        claim = self._claim
        if claim is None or (claim.term, claim.epoch) != (verdict.term, verdict.epoch):
            return
        if verdict.granted is not None:
            self._out.log("lease", epoch=verdict.epoch, granted=verdict.granted, reason=verdict.reason)
        self._verdict = verdict

    def _permission(self, reached: Workers, own: Formed | None, epoch: int | None = None) -> Permission:
        """Return the permission of ``reached`` to continue; ``epoch``: the rendezvous of these workers, if any."""
        bases, gone = self._bases(own), self._roster.gone
        if self.slack is None:
            return Permission.ENOUGH if may_go_on(reached, bases, gone, own is not None) else Permission.TOO_FEW
        may = permission(reached, bases, gone, self.slack)
        if may is Permission.TOO_FEW and reached:
            missing = self._missing(reached, bases)
            return Permission.CLAIM if self.witness.leaves_alone(reached, missing, epoch) else may
        return may

    def _bases(self, own: Formed | None) -> list[Workers]:
        return self.evidence.bases if own is None else [own.members]

    def _missing(self, reached: Workers, bases: list[Workers]) -> Workers:
        return frozenset().union(*bases) - self._roster.gone - reached
