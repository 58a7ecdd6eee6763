"""Whom the coordinator knows: workers, witnesses, their sessions, and what became of them.

What makes a worker go, by what is known of it: its kernel closes the session, or its launcher sees the process end: it
is *dead* and never counts again. Its host is silent, or it hangs (``detect``): it is *out*, is told so if it ever
wakes up, is killed by its launcher, and until that is confirmed it counts as possibly running elsewhere (``quorum``).
It says bye: it has *left*. None of these is ever undone. Who turns away from this coordinator is none of these, but
*awaited*: it is a live worker without a session.

A *newcomer* is a worker whose id is none of the launch's (those are below ``world``). It becomes known when it
attaches, or when a member presents an epoch that counts on it. Ids never come back: who is started again has a new one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from recover_megatron.membership.detect import Progress
from recover_megatron.membership.events import Close, CoordinatorEffect, Log, Probe, Send
from recover_megatron.membership.records import Json, Settings, to_runs


class Fate(Enum):
    """What a worker is to the run. All but LIVE are final."""

    LIVE = "live"
    DEAD = "dead"
    OUT = "out"
    LEFT = "left"


@dataclass
class Worker:
    """What is known of one worker."""

    number: int
    progress: Progress
    fate: Fate = Fate.LIVE
    session: int | None = None
    incarnation: str = ""
    host: str = ""
    witness: str = ""
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
    joined: int = 0
    """The last rendezvous joined."""
    status: Json = None
    formed_epoch: int = 0
    """The last epoch whose plan this worker presented to hold."""
    new: bool = False
    """A newcomer that has had no plan yet: the next rendezvous takes it in."""

    @property
    def name(self) -> str:
        """For people."""
        return f"worker {self.number} on {self.host or 'an unknown host'}"


@dataclass
class Witness:
    """A launcher that watches the workers of its node."""

    node: str
    session: int | None
    heard: float
    excused: float = 0.0
    running: set[int] = field(default_factory=set)
    """The workers that it has started and not seen end."""
    acknowledged: int = 0
    ended: bool = False
    """Its process has ended: it can tell nobody anything any more."""
    stopping: int = 0
    """The signal by which somebody has told it to end its workers; 0: nobody has."""


class Roster:
    """The bookkeeping half of ``Coordinator``: collects effects, and in ``_changes`` the reasons for a new epoch."""

    def __init__(self, world: int, settings: Settings) -> None:
        self.settings = settings
        self.world = world
        self.workers = {n: Worker(n, Progress(n)) for n in range(world)}
        self.witnesses: dict[str, Witness] = {}
        self._sessions: dict[int, Worker | Witness] = {}
        self._changes: list[str] = []
        self._out_together: frozenset[int] = frozenset()  # all that are being put out at once
        self._fault: float | None = None  # when the first fault since the last plan was seen
        self._effects: list[CoordinatorEffect] = []

    # -- effects ------------------------------------------------------------------------------------------------------

    def _do(self, effect: CoordinatorEffect) -> None:
        self._effects.append(effect)

    def _log(self, event: str, **fields: Json) -> None:
        self._do(Log({"event": event, **fields}))

    def _send(self, sessions: Iterable[int], message: Mapping[str, Any]) -> None:
        if targets := tuple(sessions):
            self._do(Send(targets, message))

    # -- views --------------------------------------------------------------------------------------------------------

    @property
    def gone(self) -> frozenset[int]:
        """Workers that are certainly not running any more, or have left in order."""
        return frozenset(n for n, w in self.workers.items() if w.fate in (Fate.DEAD, Fate.LEFT))

    def _with_fate(self, fate: Fate) -> frozenset[int]:
        return frozenset(n for n, w in self.workers.items() if w.fate is fate)

    @property
    def _newcomers(self) -> frozenset[int]:
        """Those that wait for their first plan."""
        return frozenset(n for n, w in self.workers.items() if w.new and w.fate is Fate.LIVE and w.session is not None)

    def _meet(self, numbers: Iterable[int]) -> None:
        """From now on these are known, if they were not: newcomers that others count on."""
        for number in numbers:
            if number not in self.workers:
                self.workers[number] = Worker(number, Progress(number))

    def _attached(self, members: Iterable[int]) -> list[int]:
        """The sessions of those members that have one."""
        return [s for n in sorted(members) if (s := self.workers[n].session) is not None]

    def _witness_sessions(self) -> list[int]:
        return [w.session for w in self.witnesses.values() if w.session is not None]

    def _witness_of(self, worker: Worker) -> Witness | None:
        """Its launcher: the one it has named itself, or that says that it runs there."""
        if worker.witness:
            return self.witnesses.get(worker.witness)
        return next((w for w in self.witnesses.values() if worker.number in w.running), None)

    def _vouched(self, worker: Worker, now: float) -> bool:
        """Whether the worker's launcher is heard, so that it would have told if the process had ended."""
        witness = self._witness_of(worker)
        return (
            witness is not None
            and witness.session is not None
            and self._silence(witness, now) <= self.settings.heartbeat_timeout
        )

    @staticmethod
    def _silence(peer: Worker | Witness, now: float) -> float:
        """For how long nothing was heard of a peer, while this coordinator could have heard it."""
        return now - peer.heard - peer.excused

    def _excuse(self, pause: float, now: float) -> None:
        """This process was kept from running for so long: what it did not hear meanwhile is held against nobody.

        What has come before this is called is heard already.
        """
        for worker in self.workers.values():
            worker.excused = min(worker.excused + pause, now - worker.heard)
            worker.awaited_until += pause
            worker.progress.excuse(pause, now)
        for witness in self.witnesses.values():
            witness.excused = min(witness.excused + pause, now - witness.heard)

    def _hear(self, peer: Worker | Witness, now: float) -> None:
        peer.heard, peer.excused = now, 0.0
        if isinstance(peer, Worker):
            peer.progress.heard = now

    # -- sessions -----------------------------------------------------------------------------------------------------

    def _bind(self, peer: Worker | Witness, session: int, now: float) -> None:
        self._unbind(peer)
        peer.session = session
        self._hear(peer, now)
        self._sessions[session] = peer

    def _unbind(self, peer: Worker | Witness) -> None:
        if peer.session is not None:
            del self._sessions[peer.session]
            self._do(Close(peer.session))
            peer.session = None

    def _refuse(self, session: int, reason: str) -> None:
        self._log("refused", reason=reason)
        self._send([session], {"type": "refused", "reason": reason})
        self._do(Close(session))

    def _quiet(self, seconds: float, now: float) -> list[Worker]:
        """Attached workers of which nothing was heard for so long."""
        return [w for w in self.workers.values() if w.session is not None and self._silence(w, now) > seconds]

    def _ask_the_quiet(self, now: float) -> None:
        """Ask for a sign of life whoever gives none; a launcher that has given none for too long is gone.

        A worker whose launcher vouches for it may be deaf for long (a call that holds the interpreter): its host's
        kernel is asked instead (``Probe``), which needs something sent to acknowledge.
        """
        settings = self.settings
        for worker in self._quiet(1.5 * settings.heartbeat_interval, now):
            assert worker.session is not None
            self._send([worker.session], {"type": "beat"})
            if self._silence(worker, now) > settings.heartbeat_timeout and self._vouched(worker, now):
                self._do(Probe(worker.session))
        for witness in self.witnesses.values():
            if witness.session is not None and self._silence(witness, now) > settings.heartbeat_timeout:
                self._log("witness_gone", node=witness.node, reason="silent")
                self._unbind(witness)

    def _silent(self, now: float, fresh: float = -math.inf) -> list[Worker]:
        """Workers without a sign of life for the heartbeat timeout (and since ``fresh``), for whom nobody vouches."""
        timeout = self.settings.heartbeat_timeout
        return [w for w in self._quiet(timeout, now) if now - fresh > timeout and not self._vouched(w, now)]

    # -- workers go ---------------------------------------------------------------------------------------------------

    def _dead(self, worker: Worker, reason: str, now: float) -> None:
        """The process has ended, for certain."""
        if worker.fate is Fate.LIVE:
            self._changes.append(f"{worker.name} died: {reason}")
        worker.fate = Fate.DEAD
        self._unbind(worker)
        self._fault_seen("dead", worker, reason, now)

    def _exclude(self, worker: Worker, reason: str, now: float) -> None:
        """Put a worker out that may still be running: tell it, and have its launcher kill it."""
        self._changes.append(f"{worker.name} is out: {reason}")
        worker.fate = Fate.OUT
        self._fault_seen("out", worker, reason, now)
        if worker.session is not None:
            self._send([worker.session], {"type": "fenced", "reason": reason})
        self._unbind(worker)
        self._kill(worker, reason)

    def _kill(self, worker: Worker, reason: str) -> None:
        witness = self._witness_of(worker)
        if witness is not None and witness.session is not None:
            order = {"type": "kill", "worker": worker.number, "reason": reason}
            if self._out_together:  # so that nobody says of the next one that it goes on
                order["with"] = to_runs(self._out_together)
            self._send([witness.session], order)

    def _fault_seen(self, kind: str, worker: Worker, reason: str, now: float) -> None:
        self._fault = now if self._fault is None else self._fault
        self._log("fault", kind=kind, worker=worker.number, host=worker.host, reason=reason)
