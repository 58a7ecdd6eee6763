"""Epochs: the last formed epoch with its plan and commits, and the rendezvous of the next one.

                          joins                  all have joined, and may continue
    Rendezvous.open ---------------> may_follow -------------------------------> form ---> Epochs: reports, commits
       ^                                 |                                                            |
       |     a change of membership      |               a change of membership                       |
       '---------------------------------'------------------------------------------------------------'

A member has a *part* in the epoch unless it has reported itself idle. A commit needs the reports of all members with a
part, so it needs no log. If every survivor of an epoch presents ``done >= t``, iteration t counts as committed, since a
late commit does no harm. If any survivor presents less, t was not committed. So a lost coordinator loses no decision,
and a decision that a single worker has received is never reversed.
"""

from __future__ import annotations

from collections.abc import Container

from recover_megatron.membership.events import Outbox
from recover_megatron.membership.leadership import Leadership, Permission
from recover_megatron.membership.messages import fields, to_coordinator, to_member
from recover_megatron.membership.messages.fields import NO_PLAN, PlanId
from recover_megatron.membership.messages.plan_changes import packed_for, presented
from recover_megatron.membership.records import (
    EXIT_LOST_MAJORITY,
    EXIT_NO_REPLICA,
    Evidence,
    Formed,
    Json,
    NoPlan,
    Opened,
    Planner,
    PlanRequest,
    RunOver,
    WorkerId,
    Workers,
    runs_of,
    to_runs,
)
from recover_megatron.membership.roster import Fate, Member, Roster


class Epochs:
    """The last formed epoch: its members, its plan, and its commits."""

    def __init__(self, roster: Roster, planner: Planner, out: Outbox) -> None:
        self.formed = Formed(0, frozenset(roster.workers))
        self.own = False
        """True if this coordinator has formed the last epoch."""
        self._base: tuple[PlanId, Json] = NO_PLAN, None  # the plan before, if it is known
        self.plan: Json = None
        """Plan of the last epoch, from the planner or from a member that has presented it; None: not known."""
        self.committed = 0
        """The last committed iteration; 0: none."""
        self._roster = roster
        self._planner = planner
        self._out = out
        self._ready = 0  # number of members for which ``is_ready`` is true
        self._some_left = False  # True if a worker that was not idle in this epoch has left
        self._stuck = 0  # consecutive epochs that ended without a commit because all workers waited for each other
        self._apart = Workers()  # result of ``detect.apart`` in the last stuck epoch

    @property
    def working(self) -> Workers:
        """Members of the last epoch that have a part in it: they have not reported themselves idle."""
        return self.formed.members - self._roster.idle(self.formed)

    def adopt(self, evidence: Evidence) -> None:
        """Adopt the newest epoch, the last commit and the ended workers that members have presented."""
        if evidence.formed != self.formed:
            self.formed, self.plan = evidence.formed, None
        self.committed = max(self.committed, evidence.committed)
        self._roster.merge_ends(evidence.dead, evidence.left)

    def take_over(self, evidence: Evidence, now: float) -> Workers:
        """Adopt the members' presentations as the new coordinator. Return the workers that the run counts on.

        A live worker on which the run does not count is set aside if a member presented it as set aside, and is evicted
        otherwise. Newcomers are neither set aside nor evicted.
        """
        self.adopt(evidence)
        for worker in self._roster.workers.values():
            if worker.fate is not Fate.LIVE or worker.number in evidence.target or worker.new:
                continue
            if worker.number in evidence.aside:
                self._roster.set_aside([worker.number], "it was set aside when the previous coordinator was lost", now)
            else:
                self._roster.exclude(worker, "it was evicted earlier in the run", now)
        self._roster.log_unclear_ends(now)
        self._roster.changes.clear()
        return evidence.target

    # -- plan ---------------------------------------------------------------------------------------------------------

    def form(self, opened: Opened, opened_at: float, now: float, drain: tuple[str, ...]) -> None:
        """Form the epoch of a rendezvous that all members have joined. Raises RunOver if no plan is possible."""
        previous, workers = self.formed, self._roster.workers
        self._base = (previous.plan_id, self.plan) if self.plan is not None else (NO_PLAN, None)
        self.formed = Formed(opened.epoch, opened.members, opened.term)
        self.commit(self.formed.members & previous.members - self._roster.idle(previous))
        members = tuple(sorted(self.formed.members))
        statuses = {member: workers[member].status for member in members}
        try:
            lost = self._lost(previous.members - self.formed.members)
            aside = tuple(sorted(self._roster.with_fate(Fate.ASIDE)))
            request = PlanRequest(opened.epoch, members, statuses, self.plan, self.committed, lost, drain, aside)
            self.plan = self._planner(request)
        except NoPlan as error:
            raise RunOver(error.code, str(error)) from error
        self.own, self._some_left = True, False
        for worker in (workers[member] for member in members):
            worker.status, worker.new, worker.back = None, False, False
            worker.progress.marked, worker.progress.waiting_since, worker.progress.waits = now, None, False
        seconds, fault_at = {"rendezvous": now - opened_at}, self._roster.fault_at
        if fault_at is not None:
            seconds["since_fault"] = now - fault_at
        self._roster.fault_at = None
        self._out.log("plan", epoch=opened.epoch, members=to_runs(members), committed=self.committed, seconds=seconds)

    def _lost(self, missing: Workers) -> dict[WorkerId, Json]:
        """Return worker id -> last known progress, for the workers in ``missing`` that have not left normally."""
        gone = [worker for number in sorted(missing) if (worker := self._roster.workers[number]).fate is not Fate.LEFT]
        return {
            w.number: {"iteration": w.progress.iteration, "phase": w.progress.phase, "aside": w.fate is Fate.ASIDE}
            for w in gone
        }

    def plan_message(self, data: Json = None, base: PlanId = NO_PLAN) -> to_member.Plan:
        """Return the message with the last epoch's plan; without ``data``: for launchers."""
        formed = self.formed
        return to_member.Plan(formed.epoch, formed.term, to_runs(formed.members), self.committed, data, base)

    def send_plan(self) -> None:
        """Send the plan to the epoch's members; to a member that holds the plan before, only the changes."""
        holds = {member: self._roster.workers[member].holds for member in self.formed.members}
        for receivers, base, data in packed_for(self.plan, holds, *self._base):
            self._out.send(self._roster.sessions_of(receivers), self.plan_message(data, base))

    # -- commits ------------------------------------------------------------------------------------------------------

    def done(self, worker: Member, iteration: int, now: float) -> None:
        before = self.is_ready(worker)
        worker.done = max(worker.done, iteration)
        worker.progress.marked = now
        if worker.progress.waiting_since is None:
            worker.progress.waiting_since = now
        if self._some_left:
            self._roster.changes.append("a worker has left while others continue")
        self._reported(worker, before)

    def idle(self, worker: Member) -> None:
        """Record a member's report that it has no part in the last epoch."""
        before = self.is_ready(worker)
        worker.idle_in = self.formed.epoch
        self._reported(worker, before)

    def left(self, worker: Member, why: str) -> None:
        """Record that a worker has left normally.

        Unless the worker was idle in the last epoch, that epoch commits nothing more, because a report may be missing.
        """
        self._some_left |= worker.number not in self.formed.members or worker.idle_in != self.formed.epoch
        worker.fate = Fate.LEFT
        self._out.log("left", worker=worker.number, reason=why)

    @property
    def finished(self) -> bool:
        """True if no member with a part in the last epoch is live, and at least one of these members left normally.

        False if another coordinator formed the epoch, because then this coordinator cannot know whether the workers
        that left had a part in the epoch.
        """
        fates = {self._roster.workers[member].fate for member in self.working} if self.own else set()
        return Fate.LEFT in fates and Fate.LIVE not in fates

    def commit(self, reporters: Workers) -> bool:
        """Commit the iteration that all ``reporters``, members with a part, have reported; False: it was before."""
        workers = self._roster.workers
        decided = min((workers[number].done for number in reporters), default=0)
        new = decided > self.committed
        if new:
            self.committed = decided
            self._stuck, self._apart = 0, Workers()
            self._out.log("commit", epoch=self.formed.epoch, iteration=decided)
        self._ready = sum(self.is_ready(workers[member]) for member in self.formed.members)
        return new

    def is_ready(self, worker: Member) -> bool:
        """Return whether the next commit does not wait for this member: it has reported done or is idle."""
        return worker.done > self.committed or worker.idle_in == self.formed.epoch

    def all_wait(self, apart: Workers) -> Workers:
        """Return the workers that must be evicted because all members wait for each other (the epoch is *stuck*).

        ``apart``: result of ``detect.apart`` for the members. A worker that was in ``apart`` in the previous
        stuck epoch, too, must be evicted. If there is no such worker, request a new epoch. Raises RunOver after more
        than ``max_stuck_epochs`` stuck epochs in a row.
        """
        self._stuck += 1
        again, self._apart = self._apart & apart, apart
        self._out.log("stuck", epoch=self.formed.epoch, times=self._stuck, apart=to_runs(apart))
        if again:
            self._stuck = 0
            return again
        if self._stuck > self._roster.settings.max_stuck_epochs:
            raise RunOver(EXIT_LOST_MAJORITY, f"all workers waited for each other in {self._stuck} epochs in a row")
        self._roster.changes.append("all workers wait for each other")
        return Workers()

    def _reported(self, worker: Member, before: bool) -> None:
        """Count a worker's report, and commit if no report is missing. ``before``: ``is_ready`` before the report."""
        self._ready += self.is_ready(worker) and not before
        if self._some_left:
            if self.finished:
                self._roster.changes.append("only workers without a part in the work remain")
        elif self._ready == len(self.formed.members) and self.commit(self.working):
            message = to_member.Commit(self.formed.epoch, self.committed)
            self._out.send(self._roster.sessions_of(self.formed.members), message)
            for progress in (self._roster.workers[member].progress for member in self.formed.members):
                progress.waiting_since, progress.waits = None, False


class RevokeConfirmations:
    """Workers' confirmations that they know that the last epoch is over.

    No worker may abort operations before all live workers have confirmed. The reason: an aborted NCCL kernel still
    posts its steps, empty, so the kernels of its peers complete with garbage and without an error. A worker that does
    not know yet that the epoch is over would use that garbage. Set-aside workers must confirm, too, because they may
    come back. Evicted workers need not confirm once the next epoch may be formed without them (``may``).
    """

    def __init__(self, roster: Roster, epochs: Epochs) -> None:
        self.announced = True
        """True once ``AllHeard`` was sent, because all workers have confirmed; True before the first epoch."""
        self.may = False
        """True if no worker is evicted, or the next epoch may be formed without the evicted workers."""
        self._roster = roster
        self._epochs = epochs
        self._after = 0
        self._missing: set[WorkerId] = set()

    def begin(self) -> None:
        """Start to wait for confirmations when a rendezvous opens. Those received since the last plan remain valid."""
        epoch, workers = self._epochs.formed.epoch, self._roster.workers
        if self._after < epoch:
            self._after, self.announced = epoch, False
        asked = self._epochs.formed.members | self._roster.with_fate(Fate.ASIDE)
        self._missing = {number for number in asked if workers[number].heard_of <= epoch}
        self.may = False

    def heard(self, worker: Member, epoch: int) -> None:
        """Record a worker's confirmation that it has received the revoke of rendezvous ``epoch``."""
        worker.heard_of = max(worker.heard_of, epoch)
        if worker.heard_of > self._after:
            self._missing.discard(worker.number)

    @property
    def missing(self) -> Workers:
        """Live and set-aside workers whose confirmation has not arrived."""
        return frozenset(filter(self._counts, self._missing))

    def _counts(self, number: WorkerId) -> bool:
        return self._roster.workers[number].fate in (Fate.LIVE, Fate.ASIDE)

    @property
    def due(self) -> bool:
        """True if all confirmations have arrived, but the message ``AllHeard`` has not been sent."""
        return not self.announced and not any(map(self._counts, self._missing))

    def tell(self, epoch: int, term: int, out: Outbox, now: float) -> None:
        """Send ``AllHeard`` to all workers if it is due and allowed (``may``), and restart their hang timeouts."""
        if not self.due or not self.may:
            return
        self.announced = True
        workers = self._roster.with_fate(Fate.LIVE) | self._roster.with_fate(Fate.ASIDE)
        out.send(self._roster.sessions_of(workers), to_member.AllHeard(epoch, term))
        for number in workers:
            progress = self._roster.workers[number].progress
            progress.marked = max(progress.marked, now)


class Rendezvous:
    """The rendezvous opened last: the members that it waits for, and whether its epoch may be formed."""

    def __init__(self, roster: Roster, epochs: Epochs, leadership: Leadership) -> None:
        self.opened = Opened(0, frozenset(), 0)
        self.too_few = False
        """True if the rendezvous has too few members to continue the run, as far as the coordinator knows now."""
        self.is_open = False
        """True from the opening of the rendezvous until its epoch is formed."""
        self.opened_at = 0.0
        self.patience = 0.0
        """Time until which the rendezvous waits for members without a connection."""
        self._roster = roster
        self._epochs = epochs
        self._leadership = leadership
        self._joined = 0  # number of members that have joined
        self.hearing = RevokeConfirmations(roster, epochs)

    @property
    def members(self) -> Workers:
        return self.opened.members

    def open(self, members: Workers, now: float) -> None:
        """Open the next rendezvous, which ``members`` must join even if they have joined an earlier one."""
        settings = self._roster.settings
        if self._epochs.formed.epoch > 0:
            self.patience = now + 1.2 * settings.heartbeat_timeout
        elif self.opened.epoch == 0:
            self.patience = now + settings.start_timeout
        self.opened = Opened(self._leadership.next_epoch(), members, self._leadership.term)
        if self._leadership.witness.off:
            self._leadership.witness.opened()
        self.is_open = True
        self.opened_at = now
        self._joined = 0
        self.hearing.begin()
        for number in members:
            self._roster.workers[number].joined = 0
            self._roster.workers[number].progress.waiting_since = None

    def is_apart(self, worker: Member) -> bool:
        """Return whether a worker is new, set aside, or for another reason no member of the last epoch."""
        return worker.new or worker.fate is Fate.ASIDE or worker.number not in self._epochs.formed.members

    def revoke_message(self, reason: str, *, apart: bool = False) -> to_member.Revoke:
        """Return the message that ends the last epoch and contains the last commit and the next members.

        ``apart``: the receivers are workers for which ``is_apart`` is true, and the message has no commit. Such workers
        took no part in the committed step: they do not apply it, but copy the state of a worker that has applied it.
        """
        epochs, opened, formed = self._epochs, self.opened, self._epochs.formed
        dead, left, aside = (runs_of(self._roster.with_fate(fate)) for fate in (Fate.DEAD, Fate.LEFT, Fate.ASIDE))
        holder = None
        if not epochs.own and epochs.plan is None and formed.epoch > 0:
            holders = (self._roster.workers[m] for m in sorted(self.members))
            holder = next((w.number for w in holders if w.session and w.formed_epoch == formed.epoch), None)
        # If no member of the last epoch is in the next one, the next coordinator must still know of the last epoch.
        after = fields.Epoch.of(formed) if apart and not self.members & formed.members else None
        members, committed = runs_of(opened.members), 0 if apart else epochs.committed
        return to_member.Revoke(
            opened.epoch, opened.term, members, dead, left, committed, reason[:2000], aside, holder, after
        )

    def join(self, worker: Member, message: to_coordinator.Join, now: float) -> None:
        """Record a worker's join, status and last reports. Ignore a join of a rendezvous that is not open."""
        if not self.is_open or message.epoch != self.opened.epoch or worker.number not in self.members:
            return
        self._joined += worker.joined != self.opened.epoch
        worker.joined, worker.status, worker.done = message.epoch, message.status, message.done
        worker.idle_in, worker.vacant, worker.holds = message.idle, message.vacant, message.holds
        if isinstance(message.status, dict) and isinstance(node := message.status.get("node"), str) and node:
            worker.node = node[:256]
        worker.progress.marked = worker.progress.waiting_since = now
        if message.plan is not None and not self._epochs.own and message.holds == self._epochs.formed.plan_id:
            self._epochs.plan = presented(message.plan, self._epochs.formed.members)

    def withdraw(self, worker: Member) -> None:
        """Require a worker to join again, because it has a new connection."""
        self._joined -= self.is_open and worker.joined == self.opened.epoch
        worker.joined = 0

    @property
    def all_joined(self) -> bool:
        return self._joined == len(self.members)

    def may_follow(self, unreached: Container[int], now: float) -> bool:
        """Evict members that did not attach in time. Return whether the epoch may be formed once all have joined.

        ``unreached``: workers whose connections have ended; ``lateness`` decides about their eviction. Raises RunOver
        if the rendezvous can have no plan.
        """
        late = self._late(unreached, now)
        launched = [w.number for w in late if w.number < self._roster.world]
        if self._epochs.formed.epoch == 0 and launched:
            names = ", ".join(map(str, launched[:20]))
            patience = f"{self._roster.settings.start_timeout:.0f} s"
            raise RunOver(EXIT_NO_REPLICA, f"workers {names} did not attach within {patience}")
        for worker in late:
            self._roster.exclude(worker, "it did not attach to the new coordinator", now)
        return not late and self._may_follow(now)

    def form(self, now: float, drain: tuple[str, ...]) -> None:
        """Form the epoch of the rendezvous. ``drain``: see ``PlanRequest``. Raises RunOver if no plan is possible."""
        self._epochs.form(self.opened, self.opened_at, now, drain)
        self.is_open = False

    def excuse(self, pause: float) -> None:
        """Shift the deadlines by a pause of this process, in seconds."""
        self.patience += pause
        self.opened_at += pause

    def _late(self, unreached: Container[int], now: float) -> list[Member]:
        """Return the members that have not attached in time.

        Before the first epoch, workers of the launch have ``start_timeout``. In all other cases the time is 1.2
        heartbeat timeouts.
        """
        newcomers_until = min(self.patience, self.opened_at + 1.2 * self._roster.settings.heartbeat_timeout)
        missing = [self._roster.workers[m] for m in self.members if m not in unreached]
        missing = [w for w in missing if w.session is None]
        until = {w.number: newcomers_until if w.number >= self._roster.world else self.patience for w in missing}
        return [w for w in missing if now > max(until[w.number], w.awaited_until)]

    def _may_follow(self, now: float) -> bool:
        """Return whether the rules of ``leadership`` allow the members to continue after the last epoch.

        Raises RunOver if no later event can allow it. Evicts members whose launchers have not acknowledged the
        rendezvous in time.
        """
        contest = self._leadership.contest(self.opened, self._epochs.formed, self._epochs.own)
        self.too_few = contest is not None and contest.permission is Permission.TOO_FEW
        if contest is None:
            return True
        roster, members = self._roster, [self._roster.workers[m] for m in self.members]
        unheard = [w for w in members if w.node_agent and not self._acknowledged(w.node_agent, now)]
        may = contest.permission is not Permission.TOO_FEW
        if may and not unheard:
            enough = contest.permission is Permission.ENOUGH
            if not enough and (self.all_joined or not self.hearing.missing):  # either way all members follow this term
                enough = self._leadership.has_lease(self.opened, now)
            return enough
        evicted = [roster.workers[n] for n in roster.with_fate(Fate.OUT)]
        vouched = any(roster.vouched(w, now) for w in evicted)
        hopeless = not vouched or now > self.patience + 2 * roster.settings.heartbeat_timeout
        if not may and hopeless and not self._leadership.witness.waits(now):
            text = f"only {len(members)} of {len(contest.missing | self.members)} workers that may be running are "
            text += "reached: the others may continue elsewhere, so this side stops"
            if not contest.known:
                text += " (the reached workers have no part in the work, and do not know the last commit)"
            raise RunOver(EXIT_LOST_MAJORITY, text)
        for worker in unheard if may else []:
            node_agent = roster.node_agents.get(worker.node_agent)
            stopped = node_agent is not None and node_agent.session is not None  # if so, its host answers probes
            if now > self.patience + (roster.settings.heartbeat_timeout if stopped else 0.0):
                roster.exclude(worker, "its launcher is not reached, and may vouch for it to another coordinator", now)
        return False

    def _acknowledged(self, node: str, now: float) -> bool:
        """Return whether the launcher cannot attach to another coordinator without presenting this rendezvous.

        That is certain if the launcher has acknowledged the rendezvous, or has ended. It is also certain if the
        launcher's process is stopped, its host has received the revoke, and the time ``patience`` is over, because by
        then all messages that the launcher sent earlier have arrived.
        """
        node_agent = self._roster.node_agents.get(node)
        if node_agent is None:
            return False
        delivered = node_agent.delivered == self.opened.epoch and now > self.patience
        return node_agent.ended or node_agent.acknowledged == self.opened.epoch or delivered
