"""State machine that finds and follows a coordinator: the common part of workers and launchers, without I/O.

                connected          lead, revoke of own term or higher          fenced, stopped, given up
    SEEKING ---------------> ATTACHED --------------------------> FOLLOWING ------------------------> OUT
       ^  refused, silent,      |                                    |
       |  does not lead         |         connection lost, silent    |
       '------------------------'------------------------------------'

SEEKING     dials the candidates in turn, beginning after the candidate that it lost.
ATTACHED    has presented its knowledge (``Presentation``) to a candidate that does not lead (yet).
FOLLOWING   obeys the coordinator of ``presentation.term``. Revokes and plans of a lower term are never obeyed.
            ``lead`` only announces the leader: the rendezvous opens when all members have attached.
OUT         final; ``out`` has the reason.

The subclasses ``Member`` (worker) and ``NodeAgentClient`` (launcher) add the reports. A connection is given up only
with ``Abandon`` (a message, and no close), because the coordinator interprets a closed session as a death.
The partition rule (``leadership``) relies on that.
"""

from __future__ import annotations

import math
from collections import deque
from enum import Enum
from typing import Any

from msgspec.structs import replace

from recover_megatron.membership.events import (
    Abandon,
    Accepted,
    Challenged,
    Connected,
    Dial,
    Hangup,
    Heard,
    Look,
    Lost,
    MemberEffect,
    MemberEvent,
    Notify,
    Say,
    Tick,
)
from recover_megatron.membership.messages import fields, to_coordinator, to_member
from recover_megatron.membership.messages.to_coordinator import Hello, ToCoordinator
from recover_megatron.membership.records import (
    CoordinatorLost,
    Fenced,
    MembershipError,
    Presentation,
    Settings,
    from_runs,
)


class Stage(Enum):
    """Stage of a follower; the module's docstring draws the transitions."""

    SEEKING = "seeking"
    ATTACHED = "attached"
    FOLLOWING = "following"
    OUT = "out"


class Follower:
    """Finds and follows the coordinator. ``hello``: the first message, which identifies this process.

    ``late``: True if the run began before this process. Then any candidate may lead, and the first in the
    list may be a fresh standby.
    """

    beat: to_coordinator.Heartbeat | to_coordinator.Beat = to_coordinator.Beat()

    def __init__(self, hello: Hello, candidates: int, settings: Settings, now: float, *, late: bool = False) -> None:
        self.settings = settings
        self._late = late
        self.stage = Stage.SEEKING
        self.out: MembershipError | None = None
        self.presentation = Presentation()
        self.last_epoch = 0
        """The last epoch of a run that has stopped, as its coordinator reported; 0: none."""
        self.deadline = now
        self._hello = hello
        self._launched = candidates  # number of candidates of the launch, which precede ``_added``
        self._added: tuple[tuple[str, int], ...] = ()
        self.candidate = -1  # index of the last candidate dialed
        self._connected = False
        self._heard = now
        self._beat_at = now
        self.in_step = False
        """True to send heartbeats at multiples of the interval, so that a relay gets those of its host together."""
        self._alone_since = now
        self._move_at: float | None = now  # time at which to try the next candidate; None: stay
        self._failures = 0
        self._beats = 0  # number of the last heartbeat
        self._asked = deque[tuple[int, float]]()  # numbers and send times of unanswered heartbeats
        self._answered = -math.inf  # send time of the last answered heartbeat
        self._silent = False  # True if the last coordinator was left because of silence
        self._accepted = False  # True if the host of the last dialed candidate has accepted the connection
        self._mute: set[int] = set()  # candidates that have sent nothing although their host has accepted a connection
        self.leaving = False
        """True if this member has sent ``bye``."""
        self._again = False  # True to dial the same candidate once more
        self._complaint = "no candidate was tried"
        self._effects: list[MemberEffect] = []

    def in_touch(self, now: float, *, in_epoch: bool = True) -> bool:
        """Return whether the coordinator cannot yet have evicted this member for silence.

        The silence counts from the sending of the last message that was answered, not from the arrival of the answer:
        answers may lie unread in the socket of a stopped process. ``in_epoch``: only answers of the coordinator that
        formed the current epoch count.
        """
        if self.stage is not Stage.FOLLOWING or (in_epoch and self.presentation.term != self.presentation.formed.term):
            return False
        return now - self._answered <= self.settings.heartbeat_timeout

    def handle(self, event: MemberEvent, now: float) -> list[MemberEffect]:
        """Process one event and return effects. ``Tick`` is due at time ``deadline``."""
        self._effects = []
        if self.stage is Stage.OUT:
            return self._effects
        match event:
            case Accepted():
                self._accepted = True
                self._mute.add(self.candidate)
                if self._candidates == 1:
                    self._move_at = None  # no other candidate: wait until this one wakes up
            case Challenged() if self._move_at is not None:
                # It may need seconds for the proofs of all members of a large run that it takes over.
                self._move_at = max(self._move_at, now + self.settings.heartbeat_timeout)
            case Connected():
                self._connected, self._failures = True, 0
                self._mute.discard(self.candidate)
                self._heard = self._beat_at = now
                self._asked.clear()
                self._answered = -math.inf
                self._move_at = None
                self.stage = Stage.ATTACHED
                self._say(self._attach_message())
            case Lost(reason, again=again):
                self._complaint = reason
                self._again = again
                if not again:
                    self._mute.discard(self.candidate)
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
        """Exclude a pause of this process from the coordinator's silence and from this member's deadlines."""
        self._alone_since += pause
        self._heard = min(now, self._heard + pause)
        if self._move_at is not None:
            self._move_at += pause

    # -- find a coordinator -------------------------------------------------------------------------------------------

    @property
    def _patience(self) -> float:
        if not self.presentation.term:
            return self.settings.start_timeout
        return self.settings.stall_timeout if self._mute else self.settings.lost_timeout

    @property
    def _first(self) -> bool:
        """True if a run starts and the last candidate dialed is the first in the list, which normally leads first."""
        return not self._late and self.presentation.term == 0 and self.candidate == 0

    @property
    def _dwell(self) -> float:
        """Seconds for which this member stays with a candidate that does not lead before it tries the next one."""
        if self._first:
            return self.settings.start_timeout / 2
        if self._late and self.presentation.term == 0:
            return self.settings.heartbeat_interval  # a newcomer's attach makes no candidate lead
        return self.settings.heartbeat_timeout

    def _seek(self, now: float) -> None:
        """Try the next candidate immediately, or after a pause if all candidates have just failed."""
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
            self._leave_with(CoordinatorLost(f"no coordinator that may continue was found {since}: {self._complaint}"))
            return
        if self._connected and now - self._heard > self.settings.heartbeat_timeout:
            self._complaint = f"the coordinator was silent for {now - self._heard:.1f} s"
            self._effects.append(Abandon(self._complaint))
            self._silent |= self.stage is Stage.FOLLOWING
            self._seek(now)
        elif self._move_at is not None and now >= self._move_at:
            if self._connected:
                self._complaint = "candidates were reached, but too few members are attached to any of them"
                self._effects.append(Abandon("this candidate does not lead"))
                self._connected = False
                self.stage = Stage.SEEKING
            if not self._accepted and not self._again:
                self._mute.discard(self.candidate)
            self._accepted = False
            self.candidate = (self.candidate + (not self._again)) % self._candidates
            self._again = False
            # At the start of a run, wait longer for a host that does not answer, as the candidate may be starting.
            slow = self.settings.start_timeout / 20 if self._first else 0.0
            self._move_at = now + max(slow, self.settings.heartbeat_timeout / 2)
            self._effects.append(Dial(self.candidate))
        elif self._connected and now >= self._beat_at:
            interval = self.settings.heartbeat_interval
            self._beat_at = interval * (now // interval + 1) if self.in_step else now + interval
            self._say(self._next_beat(now))

    def _next_beat(self, now: float = -math.inf) -> to_coordinator.Heartbeat | to_coordinator.Beat:
        """Return the next heartbeat. Without ``now``, its time, the answer to it does not count for ``in_touch``."""
        self._beats += 1
        self._asked.append((self._beats, now))
        return replace(self.beat, number=self._beats)

    def _set_deadline(self) -> None:
        times = [self._beat_at, self._heard + self.settings.heartbeat_timeout + 0.001] if self._connected else []
        if self._move_at is not None:
            times.append(self._move_at)
        if self.stage is not Stage.FOLLOWING:
            times.append(self._alone_since + self._patience)
        self.deadline = min(times) if self.stage is not Stage.OUT else math.inf

    def _attach_message(self) -> Hello:
        presented = fields.Presented.of(self.presentation)
        return replace(self._hello, presentation=presented, silent=self._silent, **self._reports())

    def farewell(self) -> list[ToCoordinator]:
        """Return the messages by which this member leaves on a new connection (hook for subclasses)."""
        return []

    def _reports(self) -> dict[str, Any]:
        """Return the other fields of the attach message that change (hook for subclasses)."""
        return {}

    # -- follow it ----------------------------------------------------------------------------------------------------

    def _on(self, message: to_member.ToMember, now: float) -> None:
        presentation = self.presentation
        match message:
            case to_member.Beat(answers):
                while self._asked and self._asked[0][0] <= answers:
                    self._answered = max(self._answered, self._asked.popleft()[1])
                self._reached(now)
            case to_member.Standby():
                self._reached(now)
                self._move_at = now + self._dwell if self._candidates > 1 else None
            case to_member.Refused(reason):
                self._complaint = reason
                self._effects.append(Hangup())
                self._failures = self._candidates - 1  # a pause precedes the next attempt
                self._seek(now)
            case to_member.Fenced(reason):
                self._leave_with(Fenced(reason))
            case to_member.Stop(reason, code, epoch, by, left):
                self.last_epoch = epoch
                presentation.left |= from_runs(left)
                self._leave_with(CoordinatorLost(reason, code, by, reported=True))
            case to_member.Lead(term) if term >= presentation.term:
                self._follow(term)
            case to_member.Revoke() if message.term >= presentation.term:
                self._follow(message.term)
                self._opened(message)
                self._revoked(message)
            case to_member.Plan() if self._is_open(message):
                self._planned(message)  # first, because it may refuse the message
                presentation.formed = message.formed()
                presentation.opened = None
                presentation.committed = max(presentation.committed, message.committed)
                self._effects.append(Notify(message))
            case to_member.Commit(epoch, iteration) if epoch == presentation.formed.epoch and not presentation.opened:
                presentation.committed = max(presentation.committed, iteration)
                self._effects.append(Notify(message))
            case to_member.Candidates():
                self._set_candidates(tuple(message.added))
                self._effects.append(Notify(message))
            case to_member.Kill() | to_member.Note() | to_member.Tell() | to_member.Drain():
                self._effects.append(Notify(message))

    @property
    def _candidates(self) -> int:
        return self._launched + len(self._added)

    def _set_candidates(self, added: tuple[tuple[str, int], ...]) -> None:
        """Set the candidates that joined after the launch. The candidate dialed last keeps its place in the order."""
        if self.candidate >= self._launched:
            current = self._added[self.candidate - self._launched]
            place = added.index(current) if current in added else len(added) - 1
            self.candidate = self._launched + place
        self._added = added
        self._effects.append(Look(added))

    def _reached(self, now: float) -> None:
        """React to a message from a candidate that leads or may lead later (hook for subclasses)."""

    def _is_open(self, message: to_member.Plan) -> bool:
        opened = self.presentation.opened
        return opened is not None and (opened.term, opened.epoch) == (message.term, message.epoch)

    def _follow(self, term: int) -> None:
        self.stage = Stage.FOLLOWING
        self._silent = False
        self._mute.clear()
        self._move_at = None
        self.presentation.term = term

    def _opened(self, message: to_member.Revoke) -> None:
        presentation = self.presentation
        presentation.opened = message.opened()
        presentation.dead |= from_runs(message.dead)
        presentation.left |= from_runs(message.left)
        presentation.aside = from_runs(message.aside)
        if message.after is not None and message.after.epoch > presentation.formed.epoch:
            presentation.formed = message.after.formed()
        if presentation.formed.epoch and message.committed > presentation.committed:
            # The previous coordinator was lost while it sent this commit, so only other members have received it.
            presentation.committed = message.committed
            self._effects.append(Notify(to_member.Commit(presentation.formed.epoch, message.committed)))

    def _revoked(self, message: to_member.Revoke) -> None:
        """React to the opening of a rendezvous (hook for subclasses)."""

    def _planned(self, message: to_member.Plan) -> None:
        """React to the plan of a rendezvous (hook for subclasses). Raises WireError if the plan cannot be read."""

    def late_message(self, message: to_member.ToMember) -> None:
        """React to a message that a coordinator had sent before this member abandoned it (hook for subclasses)."""

    def _report(self, message: ToCoordinator, *, may: bool | None = None) -> list[MemberEffect]:
        """Return effects that send a message if ``may`` is True, or if it is None and a candidate is connected."""
        self._effects = []
        if self._connected if may is None else may:
            self._say(message)
        return self._effects

    def _say(self, message: ToCoordinator) -> None:
        self._effects.append(Say(message))

    def give_up(self, reason: MembershipError) -> list[MemberEffect]:
        """Enter the stage OUT for a ``reason`` that the owner of this session gives."""
        self._effects = []
        self._leave_with(reason)
        return self._effects

    def _leave_with(self, reason: MembershipError) -> None:
        self.stage = Stage.OUT
        self.out = reason
        if self._connected:
            self._effects.append(Abandon(str(reason)))
            self._connected = False
        self._effects.append(Notify(None))
