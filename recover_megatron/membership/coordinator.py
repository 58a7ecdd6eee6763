"""The coordinator as a state machine without I/O: ``handle(event, now) -> effects``.

The way from the end of a worker's session to the next plan can be read here from top to bottom. What a step needs to
know is asked of one part, and no part knows this module: ``roster`` (who is there), ``lateness`` (who is late),
``leadership`` (who may go on), ``epochs`` (the last epoch and the open rendezvous), ``admission`` (who comes),
``ending`` (who is told). Only this module changes the state:

            quorum attached            all attached            all joined: plan           death, fence, reconnect
    STANDBY ---------------> GATHERING ------------> RENDEZVOUS ---------------> STEADY(1) ---------> RENDEZVOUS ...
      ^ nobody comes: stays                            (1) |  ^                    |                     (2)
      |                                                    |__| death, fence:      | all left
      | too many turn away:                                |    RENDEZVOUS(2)      v
      '-- a fresh candidate                                '---------------------> STOPPED
                                                        no quorum, no plan possible

STANDBY     Passive, at start and as a spare. Members attach and present what they follow and hold (``Presentation``).
            When those attached may take over (``quorum``), the candidate leads under a new term.
GATHERING   Tells who leads (``lead``), and waits for the others that may be running: what one of them holds is to be
            known to all before anybody is told that the epoch is over. Not at the start of a run: there is nothing yet.
RENDEZVOUS  ``revoke(n)`` has been pushed; waits for ``join(n, status)`` of every worker the run counts on. A change
            of membership opens n+1, and so does a newcomer. If a worker is left out that may still run somewhere
            (*contested*), the plan also waits for the quorum and for the acknowledgement of the members' node agents.
STEADY      The plan of epoch n is pushed. ``done(n, t)`` of all members commits iteration t. Who has said ``idle(n)``
            has no part in epoch n: commits and hang detection pass it over.
STOPPED     The run is over or may not go on here; everybody was told why.

Members that hear nothing turn away from a coordinator (``abandon``), and it cannot know of it while it does not run: it
was stopped, or its host was busy. Then they are alive, and they either come back, and are waited for, or another
candidate leads them. So a coordinator that has less than its quorum left *steps down*: it sends who is left to look for
another one, forgets all (``StepDown``), and is a candidate like any other. Its own pauses count against nobody. A
fresh candidate has promised nothing, whatever the process did before: members alone keep what binds (``quorum``).

A commit needs the report of all members, so it needs no log: if every survivor of an epoch presents ``done >= t``, t is
committed (it may have been, and it does no harm if it was not); if one does not, it was not. So a lost coordinator
loses no decision, and a decision that a single worker has received is never taken again. Idle members report nothing,
so they are no such survivors (``quorum.can_tell``).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from recover_megatron.membership.admission import Admission
from recover_megatron.membership.ending import Ending
from recover_megatron.membership.epochs import Epochs, Rendezvous
from recover_megatron.membership.errors import EXIT_NO_REPLICA, EXIT_SAME_FAULT, RunOver
from recover_megatron.membership.events import (
    Acknowledged,
    Close,
    Closed,
    CoordinatorEffect,
    CoordinatorEvent,
    Log,
    Outbox,
    Received,
    Settle,
    StepDown,
    Tick,
    Verdict,
)
from recover_megatron.membership.exception_reports import ExceptionReports
from recover_megatron.membership.lateness import Lateness
from recover_megatron.membership.leadership import Leadership
from recover_megatron.membership.records import Planner, Settings, members_only, to_runs
from recover_megatron.membership.roster import Fate, Member, NodeAgentStatus, Roster
from recover_megatron.membership.view import History, Observers, view


class State(Enum):
    """See the drawing above."""

    STANDBY = "standby"
    GATHERING = "gathering"
    RENDEZVOUS = "rendezvous"
    STEADY = "steady"
    STOPPED = "stopped"
    RETIRED = "retired"
    """It has stepped down: a fresh one has its place."""


class Coordinator:
    """One candidate coordinator. Give it every event, carry out its effects in order, send ``Tick`` at ``deadline``.

    ``salt``: 32 random bits, the part of the term that makes it unlike any other coordinator's.
    ``arbiter``: whether effects ``AskArbiter`` are answered; contested epochs then depend on it alone.
    """

    def __init__(
        self,
        world: int,
        settings: Settings,
        salt: int,
        planner: Planner = members_only,
        arbiter: bool = False,
        now: float = 0.0,
    ) -> None:
        self.settings = settings
        self.state = State.STANDBY
        self.deadline = now + settings.heartbeat_interval / 4
        self.history = History()
        self._planner = planner
        self._out = out = Outbox()
        self._observers = Observers(out)
        self.roster = roster = Roster(world, settings, out)
        self.leadership = Leadership(roster, out, salt, arbiter)
        self.epochs = Epochs(roster, planner, out)
        self.rendezvous = Rendezvous(roster, self.epochs, self.leadership)
        self.lateness = Lateness(roster, self.epochs, out)
        self._admission = Admission(roster, self.leadership, self.epochs, self.rendezvous, out)
        self._ending = Ending(roster, out)
        self._exceptions = ExceptionReports(out)
        self._due = False  # something other than a join may have made the open rendezvous ready

    def fresh(self, salt: int, now: float) -> Coordinator:
        """A candidate with the same task that knows nothing, to take the place of one that has stepped down."""
        return Coordinator(self.roster.world, self.settings, salt, self._planner, self.leadership.arbiter, now)

    def view(self, now: float) -> dict[str, Any]:
        """What an observer is shown. Changes nothing."""
        opened, stall, state = self.rendezvous.opened, self.lateness.stall, self.state.value
        return view(self.roster, self.epochs, opened, stall, self.history, state, self.leadership.term, now)

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorEffect]:
        """Apply one event. Changes of membership are collected until ``Settle``, which must follow each batch."""
        self._due |= not isinstance(event, Settle) and not (
            isinstance(event, Received) and event.message["type"] in ("heartbeat", "join", "observe")
        )
        try:
            self._apply(event, now)
        except RunOver as over:
            self._stop(over, now)
        effects = self._out.take()
        for effect in effects:
            if isinstance(effect, Log):
                self.history.note(effect.record, self.epochs.plan, now)
        return effects

    def _apply(self, event: CoordinatorEvent, now: float) -> None:
        match event:
            case _ if self.state is State.STOPPED:
                self._ending.handle(event, now)
                self.deadline = self._ending.deadline
            case _ if self.state is State.RETIRED:
                pass  # another one has its place
            case Closed(session, ended, reason):
                self._closed(session, ended, reason, now)
            case Received(session, message):
                self._received(session, message, now)
            case Acknowledged(session, silence):
                self._acknowledged(session, silence, now)
            case Verdict(held_until):
                self.leadership.lease(held_until)
            case Tick():
                self._tick(now)
            case Settle():
                self._settle(now)

    # -- a session ends, or is silent ---------------------------------------------------------------------------------

    def _closed(self, session: int, ended: bool, reason: str, now: float) -> None:
        self._observers.forget(session)
        peer = self.roster.forget(session)
        if peer is None:
            return
        ended = ended and now - peer.heard <= self.settings.heartbeat_timeout  # by the clock: no excuses
        if isinstance(peer, NodeAgentStatus):
            peer.ended = ended
            self._out.log("witness_gone", node=peer.node, reason=reason)
        elif ended and peer.fate is Fate.LIVE:
            self.roster.dead(peer, reason, now)
        elif peer.fate is Fate.LIVE:
            self._lost_touch(peer, reason, now)

    def _lost_touch(self, worker: Member, reason: str, now: float) -> None:
        """A worker is not reached that may still be running."""
        if self.state is State.STANDBY:
            self.roster.unbind(worker)
        elif self.state is State.GATHERING:
            self.roster.exclude(worker, reason, now)
        else:
            self.lateness.lost_touch(worker, reason, now)
            self.lateness.put_out(self._awaited, now)

    def _acknowledged(self, session: int, silence: float, now: float) -> None:
        """The answer of the kernel to a ``Probe``."""
        worker = self.roster.sessions.get(session)
        if not isinstance(worker, Member) or silence <= self.settings.heartbeat_timeout:
            return
        reason = f"its host has acknowledged nothing for {silence:.1f} s"
        if self.state in (State.STANDBY, State.GATHERING):
            self._lost_touch(worker, reason, now)
        else:
            self.lateness.unacknowledged(worker, reason, now)
            self.lateness.put_out(self._awaited, now)

    @property
    def _awaited(self) -> frozenset[int]:
        """The workers that the run waits for now."""
        return self.epochs.working if self.state is State.STEADY else self.rendezvous.members

    def _tick(self, now: float) -> None:
        late = now - self.deadline
        self.deadline = now + self.settings.heartbeat_interval / 4
        if late > self.settings.heartbeat_interval:
            self._excuse(late, now)
        if self.leadership.has_lost_lease(now):
            self._step_down("the lease could not be renewed: another coordinator may go on")
            return
        self.lateness.ask_the_quiet(now)
        if self.state in (State.STANDBY, State.GATHERING):
            for worker in self.lateness.silent(now):
                self._lost_touch(worker, f"silent for {now - worker.heard:.1f} s", now)
            return
        stuck = self.lateness.put_out(self._awaited, now)
        if stuck and self.state is State.STEADY and not self.roster.changes:
            self.epochs.all_wait()

    def _excuse(self, pause: float, now: float) -> None:
        """This process was kept from running for so long: nobody's silence meanwhile counts."""
        self._out.log("held_up", seconds=pause)
        self.roster.excuse(pause, now)
        self.rendezvous.excuse(pause)
        self.leadership.excuse(pause)
        self.lateness.excuse(pause)

    # -- the next epoch -----------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Act on all that has changed since the last call."""
        if self.state is State.STANDBY:
            self.roster.changes.clear()
            self._consider_leading(now)
        own = self.epochs.formed if self.epochs.own else None
        if self.roster.deserted and not self.leadership.has_followers(own):
            self._step_down("so many have turned away from this coordinator that another one may lead")
            return
        self.roster.deserted = False
        if self.state is State.GATHERING:
            self._gather(now)
        for _ in range(len(self.roster.workers) + 1):  # each round but the last puts somebody out
            if self.roster.changes and self.state in (State.RENDEZVOUS, State.STEADY):
                self._open(now)
            if self.state is State.RENDEZVOUS and (self._due or self.rendezvous.all_joined):
                self._try_to_form(now)
            if not self.roster.changes:
                break
        self._due = False

    def _consider_leading(self, now: float) -> None:
        self.epochs.adopt(self.leadership.evidence)
        if not self.leadership.may_lead(now):
            return
        self.leadership.lead(now)
        if self.epochs.formed.epoch == 0:
            self.state = State.RENDEZVOUS
            self.roster.changes.append("the run starts")
        else:
            self.state = State.GATHERING
            self._out.send(self.roster.sessions, self.leadership.lead_message)

    def _gather(self, now: float) -> None:
        """Wait until all whom the run counts on have presented what they hold, or are late; then meet them.

        One of them may have been told of a commit that the lost coordinator told nobody else: its mates must hear of it
        while they wait for it, or it goes on alone into operations that need them.
        """
        self.epochs.adopt(self.leadership.evidence)
        missing = self.leadership.not_come
        if any(now <= self.leadership.gathers_until(worker, now) for worker in missing):
            return
        for worker in missing:
            self.roster.exclude(worker, "did not come to the new coordinator", now)
        self.state = State.RENDEZVOUS
        self.roster.changes.insert(0, "a new coordinator leads")

    def _open(self, now: float) -> None:
        """Open the next rendezvous: everybody the run counts on must join it, and so must the newcomers."""
        roster, epochs = self.roster, self.epochs
        reasons = roster.take_changes()
        counted_on = epochs.formed.members if epochs.own else epochs.take_over(self.leadership.evidence, now)
        members = counted_on & roster.with_fate(Fate.LIVE)
        if not members & epochs.formed.members:  # newcomers alone have nothing to go on from
            if counted_on & roster.with_fate(Fate.LEFT):
                raise RunOver(0, "all workers have left")
            raise RunOver(EXIT_NO_REPLICA, f"no live worker is left{self._exceptions.last_of(epochs.formed.members)}")
        if epochs.finished:
            raise RunOver(0, "all workers that had a part in the work have left")
        members |= roster.newcomers
        self.state = State.RENDEZVOUS
        self.rendezvous.open(members, now)
        reason = "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")
        self._out.log("revoke", epoch=self.rendezvous.opened.epoch, reason=reason, members=to_runs(members))
        everybody = [*roster.sessions_of(members), *roster.node_agent_sessions]
        self._out.send(everybody, self.rendezvous.revoke_message(reason))

    def _try_to_form(self, now: float) -> None:
        """Fix the plan of the open rendezvous, if all have joined and may go on."""
        if not self.rendezvous.is_ready(self.lateness.unreached, now):
            return
        self.rendezvous.form(now)
        self.state = State.STEADY
        plan, members = self.epochs.plan_message, self.epochs.formed.members
        self._out.send(self.roster.sessions_of(members), {**plan, "data": self.epochs.plan})
        self._out.send(self.roster.node_agent_sessions, plan)

    # -- what members say ---------------------------------------------------------------------------------------------

    def _received(self, session: int, message: Mapping[str, Any], now: float) -> None:
        peer = self.roster.sessions.get(session)
        if peer is not None:
            self.roster.hear(peer, now)
            if isinstance(peer, NodeAgentStatus):
                self.roster.from_node_agent(peer, session, message, self.leadership.term, now)
            else:
                self._from_worker(peer, session, message, now)
        elif message["type"] == "observe":
            self._observed(session, now)
        elif session in self._observers:
            self._observers.forget(session)
            self.roster.refuse(session, f"{message['type']} of an observer")
        elif message["type"] not in ("attach", "attach_node_agent"):
            self.roster.refuse(session, f"{message['type']} before attach")
        elif self.state is not State.STANDBY and message["term"] > self.leadership.term:
            self.roster.refuse(session, "you follow a newer coordinator")
            self._step_down("a member follows a newer coordinator")
        elif message["type"] == "attach":
            self._admission.worker(session, message, now)
        else:
            self._admission.node_agent(session, message, now)

    def _from_worker(self, worker: Member, session: int, message: Mapping[str, Any], now: float) -> None:
        epochs, changes = self.epochs, self.roster.changes
        steady = self.state is State.STEADY
        of_this_epoch = steady and message.get("epoch") == epochs.formed.epoch
        match message["type"]:
            case "heartbeat":
                worker.progress.heartbeat(message, now, may_wait=steady and worker.done <= epochs.committed)
                self._out.send([session], {"type": "beat"})
            case "join":
                self.rendezvous.join(worker, message, now)
            case "done" if of_this_epoch:
                epochs.done(worker, message["iteration"], now)
            case "idle" if of_this_epoch:
                epochs.idle(worker)
            case "bye":
                epochs.left(worker)
                nobody = not epochs.formed.members & self.roster.with_fate(Fate.LIVE)
                if self.state is State.RENDEZVOUS or nobody or epochs.finished:
                    changes.append(f"{worker.name} has left")
            case "complain" if of_this_epoch:
                if "peer" in message:
                    self._out.log("complaint", worker=worker.number, peer=message["peer"], reason=message["reason"])
                changes.append(f"{worker.name} asks for it: {message['reason']}")
            case "give_up" if steady or self.state is State.RENDEZVOUS:  # repeated when a rendezvous opens
                code, reason = message["code"], message["reason"]
                self._out.log("give_up", worker=worker.number, host=worker.host, code=code, reason=reason)
                raise RunOver(code, reason, by=worker.number)
            case "note":
                self.roster.pass_on(worker, message["text"])
            case "last_words":
                self._out.send([session], {"type": "noted"})
                cause = self._exceptions.add(worker, message)
                if cause is not None and self.state is not State.STANDBY:
                    raise RunOver(EXIT_SAME_FAULT, cause, by=worker.number)
            case "abandon":
                self.roster.turned_away(worker, message["reason"], now, followed=self.state is not State.STANDBY)

    def _observed(self, session: int, now: float) -> None:
        """Show an observer the state; see ``view`` for what it may ask."""
        if not self._observers.ask(session, now):
            self.roster.refuse(session, "an observer that asks too often")
            return
        self._out.send([session], self.view(now))
        self._observers.make_room()

    # -- it ends ------------------------------------------------------------------------------------------------------

    def _step_down(self, reason: str) -> None:
        """Lead no longer: who still follows is sent to look for another coordinator."""
        self._out.log("step_down", reason=reason)
        for session in [*self.roster.sessions, *self._observers.sessions]:
            self._out.send([session], {"type": "refused", "reason": reason})
            self._out.do(Close(session))
        self.roster.sessions.clear()
        self.roster.changes.clear()
        self.state = State.RETIRED
        self._out.do(StepDown())

    def _stop(self, over: RunOver, now: float) -> None:
        """The run is over, or may not go on here."""
        absent = frozenset[int]()
        if self.state is State.RENDEZVOUS:
            absent = self.rendezvous.members & self.roster.with_fate(Fate.LIVE) - self.roster.reached
        self._ending.begin(over, self.epochs.formed, absent, self.rendezvous.patience, self._observers.sessions, now)
        self.roster.changes.clear()
        self.deadline = self._ending.deadline
        self.state = State.STOPPED
