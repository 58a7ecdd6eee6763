"""A worker's side of the protocol as a state machine without I/O, on top of ``follower``.

                    join                        revoke                     plan
    no plan ---------------> waits for a plan ----------> sends join ---------------> in an epoch
                                    ^                      ^   | revoke                  |
                                    | join: sends complain '---'                         | revoke: the epoch is over
                                    '----------------------------------------------------'

A worker presents its reports (``done``, ``idle``) to every new coordinator. It also repeats its request to end the run.
It repeats its exception report until a coordinator has received the report.
"""

from __future__ import annotations

import math

from recover_megatron.membership.events import Connected, MemberEffect, MemberEvent, Notify, Say
from recover_megatron.membership.messages import to_coordinator, to_member
from recover_megatron.membership.messages.fields import NO_PLAN
from recover_megatron.membership.messages.plan_changes import pack, unpack
from recover_megatron.membership.records import CoordinatorLost, Json, MembershipError, Opened, Plan, Settings, WorkerId
from recover_megatron.membership.sides.follower import Follower, Stage
from recover_megatron.network.messages import WireError


class Member(Follower):
    """A worker's side of the protocol.

    A newcomer (field ``newcomer`` of ``hello``) dials no candidate before its first ``join``. The other workers would
    wait for it as soon as it attached, so it first prepares itself. If a newcomer reaches no candidate, the run is
    probably over, so the newcomer gives up sooner than a worker of the launch.
    """

    def __init__(self, hello: to_coordinator.Attach, candidates: int, settings: Settings, now: float) -> None:
        self._asleep = self._newcomer = hello.newcomer
        super().__init__(hello, candidates, settings, now, late=self._newcomer)
        self._reached_at = now
        self.plan: Plan | None = None
        self._holds = NO_PLAN
        self.done = 0
        self.place: tuple[int, int, int] | None = None
        """Replica, position and quota, sent with each mark; None: no place."""
        self.goes_back = False
        """True if lost state could be loaded from a checkpoint or a snapshot; sent with each mark."""
        self.loss: tuple[int, float] | None = None
        """The last finished step and its loss, sent with each mark; None: none."""
        self._count = -1
        self._worker = hello.worker
        self.mark(0, "", None, False, 0.0)
        self.noted = False
        """True once a coordinator has received the exception report."""
        self.idle_in = 0
        """Number of the last epoch in which this member has no part; 0: none."""
        self.vacant = False
        """True if no member has a part in epoch ``idle_in``."""
        self.all_heard = 0
        """Number of a rendezvous: no live worker uses results of an epoch before that rendezvous any more."""
        self._end_request: to_coordinator.GiveUp | None = None
        self._exception: to_coordinator.ReportException | None = None
        self._status: tuple[Json] | None = None
        self._present_plan = False

    @property
    def revoked(self) -> bool:
        """True if the epoch of ``plan`` is over (or none has been formed yet)."""
        return self.plan is None or self.presentation.opened is not None

    @property
    def committed(self) -> int:
        """The last iteration known to be committed."""
        return self.presentation.committed

    def mark(self, iteration: int, phase: str, microbatch: int | None, waiting: bool, allow: float) -> None:
        """Set the progress that the next heartbeat carries."""
        loss = self.loss and (self.loss[0], self.loss[1] if math.isfinite(self.loss[1]) else None)
        self._count += 1
        self.beat = to_coordinator.Heartbeat(
            self._count, iteration, phase, waiting, allow, microbatch, self.place, self.goes_back, loss
        )

    def join(self, status: Json, reason: str) -> list[MemberEffect]:
        """Ask for a place in the next epoch. The request remains valid until a plan arrives."""
        self._status = (status,)
        if self._asleep:
            self.deadline = -math.inf
        opened = self.presentation.opened
        message = self._request(reason) if opened is None else self._join_message(opened, status)
        return self._report(message, may=self.stage is Stage.FOLLOWING)

    def ask(self, reason: str, peer: WorkerId | None = None) -> list[MemberEffect]:
        """Request a new epoch, unless one is being formed. This call does not join the epoch."""
        return self._report(self._request(reason, peer), may=self._in_epoch)

    @property
    def _in_epoch(self) -> bool:
        """True if the epoch of ``plan`` is not revoked, and its coordinator is reached."""
        return self.stage is Stage.FOLLOWING and not self.revoked

    def _request(self, reason: str, peer: WorkerId | None = None) -> to_coordinator.Complain:
        return to_coordinator.Complain(self.presentation.formed.epoch, reason[:2000], peer)

    def report_done(self, iteration: int) -> list[MemberEffect]:
        """Report that every segment of ``iteration`` is REDUCED here."""
        self.done = max(self.done, iteration)
        message = to_coordinator.Done(self.presentation.formed.epoch, iteration)
        return self._report(message, may=self._in_epoch)

    def heard(self, epoch: int, term: int) -> list[MemberEffect]:
        """Confirm that this worker uses no result of an epoch before rendezvous ``epoch`` any more."""
        following = self.stage is Stage.FOLLOWING and self.presentation.term == term
        return self._report(to_coordinator.Heard(epoch, term), may=following)

    def idle(self, vacant: bool = False) -> list[MemberEffect]:
        """Report that this worker has no part in the epoch of ``plan``.

        ``vacant``: True if no member has a part.
        The report is valid for that epoch only, and is repeated to every coordinator.
        """
        if self.plan is None or self.idle_in == self.plan.epoch:
            return []
        self.idle_in, self.vacant = self.plan.epoch, vacant
        return self._report(to_coordinator.Idle(self.idle_in), may=self._in_epoch)

    def note(self, text: str) -> list[MemberEffect]:
        """Send a note for the event log and workers.json. The note is not repeated if the coordinator is lost."""
        return self._report(to_coordinator.Note(text[:2000]), may=self.stage is Stage.FOLLOWING)

    def answer_drain(self, node: str, reason: str) -> list[MemberEffect]:
        """Send the decision that the members of ``plan`` took about a drain. Not repeated to another coordinator."""
        if self.plan is None:
            return []
        message = to_coordinator.DrainAnswer(self.plan.epoch, node, reason[:2000])
        return self._report(message, may=self.stage is Stage.FOLLOWING)

    def end_run(self, code: int, reason: str) -> list[MemberEffect]:
        """Ask the current or next coordinator to end the run for all workers."""
        if self._end_request is not None:
            return []
        self._end_request = to_coordinator.GiveUp(code, reason)
        return self._report(self._end_request, may=self.stage is Stage.FOLLOWING)

    def report_exception(self, report: to_coordinator.ReportException) -> list[MemberEffect]:
        """Report the exception that ends this worker; ``noted`` becomes True when a coordinator has received it."""
        if self._exception is not None or self.stage is Stage.OUT:
            return []
        self._exception = report
        return self._report(self._exception)

    def handle(self, event: MemberEvent, now: float) -> list[MemberEffect]:
        """Apply one event, as in ``Follower``; repeat an unconfirmed exception report to the next coordinator."""
        if self._asleep:
            if self._status is None:
                self.deadline = math.inf
                return []
            self._asleep = False
            self._alone_since = self._reached_at = self._move_at = now
        effects = super().handle(event, now)
        if isinstance(event, Connected) and self._connected and self._exception is not None and not self.noted:
            self._say(self._exception)
        return effects

    def _reached(self, now: float) -> None:
        self._reached_at = now

    def _excuse(self, pause: float, now: float) -> None:
        super()._excuse(pause, now)
        self._reached_at += pause

    def _tick(self, now: float) -> None:
        if self._newcomer and self.presentation.term == 0 and now >= self._reached_at + self.settings.lost_timeout:
            self._leave_with(CoordinatorLost(f"the run that this worker should join is not reached: {self._complaint}"))
        else:
            super()._tick(now)

    def leave(self) -> list[MemberEffect]:
        # ``Bye`` repeats the idle report, because ``Idle`` is ignored while the next epoch is being formed.
        self._effects = [Say(to_coordinator.Bye(self.idle_in))] if self._connected else []
        self.leaving = self._connected
        self.stage = Stage.OUT
        self.out = MembershipError("this worker has left the run")
        self._set_deadline()
        return self._effects

    def farewell(self) -> list[to_coordinator.ToCoordinator]:
        """Return the messages by which this member leaves on a new connection."""
        return [self._attach_message(), to_coordinator.Bye(self.idle_in)]

    def _reports(self) -> dict[str, int | bool]:
        """Return this member's reports for the last epoch, which decide what that epoch committed."""
        return {"done": self.done, "idle": self.idle_in, "vacant": self.vacant}

    def _on(self, message: to_member.ToMember, now: float) -> None:
        match message:
            case to_member.Noted():
                self.noted = True
            case to_member.AllHeard() if message.term >= self.presentation.term:
                self.all_heard = max(self.all_heard, message.epoch)
        super()._on(message, now)

    def _revoked(self, message: to_member.Revoke) -> None:
        self._present_plan = message.present_plan == self._worker
        self._effects.append(Notify(message))
        if self._end_request is not None:
            self._say(self._end_request)
        if self._status is not None and self.presentation.opened is not None:
            self._say(self._join_message(self.presentation.opened, *self._status))

    def _join_message(self, opened: Opened, status: Json) -> to_coordinator.Join:
        plan = pack(self.plan.data, self.plan.members) if self._present_plan and self.plan is not None else None
        return to_coordinator.Join(opened.epoch, status, self.done, self.idle_in, self.vacant, self._holds, plan)

    def _planned(self, message: to_member.Plan) -> None:
        formed, before, held = message.formed(), self.plan.data if self.plan is not None else None, self._holds
        self._holds = NO_PLAN  # if this plan is refused, the next one must not be changes
        if message.base not in (NO_PLAN, held):
            raise WireError(f"a plan that changes the plan of epoch {message.base[0]}, which is not held")
        try:
            data = unpack(message.data, formed.members, before if message.base != NO_PLAN else None)
        except ValueError as error:
            raise WireError(str(error)) from error
        self.plan = Plan(formed.epoch, formed.members, message.committed, data)
        self._holds = formed.plan_id
        self._status = None
