"""State machine of a coordinator, without I/O: ``Coordinator.handle(event, now)`` returns effects.

The methods are in the order of a recovery, from the end of a worker's session to the next plan. They call the modules
``roster`` (known members), ``lateness`` (late workers), ``leadership`` (which side of a partition may continue),
``epochs`` (the last epoch and the open rendezvous), ``admission`` (attaching members, and the takeover of a run),
``view`` (observers) and ``ending`` (whether any worker can continue, and stop messages). None of these modules knows
this one. Only this module changes ``Coordinator.state``:

            quorum attached            all attached            all joined: plan         death, eviction, reconnect
    STANDBY ---------------> GATHERING ------------> RENDEZVOUS ---------------> STEADY(1) ---------> RENDEZVOUS ...
      ^ no member: stays                               (1) |  ^                    |                     (2)
      |                                                    |__| death, eviction:   | all left
      | too many members leave:                            |    RENDEZVOUS(2)      v
      '-- a fresh candidate                                '---------------------> STOPPED
                                                        no quorum, no plan possible

STANDBY     Passive: at the start, and as a standby candidate. Members attach and present the terms, epochs and
            ended workers that they know (``Presentation``). When enough members have attached (``leadership``), the
            candidate leads under a new term.
GATHERING   Announces the new term (``lead``) and waits for the other members that may be running, because all must
            attach before any of them learns that the last epoch is over. Skipped at the start of a run.
RENDEZVOUS  ``revoke(n)`` was sent; waits for ``join(n, status)`` of every worker that the run counts on. A change
            of membership, such as a newcomer, opens n+1. If a left-out worker may still be running somewhere
            (*contested*), the plan also waits for the quorum and for acknowledgements from the members' node agents.
STEADY      The plan of epoch n was sent. ``done(n, t)`` of all members commits iteration t. A worker that has sent
            ``idle(n)`` has no part in epoch n: commits and hang detection ignore it.
STOPPED     The run is over, or may not continue on this side; the reason was sent to all members.

Members abandon a coordinator whose process is paused (``abandon``). They stay alive, and later return to it or follow
another candidate. So a coordinator that has lost its quorum *steps down*: it refuses the remaining members, which then
look for another coordinator, and a fresh candidate without state replaces it (``StepDown``). A pause of the
coordinator's process counts against no member.
"""

from __future__ import annotations

from recover_megatron.membership.admission import AddedCandidates, Admission, TakeOver
from recover_megatron.membership.drains import Drains
from recover_megatron.membership.ending import Ending, ExceptionReports, Survivors
from recover_megatron.membership.epochs import Epochs, Rendezvous
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
    State,
    Statement,
    StepDown,
    Tick,
    Verdict,
)
from recover_megatron.membership.lateness import Lateness, Witnessed
from recover_megatron.membership.leadership import Leadership
from recover_megatron.membership.messages import fields, to_coordinator, to_member
from recover_megatron.membership.records import (
    EXIT_NO_REPLICA,
    EXIT_SAME_FAULT,
    NEW_COORDINATOR,
    Planner,
    RunOver,
    Settings,
    Workers,
    members_only,
    to_runs,
)
from recover_megatron.membership.roster import Fate, Member, NodeAgentStatus, Roster
from recover_megatron.membership.view import Observing
from recover_megatron.membership.witness import Witness

_MINOR = to_coordinator.Heartbeat, to_coordinator.Heard, to_coordinator.Join, to_coordinator.Observe
"""Messages after which a rendezvous can be complete only if it says so itself (``all_joined``, ``hearing.due``)."""


class Coordinator:
    """Candidate coordinator: a state machine without I/O. Times are seconds of a monotonic clock.

    The caller passes every event to ``handle`` (see also ``heartbeat``), carries out the returned effects in order, and
    sends ``Tick`` at time ``deadline``. ``salt``: 32 random bits that make this coordinator's terms unique. ``slack``:
    if two halves of the run differ by at most this number of workers, the lease (effect ``AskForLease``) decides which
    half continues; None: the run has no lease. ``lease``: path of the lease, which is sent to candidates that join.
    ``nodes``: nodes about which the witness can be asked (see ``Witness``); requires a lease.
    """

    def __init__(
        self,
        world: int,
        settings: Settings,
        salt: int,
        planner: Planner = members_only,
        slack: int | None = None,
        now: float = 0.0,
        lease: str | None = None,
        nodes: frozenset[str] | None = None,
    ) -> None:
        assert nodes is None or slack is not None, "a witness requires a lease"
        self.settings = settings
        self.state = State.STANDBY
        self.deadline = now + settings.heartbeat_interval / 4
        self._planner = planner
        self._out = out = Outbox()
        self.roster = roster = Roster(world, settings, out)
        self.leadership = Leadership(roster, out, salt, slack, Witness(roster, out, nodes))
        self.epochs = Epochs(roster, planner, out)
        self.rendezvous = Rendezvous(roster, self.epochs, self.leadership)
        self.lateness = Lateness(roster, self.epochs, out)
        self._witnessed = Witnessed(roster, self.leadership, self.epochs, self.rendezvous, self.lateness)
        self.drains = Drains(roster, self.epochs, out)
        self._observing = Observing(
            roster, self.leadership, self.epochs, self.rendezvous, self.lateness.stall, self.drains, out
        )
        self.history = self._observing.history
        self._takeover = TakeOver(roster, self.leadership, self.epochs, self.lateness)
        self._lease = lease
        self._candidates = AddedCandidates(roster, out, lease, slack, witnessed=nodes is not None)
        self._admission = Admission(roster, self.leadership, self.epochs, self.rendezvous, self.drains, out)
        self._ending = Ending(roster, out)
        self._exceptions = ExceptionReports(out)
        self._survivors = Survivors(roster, self.epochs, self._exceptions, out)
        self._due = False  # True if an event other than a join may have completed the open rendezvous

    def fresh(self, salt: int, now: float) -> Coordinator:
        """Return a candidate with the same settings but no state. It replaces this candidate after a ``StepDown``."""
        slack, lease = self.leadership.slack, self._lease
        nodes = self.leadership.witness.nodes
        return Coordinator(self.roster.world, self.settings, salt, self._planner, slack, now, lease, nodes)

    def view(self, now: float) -> to_member.View:
        """Return the message that observers get, without changing any state."""
        return self._observing.view(self.state, now)

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorEffect]:
        """Process one event, and return the effects that the caller must carry out in order.

        A change of membership takes effect at the next ``Settle`` event, which must follow each batch of events.
        """
        self._due |= not isinstance(event, Settle) and not (
            isinstance(event, Received) and isinstance(event.message, _MINOR)
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

    def heartbeat(self, session: int, beat: to_coordinator.Heartbeat, now: float) -> bool:
        """Record a worker's heartbeat, without an event or effect, because nearly all messages are heartbeats.

        Return True if the caller must answer it; False: ``handle`` must process it.
        """
        worker, steady = self.roster.sessions.get(session), self.state is State.STEADY
        if not isinstance(worker, Member) or self.state in (State.STOPPED, State.RETIRED):
            return False
        self.roster.hear(worker, now)
        worker.progress.heartbeat(beat, now, may_wait=steady and worker.done <= self.epochs.committed)
        return True

    def _apply(self, event: CoordinatorEvent, now: float) -> None:
        match event:
            case _ if self.state is State.STOPPED:
                self._ending.handle(event, now)
                self.deadline = self._ending.deadline
            case _ if self.state is State.RETIRED:
                pass  # a fresh candidate has replaced this one
            case Closed(session, ended, reason):
                self._closed(session, ended, reason, now)
            case Received(session, message):
                self._received(session, message, now)
            case Acknowledged(session, silence, delivered):
                self._acknowledged(session, silence, delivered, now)
            case Verdict():
                self.leadership.lease(event)
            case Statement():
                self._witnessed.hear(event, self.state, now)
            case Tick():
                self._tick(now)
            case Settle():
                self._act_on_changes(now)

    # -- a session ends or is silent ----------------------------------------------------------------------------------

    def _closed(self, session: int, ended: bool, reason: str, now: float) -> None:
        self._observing.sessions.pop(session, None)
        peer = self.roster.forget(session)
        if peer is None:
            return
        # After a long silence of the peer or a pause of this process, a close does not prove that the peer has ended.
        ended = ended and now - peer.heard <= self.settings.heartbeat_timeout
        if isinstance(peer, NodeAgentStatus):
            peer.ended = ended
            self._out.log("witness_gone", node=peer.node, reason=reason)
        elif ended and peer.fate in (Fate.LIVE, Fate.ASIDE):
            self.roster.dead(peer, reason, now)
        elif peer.back:
            self.roster.set_aside_again(peer)
        elif peer.fate is Fate.LIVE:
            self._lost_touch(peer, reason, now, connected=False)

    def _lost_touch(self, worker: Member, reason: str, now: float, *, connected: bool) -> None:
        """Record that a worker that may still be running is not reached, and evict late workers."""
        if self._is_taking_over:
            self._takeover.connection_ended(worker, reason, now)
        else:
            (self.lateness.unacknowledged if connected else self.lateness.connection_ended)(worker, reason, now)
            self.lateness.evict(self._awaited, now)

    def _acknowledged(self, session: int, silence: float, delivered: bool, now: float) -> None:
        """Process the answer to ``Probe``.

        A host that has acknowledged no data for the heartbeat timeout counts as unreachable.
        """
        worker = self.roster.sessions.get(session)
        if isinstance(worker, NodeAgentStatus):
            if silence > self.settings.heartbeat_timeout:
                self.roster.unbind(worker)
            elif delivered:
                worker.delivered = self.rendezvous.opened.epoch
        if not isinstance(worker, Member) or silence <= self.settings.heartbeat_timeout:
            return
        self._lost_touch(worker, f"its host has not acknowledged any data for {silence:.1f} s", now, connected=True)

    @property
    def _is_taking_over(self) -> bool:
        """True until this coordinator opens its first rendezvous."""
        return self.state in (State.STANDBY, State.GATHERING)

    @property
    def _awaited(self) -> Workers:
        """Workers that the run waits for now.

        In the state STEADY these are the members with a part in the epoch. In a rendezvous these are at first only the
        members that have not confirmed the revoke, since the others wait for them; after ``all_heard``, all members.
        """
        if self.state is State.STEADY:
            return self.epochs.working
        hearing = self.rendezvous.hearing
        return self.rendezvous.members & (self.rendezvous.members if hearing.announced else hearing.missing)

    def _tick(self, now: float) -> None:
        late = now - self.deadline
        self.deadline = now + self.settings.heartbeat_interval / 4
        held_up = late > self.settings.heartbeat_interval
        if held_up:
            self._excuse(late, now)
        self.roster.expire_ended(now)
        self.lateness.ask_the_quiet(now, held_up)
        self._candidates.look()
        self._witnessed.look(self.state, now)
        if self._is_taking_over:
            self._takeover.lose_silent(now)
            return
        self.lateness.evict_aside(now)
        stuck = self.lateness.evict(awaited := self._awaited, now)
        if self.state is State.STEADY and not self.roster.changes:
            self.lateness.set_aside(awaited, now)
        if stuck and self.state is State.STEADY and not self.roster.changes:
            self.lateness.all_wait(awaited, now)

    def _excuse(self, pause: float, now: float) -> None:
        """Exclude a pause of this process, in seconds, from all deadlines and from the silence of all members."""
        self._out.log("held_up", seconds=pause)
        self.roster.excuse(pause, now)
        self.rendezvous.excuse(pause)
        self.leadership.excuse(pause)
        self.lateness.excuse(pause)

    # -- the next epoch -----------------------------------------------------------------------------------------------

    def _act_on_changes(self, now: float) -> None:
        """Lead, step down, open a rendezvous or form its plan, as the events since the last call require."""
        hearing = self.rendezvous.hearing
        if self.state is State.STANDBY:
            self.roster.changes.clear()
            self._consider_leading(now)
        own = self.epochs.formed if self.epochs.own else None
        if self.roster.was_abandoned and not self.leadership.has_followers(own):
            self._step_down("so many members abandoned this coordinator that another candidate may lead")
            return
        self.roster.was_abandoned = False
        if self.state is State.GATHERING:
            self._gather(now)
        for _ in range(len(self.roster.workers) + 1):  # each iteration except the last one evicts a worker
            if self.roster.changes and self.state in (State.RENDEZVOUS, State.STEADY):
                self._open(now)
            if self.state is State.RENDEZVOUS and (self._due or self.rendezvous.all_joined or hearing.due):
                self._try_to_form(now)
            if not self.roster.changes:
                break
        self._due = False
        if self.state in (State.RENDEZVOUS, State.STEADY):
            hearing.tell(self.rendezvous.opened.epoch, self.leadership.term, self._out, now)

    def _consider_leading(self, now: float) -> None:
        if not self._takeover.leads(now):
            return
        self._candidates.lead()
        if self.epochs.formed.epoch == 0:
            self.state = State.RENDEZVOUS
            self.roster.changes.append("the run starts")
        else:
            self.state = State.GATHERING
            self._out.send(self.roster.sessions, to_member.Lead(self.leadership.term))

    def _gather(self, now: float) -> None:
        if self._takeover.gathered(now):
            self.state = State.RENDEZVOUS
            self.roster.changes.insert(0, NEW_COORDINATOR)

    def _open(self, now: float) -> None:
        """Open the next rendezvous: all live workers that the run counts on, and the newcomers, must join it."""
        roster, epochs = self.roster, self.epochs
        reasons, roster.changes = roster.changes, []
        counted_on = epochs.formed.members if epochs.own else epochs.take_over(self.leadership.evidence, now)
        members = counted_on & roster.with_fate(Fate.LIVE)
        if epochs.formed.epoch == 0 and roster.settings.start_needs_all and (lost := epochs.formed.members - members):
            names = ", ".join(map(str, sorted(lost)[:20]))
            raise RunOver(EXIT_NO_REPLICA, f"workers {names} were lost before the first plan, which needs all workers")
        roster.required_aside = self._survivors.required_aside(members)
        self._survivors.check(members, counted_on)
        if not members & epochs.formed.members and not roster.returning:
            self._survivors.wait_for_heirs()
            return
        members |= roster.newcomers
        lets_in = self.leadership.witness.lets_in
        members -= {number for number in members - epochs.formed.members if not lets_in(number, epochs.formed)}
        self.state = State.RENDEZVOUS
        self.rendezvous.open(members, now)
        reason = "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")
        self._out.log("revoke", epoch=self.rendezvous.opened.epoch, reason=reason, members=to_runs(members))
        receivers = members | roster.with_fate(Fate.ASIDE)
        apart = frozenset(number for number in receivers if self.rendezvous.is_apart(roster.workers[number]))
        message = self.rendezvous.revoke_message(reason)
        self._out.send([*roster.sessions_of(receivers - apart), *roster.node_agent_sessions], message)
        self._out.send(roster.sessions_of(apart), self.rendezvous.revoke_message(reason, apart=True))

    def _try_to_form(self, now: float) -> None:
        """Form the epoch of the open rendezvous, and send its plan, if all members have joined and may continue."""
        may = not self.roster.required_aside and self.rendezvous.may_follow(self.lateness.unreached, now)
        self.rendezvous.hearing.may = may or not self.roster.with_fate(Fate.OUT)
        if not may or not self.rendezvous.all_joined:
            return
        self.rendezvous.form(now, self.drains.to_decide(self.rendezvous.members))
        self.state = State.STEADY
        self.leadership.formed(self.epochs.formed)
        self.epochs.send_plan()
        self._out.send(self.roster.node_agent_sessions, self.epochs.plan_message())

    # -- messages of members ------------------------------------------------------------------------------------------

    def _received(self, session: int, message: to_coordinator.ToCoordinator, now: float) -> None:
        peer = self.roster.sessions.get(session)
        if isinstance(message, to_coordinator.Heartbeat) and self.heartbeat(session, message, now):
            self._out.send([session], to_member.Beat(message.number))
        elif peer is not None:
            self.roster.hear(peer, now)
            if isinstance(peer, Member):
                self._from_worker(peer, session, message, now)
            elif isinstance(message, to_coordinator.Candidate):
                self._candidates.has(peer, message.address)
            else:
                self.roster.from_node_agent(peer, message, self.leadership.term, now)
        elif isinstance(message, to_coordinator.Observe | to_coordinator.Drain):
            self._observing.asked(session, message, self.state, now)
        elif session in self._observing.sessions:
            self._observing.sessions.pop(session, None)
            self.roster.refuse(session, f"an observer may not send {message.kind}")
        elif not isinstance(message, to_coordinator.Hello):
            self.roster.refuse(session, f"received {message.kind} before attach")
        elif self.state is not State.STANDBY and message.presentation.term > self.leadership.term:
            self.roster.refuse(session, "you follow a newer coordinator")
            self._step_down("a member follows a newer coordinator")
        else:
            if isinstance(message, to_coordinator.Attach):
                self._admission.worker(session, message, now)
            else:
                self._admission.node_agent(session, message, now)
            self._candidates.greet(session)

    def _from_worker(self, worker: Member, session: int, message: to_coordinator.ToCoordinator, now: float) -> None:
        epochs, changes, steady = self.epochs, self.roster.changes, self.state is State.STEADY
        of_this_epoch = steady and isinstance(message, fields.OfEpoch) and message.epoch == epochs.formed.epoch
        match message:
            case to_coordinator.Join() if worker.fate is Fate.ASIDE:
                self.roster.take_back(worker, now)
            case to_coordinator.Join():
                self.rendezvous.join(worker, message, now)
            case to_coordinator.Heard(epoch, term) if term == self.leadership.term:
                self.rendezvous.hearing.heard(worker, epoch)
                if self.rendezvous.hearing.announced and self.epochs.formed.epoch:  # the worker missed ``AllHeard``
                    self._out.send([session], to_member.AllHeard(epoch, term))
            case to_coordinator.Done(iteration=iteration) if of_this_epoch:
                epochs.done(worker, iteration, now)
            case to_coordinator.Idle() if of_this_epoch:
                epochs.idle(worker)
            case to_coordinator.Bye(idle):
                worker.idle_in = idle or worker.idle_in
                epochs.left(worker, self.drains.why_left(worker))
                all_gone = not epochs.formed.members & self.roster.with_fate(Fate.LIVE)
                if self.state is State.RENDEZVOUS or all_gone or epochs.finished:
                    changes.append(f"{worker.name} has left")
                changes.extend(self.drains.news_of(worker.node))
            case to_coordinator.DrainAnswer(node=node, reason=reason) if of_this_epoch:
                self.drains.answered(node, reason)
            case to_coordinator.Complain(reason=reason, peer=peer) if of_this_epoch:
                if peer is not None:
                    self._out.log("complaint", worker=worker.number, peer=peer, reason=reason)
                changes.append(f"{worker.name} requested a new epoch: {reason}")
            # In other states ``GiveUp`` is ignored, because workers repeat it when a rendezvous opens.
            case to_coordinator.GiveUp(code, reason) if steady or self.state is State.RENDEZVOUS:
                self._out.log("give_up", worker=worker.number, host=worker.host, code=code, reason=reason)
                raise RunOver(code, reason, by=worker.number)
            case to_coordinator.Note(text):
                self.roster.pass_on(worker, text)
            case to_coordinator.ReportException():
                self._out.send([session], to_member.Noted())
                cause = self._exceptions.add(worker, message)
                if cause is not None and self.state is not State.STANDBY:
                    raise RunOver(EXIT_SAME_FAULT, cause, by=worker.number)
            case to_coordinator.Abandon(reason):
                self.roster.abandoned(worker, reason, now, followed=self.state is not State.STANDBY)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _step_down(self, reason: str) -> None:
        """Stop leading, and refuse all attached members, so that they look for another coordinator."""
        self._out.log("step_down", reason=reason)
        for session in [*self.roster.sessions, *self._observing.sessions]:
            self._out.send([session], to_member.Refused(reason))
            self._out.do(Close(session))
        self.roster.sessions.clear()
        self.roster.changes.clear()
        self.state = State.RETIRED
        self._out.do(StepDown())

    def _stop(self, over: RunOver, now: float) -> None:
        absent = Workers()
        if self.state is State.RENDEZVOUS:
            absent = self.rendezvous.members & self.roster.with_fate(Fate.LIVE) - self.roster.reached
        self._ending.begin(over, self.epochs.formed, absent, self.rendezvous.patience, self._observing.sessions, now)
        self.roster.changes.clear()
        self.deadline = self._ending.deadline
        self.state = State.STOPPED
