"""Admission of members to a coordinator, the takeover of a run, and candidates that joined after the launch.

``Admission``: checks the first message of a session, records the presentation in it, and sends the first answer.

attach, attach_node_agent ---> barred: fenced, or refused
              |
              v
bound, presentation recorded -------> standby              (this candidate does not lead)
                                 |--> lead                 (it leads, and waits for more members)
                                 |--> revoke               (a rendezvous is open; a set-aside worker: the last one)
                                 '--> otherwise: a launcher receives revoke and plan; a worker receives nothing yet,
                                      because its attach opens a rendezvous

``TakeOver``: decides, before a candidate's first rendezvous, whether it takes over the run, and which workers it must
wait for.

    leads --> at the start of a run: nothing to wait for
        '---> in place of a lost coordinator: gathered, once all workers that the run counts on are attached or evicted

``AddedCandidates``: candidates that joined a run after its launch. The leading candidate keeps and sends their list.

    launcher that joins: candidate(address) ---> coordinator ---candidates(added...)---> all members, new ones too

The list decides where members look for a coordinator, never which candidate may lead. So lists that differ for a moment
do no harm. A new coordinator starts with an empty list, and each launcher reports its candidate to that coordinator.
The candidate of a launcher without a session is not in the list.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from recover_megatron.membership.detect import WorkerProgress
from recover_megatron.membership.drains import Drains
from recover_megatron.membership.epochs import Epochs, Rendezvous
from recover_megatron.membership.events import Close, Outbox
from recover_megatron.membership.lateness import Lateness
from recover_megatron.membership.leadership import Leadership
from recover_megatron.membership.messages import fields, to_coordinator, to_member
from recover_megatron.membership.records import ADMITTED, MOST_ADDED, Address, from_runs, to_runs
from recover_megatron.membership.roster import Fate, Member, NodeAgentStatus, Roster


@dataclass(eq=False)
class Admission:
    """Checks and answers the first message of a session, ``Attach`` or ``AttachNodeAgent``."""

    _roster: Roster
    _leadership: Leadership
    _epochs: Epochs
    _rendezvous: Rendezvous
    _drains: Drains
    _out: Outbox
    _presented: set[bytes] = field(default_factory=set)
    """Presentations that were recorded; recording one again changes nothing."""

    def worker(self, session: int, message: to_coordinator.Attach, now: float) -> None:
        """Attach the worker that sent ``message``, or refuse it.

        The worker may be new, may have lost its connection, or may come from another coordinator.
        """
        number, newcomer, evidence = message.worker, message.newcomer, self._leadership.evidence
        if newcomer:
            self._roster.meet([number])
        worker = self._roster.workers.get(number)
        if worker is None:
            self._roster.refuse(session, f"there is no worker {number} in this run")
            return
        formed_epoch = message.presentation.formed.epoch
        new = newcomer and formed_epoch == 0
        if barred := self._why_barred(worker, message, new):
            reason = f"{barred}: this process is not part of the run"
            self._out.log("refused", worker=number, host=message.host, reason=reason)
            self._out.send([session], to_member.Fenced(reason))
            self._out.do(Close(session))
            return
        if new and not worker.new and number not in self._epochs.formed.members:
            self._out.log("admitted", worker=number, host=message.host)
        self._roster.bind(worker, session, now)
        awaited = self._rendezvous.is_open and number in self._rendezvous.members
        if worker.back and not awaited:
            self._roster.set_aside_again(worker)
        worker.new = new or worker.back
        worker.incarnation, worker.host = message.incarnation, message.host
        worker.node_agent, worker.done = message.node_agent, message.done
        worker.node = worker.node or worker.node_agent
        worker.left_silence = message.silent
        worker.idle_in, worker.vacant = message.idle, message.vacant
        worker.formed_epoch = formed_epoch
        worker.progress = WorkerProgress(worker.number, marked=now, heard=now)
        self._rendezvous.withdraw(worker)
        self._out.log("attached", worker=worker.number, host=worker.host, pid=message.pid)
        self._present(session, message.presentation)
        if self._leadership.term == 0:
            return
        if number in self._rendezvous.members:
            if not self._rendezvous.is_open:
                self._roster.changes.append(f"{worker.name} lost its connection and reconnected")
        elif worker.fate is Fate.ASIDE:
            if self._rendezvous.opened.epoch > 0 and not self._rendezvous.is_open:
                self._out.send([session], self._rendezvous.revoke_message("attached", apart=True))
        elif new:
            if self._leadership.witness.lets_in(number, self._epochs.formed):
                self._roster.changes.append(f"{worker.name} {ADMITTED}")
        elif number not in evidence.target and number not in evidence.aside:
            self._roster.exclude(worker, "it was evicted earlier in the run", now)

    def node_agent(self, session: int, message: to_coordinator.AttachNodeAgent, now: float) -> None:
        node = message.node
        node_agent = self._roster.node_agents.setdefault(node, NodeAgentStatus(node, None, now))
        self._roster.bind(node_agent, session, now)
        node_agent.acknowledged, node_agent.ended, node_agent.awaited_until = 0, False, 0.0
        node_agent.running = set(from_runs(message.running))
        self._out.log("witness", node=node)
        self._present(session, message.presentation)
        if self._epochs.own and not self._rendezvous.is_open:
            self._out.send([session], self._rendezvous.revoke_message("attached"))
            self._out.send([session], self._epochs.plan_message())
        for number in self._roster.with_fate(Fate.OUT):
            if self._roster.workers[number].node_agent == node:
                self._roster.kill(self._roster.workers[number], "evicted from the run")
        self._drains.tell_launcher(node)

    def _why_barred(self, worker: Member, message: to_coordinator.Attach, new: bool) -> str:
        """Return why a process may not attach as ``worker``; empty if it may."""
        evidence = self._leadership.evidence
        if self._leadership.term > 0 and (worker.number in evidence.dead or worker.number in evidence.left):
            return f"worker {worker.number} has ended"
        if worker.fate not in (Fate.LIVE, Fate.ASIDE):
            return f"worker {worker.number} is known as {'evicted' if worker.fate is Fate.OUT else worker.fate.value}"
        if worker.incarnation not in ("", message.incarnation):
            return f"worker {worker.number} is a different process"
        if new and self._drains.is_draining(message.node_agent):
            return f"node {message.node_agent} is being drained"
        if message.newcomer and worker.number < self._roster.world:
            return f"worker id {worker.number} belongs to the launch, and a newcomer needs a new id"
        apart = new or worker.back or worker.fate is Fate.ASIDE
        if self._epochs.own and not apart and worker.number not in self._epochs.formed.members:
            worker.fate = Fate.OUT  # this coordinator has formed a newer epoch without the worker
            return f"worker {worker.number} is evicted"
        return ""

    def _present(self, session: int, presented: fields.Presented) -> None:
        """Record a member's presentation, and send the first answer.

        Until this coordinator has formed an epoch, a presentation may contain an epoch that it does not know.
        """
        news, text = False, msgspec.json.encode(presented)
        if text not in self._presented:  # else 16,384 workers that present the same would cost 16,384 x 16,384
            self._presented.add(text)
            presentation = presented.presentation()
            news = self._leadership.presented(presentation)
            self._roster.meet(presentation.mentioned)
        if self._leadership.term == 0:
            self._out.send([session], to_member.Standby())
        elif self._rendezvous.is_open:
            if news and not self._epochs.own:
                self._roster.changes.append("a member presented unknown epochs or deaths")
            else:
                self._tell_of_rendezvous(session)
        elif not self._epochs.own:
            self._out.send([session], to_member.Lead(self._leadership.term))

    def _tell_of_rendezvous(self, session: int) -> None:
        """Send the open rendezvous to a launcher, to a worker that must join it, or to a set-aside worker."""
        peer = self._roster.sessions[session]
        apart = isinstance(peer, Member) and self._rendezvous.is_apart(peer)
        revoke = self._rendezvous.revoke_message("attached", apart=apart)
        if isinstance(peer, Member) and peer.fate is Fate.LIVE and peer.number not in self._rendezvous.members:
            return
        if isinstance(peer, NodeAgentStatus) and self._epochs.own:
            # The launcher must know that the run has begun, because it then reacts to a worker's death differently.
            formed = self._epochs.formed
            self._out.send([session], replace(revoke, epoch=formed.epoch, members=to_runs(formed.members)))
            self._out.send([session], self._epochs.plan_message())
        self._out.send([session], revoke)


@dataclass(eq=False)
class TakeOver:
    """Takeover of a run: actions of a coordinator in the states STANDBY and GATHERING."""

    _roster: Roster
    _leadership: Leadership
    _epochs: Epochs
    _lateness: Lateness

    def leads(self, now: float) -> bool:
        """Begin a term if enough members are attached. Return whether this candidate leads."""
        self._epochs.adopt(self._leadership.evidence)
        if not self._leadership.may_lead(now):
            return False
        self._leadership.lead(now)
        return True

    def gathered(self, now: float) -> bool:
        """Evict workers that did not attach in time. Return whether all others that the run counts on have attached.

        The lost coordinator may have sent a commit to only one worker. The other workers of that worker's replica must
        receive the commit no later than the revoke. Otherwise the worker that has the commit would begin collective
        operations in which the other workers do not take part.
        """
        self._epochs.adopt(self._leadership.evidence)
        missing = self._leadership.not_come
        if any(now <= self._leadership.gathers_until(worker, now) for worker in missing):
            return False
        for worker in missing:
            self._roster.exclude(worker, "it did not attach to the new coordinator", now)
        return True

    def lose_silent(self, now: float) -> None:
        """Treat workers that were silent for the heartbeat timeout like workers whose connection has ended."""
        for worker in self._lateness.silent(now):
            self.connection_ended(worker, f"silent for {now - worker.heard:.1f} s", now)

    def connection_ended(self, worker: Member, reason: str, now: float) -> None:
        """Evict a worker that cannot be reached but may still run, or only close its session so that it may return.

        The worker is not evicted if this candidate does not lead yet, or if the run does not count on the worker. In
        the second case the worker's fate is decided when all workers that the run counts on have attached.
        """
        if self._leadership.term == 0 or worker.number not in self._leadership.evidence.target:
            self._roster.unbind(worker)
        else:
            self._roster.exclude(worker, reason, now)


class AddedCandidates:
    """List of the candidates that joined after the launch, as one coordinator knows them.

    ``lease``: path of the lease, which launchers receive for their candidates; None if the run has no lease.
    ``slack``: see ``leadership.permission``.
    """

    def __init__(self, roster: Roster, out: Outbox, lease: str | None, slack: int | None, witnessed: bool) -> None:
        """Create an empty list. ``witnessed``: whether the run has a witness."""
        self._roster = roster
        self._out = out
        slack = 0 if lease is None else slack or 0
        self._for_workers = to_member.Candidates([], roster.world)
        self._for_launchers = replace(self._for_workers, lease=lease, slack=slack, witnessed=witnessed)
        self._by_node: dict[str, tuple[NodeAgentStatus, Address]] = {}
        """Node name -> the launcher that joined, and the address of its candidate, in the order of arrival."""
        self._leads = False
        self._listed: list[Address] = []

    def has(self, node_agent: NodeAgentStatus, address: Address) -> None:
        """Add the candidate that a launcher has reported. Send the list if it has changed and this candidate leads."""
        self._by_node[node_agent.node] = node_agent, address
        self._tell_if_changed()

    def look(self) -> None:
        """Remove the candidates of launchers without a session. Called at every tick."""
        gone = [node for node, (node_agent, _) in self._by_node.items() if node_agent.session is None]
        for node in gone:
            del self._by_node[node]
        self._tell_if_changed()

    def _tell_if_changed(self) -> None:
        if self._leads and self._listed != self._list:
            self._out.log("candidates", added=[f"{host}:{port}" for host, port in self._list])
            self.lead()

    def lead(self) -> None:
        """Send the candidate list to all members, now and at each change.

        Launchers also receive the settings that a candidate needs.
        """
        self._leads = True
        self._listed = self._list
        for session in list(self._roster.sessions):
            self.greet(session)

    def greet(self, session: int) -> None:
        """Send the candidate list to the member of ``session`` if that member was accepted and this candidate leads."""
        peer = self._roster.sessions.get(session)
        if self._leads and peer is not None:
            message = self._for_launchers if isinstance(peer, NodeAgentStatus) else self._for_workers
            self._out.send([session], replace(message, added=self._listed))

    @property
    def _list(self) -> list[Address]:
        return [address for _, address in self._by_node.values()][:MOST_ADDED]
