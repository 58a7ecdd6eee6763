"""The epochs: when a candidate leads, opens a rendezvous, fixes its plan, commits, stops. See ``coordinator``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from enum import Enum
from signal import Signals
from typing import Any

from recover_megatron.membership.errors import EXIT_LOST_MAJORITY, EXIT_NO_REPLICA, NoPlan
from recover_megatron.membership.events import AskArbiter, Exit
from recover_megatron.membership.quorum import can_tell, may_go_on
from recover_megatron.membership.records import (
    Formed,
    Json,
    Opened,
    Planner,
    PlanRequest,
    Settings,
    members_only,
    to_runs,
)
from recover_megatron.membership.roster import Fate, Roster, Worker
from recover_megatron.membership.stall import Stall
from recover_megatron.membership.succession import Evidence, next_term
from recover_megatron.membership.view import History, Observers
from recover_megatron.membership.words import LastWords


class State(Enum):
    """See the drawing above."""

    STANDBY = "standby"
    GATHERING = "gathering"
    RENDEZVOUS = "rendezvous"
    STEADY = "steady"
    STOPPED = "stopped"
    RETIRED = "retired"
    """It has stepped down: a fresh one has its place."""


class Epochs(Roster, ABC):
    """The deciding half of ``Coordinator``."""

    def __init__(
        self,
        world: int,
        settings: Settings,
        salt: int,
        planner: Planner = members_only,
        arbiter: bool = False,
        now: float = 0.0,
    ) -> None:
        super().__init__(world, settings)
        self.state = State.STANDBY
        self.term = 0
        self.formed = Formed(0, frozenset(range(world)))
        self.opened = Opened(0, frozenset(), 0)
        self.committed = 0
        self.deadline = now + settings.heartbeat_interval / 4
        self.history = History(world)
        self.stall = Stall(settings)
        self._observers = Observers()
        self._evidence = Evidence(world)
        self._salt = salt
        self._planner = planner
        self._arbiter = arbiter
        self._lease_until = 0.0
        self._plan: Json = None
        self._own = False  # the last epoch was formed by this coordinator
        self._ready = 0  # members that have reported done beyond self.committed, or have no part
        self._patience = 0.0  # until when a rendezvous waits for somebody it does not reach
        self._some_left = False  # of the formed epoch
        self._leased = False  # an epoch was formed by virtue of the lease: losing it ends this coordinator
        self._led_at = 0.0  # when it began to gather
        self._deserted = False  # somebody has turned away since the last ``Settle``
        self._joined = 0  # members that have joined the open rendezvous
        self._due = False  # something other than a join may have made the open rendezvous ready
        self._stuck_epochs = 0
        self._deaf: dict[int, tuple[float, str]] = {}  # worker that its host does not answer for -> when asked last
        self._unreached: dict[int, tuple[float, str]] = {}  # worker whose connection has ended -> since when, and why
        self._words: dict[int, LastWords] = {}  # by worker
        self._farewell: dict[str, Any] = {}  # the stop message, once there is one
        self._untold: set[int | str] = set()  # workers and launchers still to get it; then the coordinator ends
        self._now = now  # the time of the event that is being handled
        self._revoked_at = 0.0

    # -- epochs -------------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        if self.state is State.STANDBY:
            self._changes.clear()
            self._consider_leading(now)
        if self._deserted and not self._has_followers():
            self._step_down("so many have turned away from this coordinator that another one may lead")
            return
        self._deserted = False
        if self.state is State.GATHERING:
            self._gather(now)
        for _ in range(len(self.workers) + 1):  # each round but the last puts somebody out
            if self._changes and self.state in (State.RENDEZVOUS, State.STEADY):
                self._open(now)
            if self.state is State.RENDEZVOUS and (self._due or self._joined == len(self.opened.members)):
                self._try_to_form(now)
            if not self._changes:
                break
        self._due = False

    def _consider_leading(self, now: float) -> None:
        self._adopt_evidence()
        reached = frozenset(n for n, w in self.workers.items() if w.session is not None and w.fate is Fate.LIVE)
        bases = self._evidence.bases
        if not reached & self._evidence.target:
            return
        missing = frozenset().union(*bases) - self.gone - reached
        counted = reached & self._evidence.target & self.formed.members
        if not can_tell(counted, self._idle(self.formed), missing, own=False):
            return
        if missing and self._arbiter and self.formed.epoch > 0:
            if now >= self._lease_until:
                self._do(AskArbiter(self._evidence.highest_term))
                return
        elif not may_go_on(reached, bases, self.gone, own=False):
            return
        self.term = next_term(self._evidence.highest_term, self._salt)
        self._led_at = now
        self._log("lead", term=self.term, formed=self.formed.epoch, reached=to_runs(reached))
        if self.formed.epoch == 0:
            self.state = State.RENDEZVOUS
            self._changes.append("the run starts")
        else:
            self.state = State.GATHERING
            self._send(self._sessions, self._lead_message())

    def _gather(self, now: float) -> None:
        """Wait until all whom the run counts on have presented what they hold, or are late; then meet them.

        One of them may have been told of a commit that the lost coordinator told nobody else: its mates must hear of it
        while they wait for it, or it goes on alone into operations that need them.
        """
        self._adopt_evidence()
        missing = [self.workers[n] for n in sorted(self._evidence.target) if self.workers[n].fate is Fate.LIVE]
        missing = [w for w in missing if w.session is None]
        if any(now <= max(self._gathers_until(w, now), w.awaited_until) for w in missing):
            return
        for worker in missing:
            self._exclude(worker, "did not come to the new coordinator", now)
        self.state = State.RENDEZVOUS
        self._changes.insert(0, "a new coordinator leads")

    def _gathers_until(self, worker: Worker, now: float) -> float:
        """Until when a new coordinator waits for a worker that it does not reach.

        Whose launcher says that it runs may be deaf for a while. Else, where all have heard nothing of the lost
        coordinator for the heartbeat timeout, this one has not either, if it runs, and comes at the same time; unless
        its launcher is late, too, or it has none that could speak for it. Else it is waited for as any silent host is.
        """
        s = self.settings
        if self._vouched(worker, now):
            return self._led_at + max(s.hang_timeout, s.heartbeat_timeout)
        here = [w for w in self.workers.values() if w.session is not None]
        silence = all(w.left_silence for w in here)
        if silence and all(w.witness and self._vouched(w, now) for w in here):
            return self._led_at + s.heartbeat_interval
        return self._led_at + s.heartbeat_timeout + s.heartbeat_interval

    def _has_followers(self) -> bool:
        """Whether those attached are all that may be running, or so many that no other candidate may lead the rest."""
        reached = frozenset(n for n, w in self.workers.items() if w.session is not None and w.fate is Fate.LIVE)
        bases = [self.formed.members] if self._own else self._evidence.bases
        return may_go_on(reached, bases, self.gone, self._own)

    @abstractmethod
    def _step_down(self, reason: str) -> None:
        """Lead no longer."""

    def _adopt_evidence(self) -> None:
        """Take over the newest state that anybody presented."""
        self.formed = self._evidence.formed
        self.committed = max(self.committed, self._evidence.committed)
        for number in self._evidence.dead | self._evidence.left:
            worker = self.workers[number]
            if worker.fate is not Fate.LEFT:
                worker.fate = Fate.LEFT if number in self._evidence.left else Fate.DEAD
                self._unbind(worker)

    def _open(self, now: float) -> None:
        """Open the next rendezvous: everybody the run counts on must join it, and so must the newcomers."""
        reasons, self._changes = self._changes, []
        target = self.formed.members
        if not self._own:
            self._adopt_evidence()
            target = self._evidence.target
            for worker in self.workers.values():
                if worker.fate is Fate.LIVE and worker.number not in target and not worker.new:
                    self._exclude(worker, "it was put out of the run before", now)
            self._changes = []
        members = target & self._with_fate(Fate.LIVE)
        if not members & self.formed.members:  # newcomers alone have nothing to go on from
            left = target & self._with_fate(Fate.LEFT)
            self._stop(0 if left else EXIT_NO_REPLICA, "all workers have left" if left else self._why_nobody_lives())
            return
        if self._finished():
            self._stop(0, "all workers that had a part in the work have left")
            return
        members |= self._newcomers
        if self.formed.epoch > 0:
            self._patience = now + 1.2 * self.settings.heartbeat_timeout
        elif self.opened.epoch == 0:
            self._patience = now + self.settings.start_timeout
        self._evidence.highest_epoch += 1
        self.state = State.RENDEZVOUS
        self.opened = Opened(self._evidence.highest_epoch, members, self.term)
        self._revoked_at = now
        self._joined, self._due = 0, True
        for number in members:
            self.workers[number].joined = 0
            self.workers[number].progress.waiting_since = None
        reason = "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")
        self._log("revoke", epoch=self.opened.epoch, reason=reason, members=to_runs(members))
        self._send([*self._attached(members), *self._witness_sessions()], self._revoke_message(reason))

    def _try_to_form(self, now: float) -> None:
        members = [self.workers[m] for m in self.opened.members]
        if late := self._late(members, now):
            launched = [w for w in late if w.number < self.world]
            if self.formed.epoch == 0 and launched:
                names = ", ".join(str(w.number) for w in launched[:20])
                self._stop(EXIT_NO_REPLICA, f"workers {names} did not come within {self.settings.start_timeout:.0f} s")
            for worker in late if self.state is not State.STOPPED else ():
                self._exclude(worker, "did not come to the new coordinator", now)
        elif self._may_form(members, now) and self._joined == len(members):
            self._form(now)

    def _late(self, members: list[Worker], now: float) -> list[Worker]:
        """Whom the open rendezvous waits for no longer. The launch has long to start, a newcomer never has."""
        newcomers_until = min(self._patience, self._revoked_at + 1.2 * self.settings.heartbeat_timeout)
        missing = [w for w in members if w.session is None and w.number not in self._unreached]
        until = {w.number: newcomers_until if w.number >= self.world else self._patience for w in missing}
        return [w for w in missing if now > max(until[w.number], w.awaited_until)]

    def _excuse(self, pause: float, now: float) -> None:
        super()._excuse(pause, now)
        self._patience += pause
        self._revoked_at += pause
        self._led_at += pause
        self.stall.excuse(pause)

    def _may_form(self, members: list[Worker], now: float) -> bool:
        """The rule of ``quorum`` for the open rendezvous; stops or puts out members when it can't be met."""
        bases = [self.formed.members] if self._own else self._evidence.bases
        missing = frozenset().union(*bases) - self.gone - self.opened.members
        if not missing:
            return True
        if self._arbiter:
            quorum = now < self._lease_until
            if not quorum:
                self._do(AskArbiter(self.term))
        else:
            quorum = may_go_on(self.opened.members, bases, self.gone, self._own)
        known = can_tell(self.opened.members & self.formed.members, self._idle(self.formed), missing, self._own)
        quorum = quorum and known
        unheard = [w for w in members if w.witness and not self._acknowledged(w.witness)]
        if quorum and not unheard:
            self._leased |= self._arbiter
            return True
        outs = [self.workers[n] for n in self._with_fate(Fate.OUT)]
        hope = self._arbiter or any(self._vouched(w, now) for w in outs)
        if not quorum and (not hope or now > self._patience + 2 * self.settings.heartbeat_timeout):
            self._stop(
                EXIT_LOST_MAJORITY,
                f"only {len(members)} of {len(missing | self.opened.members)} workers that may be running are "
                "reached: the others may go on elsewhere, so this side stops"
                + ("" if known else " (those reached have no part in the work, and cannot tell what it committed)"),
            )
        elif quorum and now > self._patience:
            for worker in unheard:
                self._exclude(worker, "its launcher, who could speak for it elsewhere, is not reached", now)
        return False

    def _acknowledged(self, node: str) -> bool:
        witness = self.witnesses.get(node)
        return witness is not None and (witness.ended or witness.acknowledged == self.opened.epoch)

    def _form(self, now: float) -> None:
        """Fix the plan of the open rendezvous."""
        previous = self.formed
        self.formed = Formed(self.opened.epoch, self.opened.members, self.term)
        self._commit(self.formed.members & previous.members - self._idle(previous))
        members = tuple(sorted(self.formed.members))
        statuses = {m: self.workers[m].status for m in members}
        old = tuple(sorted(previous.members))
        try:
            self._plan = self._planner(
                PlanRequest(self.formed.epoch, members, statuses, self._plan, old, self.committed)
            )
        except NoPlan as error:
            self._stop(error.code, str(error))
            return
        self._own = True
        self._some_left = False
        self.state = State.STEADY
        for member in members:
            worker = self.workers[member]
            worker.status, worker.new = None, False
            worker.progress.marked, worker.progress.waiting_since = now, None
        seconds = {"rendezvous": now - self._revoked_at}
        if self._fault is not None:
            seconds["since_fault"] = now - self._fault
        self._fault = None
        self._log("plan", epoch=self.formed.epoch, members=to_runs(members), committed=self.committed, seconds=seconds)
        self._send(self._attached(members), {**self._plan_message(), "data": self._plan})
        self._send(self._witness_sessions(), self._plan_message())

    def _idle(self, epoch: Formed) -> frozenset[int]:
        """The members of ``epoch`` that have said that they have no part in it."""
        return frozenset(n for n, w in self.workers.items() if w.idle_in == epoch.epoch > 0) & epoch.members

    def _finished(self) -> bool:
        """Whether all that had a part in the last epoch are gone, some of them because they had finished.

        A new coordinator does not know whether who has left had a part: it asks those that are there for a new epoch.
        """
        if not self._own:
            return False
        fates = {self.workers[m].fate for m in self.formed.members - self._idle(self.formed)}
        return Fate.LEFT in fates and Fate.LIVE not in fates

    def _commit(self, reporters: frozenset[int]) -> bool:
        """Commit what all ``reporters`` have reported, those with a part in an epoch; whether that is anything new."""
        decided = min((self.workers[number].done for number in reporters), default=0)
        new = decided > self.committed
        if new:
            self.committed = decided
            self._stuck_epochs = 0
            self._log("commit", epoch=self.formed.epoch, iteration=decided)
        self._ready = sum(self._is_ready(self.workers[m]) for m in self.formed.members)
        return new

    def _is_ready(self, worker: Worker) -> bool:
        """Whether the next commit of the formed epoch does not wait for this member (any more)."""
        return worker.done > self.committed or worker.idle_in == self.formed.epoch

    def _revoke_message(self, reason: str) -> dict[str, Any]:
        message: dict[str, Any] = {
            "type": "revoke",
            "epoch": self.opened.epoch,
            "term": self.term,
            "members": to_runs(self.opened.members),
            "dead": to_runs(self._with_fate(Fate.DEAD)),
            "left": to_runs(self._with_fate(Fate.LEFT)),
            "committed": self.committed,
            "reason": reason[:2000],
        }
        if not self._own and self._plan is None and self.formed.epoch > 0:
            holders = (self.workers[m] for m in sorted(self.opened.members))
            holder = next((w for w in holders if w.session and w.formed_epoch == self.formed.epoch), None)
            if holder is not None:
                message["present_plan"] = holder.number
        return message

    def _lead_message(self) -> dict[str, Any]:
        return {"type": "lead", "term": self.term}

    def _plan_message(self) -> dict[str, Any]:
        return {
            "type": "plan",
            "epoch": self.formed.epoch,
            "term": self.term,
            "members": to_runs(self.formed.members),
            "committed": self.committed,
        }

    def _why_nobody_lives(self) -> str:
        """With what the last of those said that said anything."""
        said = [words for number, words in self._words.items() if number in self.formed.members]
        last = f"; {said[-1].name} was the last to say why: {said[-1].error[:1000]}" if said else ""
        return f"no live worker is left{last}"

    def _told_to_stop(self) -> tuple[int, str] | None:
        """Code and reason of a run whose launchers, all that have workers in it, were told to end them."""
        nodes = {self.workers[number].witness for number in self.formed.members}
        witnesses = [self.witnesses[node] for node in sorted(nodes) if node in self.witnesses]
        if not nodes or len(witnesses) < len(nodes) or not all(witness.stopping for witness in witnesses):
            return None
        number = witnesses[0].stopping
        names = ", ".join(witness.node for witness in witnesses)
        return 128 + number, f"ended by {Signals(number).name}, which the launcher on {names} received"

    def _stop(self, code: int, reason: str, by: int | None = None) -> None:
        """End the run for all; ``by``: the worker whose word it is.

        A worker's word holds for those, too, that have not come to the open rendezvous yet: they are waited for, as
        long as the rendezvous would have, and told. (Any other reason may be this coordinator's alone: let them try
        another.) Launchers that workers have named and that have not come yet, in a run shorter than their way here,
        are waited for, too: they need the exit code; and so are those that have just lost their connection, and may be
        on their way back. Not where another coordinator may go on.
        """
        if code and (told := self._told_to_stop()):
            code, reason = told
        workers: set[int] = set()
        nodes: set[str] = set()
        if by is not None and self.state is State.RENDEZVOUS:
            members = self.opened.members & self._with_fate(Fate.LIVE)
            workers = {n for n in members if self.workers[n].session is None}
        if by is not None or code != EXIT_LOST_MAJORITY:
            nodes = {w.witness for w in self.workers.values() if w.witness and w.witness not in self.witnesses}
        until = [self._patience] * bool(workers) + [self._now + self.settings.heartbeat_timeout] * bool(nodes)
        if code != EXIT_LOST_MAJORITY and (lost := self._just_lost()):
            nodes |= lost
            until.append(self._now + 2 * self.settings.heartbeat_timeout)
        self._untold = workers | nodes
        self.deadline = max(until, default=math.inf)
        self.state = State.STOPPED
        self._changes = []
        self._log("stop", code=code, reason=reason)
        self._farewell = {"type": "stop", "code": code, "reason": reason[:2000], "epoch": self.formed.epoch}
        if by is not None:
            self._farewell["by"] = by
        self._send([*sorted(self._sessions), *self._observers.sessions], self._farewell)
        if not self._untold:
            self._do(Exit(code, reason))

    def _just_lost(self) -> set[str]:
        """The launchers that are not reached, but were not long ago, and are not known to have ended."""
        since = self._now - self.settings.lost_timeout
        return {w.node for w in self.witnesses.values() if w.session is None and not w.ended and w.heard > since}
