"""The coordinator as a state machine without I/O: ``handle(event, now) -> effects``.

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
            (*contested*), the plan also waits for the quorum and for the acknowledgement of the members' witnesses.
STEADY      The plan of epoch n is pushed. ``done(n, t)`` of all members commits iteration t. Who has said ``idle(n)``
            has no part in epoch n: commits and hang detection pass it over.
STOPPED     The run is over or may not go on here; everybody was told why.

Members that hear nothing turn away from a coordinator (``abandon``), and it cannot know of it while it does not run: it
was stopped, or its host was busy. Then they are alive, and they either come back, and are waited for, or another
candidate leads them. So a coordinator that has less than its quorum left *steps down*: it sends who is left to look for
another one, forgets all (``StepDown``), and is a candidate like any other. Its own pauses count against nobody
(``_excuse``).
A fresh candidate has promised nothing, whatever the process did before: members alone keep what binds (``quorum``).

A commit needs the report of all members, so it needs no log: if every survivor of an epoch presents ``done >= t``, t is
committed (it may have been, and it does no harm if it was not); if one does not, it was not. So a lost coordinator
loses no decision, and a decision that a single worker has received is never taken again. Idle members report nothing,
so they are no such survivors (``quorum.can_tell``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from recover_megatron.membership.detect import Progress
from recover_megatron.membership.epochs import State
from recover_megatron.membership.errors import EXIT_LOST_MAJORITY, EXIT_SAME_FAULT
from recover_megatron.membership.events import (
    Acknowledged,
    Close,
    Closed,
    CoordinatorEffect,
    CoordinatorEvent,
    Exit,
    Log,
    Received,
    Settle,
    StepDown,
    Tick,
    Verdict,
)
from recover_megatron.membership.lateness import Lateness
from recover_megatron.membership.records import from_runs, to_runs
from recover_megatron.membership.roster import Fate, Witness, Worker
from recover_megatron.membership.succession import presentation_from_wire
from recover_megatron.membership.view import view
from recover_megatron.membership.words import LastWords, true_cause


class Coordinator(Lateness):
    """One candidate coordinator. Give it every event, carry out its effects in order, send ``Tick`` at ``deadline``.

    ``salt``: 32 random bits, the part of the term that makes it unlike any other coordinator's.
    ``arbiter``: whether effects ``AskArbiter`` are answered; contested epochs then depend on it alone.
    """

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorEffect]:
        """Apply one event. Changes of membership are collected until ``Settle``, which must follow each batch."""
        self._effects = []
        self._now = now
        self._due |= not isinstance(event, Settle) and not (
            isinstance(event, Received) and event.message["type"] in ("heartbeat", "join", "observe")
        )
        if self.state is State.STOPPED:
            self._after_the_end(event, now)
            return self._effects
        if self.state is State.RETIRED:  # another one has its place
            return self._effects
        match event:
            case Received(session, message):
                self._received(session, message, now)
            case Closed(session, ended, reason):
                self._closed(session, ended, reason, now)
            case Acknowledged(session, silence):
                peer = self._sessions.get(session)
                if isinstance(peer, Worker) and silence > self.settings.heartbeat_timeout:
                    self._unacknowledged(peer, silence, now)
            case Verdict(held_until):
                self._lease_until = held_until
            case Tick():
                self._tick(now)
            case Settle():
                self._settle(now)
        return self._effects

    def fresh(self, salt: int, now: float) -> Coordinator:
        """A candidate with the same task that knows nothing, to take the place of one that has stepped down."""
        return Coordinator(self.world, self.settings, salt, self._planner, self._arbiter, now)

    def _step_down(self, reason: str) -> None:
        """Lead no longer: who still follows is sent to look for another coordinator; see the module's text."""
        self._log("step_down", reason=reason)
        for session in [*self._sessions, *self._observers.sessions]:
            self._send([session], {"type": "refused", "reason": reason})
            self._do(Close(session))
        self._sessions.clear()
        self._changes = []
        self.state = State.RETIRED
        self._do(StepDown())

    def _after_the_end(self, event: CoordinatorEvent, now: float) -> None:
        """Tell those who come late, if they are waited for; see ``_stop``."""
        waited = bool(self._untold)
        if isinstance(event, Received):
            if event.message["type"] == "observe" or (waited and event.message["type"] in ("attach", "attach_witness")):
                self._send([event.session], self._farewell)
                self._do(Close(event.session))
                self._untold -= {event.message.get("worker"), event.message.get("node")}
            else:
                self._refuse(event.session, "this coordinator has stopped")
        if waited and (not self._untold or now >= self.deadline):
            self._untold.clear()
            self.deadline = math.inf
            self._do(Exit(self._farewell["code"], self._farewell["reason"]))

    # -- members come and go ------------------------------------------------------------------------------------------

    def _received(self, session: int, message: Mapping[str, Any], now: float) -> None:
        peer = self._sessions.get(session)
        if peer is not None:
            self._hear(peer, now)
            if isinstance(peer, Witness):
                self._from_witness(peer, session, message, now)
            else:
                self._from_worker(peer, session, message, now)
        elif message["type"] == "observe":
            self._observed(session, now)
        elif session in self._observers:
            self._observers.forget(session)
            self._refuse(session, f"{message['type']} of an observer")
        elif message["type"] not in ("attach", "attach_witness"):
            self._refuse(session, f"{message['type']} before attach")
        elif self.state is not State.STANDBY and message["term"] > self.term:
            self._refuse(session, "you follow a newer coordinator")
            self._step_down("a member follows a newer coordinator")
        elif message["type"] == "attach":
            self._attach_worker(session, message, now)
        else:
            self._attach_witness(session, message, now)

    def _attach_worker(self, session: int, message: Mapping[str, Any], now: float) -> None:
        number = message["worker"]
        newcomer = message.get("newcomer", False)
        if newcomer:
            self._meet([number])
        worker = self.workers.get(number)
        if worker is None:
            self._refuse(session, f"there is no worker {number} in this run")
            return
        new = newcomer and message["formed_epoch"] == 0
        if barred := self._why_barred(worker, message, new):
            reason = f"{barred}: this process is not part of the run"
            self._log("refused", worker=number, host=message["host"], reason=reason)
            self._send([session], {"type": "fenced", "reason": reason})
            self._do(Close(session))
            return
        if new and not worker.new and number not in self.formed.members:
            self._log("admitted", worker=number, host=message["host"])
        worker.new = new
        self._bind(worker, session, now)
        worker.incarnation, worker.host = message["incarnation"], message["host"]
        worker.witness, worker.done = message.get("witness", ""), message["done"]
        worker.left_silence = message.get("silent", False)
        worker.idle_in = message.get("idle", 0)
        self._joined -= self.state is State.RENDEZVOUS and worker.joined == self.opened.epoch
        worker.joined, worker.formed_epoch = 0, message["formed_epoch"]
        worker.progress = Progress(worker.number, marked=now, heard=now)
        self._log("attached", worker=worker.number, host=worker.host, pid=message["pid"])
        self._presented(session, message)
        if self.state is State.STANDBY:
            return
        if number in self.opened.members:
            if self.state is State.STEADY:
                self._changes.append(f"{worker.name} has lost its connection and come back")
        elif new:
            self._changes.append(f"{worker.name} is admitted")
        elif number not in self._evidence.target:
            self._exclude(worker, "it was put out of the run before", now)

    def _why_barred(self, worker: Worker, message: Mapping[str, Any], new: bool) -> str:
        """What speaks against a process that presents itself as ``worker``; empty: nothing."""
        if worker.number in self._evidence.dead | self._evidence.left and self.state is not State.STANDBY:
            return f"worker {worker.number} has ended"
        if worker.fate is not Fate.LIVE:
            return f"worker {worker.number} is {worker.fate.value}"
        if worker.incarnation not in ("", message["incarnation"]):
            return f"worker {worker.number} is another process"
        if message.get("newcomer", False) and worker.number < self.world:
            return f"worker {worker.number} was launched with the run, and a newcomer needs an id of its own"
        if self._own and not new and worker.number not in self.formed.members:
            worker.fate = Fate.OUT  # it holds a plan of an epoch that this coordinator's epochs have left behind
            return f"worker {worker.number} is {worker.fate.value}"
        return ""

    def _attach_witness(self, session: int, message: Mapping[str, Any], now: float) -> None:
        node = message["node"]
        witness = self.witnesses.setdefault(node, Witness(node, None, now))
        self._bind(witness, session, now)
        witness.acknowledged, witness.ended = 0, False
        witness.running = set(from_runs(message.get("running", [])))
        self._log("witness", node=node)
        self._presented(session, message)
        if self.state is State.STEADY:
            self._send([session], self._revoke_message("attached"))
            self._send([session], self._plan_message())
        for number in self._with_fate(Fate.OUT):
            if self.workers[number].witness == node:
                self._kill(self.workers[number], "put out of the run")

    def _presented(self, session: int, message: Mapping[str, Any]) -> None:
        """Take in a presentation; before this coordinator has formed an epoch itself, it may change the picture."""
        before = (self._evidence.formed, self._evidence.bases, self._evidence.dead, self._evidence.left)
        presentation = presentation_from_wire(message)
        self._evidence.add(presentation)
        self._meet(presentation.mentioned)
        peer = self._sessions[session]
        if self.state is State.STANDBY:
            self._send([session], {"type": "standby"})
        elif self.state is State.GATHERING:
            self._send([session], self._lead_message())
        elif self.state is State.RENDEZVOUS:
            now_known = (self._evidence.formed, self._evidence.bases, self._evidence.dead, self._evidence.left)
            if not self._own and before != now_known:
                self._changes.append("a member presented something newer")
            elif isinstance(peer, Witness) or peer.number in self.opened.members:
                if isinstance(peer, Witness) and self._own:  # that the run has begun decides what a death means to it
                    formed = {"epoch": self.formed.epoch, "members": to_runs(self.formed.members)}
                    self._send([session], {**self._revoke_message("attached"), **formed})
                    self._send([session], self._plan_message())
                self._send([session], self._revoke_message("attached"))

    def _observed(self, session: int, now: float) -> None:
        """Show an observer the state; see ``view`` for what it may ask."""
        if not self._observers.ask(session, now):
            self._observers.forget(session)
            self._refuse(session, "an observer that asks too often")
            return
        self._send([session], view(self, self._plan, now))
        if (quietest := self._observers.one_too_many()) is not None:
            self._do(Close(quietest))

    def _do(self, effect: CoordinatorEffect) -> None:
        if isinstance(effect, Log):
            self.history.note(effect.record, self._plan, self._now)
        super()._do(effect)

    def _closed(self, session: int, ended: bool, reason: str, now: float) -> None:
        self._observers.forget(session)
        peer = self._sessions.pop(session, None)
        if peer is None:
            return
        peer.session = None
        ended = ended and now - peer.heard <= self.settings.heartbeat_timeout  # by the clock: no excuses
        if isinstance(peer, Witness):
            peer.ended = ended
            self._log("witness_gone", node=peer.node, reason=reason)
        elif ended and peer.fate is Fate.LIVE:
            self._dead(peer, reason, now)
        elif peer.fate is Fate.LIVE:
            self._lost_touch(peer, reason, now)

    # -- what members say ---------------------------------------------------------------------------------------------

    def _from_worker(self, worker: Worker, session: int, message: Mapping[str, Any], now: float) -> None:
        match message["type"]:
            case "heartbeat":
                self._heartbeat(worker, message, now)
                self._send([session], {"type": "beat"})
            case "join" if self._is_awaited(worker, message["epoch"]):
                self._joined += worker.joined != self.opened.epoch
                worker.joined, worker.status, worker.done = message["epoch"], message["status"], message["done"]
                worker.idle_in = message.get("idle", 0)
                worker.progress.marked = worker.progress.waiting_since = now
                if "plan" in message and not self._own:
                    self._plan = message["plan"]
            case "done" if self.state is State.STEADY and message["epoch"] == self.formed.epoch:
                self._done(worker, message["iteration"], now)
            case "idle" if self.state is State.STEADY and message["epoch"] == self.formed.epoch:
                before = self._is_ready(worker)
                worker.idle_in = self.formed.epoch
                self._reported(worker, before)
            case "bye":
                worker.fate = Fate.LEFT
                self._some_left = True
                self._log("left", worker=worker.number)
                nobody = not self.formed.members & self._with_fate(Fate.LIVE)
                if self.state is State.RENDEZVOUS or nobody or self._finished():
                    self._changes.append(f"{worker.name} has left")
            case "complain" if self.state is State.STEADY and message["epoch"] == self.formed.epoch:
                if "peer" in message:
                    self._log("complaint", worker=worker.number, peer=message["peer"], reason=message["reason"])
                self._changes.append(f"{worker.name} asks for it: {message['reason']}")
            case "give_up" if self.state in (State.RENDEZVOUS, State.STEADY):  # repeated when a rendezvous opens
                code, reason = message["code"], message["reason"]
                self._log("give_up", worker=worker.number, host=worker.host, code=code, reason=reason)
                self._stop(code, reason, by=worker.number)
            case "note":
                self._log("note", worker=worker.number, host=worker.host, text=message["text"])
                witness = self.witnesses.get(worker.witness)
                if witness is not None and witness.session is not None:
                    note = {"type": "note", "worker": worker.number, "text": message["text"]}
                    self._send([witness.session], note)
            case "last_words":
                self._note(worker, session, message)
            case "abandon":
                self._log("abandoned", worker=worker.number, reason=message["reason"])
                self._turned_away(worker, now)

    def _turned_away(self, worker: Worker, now: float) -> None:
        """It looks for a coordinator: it comes back if there is no other, or its launcher tells of its end.

        Not out, whoever was silent: what this coordinator has missed while it did not run is no fault of the worker's.
        """
        self._unbind(worker)
        if self.state is not State.STANDBY and worker.fate is Fate.LIVE:
            worker.awaited_until = now + self.settings.lost_timeout
            self._deserted = True
            self._changes.append(f"{worker.name} has turned away and is waited for")

    def _is_awaited(self, worker: Worker, epoch: int) -> bool:
        opened = self.opened
        return self.state is State.RENDEZVOUS and epoch == opened.epoch and worker.number in opened.members

    def _heartbeat(self, worker: Worker, message: Mapping[str, Any], now: float) -> None:
        progress = worker.progress
        progress.iteration, progress.phase = message["iteration"], message["phase"]
        progress.microbatch, progress.place = message.get("microbatch"), message.get("place")
        if message["count"] == progress.count:
            return
        progress.count, progress.marked, progress.allow = message["count"], now, message["allow"]
        if self.state is State.STEADY and worker.done <= self.committed:
            if not message["waiting"]:
                progress.waiting_since = None
            elif progress.waiting_since is None:
                progress.waiting_since = now

    def _done(self, worker: Worker, iteration: int, now: float) -> None:
        before = self._is_ready(worker)
        worker.done = max(worker.done, iteration)
        worker.progress.marked = now
        if worker.progress.waiting_since is None:
            worker.progress.waiting_since = now
        if self._some_left:
            self._changes.append("a worker has left while others go on")
        self._reported(worker, before)

    def _reported(self, worker: Worker, before: bool) -> None:
        """Commit if that was the last report missing; ``before``: whether the worker was ready before it."""
        self._ready += self._is_ready(worker) and not before
        if self._some_left:
            if self._finished():
                self._changes.append("only workers without a part are left")
        elif self._ready == len(self.formed.members) and self._commit(self.formed.members - self._idle(self.formed)):
            message = {"type": "commit", "epoch": self.formed.epoch, "iteration": self.committed}
            self._send(self._attached(self.formed.members), message)
            for member in self.formed.members:
                self.workers[member].progress.waiting_since = None

    def _note(self, worker: Worker, session: int, message: Mapping[str, Any]) -> None:
        """Keep a worker's last words; when another replica ended in the same way, the run cannot go on."""
        self._send([session], {"type": "noted"})
        if worker.number in self._words:
            return
        words = LastWords.of(worker.name, message)
        where = {"iteration": words.iteration, "microbatch": words.microbatch, "group": words.group}
        said = {"phase": words.phase, "own": words.own, "error": words.error, "traceback": message["traceback"]}
        self._log("exception", worker=worker.number, host=worker.host, **where, **said)
        cause = true_cause(words, self._words.values())
        self._words[worker.number] = words
        if cause is not None and self.state is not State.STANDBY:
            self._stop(EXIT_SAME_FAULT, cause, by=worker.number)

    def _from_witness(self, witness: Witness, session: int, message: Mapping[str, Any], now: float) -> None:
        match message["type"]:
            case "beat":
                self._send([session], {"type": "beat"})
            case "ack" if message["term"] == self.term:
                witness.acknowledged = max(witness.acknowledged, message["epoch"])
            case "spawned":
                witness.running.add(message["worker"])
                self._log("spawned", worker=message["worker"], pid=message["pid"], node=witness.node)
            case "stopping":
                witness.stopping = message["signal"]
                self._log("stopping", node=witness.node, signal=witness.stopping)
            case "ended":
                witness.running.discard(message["worker"])
                self._ended(message["worker"], message["how"], now)
            case "abandon":
                self._unbind(witness)

    def _ended(self, number: int, how: str, now: float) -> None:
        """A launcher has seen a process end."""
        if number not in self.workers:  # a newcomer, before it came here: it may be in what others will present
            self._meet([number])
            self.workers[number].fate = Fate.DEAD
            return
        if self.workers[number].fate in (Fate.LIVE, Fate.OUT):
            self._dead(self.workers[number], f"its process has ended ({how})", now)

    # -- time ---------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        late = now - self.deadline
        self.deadline = now + self.settings.heartbeat_interval / 4
        if late > self.settings.heartbeat_interval:
            self._log("held_up", seconds=late)
            self._excuse(late, now)
        if self._leased and now >= self._lease_until:
            self._step_down("the lease could not be renewed: another coordinator may go on")
            return
        self._ask_the_quiet(now)
        if self.state in (State.STANDBY, State.GATHERING):
            for worker in self._silent(now):
                self._lost_touch(worker, f"silent for {now - worker.heard:.1f} s", now)
            return
        stuck = self._put_out_the_late(now)
        if stuck and self.state is State.STEADY and not self._changes:
            self._stuck_epochs += 1
            self._log("stuck", epoch=self.formed.epoch, times=self._stuck_epochs)
            if self._stuck_epochs > self.settings.max_stuck_epochs:
                self._stop(
                    EXIT_LOST_MAJORITY, f"all workers waited for each other in {self._stuck_epochs} epochs in a row"
                )
            else:
                self._changes.append("all workers wait for each other")
