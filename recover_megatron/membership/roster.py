"""Roster of a coordinator: workers, node agents, their sessions, and the workers' fates.

    dead   the worker's process has certainly ended: its kernel closed the session, or its launcher saw the end
    out    the worker was evicted, because its host is silent or it hangs (``detect``). It is notified if it is ever
           reached, and its launcher kills it. Until the launcher reports the end, the worker may be running on
           another side of a partition (``leadership``)
    left   the worker has left normally: it has sent ``bye``
    aside  the worker's replica is late (``Settings.grace``). The worker is in no epoch until it asks for a place. From
           then on it counts as a newcomer

Only *aside* can be undone. A worker that abandons this coordinator stays live and is *awaited*: it has no session, but
may come back. A *newcomer* has an id that is not from the launch (launch ids are below ``world``). The coordinator
knows a newcomer that has attached, or that is in an epoch that a member has presented. Ids are never reused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from recover_megatron.membership.detect import WorkerProgress
from recover_megatron.membership.events import Close, Outbox
from recover_megatron.membership.messages import to_coordinator, to_member
from recover_megatron.membership.messages.fields import NO_PLAN, PlanId
from recover_megatron.membership.messages.to_coordinator import ToCoordinator
from recover_megatron.membership.records import Formed, Json, Settings, WorkerId, Workers, to_runs

ENDED_IN_ORDER = "exit code 0"
"""Text by which a launcher reports that a worker's process ended normally."""


class Fate(Enum):
    """Status of a worker in the run. Only a LIVE or ASIDE worker can be in a later epoch."""

    LIVE = "live"
    ASIDE = "aside"
    DEAD = "dead"
    OUT = "out"
    LEFT = "left"


class _FateOf:
    """Attribute ``fate`` of all members, which counts its changes: ``Roster.with_fate`` need not search each time."""

    changes = 0

    def __get__(self, member: Any, kind: type[Member]) -> Any:
        return Fate.LIVE if member is None else member._fate

    def __set__(self, member: Any, fate: Fate) -> None:
        member._fate = fate  # ``__dict__`` would make CPython create a dict for each member, and read it more slowly
        _FateOf.changes += 1


_FATE = cast(Fate, _FateOf())


@dataclass
class Member:
    """State of one worker, as far as this coordinator knows it."""

    number: WorkerId
    progress: WorkerProgress
    fate: Fate = _FATE
    session: int | None = None
    incarnation: str = ""
    host: str = ""
    node_agent: str = ""
    node: str = ""
    """Node that the worker's status names; before its first status, the name of its launcher."""
    heard: float = 0.0
    excused: float = 0.0
    """Part of the worker's silence, in seconds, in which this coordinator did not run and so received nothing."""
    awaited_until: float = 0.0
    """Time until which a worker that abandoned this coordinator is awaited, because it may come back."""
    left_silence: bool = False
    """True if the worker left its last coordinator because that coordinator was silent, not because of a disconnect."""
    done: int = 0
    idle_in: int = 0
    """Number of the last epoch in which this worker has reported that it has no part; 0: none."""
    vacant: bool = False
    """True if the worker has reported that no worker has a part in epoch ``idle_in``."""
    joined: int = 0
    """Number of the last rendezvous that the worker joined; 0: none."""
    heard_of: int = 0
    """The last rendezvous whose revoke the worker has confirmed. The worker uses no result of an earlier epoch."""
    status: Json = None
    holds: PlanId = NO_PLAN
    """Plan that the worker held when it joined."""
    formed_epoch: int = 0
    """Number of the last epoch whose plan the worker had when it attached; 0: none."""
    new: bool = False
    """True while the worker has no plan because it is a newcomer, or is back after it was set aside."""
    aside_since: float = 0.0
    back: bool = False
    """True if the worker was set aside, has asked for a place again, and has no new plan yet."""
    ended_at: float | None = None
    """Time at which the launcher reported exit code 0 although the worker's connection was open; None: not reported."""

    @property
    def name(self) -> str:
        """Worker id and host, for messages."""
        return f"worker {self.number} on {self.host or 'an unknown host'}"


@dataclass
class NodeAgentStatus:
    """State of one launcher, as far as this coordinator knows it."""

    node: str
    session: int | None
    heard: float
    excused: float = 0.0
    running: set[WorkerId] = field(default_factory=set)
    """Workers that the launcher has started and has not seen end."""
    awaited_until: float = 0.0
    """Time until which the launcher still vouches for its workers after it has abandoned this coordinator, because it
    may come back."""
    acknowledged: int = 0
    """The last rendezvous that the launcher has acknowledged; 0: none."""
    delivered: int = 0
    """The last rendezvous whose revoke has reached the host of a launcher that is stopped. The launcher will read it
    before it abandons this coordinator."""
    silent: bool = False
    """True if no message from the launcher has arrived for the heartbeat timeout."""
    asked: float = 0.0
    """Seconds for which the launcher had been silent when this coordinator last asked for a sign of life; 0: never."""
    ended: bool = False
    """True if the launcher's process has ended, so it can report to no coordinator any more."""
    stopping: int = 0
    """Number of the signal that ordered the launcher to stop its workers; 0: none."""


class Roster:
    """Workers, launchers and their sessions. ``changes`` collects the reasons for a new epoch."""

    def __init__(self, world: int, settings: Settings, out: Outbox) -> None:
        self.world = world
        """Number of workers of the launch."""
        self.settings = settings
        self._found: dict[Fate, Workers] = {}  # results of ``with_fate`` after change ``_found_at`` of a fate
        self._found_at = -1
        self.workers = {n: Member(n, WorkerProgress(n)) for n in map(WorkerId, range(world))}
        self.node_agents: dict[str, NodeAgentStatus] = {}
        """Node name -> launcher of that node."""
        self.sessions: dict[int, Member | NodeAgentStatus] = {}
        self.changes: list[str] = []
        """Reasons to open the next rendezvous, as text; empty: none."""
        self.fault_at: float | None = None
        """Time of the first fault since the last plan; None: no fault."""
        self.required_aside: Workers = frozenset()
        """Set-aside workers that the next epoch must wait for, because no live worker has a part in the last epoch."""
        self.was_abandoned = False
        """True if a member has abandoned this coordinator and may follow another one."""
        self._unclear_ends: set[WorkerId] = set()
        """Workers that ended with exit code 0 before this candidate led. They may or may not have left the run."""
        self._out = out

    # -- views --------------------------------------------------------------------------------------------------------

    @property
    def gone(self) -> Workers:
        """Workers that certainly do not run any more, or have left normally."""
        return frozenset(n for n, w in self.workers.items() if w.fate in (Fate.DEAD, Fate.LEFT))

    @property
    def reached(self) -> Workers:
        return frozenset(n for n, w in self.workers.items() if w.session is not None and w.fate is Fate.LIVE)

    @property
    def newcomers(self) -> Workers:
        """Connected workers that wait for a plan: newcomers, and workers back after they were set aside."""
        return frozenset(n for n, w in self.workers.items() if w.new and w.session is not None and w.fate is Fate.LIVE)

    @property
    def returning(self) -> Workers:
        """Connected workers that were set aside, have asked for a place again, and have no plan yet."""
        return frozenset(n for n in self.newcomers if self.workers[n].back)

    def with_fate(self, fate: Fate) -> Workers:
        if self._found_at != _FateOf.changes:
            self._found, self._found_at = {}, _FateOf.changes
        if fate not in self._found:
            self._found[fate] = frozenset(n for n, w in self.workers.items() if w.fate is fate)
        return self._found[fate]

    def idle(self, epoch: Formed) -> Workers:
        """Return the members of ``epoch`` that have reported that they have no part in it."""
        return frozenset(n for n, w in self.workers.items() if w.idle_in == epoch.epoch > 0) & epoch.members

    def blind(self, epoch: Formed) -> Workers:
        """Return the idle members of ``epoch`` that do not know what the epoch has committed.

        Members that have reported that no member has a part (``vacant``) know that nothing was committed.
        """
        return frozenset(number for number in self.idle(epoch) if not self.workers[number].vacant)

    def sessions_of(self, members: Iterable[WorkerId]) -> list[int]:
        return [s for n in sorted(members) if (s := self.workers[n].session) is not None]

    @property
    def node_agent_sessions(self) -> list[int]:
        """Sessions of the connected launchers."""
        return [w.session for w in self.node_agents.values() if w.session is not None]

    def node_agent_of(self, worker: Member) -> NodeAgentStatus | None:
        """Return the launcher that the worker names; if it names none, the launcher that reports it as running."""
        if worker.node_agent:
            return self.node_agents.get(worker.node_agent)
        return next((w for w in self.node_agents.values() if worker.number in w.running), None)

    def vouched(self, worker: Member, now: float) -> bool:
        """Return whether the worker's launcher is connected and not silent, so it would have reported the worker's end.

        Also True while a launcher that abandoned this coordinator is awaited. The launcher did so because the
        coordinator did not run, which is no fault of the workers.
        """
        node_agent = self.node_agent_of(worker)
        if node_agent is None or node_agent.session is None:
            return node_agent is not None and now <= node_agent.awaited_until
        return self.silence(node_agent, now) <= self.settings.heartbeat_timeout

    @staticmethod
    def silence(peer: Member | NodeAgentStatus, now: float) -> float:
        """Return for how many seconds a peer was silent, without the time in which this coordinator did not run."""
        return now - peer.heard - peer.excused

    # -- messages -----------------------------------------------------------------------------------------------------

    def meet(self, numbers: Iterable[WorkerId]) -> None:
        """Add workers that are not in the roster yet, such as newcomers that other members have presented."""
        for number in numbers:
            if number not in self.workers:
                self.workers[number] = Member(number, WorkerProgress(number))

    def hear(self, peer: Member | NodeAgentStatus, now: float) -> None:
        """Record that a message from this peer has arrived."""
        peer.heard, peer.excused = now, 0.0
        if isinstance(peer, Member):
            peer.progress.heard = now
        elif peer.silent:
            self._out.log("witness", node=peer.node)
            peer.silent, peer.asked = False, 0.0

    def excuse(self, pause: float, now: float) -> None:
        """Exclude a pause of this process from the silence of all members. All pending messages must have been read."""
        for worker in self.workers.values():
            worker.excused = min(worker.excused + pause, now - worker.heard)
            worker.awaited_until += pause
            worker.aside_since += pause
            worker.progress.excuse(pause, now)
        for node_agent in self.node_agents.values():
            node_agent.excused = min(node_agent.excused + pause, now - node_agent.heard)
            node_agent.awaited_until += pause

    def pass_on(self, worker: Member, text: str) -> None:
        """Log a worker's note, and forward it to the worker's launcher, which writes it to workers.json."""
        self._out.log("note", worker=worker.number, host=worker.host, text=text)
        node_agent = self.node_agents.get(worker.node_agent)
        if node_agent is not None and node_agent.session is not None:
            self._out.send([node_agent.session], to_member.Note(worker.number, text))

    def from_node_agent(self, node_agent: NodeAgentStatus, message: ToCoordinator, term: int, now: float) -> None:
        """Record a launcher's message. ``term``: this coordinator's term; 0: it does not lead."""
        match message:
            case to_coordinator.Beat(number) if node_agent.session is not None:
                self._out.send([node_agent.session], to_member.Beat(number))
            case to_coordinator.Ack() if message.term == term:
                node_agent.acknowledged = max(node_agent.acknowledged, message.epoch)
            case to_coordinator.Spawned(worker, pid):
                node_agent.running.add(worker)
                self._out.log("spawned", worker=worker, pid=pid, node=node_agent.node)
            case to_coordinator.Stopping(signal):
                node_agent.stopping = signal
                self._out.log("stopping", node=node_agent.node, signal=signal)
            case to_coordinator.Ended(worker, how):
                node_agent.running.discard(worker)
                self._ended(worker, how, now, leads=term > 0)
            case to_coordinator.Abandon():
                self.unbind(node_agent)
                node_agent.awaited_until = now + self.settings.lost_timeout

    # -- sessions -----------------------------------------------------------------------------------------------------

    def bind(self, peer: Member | NodeAgentStatus, session: int, now: float) -> None:
        """Record that the peer uses this session, and close the peer's earlier session, if any."""
        self.unbind(peer)
        peer.session = session
        self.hear(peer, now)
        self.sessions[session] = peer

    def unbind(self, peer: Member | NodeAgentStatus) -> None:
        """Close the peer's session, if it has one."""
        if (session := peer.session) is not None:
            self.forget(session)
            self._out.do(Close(session))

    def forget(self, session: int) -> Member | NodeAgentStatus | None:
        """Remove a session that has ended. Return its worker or launcher; None if it belonged to neither."""
        peer = self.sessions.pop(session, None)
        if peer is not None:
            peer.session = None
        if isinstance(peer, NodeAgentStatus):
            peer.silent, peer.asked, peer.delivered = False, 0.0, 0
        return peer

    def refuse(self, session: int, reason: str) -> None:
        """Send a refusal and close the session. The refused peer then tries another candidate."""
        self._out.log("refused", reason=reason)
        self._out.send([session], to_member.Refused(reason))
        self._out.do(Close(session))

    # -- fates --------------------------------------------------------------------------------------------------------

    def dead(self, worker: Member, reason: str, now: float) -> None:
        """Record that a worker's process has certainly ended."""
        if worker.fate is Fate.LIVE or worker.number in self.required_aside:
            self.changes.append(f"{worker.name} died: {reason}")
        worker.fate = Fate.DEAD
        self.unbind(worker)
        self._fault("dead", worker, reason, now)

    def abandoned(self, worker: Member, reason: str, now: float, *, followed: bool) -> None:
        """Record that a worker abandons this coordinator to look for another one.

        ``followed``: True if this coordinator leads. The worker is awaited, because it comes back if it finds no other
        coordinator, unless its launcher reports its end. It is not evicted, because a pause of this coordinator is no
        fault of the worker.
        """
        self._out.log("abandoned", worker=worker.number, reason=reason)
        self.unbind(worker)
        if followed and worker.fate is Fate.LIVE:
            worker.awaited_until = now + self.settings.lost_timeout
            self.was_abandoned = True
            self.changes.append(f"{worker.name} abandoned this coordinator and is awaited")

    def merge_ends(self, dead: Workers, left: Workers) -> None:
        """Record the workers that members have presented as dead, or as having left normally."""
        for number in dead | left:
            worker = self.workers[number]
            if worker.fate is not Fate.LEFT:
                worker.fate = Fate.LEFT if number in left else Fate.DEAD
                self.unbind(worker)

    def exclude(self, worker: Member, reason: str, now: float, together: Workers = frozenset()) -> None:
        """Evict a worker that may still be running: notify it, and order its launcher to kill it.

        ``together``: all workers that are evicted with this one. The launcher receives this set, so that it does not
        report one of these workers as continuing.
        """
        self.changes.append(f"{worker.name} is evicted: {reason}")
        worker.fate = Fate.OUT
        self._fault("out", worker, reason, now)
        if worker.session is not None:
            self._out.send([worker.session], to_member.Fenced(reason))
        self.unbind(worker)
        self.kill(worker, reason, together)

    def set_aside(self, workers: Iterable[WorkerId], reason: str, now: float) -> None:
        """Set live workers aside: the run continues without them, because they are late. They may come back."""
        for worker in (self.workers[number] for number in sorted(workers)):
            self.changes.append(f"{worker.name} is set aside: {reason}")
            worker.fate, worker.aside_since = Fate.ASIDE, now
            self._out.log("aside", worker=worker.number, host=worker.host, reason=reason)

    def take_back(self, worker: Member, now: float) -> None:
        """Record that a set-aside worker asks for a place: it is live again, and waits for a plan like a newcomer."""
        self.changes.append(f"{worker.name} is back")
        worker.fate, worker.new, worker.back, worker.idle_in, worker.progress.marked = Fate.LIVE, True, True, 0, now
        self._out.log("back", worker=worker.number, host=worker.host, seconds=now - worker.aside_since)

    def set_aside_again(self, worker: Member) -> None:
        """Set a returning worker aside again: it lost its connection before it had a plan. It may come back again."""
        self.changes.append(f"{worker.name} was back, and lost its connection")
        worker.fate, worker.new, worker.back = Fate.ASIDE, False, False

    def kill(self, worker: Member, reason: str, together: Workers = frozenset()) -> None:
        """Order the launcher of an evicted worker, if reached, to kill the worker's process."""
        node_agent = self.node_agent_of(worker)
        if node_agent is not None and node_agent.session is not None:
            self._out.send([node_agent.session], to_member.Kill(worker.number, reason, to_runs(together)))

    def _ended(self, number: WorkerId, how: str, now: float, *, leads: bool) -> None:
        """Record a launcher's report that a worker's process has ended.

        If a process ended normally while this candidate did not lead, the candidate does not know whether the worker
        had left the run. Another coordinator may know it.
        """
        if number not in self.workers:  # a newcomer that never attached here; other members may present it later
            self.meet([number])
            self.workers[number].fate = Fate.DEAD
            return
        worker = self.workers[number]
        if how == ENDED_IN_ORDER and worker.fate is Fate.LIVE and worker.session is not None:
            worker.ended_at = now  # at the end of a run the report may overtake the worker's ``bye``
        elif how == ENDED_IN_ORDER and worker.fate is Fate.LIVE and not leads:
            worker.fate = Fate.DEAD
            self._unclear_ends.add(number)
        elif worker.fate in (Fate.LIVE, Fate.OUT, Fate.ASIDE):
            self.dead(worker, f"its process has ended ({how})", now)

    def log_unclear_ends(self, now: float) -> None:
        """Log as dead the workers that ended with exit code 0 and that no member has presented as having left."""
        for number in sorted(self._unclear_ends & self.with_fate(Fate.DEAD)):
            self._fault("dead", self.workers[number], f"its process has ended ({ENDED_IN_ORDER})", now)
        self._unclear_ends.clear()

    def expire_ended(self, now: float) -> None:
        """Record as dead the workers that sent no ``bye`` although their processes ended normally some time ago.

        Their connections may stay open, because child processes may hold copies of the sockets.
        """
        for worker in self.workers.values():
            ended = worker.ended_at
            if ended is not None and worker.fate is Fate.LIVE and now - ended > self.settings.heartbeat_interval:
                self.dead(worker, f"its process has ended ({ENDED_IN_ORDER}) without a reported reason", now)

    def _fault(self, kind: str, worker: Member, reason: str, now: float) -> None:
        self.fault_at = now if self.fault_at is None else self.fault_at
        self._out.log("fault", kind=kind, worker=worker.number, host=worker.host, reason=reason)
