"""What the coordinator knows of its members: workers, node agents, their sessions, and what became of them.

    dead   for certain: its kernel closed the session, or its launcher saw the process end
    out    its host is silent, or it hangs (``detect``): it is told so if it ever wakes up, and killed by its launcher;
           until that is confirmed it may be running elsewhere (``leadership``)
    left   it has said bye
    aside  its replica is late (``Settings.grace``): in no epoch until it asks for a place, from then on as a newcomer

Of these *aside* alone is ever undone. A worker that turns away from this coordinator is none of them, but *awaited*: it
lives, and has no session. A *newcomer* is a worker whose id is none of the launch's (those are below ``world``). It is
known when it attaches, or a member presents an epoch that counts on it. Ids never come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from recover_megatron.membership.detect import WorkerProgress
from recover_megatron.membership.events import Close, Outbox
from recover_megatron.membership.records import Formed, Json, Settings, WorkerId, Workers, to_runs

ENDED_IN_ORDER = "exit code 0"
"""How a launcher says that."""


class Fate(Enum):
    """What a worker is to the run. All but LIVE and ASIDE are final."""

    LIVE = "live"
    ASIDE = "aside"
    DEAD = "dead"
    OUT = "out"
    LEFT = "left"


@dataclass
class Member:
    """What is known of one worker."""

    number: WorkerId
    progress: WorkerProgress
    fate: Fate = Fate.LIVE
    session: int | None = None
    incarnation: str = ""
    host: str = ""
    node_agent: str = ""
    node: str = ""
    """Where it runs, as its status tells; before it has told: the name of its launcher."""
    heard: float = 0.0
    excused: float = 0.0
    """Seconds since then in which this coordinator could not have heard it."""
    awaited_until: float = 0.0
    """It has turned away from this coordinator, may come back, and is waited for as long."""
    left_silence: bool = False
    """It came from a coordinator that was silent, not from one whose connection had ended."""
    done: int = 0
    idle_in: int = 0
    """The last epoch in which this worker said that it has no part; it holds for that epoch only. 0: none."""
    vacant: bool = False
    """Nobody has a part in that, as it has presented."""
    joined: int = 0
    """The last rendezvous joined."""
    heard_of: int = 0
    """The last rendezvous of which it has said that nothing of an epoch before it is believed there any more."""
    status: Json = None
    formed_epoch: int = 0
    """The last epoch whose plan this worker presented to hold."""
    new: bool = False
    """A newcomer that has had no plan yet, or one that was aside: the next rendezvous takes it in."""
    aside_since: float = 0.0
    back: bool = False
    """It was aside, has asked for a place, and waits for its first plan since."""
    ended_at: float | None = None
    """When its launcher saw its process end in order, before its last word or the end of its connection came here."""

    @property
    def name(self) -> str:
        """For people."""
        return f"worker {self.number} on {self.host or 'an unknown host'}"


@dataclass
class NodeAgentStatus:
    """A launcher that watches the workers of its node."""

    node: str
    session: int | None
    heard: float
    excused: float = 0.0
    running: set[WorkerId] = field(default_factory=set)
    """The workers that it has started and not seen end."""
    awaited_until: float = 0.0
    """It has turned away from this coordinator, so it lives and may come back; until then it speaks for its workers."""
    acknowledged: int = 0
    """The last rendezvous that it said it knows of."""
    delivered: int = 0
    """The last one whose opening lies unread at its host while it does not run: it reads that before it turns away."""
    silent: bool = False
    """Nothing has been heard of it for the heartbeat timeout."""
    asked: float = 0.0
    """How long it had been silent when it was last sent something to acknowledge."""
    ended: bool = False
    """Its process has ended: it can tell nobody anything any more."""
    stopping: int = 0
    """The signal by which somebody has told it to end its workers; 0: nobody has."""


class Roster:
    """Workers, launchers and their sessions. It notes in ``changes`` what calls for a new epoch."""

    def __init__(self, world: int, settings: Settings, out: Outbox) -> None:
        self.world = world
        """Workers of the launch."""
        self.settings = settings
        self.workers = {n: Member(n, WorkerProgress(n)) for n in map(WorkerId, range(world))}
        self.node_agents: dict[str, NodeAgentStatus] = {}
        """By the name of the node."""
        self.sessions: dict[int, Member | NodeAgentStatus] = {}
        self.changes: list[str] = []
        """Why the next rendezvous has to be opened, for people; empty: it has not."""
        self.fault_at: float | None = None
        """When the first fault since the last plan was seen."""
        self.heirs: Workers = frozenset()
        """Workers that are aside and that no epoch is formed without: nobody else is left who had a part."""
        self.deserted = False
        """Whether somebody has turned away who may follow another coordinator."""
        self._untold: set[WorkerId] = set()
        """Workers that have ended in order while this candidate did not lead: it cannot know whether they had left."""
        self._out = out

    # -- views --------------------------------------------------------------------------------------------------------

    @property
    def gone(self) -> Workers:
        """Workers that are certainly not running any more, or have left in order."""
        return frozenset(n for n, w in self.workers.items() if w.fate in (Fate.DEAD, Fate.LEFT))

    @property
    def reached(self) -> Workers:
        return frozenset(n for n, w in self.workers.items() if w.session is not None and w.fate is Fate.LIVE)

    @property
    def newcomers(self) -> Workers:
        """Those that wait for their first plan."""
        return frozenset(n for n in self.reached if self.workers[n].new)

    @property
    def returning(self) -> Workers:
        """Those of them that were aside."""
        return frozenset(n for n in self.newcomers if self.workers[n].back)

    def with_fate(self, fate: Fate) -> Workers:
        return frozenset(n for n, w in self.workers.items() if w.fate is fate)

    def idle(self, epoch: Formed) -> Workers:
        """The members of ``epoch`` that have said that they have no part in it."""
        return frozenset(n for n, w in self.workers.items() if w.idle_in == epoch.epoch > 0) & epoch.members

    def blind(self, epoch: Formed) -> Workers:
        """Those of them that cannot tell what it has committed; they can where nobody has a part in it: nothing."""
        return frozenset(number for number in self.idle(epoch) if not self.workers[number].vacant)

    def sessions_of(self, members: Iterable[WorkerId]) -> list[int]:
        return [s for n in sorted(members) if (s := self.workers[n].session) is not None]

    @property
    def node_agent_sessions(self) -> list[int]:
        """The sessions of the launchers that have one."""
        return [w.session for w in self.node_agents.values() if w.session is not None]

    def node_agent_of(self, worker: Member) -> NodeAgentStatus | None:
        """Its launcher: the one it has named itself, or that says that it runs there."""
        if worker.node_agent:
            return self.node_agents.get(worker.node_agent)
        return next((w for w in self.node_agents.values() if worker.number in w.running), None)

    def vouched(self, worker: Member, now: float) -> bool:
        """Whether the worker's launcher is heard, so that it would have told if the process had ended; or is awaited:
        it has turned away since this coordinator did not run, which is no fault of its workers."""
        node_agent = self.node_agent_of(worker)
        if node_agent is None or node_agent.session is None:
            return node_agent is not None and now <= node_agent.awaited_until
        return self.silence(node_agent, now) <= self.settings.heartbeat_timeout

    @staticmethod
    def silence(peer: Member | NodeAgentStatus, now: float) -> float:
        """For how many seconds nothing was heard of a peer, while this coordinator could have heard it."""
        return now - peer.heard - peer.excused

    # -- what is heard ------------------------------------------------------------------------------------------------

    def meet(self, numbers: Iterable[WorkerId]) -> None:
        """From now on these are known, if they were not: newcomers that others count on."""
        for number in numbers:
            if number not in self.workers:
                self.workers[number] = Member(number, WorkerProgress(number))

    def hear(self, peer: Member | NodeAgentStatus, now: float) -> None:
        """Something has come from this peer."""
        peer.heard, peer.excused = now, 0.0
        if isinstance(peer, Member):
            peer.progress.heard = now
        elif peer.silent:
            self._out.log("witness", node=peer.node)
            peer.silent, peer.asked = False, 0.0

    def excuse(self, pause: float, now: float) -> None:
        """This process was kept from running for so long, and has heard what came: no silence meanwhile counts."""
        for worker in self.workers.values():
            worker.excused = min(worker.excused + pause, now - worker.heard)
            worker.awaited_until += pause
            worker.aside_since += pause
            worker.progress.excuse(pause, now)
        for node_agent in self.node_agents.values():
            node_agent.excused = min(node_agent.excused + pause, now - node_agent.heard)
            node_agent.awaited_until += pause

    def pass_on(self, worker: Member, text: str) -> None:
        """A worker has something to say to people: its launcher shows it."""
        self._out.log("note", worker=worker.number, host=worker.host, text=text)
        node_agent = self.node_agents.get(worker.node_agent)
        if node_agent is not None and node_agent.session is not None:
            self._out.send([node_agent.session], {"type": "note", "worker": worker.number, "text": text})

    def from_node_agent(
        self, node_agent: NodeAgentStatus, session: int, message: Mapping[str, Any], term: int, now: float
    ) -> None:
        """A launcher says something, to the coordinator of ``term``."""
        match message["type"]:
            case "beat":
                self._out.send([session], {"type": "beat"})
            case "ack" if message["term"] == term:
                node_agent.acknowledged = max(node_agent.acknowledged, message["epoch"])
            case "spawned":
                node_agent.running.add(message["worker"])
                self._out.log("spawned", worker=message["worker"], pid=message["pid"], node=node_agent.node)
            case "stopping":
                node_agent.stopping = message["signal"]
                self._out.log("stopping", node=node_agent.node, signal=node_agent.stopping)
            case "ended":
                node_agent.running.discard(message["worker"])
                self._ended(message["worker"], message["how"], now, leads=term > 0)
            case "abandon":
                self.unbind(node_agent)
                node_agent.awaited_until = now + self.settings.lost_timeout

    # -- sessions -----------------------------------------------------------------------------------------------------

    def bind(self, peer: Member | NodeAgentStatus, session: int, now: float) -> None:
        """The peer is reached by this session from now on, and by no other."""
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
        """A session has ended by itself; whose it was."""
        peer = self.sessions.pop(session, None)
        if peer is not None:
            peer.session = None
        if isinstance(peer, NodeAgentStatus):
            peer.silent, peer.asked, peer.delivered = False, 0.0, 0
        return peer

    def refuse(self, session: int, reason: str) -> None:
        """Send whoever it is away, to try another candidate."""
        self._out.log("refused", reason=reason)
        self._out.send([session], {"type": "refused", "reason": reason})
        self._out.do(Close(session))

    # -- workers go ---------------------------------------------------------------------------------------------------

    def dead(self, worker: Member, reason: str, now: float) -> None:
        """The process has ended, for certain."""
        if worker.fate is Fate.LIVE or worker.number in self.heirs:
            self.changes.append(f"{worker.name} died: {reason}")
        worker.fate = Fate.DEAD
        self.unbind(worker)
        self._fault("dead", worker, reason, now)

    def turned_away(self, worker: Member, reason: str, now: float, *, followed: bool) -> None:
        """It looks for another coordinator; ``followed``: this one leads.

        It comes back if there is no other, or its launcher tells of its end. It is not out: what this coordinator has
        missed while it did not run is no fault of the worker's.
        """
        self._out.log("abandoned", worker=worker.number, reason=reason)
        self.unbind(worker)
        if followed and worker.fate is Fate.LIVE:
            worker.awaited_until = now + self.settings.lost_timeout
            self.deserted = True
            self.changes.append(f"{worker.name} has turned away and is waited for")

    def told_of(self, dead: Workers, left: Workers) -> None:
        """Another coordinator had learnt that these have died, and that those have left in order."""
        for number in dead | left:
            worker = self.workers[number]
            if worker.fate is not Fate.LEFT:
                worker.fate = Fate.LEFT if number in left else Fate.DEAD
                self.unbind(worker)

    def exclude(self, worker: Member, reason: str, now: float, together: Workers = frozenset()) -> None:
        """Put a worker out that may still be running: tell it, and have its launcher kill it.

        ``together``: all that are put out at once, so that their launcher says of none that it goes on.
        """
        self.changes.append(f"{worker.name} is out: {reason}")
        worker.fate = Fate.OUT
        self._fault("out", worker, reason, now)
        if worker.session is not None:
            self._out.send([worker.session], {"type": "fenced", "reason": reason})
        self.unbind(worker)
        self.kill(worker, reason, together)

    def set_aside(self, workers: Iterable[WorkerId], reason: str, now: float) -> None:
        """Go on without live workers that are late, and may come back."""
        for worker in (self.workers[number] for number in sorted(workers)):
            self.changes.append(f"{worker.name} is set aside: {reason}")
            worker.fate, worker.aside_since = Fate.ASIDE, now
            self._out.log("aside", worker=worker.number, host=worker.host, reason=reason)

    def take_back(self, worker: Member, now: float) -> None:
        """A worker that was aside asks for a place."""
        self.changes.append(f"{worker.name} is back")
        worker.fate, worker.new, worker.back, worker.idle_in, worker.progress.marked = Fate.LIVE, True, True, 0, now
        self._out.log("back", worker=worker.number, host=worker.host, seconds=now - worker.aside_since)

    def away_again(self, worker: Member) -> None:
        """A worker that was back has lost its connection before it had a plan: it may ask once more."""
        self.changes.append(f"{worker.name} was back, and has lost its connection")
        worker.fate, worker.new, worker.back = Fate.ASIDE, False, False

    def kill(self, worker: Member, reason: str, together: Workers = frozenset()) -> None:
        """Have the launcher of a worker that is out end its process, if it is reached."""
        node_agent = self.node_agent_of(worker)
        if node_agent is not None and node_agent.session is not None:
            order = {"type": "kill", "worker": worker.number, "reason": reason}
            if together:
                order["with"] = to_runs(together)
            self._out.send([node_agent.session], order)

    def _ended(self, number: WorkerId, how: str, now: float, *, leads: bool) -> None:
        """A launcher has seen a process end. Whether one that ended in order had left, another coordinator may know."""
        if number not in self.workers:  # a newcomer, before it came here: it may be in what others will present
            self.meet([number])
            self.workers[number].fate = Fate.DEAD
            return
        worker = self.workers[number]
        if how == ENDED_IN_ORDER and worker.fate is Fate.LIVE and worker.session is not None:
            worker.ended_at = now  # at the end of a run the launcher may outrun the worker's ``bye``
        elif how == ENDED_IN_ORDER and worker.fate is Fate.LIVE and not leads:
            worker.fate = Fate.DEAD
            self._untold.add(number)
        elif worker.fate in (Fate.LIVE, Fate.OUT, Fate.ASIDE):
            self.dead(worker, f"its process has ended ({how})", now)

    def tell_of_ends(self, now: float) -> None:
        """This candidate leads, and what all hold is known: who has ended in order, and had not left, has died."""
        for number in sorted(self._untold & self.with_fate(Fate.DEAD)):
            self._fault("dead", self.workers[number], f"its process has ended ({ENDED_IN_ORDER})", now)
        self._untold.clear()

    def without_last_word(self, now: float) -> None:
        """Those are dead whose processes have ended in order, and of which nothing has come since: a child may keep
        their connections open."""
        for worker in self.workers.values():
            ended = worker.ended_at
            if ended is not None and worker.fate is Fate.LIVE and now - ended > self.settings.heartbeat_interval:
                self.dead(worker, f"its process has ended ({ENDED_IN_ORDER}), and it has not said why", now)

    def _fault(self, kind: str, worker: Member, reason: str, now: float) -> None:
        self.fault_at = now if self.fault_at is None else self.fault_at
        self._out.log("fault", kind=kind, worker=worker.number, host=worker.host, reason=reason)
