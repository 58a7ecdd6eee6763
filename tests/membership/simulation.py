"""The real state machines of coordinator, workers and node agents over a simulated network with simulated time.

A connection is two in-order queues, as TCP is; between connections any order is possible, since the test chooses what
is delivered next. A blocked link delivers nothing and loses nothing (TCP repeats it when the link heals); a host that
dies silently sends no end of file. Every plan and commit that anybody fixes or receives is checked as it happens.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from msgspec.structs import replace

from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.drains import draining_of
from recover_megatron.membership.events import (
    Abandon,
    Accepted,
    Acknowledged,
    AskForLease,
    AskWitness,
    Close,
    Closed,
    Connected,
    Dial,
    Exit,
    Hangup,
    Heard,
    Log,
    Look,
    Lost,
    Notify,
    Probe,
    Received,
    Say,
    Send,
    Settle,
    State,
    Statement,
    StepDown,
    Tick,
    Verdict,
)
from recover_megatron.membership.io.lease import is_due, may_take
from recover_megatron.membership.messages import to_coordinator, to_member
from recover_megatron.membership.messages.fields import Message, Presented
from recover_megatron.membership.messages.to_coordinator import ToCoordinator
from recover_megatron.membership.messages.to_member import ToMember
from recover_megatron.membership.records import JOINED_FROM, Presentation, Settings, from_runs
from recover_megatron.membership.roster import Fate
from recover_megatron.membership.sides.follower import Follower, Stage
from recover_megatron.membership.sides.member import Member
from recover_megatron.membership.sides.node_agent import NodeAgentClient
from recover_megatron.membership.wire import TO_COORDINATOR, TO_MEMBER
from recover_megatron.network.messages import Schema as Wire
from recover_megatron.network.messages import encode

SETTINGS = Settings(
    heartbeat_interval=1.0, heartbeat_timeout=5.0, hang_timeout=20.0, start_timeout=60.0, stall_timeout=40.0
)

OBSERVER = 10**9
"""Session of whoever looks at the run."""


class Network(Enum):
    """Events of a connection besides messages."""

    DIAL = "the member connects"
    ACCEPTED = "its host has accepted the connection"
    CONNECTED = "both sides have proved that they know the secret"
    EOF = "the other side has closed it"


def over_the_wire[T](message: Message, stage: Wire[T]) -> T:
    """Return the message as it arrives: encoded, and parsed with all checks, by the real code."""
    return stage.parse(encode(message)[4:])


def attach(worker: int, incarnation: int, host: str = "h", **more: Any) -> to_coordinator.Attach:
    """The first message of a worker that knows nothing."""
    fields = {"pid": 1000 + worker, "presentation": Presented.of(Presentation()), "done": 0, **more}
    return to_coordinator.Attach(worker, f"{incarnation:032x}", host, **fields)


@dataclass
class Connection:
    number: int
    owner: str
    candidate: int
    up: deque[ToCoordinator | Network] = field(default_factory=deque)
    down: deque[ToMember | Network] = field(default_factory=deque)
    member_uses: bool = True
    coordinator_uses: bool = False
    sent_at: float = 0.0
    acknowledged_at: float = 0.0
    arrived: int = 0
    """Of the first of ``down``: they lie at the member's host, where no broken link keeps them from it."""

    def send(self, message: ToMember, now: float) -> None:
        """The coordinator's side sends; what it sent at earlier times has been acknowledged, at once."""
        if now > self.sent_at:
            self.acknowledged_at, self.sent_at = self.sent_at, now
        self.down.append(message)

    def unacknowledged(self, now: float) -> float:
        """What the coordinator's kernel tells of it while the link is well: what is sent ``now`` is under way."""
        return now - self.acknowledged_at if self.sent_at == now else 0.0


class PropertyViolated(AssertionError):
    """A safety property of the protocol does not hold."""


class World:
    """``workers`` workers on ``nodes`` nodes, each with a launcher (unless ``node_agents`` is False)."""

    def __init__(
        self,
        workers: int,
        candidates: int = 2,
        nodes: int = 2,
        node_agents: bool = True,
        settings: Settings = SETTINGS,
        slack: int | None = None,
        witness: bool = False,
    ) -> None:
        """``slack``: there is a lease, and by so many workers two halves may differ. ``witness``: and who tells the
        truth of nodes that are off."""
        self.now = 0.0
        self._settings = settings
        self._slack = slack
        self.plans: dict[tuple[int, int], Any] = {}
        self.holders: list[AskForLease] = []  # of the lease, the last one is the present one
        self.claims: list[tuple[int, AskForLease]] = []  # by which candidate; the storage has not answered yet
        self.answers: list[tuple[int, Verdict]] = []  # to candidates that were frozen
        self.no_storage: set[int] = set()  # candidates that do not reach it
        self.launched = workers
        self._nodes = frozenset(f"node{n}" for n in range(nodes)) if witness else None
        self.questions: list[tuple[int, frozenset[str]]] = []  # by which candidate; the witness has not answered yet
        self.off: set[str] = set()  # nodes without power
        self.connections: dict[int, Connection] = {}
        self._numbers = itertools.count(1)
        self._salts = itertools.count(100)
        self.coordinators: dict[int, Coordinator] = {}
        self.added: dict[tuple[str, int], int] = {}  # address -> candidate, of those that joined
        self.first_lists: dict[str, tuple[tuple[str, int], ...]] = {}  # by member: those it was started with, and
        self.lists: dict[str, tuple[tuple[str, int], ...]] = {}  # those it was told of
        self.members: dict[str, Follower] = {}
        self.current: dict[str, Connection | None] = {}
        self.has_node_agents = node_agents
        self._launched_nodes = nodes
        self._candidates = candidates
        self.node_of: dict[int, int] = {}
        self.frozen: set[str] = set()
        for k in range(candidates):
            self.start_coordinator(k)
        for w in range(workers):
            self._add_worker(w, w * nodes // workers)
        for n in range(nodes if node_agents else 0):
            watcher = self._add_launcher(n)
            for w in [w for w, node in self.node_of.items() if node == n]:
                watcher.spawned(w, 1000 + w)
        self.spares: set[int] = set()  # workers that have no part in the epochs whose plan they get from now on
        self.vacant: set[int] = set()  # epochs in which nobody has a part
        self.members_finish = False
        """Set by tests whose members do; those of random runs never have finished their training."""
        self.aside: set[int] = set()  # workers that were set aside, and come into an epoch again as newcomers do
        self.drains_nodes = False  # whether members decide of nodes to be drained, or the test does
        self.accepted: dict[int, frozenset[str]] = {}  # by worker: the nodes that its last plan does without
        self.drained: set[str] = set()  # nodes of which somebody was told that they may be switched off
        self.busy: set[int] = set()  # workers whose main thread computes, without a mark
        self.waits: dict[int, str] = {}  # workers that wait for the others in this, join epochs, and report nothing
        self._reported_in: dict[int, int] = {}  # by worker: in which epoch it has reported its iteration last
        self._waits_said: dict[int, tuple[int, str]] = {}  # in which epoch they have said so last
        self.dead: set[str] = set()
        self.unreported: list[int] = []  # deaths that the launcher has not seen yet
        self.dying: list[int] = []  # workers whose launchers have told their deaths, and whose connections still stand
        self.blocked: set[tuple[str, int]] = set()
        self.gated: set[int] = set()  # workers that cannot join before they have aborted what they had under way
        self.deceived: set[int] = set()  # put out, and could not know it when the others aborted
        self.log: list[dict[str, Any]] = []
        self.formed: dict[int, tuple[int, frozenset[int]]] = {}  # epoch -> (term, members)
        self.order: list[int] = []
        self.told: dict[str, tuple[int, int]] = {}  # to each member: the last commit, and in or after which epoch
        self.commits: dict[int, int] = {}  # iteration -> the epoch it was first committed in

    def _add_worker(self, number: int, node: int, **more: Any) -> None:
        self.node_of[number] = node
        host = f"node{node}"
        hello = attach(number, number, host, node_agent=host if self.has_node_agents else "", **more)
        candidates = self._candidates + self._knows_added(f"w{number}")
        self.members[f"w{number}"] = Member(hello, candidates, self._settings, self.now)
        self.current[f"w{number}"] = None

    def add_node(self) -> int:
        """A launcher joins while the run goes on; its node."""
        node = len([name for name in self.members if name.startswith("node")])
        self._add_launcher(node, late=True)
        return node

    def _add_launcher(self, node: int, late: bool = False) -> NodeAgentClient:
        name, incarnation = f"node{node}", f"{node + 999:032x}"
        candidates = self._candidates + self._knows_added(name)
        watcher = NodeAgentClient(name, incarnation, candidates, self._settings, self.now, late=late)
        self.members[name], self.current[name] = watcher, None
        return watcher

    def _knows_added(self, name: str) -> int:
        """A member that is started late is given the addresses of all candidates that have joined; how many."""
        self.first_lists[name] = tuple(self.added)
        return len(self.added)

    def add_candidate(self, node: int) -> int:
        """The launcher of a node that joined starts a candidate; its number."""
        candidate = max([self._candidates - 1, *self.coordinators, *self.added.values()]) + 1
        address = (f"node{node}", candidate + 1)
        self.added[address] = candidate
        self.start_coordinator(candidate)
        watcher = self.members[f"node{node}"]
        assert isinstance(watcher, NodeAgentClient)
        self._member_effects(f"node{node}", watcher.hosts(address))
        return candidate

    def candidate_of(self, name: str, place: int) -> int:
        """Which candidate a member means by a place in its list."""
        first = [*range(self._candidates), *map(self.added.__getitem__, self.first_lists.get(name, ()))]
        return first[place] if place < len(first) else self.added[self.lists[name][place - len(first)]]

    def add_newcomer(self, node: int) -> None:
        """Start one more worker, while the run goes on; it joins when it acts."""
        joined = self._nodes is not None and node >= self._launched_nodes  # else it does not matter
        number = len(self.node_of) + (JOINED_FROM if joined else 0)
        self._add_worker(number, node, newcomer=True)
        watcher = self.members.get(f"node{node}")
        if isinstance(watcher, NodeAgentClient) and f"node{node}" not in self.dead:
            self._member_effects(f"node{node}", watcher.spawned(number, 1000 + number))

    # -- views --------------------------------------------------------------------------------------------------------

    def worker(self, number: int) -> Member:
        member = self.members[f"w{number}"]
        assert isinstance(member, Member)
        return member

    @property
    def newest(self) -> frozenset[int]:
        """The members of the newest epoch."""
        return self.formed[self.order[-1]][1]

    @property
    def out(self) -> set[int]:
        """The workers that know that they are out."""
        return {w for w in self.node_of if self.worker(w).stage is Stage.OUT}

    def logged(self, *events: str) -> list[dict[str, Any]]:
        """What coordinators have logged under these names."""
        return [record for record in self.log if record["event"] in events]

    def node(self, name: str) -> str:
        return f"node{self.node_of[int(name[1:])]}" if name.startswith("w") else name

    def is_blocked(self, connection: Connection) -> bool:
        node = self.node(connection.owner)
        return node in self.off or (node, connection.candidate) in self.blocked

    def running(self, name: str) -> bool:
        return name not in self.dead and name not in self.frozen

    def deliverable(self) -> list[tuple[int, str]]:
        """(connection, direction) pairs that have something to deliver now."""
        pairs = []
        for c in self.connections.values():
            if self.is_blocked(c):
                continue
            if c.up and c.candidate in self.coordinators and f"c{c.candidate}" not in self.frozen:
                pairs.append((c.number, "up"))
            if c.down and self.running(c.owner):
                pairs.append((c.number, "down"))
        return pairs

    # -- faults -------------------------------------------------------------------------------------------------------

    def kill_worker(self, number: int, silently: bool = False) -> None:
        name = f"w{number}"
        self.dead.add(name)
        self.frozen.discard(name)
        if not silently:
            self._end_of_file(name)
        if self.node(name) in self.members:
            self.unreported.append(number)

    def _end_of_file(self, name: str) -> None:
        for c in self.connections.values():
            if c.owner == name:
                c.up.append(Network.EOF)

    def report_death(self, number: int, how: str = "killed") -> None:
        """The launcher notices."""
        if number in self.unreported and self.node(f"w{number}") not in self.dead:
            self.unreported.remove(number)
            self._member_effects(self.node(f"w{number}"), self._launcher_of(number).ended(number, how))

    def tell_of_dying(self, number: int, last_act: bool) -> None:
        """A worker dies, and its launcher tells that at once: its connections end later (``reap``).

        ``last_act``: the system call under way at its death is finished after that: it sends a message, or dials.
        """
        name = f"w{number}"
        self._member_effects(self.node(name), self._launcher_of(number).ended(number, "SIGKILL"))
        if last_act:
            self.busy.discard(number)
            self.act(number)
            if (due := self.worker(number).deadline) < math.inf:
                self._to_member(name, Tick(), max(self.now, due))
        self.dead.add(name)
        self.dying.append(number)

    def reap(self, number: int) -> None:
        """The process has gone: its connections end, and its launcher says so again, more exactly."""
        self.dying.remove(number)
        self._end_of_file(f"w{number}")
        if self.launcher_runs(number):
            self._member_effects(self.node(f"w{number}"), self._launcher_of(number).ended(number, "killed by SIGKILL"))

    def launcher_runs(self, number: int) -> bool:
        """Whether the worker has a launcher (newcomers may have none here), which runs."""
        name = self.node(f"w{number}")
        return name in self.members and self.running(name)

    def _launcher_of(self, number: int) -> NodeAgentClient:
        launcher = self.members[self.node(f"w{number}")]
        assert isinstance(launcher, NodeAgentClient)
        return launcher

    def power_off(self, node: int, candidate: int | None = None) -> None:
        """A node loses its power, with the ``candidate`` that it hosts: nobody hears of that but the witness."""
        name = f"node{node}"
        for w, where in self.node_of.items():
            if where == node and f"w{w}" not in self.dead:
                self.kill_worker(w, silently=True)
        self.dead.add(name)
        self.off.add(name)
        if candidate in self.coordinators:
            self.coordinators.pop(candidate)
            self.frozen.discard(f"c{candidate}")

    def off_for(self, nodes: frozenset[str]) -> frozenset[str]:
        """What the witness says of these."""
        return nodes & self.off

    def answer_questions(self) -> None:
        """The witness answers those that can hear it."""
        for candidate, nodes in [question for question in self.questions if f"c{question[0]}" not in self.frozen]:
            self.questions.remove((candidate, nodes))
            off = self.off_for(nodes)
            self._to_coordinator(candidate, Statement(off, f"{', '.join(sorted(off)) or 'no node'} is off"))
            self.settle(candidate)

    def drain(self, candidate: int, node: int) -> None:
        """Somebody asks for a node to be drained, or after one that is."""
        if candidate in self.coordinators and f"c{candidate}" not in self.frozen:
            message = to_coordinator.Drain(f"node{node}")
            self._to_coordinator(candidate, Received(OBSERVER, over_the_wire(message, TO_COORDINATOR)))
            self._to_coordinator(candidate, Closed(OBSERVER, True, "it has seen enough"))
            self.settle(candidate)

    def break_up(self, connection: Connection) -> None:
        """The network ends a connection: both sides find out, and it is nobody's death."""
        connection.coordinator_uses = False
        connection.up.clear()
        connection.down.append(Network.EOF)
        self._to_coordinator(connection.candidate, Closed(connection.number, False, "its connection timed out"))
        self.settle(connection.candidate)

    def kill_coordinator(self, candidate: int, lose: bool = False) -> None:
        """``lose``: with it goes what it had sent and nobody has received."""
        self.coordinators.pop(candidate, None)
        for c in self.connections.values():
            if c.candidate == candidate:
                if lose:
                    c.down.clear()
                c.down.append(Network.EOF)
                c.up.clear()

    def start_coordinator(self, candidate: int) -> None:
        """A candidate whose process has ended is started again, at the same address, and knows nothing."""
        if candidate not in self.coordinators:
            nodes = self._nodes if candidate < self._candidates or self._nodes is None else frozenset[str]()
            salt = next(self._salts)
            self.coordinators[candidate] = Coordinator(
                self.launched, self._settings, salt, slack=self._slack, now=self.now, nodes=nodes
            )
            self.frozen.discard(f"c{candidate}")

    def answer_claims(self, most: int = 1 << 30) -> None:
        """The storage answers the claims that reach it, the first ones first, also of coordinators that are no more."""
        answered = [claim for claim in self.claims if claim[0] not in self.no_storage][:most]
        for entry in answered:
            self.claims.remove(entry)
            candidate, claim = entry
            holder = self.holders[-1] if self.holders else None
            needless = holder == claim or not is_due(holder, claim)
            granted = needless or may_take(holder, claim)
            if granted and not needless:
                self.holders.append(claim)
            self.answers.append((candidate, Verdict(claim.term, claim.epoch, granted)))
        for candidate, verdict in [answer for answer in self.answers if f"c{answer[0]}" not in self.frozen]:
            self.answers.remove((candidate, verdict))
            self._to_coordinator(candidate, verdict)
            self.settle(candidate)

    # -- steps --------------------------------------------------------------------------------------------------------

    def deliver(self, number: int, direction: str, settle: bool = True) -> None:
        c = self.connections[number]
        if direction == "down":
            message = c.down.popleft()
            c.arrived = max(0, c.arrived - 1)
            if not c.member_uses:
                return
            if message is Network.EOF:
                c.member_uses = False
                self.current[c.owner] = None
                self._to_member(c.owner, Lost("connection closed"))
            elif message is Network.ACCEPTED:
                self._to_member(c.owner, Accepted())
            elif message is Network.CONNECTED:
                self._to_member(c.owner, Connected())
            else:
                message = over_the_wire(message, TO_MEMBER)
                if isinstance(message, to_member.Candidates):  # as the client does
                    first = self.first_lists.get(c.owner, ())
                    message = replace(message, added=[address for address in message.added if address not in first])
                self._to_member(c.owner, Heard(message))
            return
        message = c.up.popleft()
        if message is Network.EOF:
            if c.coordinator_uses:
                c.coordinator_uses = False
                self._to_coordinator(c.candidate, Closed(number, True, "connection closed"))
        elif message is Network.DIAL:
            c.coordinator_uses = True
            c.down.append(Network.CONNECTED)
        elif c.coordinator_uses:
            self._to_coordinator(c.candidate, Received(number, over_the_wire(message, TO_COORDINATOR)))
        if settle:
            self.settle(c.candidate)

    def settle(self, candidate: int) -> None:
        self._to_coordinator(candidate, Settle())

    def advance(self, seconds: float) -> None:
        """Let time pass, tick by tick."""
        end = self.now + seconds
        for _ in range(10_000):
            due = [c.deadline for k, c in self.coordinators.items() if f"c{k}" not in self.frozen]
            due += [m.deadline for n, m in self.members.items() if self.running(n) and m.stage is not Stage.OUT]
            at = min(due, default=math.inf)
            if at > end:
                break
            self.now = max(self.now, at)
            self._ticks()
        else:
            raise AssertionError(f"a deadline never moves at {self.now}: {due}")
        self.now = end
        self._ticks()

    def _ticks(self) -> None:
        for k in list(self.coordinators):
            if f"c{k}" not in self.frozen and self.coordinators[k].deadline <= self.now:
                self._to_coordinator(k, Tick())
                self.settle(k)
        for name, member in self.members.items():
            if self.running(name) and member.stage is not Stage.OUT and member.deadline <= self.now:
                self._to_member(name, Tick())

    def act(self, number: int) -> None:
        """One step of a worker's program: join, then report one iteration after the other."""
        name = f"w{number}"
        member = self.worker(number)
        if not self.running(name) or number in self.busy:
            return
        if member.stage is Stage.OUT:
            self.dead.add(name)  # it stops by itself
            self._end_of_file(name)
            return
        if member.revoked:
            gated = number in self.gated and member.plan is not None
            if member._status is None and not (gated and member.all_heard <= member.plan.epoch):
                self._member_effects(name, member.join(self._status(number), "revoked"))
                if member.deadline < 0:  # a newcomer's first: now it dials
                    self._to_member(name, Tick())
        elif number in self.waits:
            if self._waits_said.get(number) != (said := (member.plan.epoch, self.waits[number])):
                self._waits_said[number] = said
                member.mark(member.committed + 1, self.waits[number], None, True, 0.0)
        elif self.node(name) in self.accepted.get(number, ()):
            self._member_effects(name, [*member.idle(), *member.leave()])
        elif number in self.spares or member.idle_in == member.plan.epoch or member.plan.epoch in self.vacant:
            self._member_effects(name, member.idle(member.plan.epoch in self.vacant))
        elif member.done <= member.committed or self._reported_in.get(number) != member.plan.epoch:
            # In each epoch anew, as a step is that meets the others again before it is committed.
            self._reported_in[number] = member.plan.epoch
            member.mark(member.committed + 1, "compute", None, False, 0.0)
            self._member_effects(name, member.report_done(member.committed + 1))

    def ask_for_places(self) -> None:
        """Nobody is a spare any more: the idle ask for another epoch."""
        self.spares.clear()
        for w in self.node_of:
            member = self.worker(w)
            if self.running(f"w{w}") and member.stage is not Stage.OUT and not member.revoked and member.idle_in:
                self._member_effects(f"w{w}", member.join(self._status(w), "a place"))

    def _status(self, number: int) -> dict[str, Any]:
        draining = self.accepted.get(number, frozenset())
        known = {"iteration": self.worker(number).committed + 1, "own": number}
        return {**known, **({"draining": sorted(draining)} if draining else {})}

    def _decide_drains(self, name: str, member: Member) -> None:
        """What the members of its plan decide, all alike: they do without a node if others are left."""
        assert member.plan is not None
        told, asked = draining_of(member.plan.data), member.plan.data.get("drain", [])
        accepted: list[str] = []
        refused: list[str] = []
        for node in [*sorted(told), *(node for node in asked if node not in told)]:
            here = [self.node(f"w{w}") for w in member.plan.members]
            (accepted if node not in here or {*here} - {*accepted, node} else refused).append(node)
        self.accepted[int(name[1:])] = frozenset(accepted)
        if int(name[1:]) == min(member.plan.members):
            for node in sorted({*asked, *refused}):
                self._member_effects(name, member.answer_drain(node, "nobody is left" if node in refused else ""))

    def run_fairly(self, seconds: float, step: float = 1.0) -> None:
        """Everybody does what it can, in round-robin order, while time passes, ``step`` by step."""
        end = self.now + seconds
        while self.now < end:
            for number in list(self.unreported):
                self.report_death(number)
            for number in list(self.dying):
                self.reap(number)
            self.answer_claims()
            self.answer_questions()
            for _ in range(2):
                for w in self.node_of:
                    self.act(w)
                for _ in range(200):
                    pairs = self.deliverable()
                    for number, direction in pairs:
                        connection = self.connections.get(number)
                        if connection is not None and (connection.up if direction == "up" else connection.down):
                            self.deliver(number, direction)
                    if not pairs:
                        break
            self.connections = {
                n: c for n, c in self.connections.items() if c.member_uses or c.coordinator_uses or c.up or c.down
            }
            self.advance(step)

    # -- carrying out effects -----------------------------------------------------------------------------------------

    def _to_member(self, name: str, event: Any, now: float | None = None) -> None:
        self._member_effects(name, self.members[name].handle(event, self.now if now is None else now))

    def _member_effects(self, name: str, effects: list[Any]) -> None:
        for effect in effects:
            current = self.current[name]
            match effect:
                case Look(added):
                    self.lists[name] = added
                case Dial(place):
                    candidate = self.candidate_of(name, place)
                    if current is not None:  # an attempt that got nowhere: nobody is attached by it
                        current.member_uses = False
                        current.up.append(Network.EOF)
                    c = Connection(next(self._numbers), name, candidate)
                    self.connections[c.number] = c
                    self.current[name] = c
                    if candidate in self.coordinators:
                        c.up.append(Network.DIAL)
                        c.down.append(Network.ACCEPTED)
                    else:
                        c.down.append(Network.EOF)
                case Say(message):
                    if current is not None:
                        current.up.append(message)
                case Abandon(reason):
                    if current is not None:
                        current.up.append(to_coordinator.Abandon(reason))
                        current.member_uses = False
                        for message in list(current.down)[: current.arrived]:
                            if not isinstance(message, Network):
                                self.members[name].late_message(over_the_wire(message, TO_MEMBER))
                    self.current[name] = None
                case Hangup():
                    if current is not None:
                        current.member_uses = False
                    self.current[name] = None
                case Notify(to_member.Kill(worker)):
                    if f"w{worker}" not in self.dead:
                        self.kill_worker(worker)
                case Notify(to_member.Revoke(epoch, term)):
                    if isinstance(member := self.members[name], Member):
                        self._revoked(name, epoch)
                        self._member_effects(name, member.heard(epoch, term))
                case Notify(to_member.Commit() | to_member.Plan() as told):
                    if isinstance(member := self.members[name], Member):
                        self._committed(member.committed, member.presentation.formed.epoch)
                        self._told(name, member)
                        if isinstance(told, to_member.Plan):
                            assert member.plan is not None
                            if member.plan.data != self.plans[told.epoch, told.term]:
                                raise PropertyViolated(f"{name} has another plan of epoch {told.epoch}")
                            if self.drains_nodes:
                                self._decide_drains(name, member)

    def _to_coordinator(self, candidate: int, event: Any) -> None:
        coordinator = self.coordinators.get(candidate)
        if coordinator is None:
            return
        for effect in coordinator.handle(event, self.now):
            match effect:
                case Send(sessions, message):
                    if isinstance(message, to_member.AllHeard):
                        self._all_heard(coordinator, message.epoch)
                    for session in sessions:
                        if session == OBSERVER:
                            self._shown(message)
                        elif self.connections[session].coordinator_uses:
                            self.connections[session].send(message, self.now)
                case Close(session) if session != OBSERVER:  # whom a coordinator tells of the end, and closes
                    self.connections[session].coordinator_uses = False
                    self.connections[session].down.append(Network.EOF)
                case Probe(session):
                    c = self.connections[session]
                    lost = self.is_blocked(c) or (c.owner in self.dead and c.owner.startswith("node"))
                    silence = 1e9 if lost else c.unacknowledged(self.now)
                    delivered = not lost and not c.up  # what was said before has come before
                    if delivered:
                        c.arrived = len(c.down)
                    self._to_coordinator(candidate, Acknowledged(session, silence, delivered))
                case AskForLease():
                    self.claims.append((candidate, effect))
                case AskWitness(nodes):
                    self.questions.append((candidate, nodes))
                case Log(record):
                    self.log.append({"time": self.now, "candidate": candidate, **record})
                    if record["event"] == "plan":
                        self._gone(coordinator)
                        term, members = coordinator.leadership.term, from_runs(record["members"])
                        self.vacant |= {record["epoch"]} if members <= self.spares else set()
                        self._formed(record["epoch"], term, members, record["committed"])
                        self.plans[record["epoch"], term] = coordinator.epochs.plan
                    elif record["event"] == "aside":
                        self.aside.add(record["worker"])
                    elif record["event"] == "stop" and record["code"] == 0 and not self.members_finish:
                        raise PropertyViolated(f"the run is said to have finished, and nobody has: {record}")
                    elif record["event"] == "commit":
                        self._committed(record["iteration"], record["epoch"])
                case StepDown():
                    self.coordinators[candidate] = coordinator.fresh(next(self._salts), self.now)
                case Exit():
                    assert coordinator.state is State.STOPPED
                    self.kill_coordinator(candidate)  # its process ends

    def _shown(self, view: ToMember) -> None:
        """Of a node that may be switched off no worker is in the newest epoch, or may come into a later one."""
        for row in view.drains if isinstance(view, to_member.View) else ():
            if row["state"] == "drained":
                self.drained.add(row["node"])
                self._without_drained(self.order[-1])

    def _without_drained(self, epoch: int) -> None:
        """But for newcomers in the first epoch of a coordinator, which has heard of it with that one's joins."""
        members = self.formed[epoch][1]
        if len(self.order) > 1 and self.formed[self.order[-2]][0] != self.formed[epoch][0]:
            members = members - self._first_in(epoch)
        alive = {w for w in members if self.running(f"w{w}") and self.node(f"w{w}") in self.drained}
        if alive:
            raise PropertyViolated(f"epoch {epoch} has {sorted(alive)}, of nodes that may be switched off")

    # -- properties ---------------------------------------------------------------------------------------------------

    def _gone(self, coordinator: Coordinator) -> None:
        """No worker that goes on is taken for dead: the majorities of a partition are counted without the dead."""
        dead = coordinator.roster.with_fate(Fate.DEAD)
        if alive := {w for w in dead if f"w{w}" in self.members and f"w{w}" not in self.dead}:
            raise PropertyViolated(f"{sorted(alive)} are taken for dead, and live")

    def _formed(self, epoch: int, term: int, members: frozenset[int], committed: int) -> None:
        if epoch in self.formed:
            raise PropertyViolated(f"epoch {epoch} was formed twice: {self.formed[epoch]} and {(term, members)}")
        newest = self.order[-1] if self.order else 0
        if epoch < newest:
            # A plan that its coordinator fixed late: all had joined it before they turned to the next coordinator,
            # so it comes before the newest epoch, and must fit in there.
            new_term, new_members = self.formed[newest]
            alive = {w for w in new_members - self._first_in(newest) if f"w{w}" not in self.dead}
            if term >= new_term or not alive <= members or any(t not in self.commits for t in range(1, committed + 1)):
                raise PropertyViolated(f"epoch {epoch} (term {term}) was formed after {newest} (term {new_term})")
            self.formed[epoch] = (term, members)
            return
        if newest:
            last_term, last_members = self.formed[newest]
            alive = {w for w in last_members if f"w{w}" not in self.dead}
            carried = {w for w in members if w < self.launched or self._was_in_a_plan(w, epoch)}
            if alive:  # else who was aside may have what is left of the run
                carried -= self.aside - last_members
            if (alive and term < last_term) or not carried or (alive and not carried <= last_members):
                raise PropertyViolated(f"two lineages: {sorted(last_members)} ({alive} live) and {sorted(members)}")
        if deceived := {w for w in members & self.deceived if f"w{w}" not in self.dead}:
            raise PropertyViolated(f"{sorted(deceived)} may have believed what others have aborted")
        self.formed[epoch] = (term, members)
        self.order.append(epoch)
        self._without_drained(epoch)
        self.told |= {f"w{w}": (committed, epoch) for w in self.aside & members}  # with the state that they get
        self.aside -= members
        for iteration, where in self.commits.items():
            members = self.formed[where][1] if where in self.formed else frozenset()
            knowers = {w for w in members if f"w{w}" not in self.dead and self._must_know(w, iteration)}
            if iteration > committed and knowers:
                raise PropertyViolated(f"iteration {iteration}, committed in {where}, is decided again in {epoch}")

    def _revoked(self, name: str, epoch: int) -> None:
        """Who hears that an epoch is over has heard of all that was committed in it to anybody it will meet again."""
        member = self.worker(int(name[1:]))
        opened = member.presentation.opened
        if member.plan is None or opened is None or opened.epoch != epoch:
            return
        for other in opened.members - {int(name[1:])}:
            mate = self.worker(other)
            of_the_same = mate.presentation.formed == member.presentation.formed
            if f"w{other}" not in self.dead and of_the_same and mate.committed > member.committed:
                raise PropertyViolated(f"{name} is to meet w{other}, which knows {mate.committed} to be committed")

    def _all_heard(self, coordinator: Coordinator, epoch: int) -> None:
        """Whoever lives and takes an epoch before this one to go on is out; if it is in touch, it goes on nowhere."""
        for number, its in coordinator.roster.workers.items():
            member = self.members.get(f"w{number}")
            if not isinstance(member, Member) or f"w{number}" in self.dead or member.stage is Stage.OUT:
                continue
            if member.plan is not None and member.plan.epoch < epoch and not member.revoked:
                if its.fate in (Fate.LIVE, Fate.ASIDE):
                    raise PropertyViolated(f"all are said to know of rendezvous {epoch}, and w{number} does not")
                if member.in_touch(self.now):
                    self.deceived.add(number)

    def _was_in_a_plan(self, number: int, before: int) -> bool:
        return any(number in members for epoch, (_, members) in self.formed.items() if epoch < before)

    def _first_in(self, epoch: int) -> set[int]:
        """Newcomers that have their first plan with this epoch."""
        members = self.formed[epoch][1]
        return {w for w in members if w >= self.launched and not self._was_in_a_plan(w, epoch)}

    def _told(self, name: str, member: Member) -> None:
        """Nothing is committed that a member with a part in it has not reported."""
        first = member.committed if int(name[1:]) >= self.launched else 0  # what was decided before it came
        committed, epoch = self.told.get(name, (first, 0))
        if member.done < member.committed > committed and member.idle_in != epoch:
            raise PropertyViolated(f"{name} is told that {member.committed} is committed, and has not reported it")
        assert member.plan is not None
        self.told[name] = (member.committed, member.plan.epoch)

    def _must_know(self, number: int, iteration: int) -> bool:
        """Who was launched and never idle has reported what its epochs committed; others may have heard of it."""
        member = self.worker(number)
        reported = number < self.launched and not member.idle_in
        return reported or max(member.done, member.committed) >= iteration

    def _committed(self, iteration: int, epoch: int) -> None:
        new = [t for t in range(1, iteration + 1) if t not in self.commits]
        for t in new:
            self.commits[t] = epoch
        if new and self.order and epoch < self.order[-1]:
            later = self.order[-1]
            raise PropertyViolated(f"iterations {new} were committed in epoch {epoch}, after {later} was formed")
