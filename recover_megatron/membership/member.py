"""The members' side as a state machine without I/O: ``handle(event, now) -> effects``.

                connected          lead, revoke of a term not below mine       fenced, stopped, given up
    SEEKING ---------------> ATTACHED --------------------------> FOLLOWING ------------------------> OUT
       ^  refused, silent,      |                                    |
       |  does not lead         |         connection lost, silent    |
       '------------------------'------------------------------------'

SEEKING     dials the candidates in turn, beginning after the one it lost.
ATTACHED    has presented what it follows and holds, to a candidate that does not lead (yet).
FOLLOWING   obeys the coordinator of ``presentation.term``. Revokes and plans of a lower term are never obeyed.
            ``lead`` alone tells who leads: the rendezvous comes when what all hold has been presented.
OUT         for good; ``out`` says why.

``Follower`` is what workers and witnesses have in common. ``Member`` is a worker, a launcher is in ``watcher``.
A connection is given up only with ``Abandon`` (a message first, no close): the kernel's closing of a session means that
the process has ended, and the partition rule rests on that being true.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from recover_megatron.membership.errors import CoordinatorLost, Fenced, MembershipError
from recover_megatron.membership.events import (
    Abandon,
    Accepted,
    Connected,
    Dial,
    Hangup,
    Heard,
    Lost,
    MemberEffect,
    MemberEvent,
    Notify,
    Say,
    Tick,
)
from recover_megatron.membership.records import Formed, Json, Opened, Plan, Presentation, Settings, from_runs
from recover_megatron.membership.succession import presentation_to_wire


class Stage(Enum):
    """See the drawing above."""

    SEEKING = "seeking"
    ATTACHED = "attached"
    FOLLOWING = "following"
    OUT = "out"


class Follower:
    """Finds and follows the coordinator. ``hello``: the fields of the attach message that tell who this is.

    ``late``: it comes to a run that has begun, so any candidate may lead, and the first one may be a fresh standby.
    """

    beat: Mapping[str, Any] = {"type": "beat"}

    def __init__(
        self, hello: Mapping[str, Any], candidates: int, settings: Settings, now: float, *, late: bool = False
    ) -> None:
        self.settings = settings
        self._late = late
        self.stage = Stage.SEEKING
        self.out: MembershipError | None = None
        self.presentation = Presentation()
        self.last_epoch = 0
        """The last epoch of a run that has stopped, as its coordinator told."""
        self.deadline = now
        self._hello = dict(hello)
        self._candidates = candidates
        self._candidate = -1
        self._connected = False
        self._heard = now
        self._beat_at = now
        self._alone_since = now
        self._move_at: float | None = now  # when to try the next candidate
        self._failures = 0
        self._silent = False  # the last coordinator was left because it was silent, not because the connection ended
        self._accepted = False  # by the host of the candidate that was dialed last
        self._mute: set[int] = set()  # candidates whose host has accepted a connection, and that said nothing
        self._complaint = "no candidate was tried"
        self._effects: list[MemberEffect] = []

    def in_touch(self, now: float) -> bool:
        """Whether the coordinator was heard lately enough that it cannot have given this member up for its silence."""
        return self._connected and now - self._heard <= self.settings.heartbeat_timeout

    @property
    def candidate(self) -> int:
        """The candidate that was dialled last."""
        return self._candidate

    def handle(self, event: MemberEvent, now: float) -> list[MemberEffect]:
        """Apply one event. ``Tick`` is due at ``deadline``."""
        self._effects = []
        if self.stage is Stage.OUT:
            return self._effects
        match event:
            case Accepted():
                self._accepted = True
                self._mute.add(self._candidate)
                if self._candidates == 1:
                    self._move_at = None  # there is nobody else: it has this connection when it wakes up
            case Connected():
                self._connected, self._failures = True, 0
                self._mute.discard(self._candidate)
                self._heard = self._beat_at = now
                self._move_at = None
                self.stage = Stage.ATTACHED
                self._say(self._attach_message())
            case Lost(reason):
                self._complaint = reason
                self._mute.discard(self._candidate)
                self._silent &= self.stage is not Stage.FOLLOWING
                self._seek(now)
            case Heard(message):
                self._heard = now
                self._on(message, now)
            case Tick():
                if self.settings.heartbeat_interval < now - self.deadline < math.inf:
                    self._excuse(now - self.deadline, now)
                self._tick(now)
        self._set_deadline()
        return self._effects

    def _excuse(self, pause: float, now: float) -> None:
        """This process was kept from running: what it did not hear meanwhile is nobody's silence."""
        self._alone_since += pause
        self._heard = min(now, self._heard + pause)
        if self._move_at is not None:
            self._move_at += pause

    # -- finding a coordinator ----------------------------------------------------------------------------------------

    @property
    def _patience(self) -> float:
        if not self.presentation.term:
            return self.settings.start_timeout
        return self.settings.stall_timeout if self._mute else self.settings.lost_timeout

    @property
    def _first(self) -> bool:
        """Whether this is the candidate that leads at the start of a run, if all goes well."""
        return not self._late and self.presentation.term == 0 and self._candidate == 0

    def _seek(self, now: float) -> None:
        """Try the next candidate: at once, or after a pause when all have just failed."""
        if self.stage is Stage.FOLLOWING:
            self._alone_since = now
            self._failures = 0
        self.stage = Stage.SEEKING
        self._connected = False
        self._failures += 1
        pause = self.settings.heartbeat_interval / 5 if self._failures % self._candidates == 0 else 0.0
        self._move_at = now + pause
        self._tick(now)

    def _tick(self, now: float) -> None:
        if self.stage is not Stage.FOLLOWING and now >= self._alone_since + self._patience:
            since = f"for {self._patience:.0f} s"
            self._leave_with(CoordinatorLost(f"no coordinator that may go on was found {since}: {self._complaint}"))
            return
        if self._connected and now - self._heard > self.settings.heartbeat_timeout:
            self._complaint = f"the coordinator was silent for {now - self._heard:.1f} s"
            self._effects.append(Abandon(self._complaint))
            self._silent |= self.stage is Stage.FOLLOWING
            self._seek(now)
        elif self._move_at is not None and now >= self._move_at:
            if self._connected:
                self._complaint = "candidates were reached, but too few members have turned to any of them"
                self._effects.append(Abandon("you do not lead"))
                self._connected = False
                self.stage = Stage.SEEKING
            if not self._accepted:
                self._mute.discard(self._candidate)
            self._accepted = False
            self._candidate = (self._candidate + 1) % self._candidates
            # For a host that does not answer. At the start of a run the process may still be starting.
            slow = self.settings.start_timeout / 20 if self._first else 0.0
            self._move_at = now + max(slow, self.settings.heartbeat_timeout / 2)
            self._effects.append(Dial(self._candidate))
        elif self._connected and now >= self._beat_at:
            self._beat_at = now + self.settings.heartbeat_interval
            self._say(self.beat)

    def _set_deadline(self) -> None:
        times = [self._beat_at, self._heard + self.settings.heartbeat_timeout + 0.001] if self._connected else []
        if self._move_at is not None:
            times.append(self._move_at)
        if self.stage is not Stage.FOLLOWING:
            times.append(self._alone_since + self._patience)
        self.deadline = min(times) if self.stage is not Stage.OUT else math.inf

    def _attach_message(self) -> dict[str, Any]:
        attach = {**self._hello, **presentation_to_wire(self.presentation)}
        return {**attach, "silent": True} if self._silent else attach

    # -- following it -------------------------------------------------------------------------------------------------

    def _on(self, message: Mapping[str, Any], now: float) -> None:
        match message["type"]:
            case "beat":
                self._reached(now)
            case "standby":
                self._reached(now)
                dwell = self.settings.start_timeout / 2 if self._first else self.settings.heartbeat_timeout
                self._move_at = now + dwell if self._candidates > 1 else None
            case "refused":
                self._complaint = message["reason"]
                self._effects.append(Hangup())
                self._failures = self._candidates - 1  # pause before the next
                self._seek(now)
            case "fenced":
                self._leave_with(Fenced(message["reason"]))
            case "stop":
                self.last_epoch = message["epoch"]
                self._leave_with(CoordinatorLost(message["reason"], message["code"], message.get("by"), told=True))
            case "lead" if message["term"] >= self.presentation.term:
                self._follow(message["term"])
            case "revoke" if message["term"] >= self.presentation.term:
                self._follow(message["term"])
                self._opened(message)
                self._revoked(message)
            case "plan" if self._is_open(message):
                presentation = self.presentation
                presentation.formed = Formed(message["epoch"], from_runs(message["members"]), message["term"])
                presentation.opened = None
                presentation.committed = max(presentation.committed, message["committed"])
                self._planned(message)
            case "commit" if message["epoch"] == self.presentation.formed.epoch and not self.presentation.opened:
                self.presentation.committed = max(self.presentation.committed, message["iteration"])
                self._effects.append(Notify("commit"))
            case "kill" | "note" | "tell":
                self._effects.append(Notify(message["type"], message))

    def _reached(self, now: float) -> None:
        """A candidate that may lead one day is there."""

    def _is_open(self, message: Mapping[str, Any]) -> bool:
        opened = self.presentation.opened
        return opened is not None and (opened.term, opened.epoch) == (message["term"], message["epoch"])

    def _follow(self, term: int) -> None:
        self.stage = Stage.FOLLOWING
        self._silent = False
        self._mute.clear()
        self._move_at = None
        self.presentation.term = term

    def _opened(self, message: Mapping[str, Any]) -> None:
        presentation = self.presentation
        presentation.opened = Opened(message["epoch"], from_runs(message["members"]), message["term"])
        presentation.dead |= from_runs(message["dead"])
        presentation.left |= from_runs(message["left"])
        if presentation.formed.epoch and message["committed"] > presentation.committed:
            # Told to others by a coordinator that was lost in doing so.
            presentation.committed = message["committed"]
            self._effects.append(Notify("commit"))

    def _revoked(self, message: Mapping[str, Any]) -> None:
        """A rendezvous was opened."""

    def _planned(self, message: Mapping[str, Any]) -> None:
        """Its plan was fixed."""

    def _say(self, message: Mapping[str, Any]) -> None:
        self._effects.append(Say(message))

    def give_up(self, reason: MembershipError) -> list[MemberEffect]:
        """Be out, for a reason that the owner knows better."""
        self._effects = []
        self._leave_with(reason)
        return self._effects

    def _leave_with(self, reason: MembershipError) -> None:
        self.stage = Stage.OUT
        self.out = reason
        if self._connected:
            self._effects.append(Abandon(str(reason)))
            self._connected = False
        self._effects.append(Notify("out"))


class Member(Follower):
    """A worker.

    A newcomer (``hello`` says so) dials nobody before its first ``join``: it gets ready, for as long as that takes,
    while the run goes on without it. Once it attaches the others wait for it. It comes to a run that has its
    coordinator: where no candidate is reached it gives up sooner than the launch would, since that run is over.
    """

    def __init__(self, hello: Mapping[str, Any], candidates: int, settings: Settings, now: float) -> None:
        self._asleep = self._newcomer = bool(hello.get("newcomer"))
        super().__init__({"type": "attach", **hello}, candidates, settings, now, late=self._newcomer)
        self._reached_at = now
        self.plan: Plan | None = None
        self.done = 0
        self.place: tuple[int, int, int] | None = None
        """For people: replica, position and quota, which marks tell along."""
        self.mark(0, "", None, False, 0.0)
        self.noted = False
        """Whether a coordinator has heard the last words."""
        self.idle_in = 0
        """The last epoch in which this member has no part; 0: none."""
        self._plea: dict[str, Any] | None = None
        self._words: dict[str, Any] | None = None
        self._status: tuple[Json] | None = None
        self._present_plan = False

    @property
    def revoked(self) -> bool:
        """Whether the epoch of ``plan`` is over (or none has been formed yet)."""
        return self.plan is None or self.presentation.opened is not None

    @property
    def committed(self) -> int:
        """The last iteration known to be committed."""
        return self.presentation.committed

    def mark(
        self, iteration: int, phase: str, microbatch: int | None, waiting: bool, allow: float
    ) -> Mapping[str, Any]:
        """Set the progress that the next heartbeat tells."""
        count = self.beat.get("count", -1) + 1
        beat = {
            "type": "heartbeat",
            "count": count,
            "iteration": iteration,
            "phase": phase,
            "waiting": waiting,
            "allow": allow,
        }
        if microbatch is not None:
            beat["microbatch"] = microbatch
        if self.place is not None:
            beat["place"] = list(self.place)
        self.beat = beat
        return beat

    def join(self, status: Json, reason: str) -> list[MemberEffect]:
        """Ask for a place in the next epoch; valid through all restarts of the rendezvous until a plan comes."""
        self._effects = []
        self._status = (status,)
        if self._asleep:
            self.deadline = -math.inf
        if self.stage is Stage.FOLLOWING:
            if self.presentation.opened is not None:
                self._say_join()
            else:
                self._complain(reason)
        return self._effects

    def ask(self, reason: str, peer: int | None = None) -> list[MemberEffect]:
        """Ask for a new epoch, if none is being made; joining it is another matter."""
        self._effects = []
        if self.stage is Stage.FOLLOWING and not self.revoked:
            self._complain(reason, peer)
        return self._effects

    def _complain(self, reason: str, peer: int | None = None) -> None:
        message = {"type": "complain", "epoch": self.presentation.formed.epoch, "reason": reason[:2000]}
        self._say(message if peer is None else {**message, "peer": peer})

    def report_done(self, iteration: int) -> list[MemberEffect]:
        """Report that every segment of ``iteration`` is REDUCED here."""
        self._effects = []
        self.done = max(self.done, iteration)
        if self.stage is Stage.FOLLOWING and not self.revoked:
            self._say({"type": "done", "epoch": self.presentation.formed.epoch, "iteration": iteration})
        return self._effects

    def idle(self) -> list[MemberEffect]:
        """Have no part in the epoch of ``plan``. It holds for that epoch alone, and every coordinator is told."""
        self._effects = []
        if self.plan is not None and self.idle_in != self.plan.epoch:
            self.idle_in = self.plan.epoch
            if self.stage is Stage.FOLLOWING and not self.revoked:
                self._say({"type": "idle", "epoch": self.idle_in})
        return self._effects

    def note(self, text: str) -> list[MemberEffect]:
        """Tell this worker's launcher something for people; not told again to the next coordinator."""
        self._effects = []
        if self.stage is Stage.FOLLOWING:
            self._say({"type": "note", "text": text[:2000]})
        return self._effects

    def end_run(self, code: int, reason: str) -> list[MemberEffect]:
        """Ask whoever leads, now or next, to end the run for all."""
        self._effects = []
        if self._plea is None:
            self._plea = {"type": "give_up", "code": code, "reason": reason}
            if self.stage is Stage.FOLLOWING:
                self._say(self._plea)
        return self._effects

    def last_words(self, words: Mapping[str, Any]) -> list[MemberEffect]:
        """Tell why this worker ends; ``noted`` when a coordinator has heard it."""
        self._effects = []
        if self._words is None and self.stage is not Stage.OUT:
            self._words = {"type": "last_words", **words}
            if self._connected:
                self._say(self._words)
        return self._effects

    def handle(self, event: MemberEvent, now: float) -> list[MemberEffect]:
        """As ``Follower.handle``; last words that nobody has heard are told to the next coordinator."""
        if self._asleep:
            if self._status is None:
                self.deadline = math.inf
                return []
            self._asleep = False
            self._alone_since = self._reached_at = self._move_at = now
        effects = super().handle(event, now)
        if isinstance(event, Connected) and self._connected and self._words is not None and not self.noted:
            self._say(self._words)
        return effects

    def _reached(self, now: float) -> None:
        self._reached_at = now

    def _excuse(self, pause: float, now: float) -> None:
        super()._excuse(pause, now)
        self._reached_at += pause

    def _tick(self, now: float) -> None:
        if self._newcomer and self.presentation.term == 0 and now >= self._reached_at + self.settings.lost_timeout:
            self._leave_with(CoordinatorLost(f"the run that this worker was to join is not reached: {self._complaint}"))
        else:
            super()._tick(now)

    def leave(self) -> list[MemberEffect]:
        """Leave in order."""
        self._effects = [Say({"type": "bye"})] if self._connected else []
        self.stage = Stage.OUT
        self.out = MembershipError("this worker has left the run")
        return self._effects

    def _attach_message(self) -> dict[str, Any]:
        return {**super()._attach_message(), **self._reports()}

    def _reports(self) -> dict[str, int]:
        """What of the last epoch this member has reported: it decides what that epoch committed."""
        return {"done": self.done, "idle": self.idle_in} if self.idle_in else {"done": self.done}

    def _on(self, message: Mapping[str, Any], now: float) -> None:
        if message["type"] == "noted":
            self.noted = True
        super()._on(message, now)

    def _revoked(self, message: Mapping[str, Any]) -> None:
        self._present_plan = message.get("present_plan") == self._hello["worker"]
        self._effects.append(Notify("revoke", {"epoch": message["epoch"], "reason": message["reason"]}))
        if self._plea is not None:
            self._say(self._plea)
        if self._status is not None:
            self._say_join()

    def _say_join(self) -> None:
        assert self._status is not None
        assert self.presentation.opened is not None
        message = {
            "type": "join",
            "epoch": self.presentation.opened.epoch,
            "status": self._status[0],
            **self._reports(),
        }
        if self._present_plan and self.plan is not None:
            message["plan"] = self.plan.data
        self._say(message)

    def _planned(self, message: Mapping[str, Any]) -> None:
        formed = self.presentation.formed
        self.plan = Plan(formed.epoch, formed.members, message["committed"], message.get("data"))
        self._status = None
        self._effects.append(Notify("plan", {"epoch": formed.epoch}))
