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
from collections.abc import Mapping
from typing import Any

from recover_megatron.membership.events import Connected, MemberEffect, MemberEvent, Notify, Say
from recover_megatron.membership.records import CoordinatorLost, Json, MembershipError, Opened, Plan, Settings
from recover_megatron.membership.sides.follower import Follower, Stage


class Member(Follower):
    """A worker's side of the protocol.

    A newcomer (flag ``newcomer`` of ``hello``) dials no candidate before its first ``join``. The other workers would
    wait for it as soon as it attached, so it first prepares itself. If a newcomer reaches no candidate, the run is
    probably over, so the newcomer gives up sooner than a worker of the launch.
    """

    def __init__(self, hello: Mapping[str, Any], candidates: int, settings: Settings, now: float) -> None:
        self._asleep = self._newcomer = bool(hello.get("newcomer"))
        super().__init__({"type": "attach", **hello}, candidates, settings, now, late=self._newcomer)
        self._reached_at = now
        self.plan: Plan | None = None
        self.done = 0
        self.place: tuple[int, int, int] | None = None
        """Replica, position and quota, sent with each mark; None: no place."""
        self.goes_back = False
        """True if lost state could be loaded from a checkpoint or a snapshot; sent with each mark."""
        self.loss: tuple[int, float] | None = None
        """The last finished step and its loss, sent with each mark; None: none."""
        self.mark(0, "", None, False, 0.0)
        self.noted = False
        """True once a coordinator has received the exception report."""
        self.idle_in = 0
        """Number of the last epoch in which this member has no part; 0: none."""
        self.vacant = False
        """True if no member has a part in epoch ``idle_in``."""
        self.all_heard = 0
        """Number of a rendezvous: no live worker uses results of an epoch before that rendezvous any more."""
        self._end_request: dict[str, Any] | None = None
        self._exception: dict[str, Any] | None = None
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
        count = self.beat.get("count", -1) + 1
        beat: dict[str, Any] = {"type": "heartbeat", "count": count, "iteration": iteration, "phase": phase}
        beat |= {"waiting": waiting, "allow": allow}
        if microbatch is not None:
            beat["microbatch"] = microbatch
        if self.place is not None:
            beat["place"] = list(self.place)
        if self.goes_back:
            beat["goes_back"] = True
        if self.loss is not None:
            beat["loss"] = [self.loss[0], self.loss[1] if math.isfinite(self.loss[1]) else None]
        self.beat = beat

    def join(self, status: Json, reason: str) -> list[MemberEffect]:
        """Ask for a place in the next epoch. The request remains valid until a plan arrives."""
        self._status = (status,)
        if self._asleep:
            self.deadline = -math.inf
        opened = self.presentation.opened
        message = self._request(reason) if opened is None else self._join_message(opened, status)
        return self._report(message, may=self.stage is Stage.FOLLOWING)

    def ask(self, reason: str, peer: int | None = None) -> list[MemberEffect]:
        """Request a new epoch, unless one is being formed. This call does not join the epoch."""
        return self._report(self._request(reason, peer), may=self._in_epoch)

    @property
    def _in_epoch(self) -> bool:
        """True if the epoch of ``plan`` is not revoked, and its coordinator is reached."""
        return self.stage is Stage.FOLLOWING and not self.revoked

    def _request(self, reason: str, peer: int | None = None) -> dict[str, Any]:
        message = {"type": "complain", "epoch": self.presentation.formed.epoch, "reason": reason[:2000]}
        return message if peer is None else {**message, "peer": peer}

    def report_done(self, iteration: int) -> list[MemberEffect]:
        """Report that every segment of ``iteration`` is REDUCED here."""
        self.done = max(self.done, iteration)
        message = {"type": "done", "epoch": self.presentation.formed.epoch, "iteration": iteration}
        return self._report(message, may=self._in_epoch)

    def heard(self, epoch: int, term: int) -> list[MemberEffect]:
        """Confirm that this worker uses no result of an epoch before rendezvous ``epoch`` any more."""
        following = self.stage is Stage.FOLLOWING and self.presentation.term == term
        return self._report({"type": "heard", "epoch": epoch, "term": term}, may=following)

    def idle(self, vacant: bool = False) -> list[MemberEffect]:
        """Report that this worker has no part in the epoch of ``plan``.

        ``vacant``: True if no member has a part.
        The report is valid for that epoch only, and is repeated to every coordinator.
        """
        if self.plan is None or self.idle_in == self.plan.epoch:
            return []
        self.idle_in, self.vacant = self.plan.epoch, vacant
        return self._report({"type": "idle", "epoch": self.idle_in}, may=self._in_epoch)

    def note(self, text: str) -> list[MemberEffect]:
        """Send a note for the event log and workers.json. The note is not repeated if the coordinator is lost."""
        return self._report({"type": "note", "text": text[:2000]}, may=self.stage is Stage.FOLLOWING)

    def answer_drain(self, node: str, reason: str) -> list[MemberEffect]:
        """Send the decision that the members of ``plan`` took about a drain. Not repeated to another coordinator."""
        if self.plan is None:
            return []
        message = {"type": "drain_answer", "epoch": self.plan.epoch, "node": node, "reason": reason[:2000]}
        return self._report(message, may=self.stage is Stage.FOLLOWING)

    def end_run(self, code: int, reason: str) -> list[MemberEffect]:
        """Ask the current or next coordinator to end the run for all workers."""
        if self._end_request is not None:
            return []
        self._end_request = {"type": "give_up", "code": code, "reason": reason}
        return self._report(self._end_request, may=self.stage is Stage.FOLLOWING)

    def report_exception(self, report: Mapping[str, Any]) -> list[MemberEffect]:
        """Report the exception that ends this worker; ``noted`` becomes True when a coordinator has received it."""
        if self._exception is not None or self.stage is Stage.OUT:
            return []
        self._exception = {"type": "report_exception", **report}
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
        # ``bye`` repeats the idle report, because ``idle`` is ignored while the next epoch is being formed.
        bye = {"type": "bye", "idle": self.idle_in} if self.idle_in else {"type": "bye"}
        self._effects = [Say(bye)] if self._connected else []
        self.stage = Stage.OUT
        self.out = MembershipError("this worker has left the run")
        return self._effects

    def _attach_message(self) -> dict[str, Any]:
        return {**super()._attach_message(), **self._reports()}

    def _reports(self) -> dict[str, int | bool]:
        """Return this member's reports for the last epoch, which decide what that epoch committed."""
        idle = {"idle": self.idle_in} if self.idle_in else {}
        return {"done": self.done, **idle, **({"vacant": True} if self.vacant else {})}

    def _on(self, message: Mapping[str, Any], now: float) -> None:
        if message["type"] == "noted":
            self.noted = True
        elif message["type"] == "all_heard" and message["term"] >= self.presentation.term:
            self.all_heard = max(self.all_heard, message["epoch"])
        super()._on(message, now)

    def _revoked(self, message: Mapping[str, Any]) -> None:
        self._present_plan = message.get("present_plan") == self._hello["worker"]
        self._effects.append(Notify("revoke", {name: message[name] for name in ("epoch", "term", "reason")}))
        if self._end_request is not None:
            self._say(self._end_request)
        if self._status is not None and self.presentation.opened is not None:
            self._say(self._join_message(self.presentation.opened, *self._status))

    def _join_message(self, opened: Opened, status: Json) -> dict[str, Any]:
        message = {"type": "join", "epoch": opened.epoch, "status": status, **self._reports()}
        return {**message, "plan": self.plan.data} if self._present_plan and self.plan is not None else message

    def _planned(self, message: Mapping[str, Any]) -> None:
        formed = self.presentation.formed
        self.plan = Plan(formed.epoch, formed.members, message["committed"], message.get("data"))
        self._status = None
        self._effects.append(Notify("plan", {"epoch": formed.epoch}))
