"""The epochs: when a candidate leads, opens a rendezvous, fixes its plan, commits, stops. See ``coordinator``."""

from __future__ import annotations

import math
from enum import Enum
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
from recover_megatron.membership.succession import Evidence, next_term
from recover_megatron.membership.view import History, Observers
from recover_megatron.membership.words import LastWords


class State(Enum):
    """See the drawing above."""

    STANDBY = "standby"
    RENDEZVOUS = "rendezvous"
    STEADY = "steady"
    STOPPED = "stopped"


class Epochs(Roster):
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
        self._joined = 0  # members that have joined the open rendezvous
        self._due = False  # something other than a join may have made the open rendezvous ready
        self._stuck_epochs = 0
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
        self.state = State.RENDEZVOUS
        self._log("lead", term=self.term, formed=self.formed.epoch, reached=to_runs(reached))
        self._changes.append("the run starts" if self.formed.epoch == 0 else "a new coordinator leads")

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
            self._stop(0 if left else EXIT_NO_REPLICA, "all workers have left" if left else "no live worker is left")
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
        missing = [w for w in members if w.session is None]
        if now <= self._patience:
            missing = [w for w in missing if w.number >= self.world]
            missing = missing if now > self._revoked_at + 1.2 * self.settings.heartbeat_timeout else []
        return missing

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
            "reason": reason[:2000],
        }
        if not self._own and self._plan is None and self.formed.epoch > 0:
            holders = (self.workers[m] for m in sorted(self.opened.members))
            holder = next((w for w in holders if w.session and w.formed_epoch == self.formed.epoch), None)
            if holder is not None:
                message["present_plan"] = holder.number
        return message

    def _plan_message(self) -> dict[str, Any]:
        return {
            "type": "plan",
            "epoch": self.formed.epoch,
            "term": self.term,
            "members": to_runs(self.formed.members),
            "committed": self.committed,
        }

    def _stop(self, code: int, reason: str, by: int | None = None) -> None:
        """End the run for all; ``by``: the worker whose word it is.

        A worker's word holds for those, too, that have not come to the open rendezvous yet: they are waited for, as
        long as the rendezvous would have, and told. (Any other reason may be this coordinator's alone: let them try
        another.) Launchers that workers have named and that have not come yet, in a run shorter than their way here,
        are waited for, too: they need the exit code. Not where another coordinator may go on.
        """
        workers: set[int] = set()
        nodes: set[str] = set()
        if by is not None and self.state is State.RENDEZVOUS:
            members = self.opened.members & self._with_fate(Fate.LIVE)
            workers = {n for n in members if self.workers[n].session is None}
        if by is not None or code != EXIT_LOST_MAJORITY:
            nodes = {w.witness for w in self.workers.values() if w.witness and w.witness not in self.witnesses}
        until = [self._patience] * bool(workers) + [self._now + self.settings.heartbeat_timeout] * bool(nodes)
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
