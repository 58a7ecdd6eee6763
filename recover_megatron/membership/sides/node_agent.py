"""A launcher's session: it reports how its workers end, vouches for running workers, and kills evicted workers."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from typing import Protocol

from recover_megatron.membership.events import Accepted, Connected, Dial, Lost, MemberEffect, MemberEvent, Notify
from recover_megatron.membership.io.client import Address, Client
from recover_megatron.membership.messages import fields, to_coordinator, to_member
from recover_megatron.membership.records import (
    CoordinatorLost,
    MembershipError,
    Runs,
    Settings,
    WorkerId,
    Workers,
    first_workers,
    from_runs,
    to_runs,
)
from recover_megatron.membership.sides.follower import Follower
from recover_megatron.membership.wire import Secret


class NodeAgentClient(Follower):
    """A launcher's side of the protocol as a state machine without I/O, on top of ``follower``."""

    def __init__(
        self, node: str, incarnation: str, candidates: int, settings: Settings, now: float, *, late: bool = False
    ) -> None:
        hello = to_coordinator.AttachNodeAgent(node, incarnation, fields.NOTHING)
        super().__init__(hello, candidates, settings, now, late=late)
        self.planned: Workers = frozenset()
        """Workers that were in any plan that this launcher has received."""
        self._running: set[WorkerId] = set()
        self.condemned: Workers = frozenset()
        """Evicted workers, on any node, that must be killed, as far as this launcher knows."""
        self.ends: dict[WorkerId, str] = {}
        """Worker whose end was reported -> how it ended."""
        self._stopping = 0
        self._own: tuple[str, int] | None = None  # this launcher's candidate, if added after the launch
        self.attached = False
        """True once a candidate has proved that it belongs to this run."""
        self._unanswered_dial: int | None = None
        self._refused: dict[int, float] = {}  # candidate -> time since which its host refuses connections

    def stopping(self, signal: int) -> list[MemberEffect]:
        """Report that a signal ordered this launcher to stop its workers; repeated to every later coordinator."""
        self._stopping = signal
        return self._report(to_coordinator.Stopping(signal))

    def hosts(self, address: tuple[str, int]) -> list[MemberEffect]:
        """Report a candidate that was started on this node after the launch; repeated to every later coordinator."""
        self._own = address
        return self._report(to_coordinator.Candidate(address))

    def ended(self, worker: WorkerId, how: str) -> list[MemberEffect]:
        """Report that a worker's process has ended; repeated to every later coordinator."""
        self.ends[worker] = how
        self._running.discard(worker)
        return self._report(to_coordinator.Ended(worker, how))

    def spawned(self, worker: WorkerId, pid: int) -> list[MemberEffect]:
        """Report a worker's process, so that the coordinator knows which launcher can report its end."""
        self._running.add(worker)
        return self._report(to_coordinator.Spawned(worker, pid))

    def handle(self, event: MemberEvent, now: float) -> list[MemberEffect]:
        """Apply one event, as in ``Follower``; repeat all earlier reports to each new coordinator."""
        tried = self.candidate
        effects = super().handle(event, now)
        if isinstance(event, (Accepted, Lost)):
            self._tried(tried, now if isinstance(event, Lost) and event.refused else None)
        if any(isinstance(effect, Dial) for effect in effects):
            if self._unanswered_dial is not None:
                self._tried(self._unanswered_dial, None)
            self._unanswered_dial = self.candidate
        if isinstance(event, Connected):
            self.attached = True
            self._say(self._next_beat())
            if self._own is not None:
                self._say(to_coordinator.Candidate(self._own))
            if self._stopping:
                self._say(to_coordinator.Stopping(self._stopping))
            for worker, how in self.ends.items():
                self._say(to_coordinator.Ended(worker, how))
        return effects

    def _tried(self, candidate: int, refused: float | None) -> None:
        """Record the result of dialing a candidate. ``refused``: time at which the host refused; None: it did not."""
        self._unanswered_dial = None
        if refused is None:
            self._refused.pop(candidate, None)
        else:
            self._refused.setdefault(candidate, refused)

    @property
    def all_refused_since(self) -> float:
        """Time since which the hosts of all candidates refuse connections; infinite: not all hosts refuse them."""
        return max(self._refused.get(candidate, math.inf) for candidate in range(self._candidates))

    def _reports(self) -> dict[str, Runs]:
        return {"running": to_runs(self._running)}

    @property
    def up_to_date(self) -> bool:
        """True if a coordinator is reached, and all messages that it sent before the last answer have arrived."""
        return self._connected and not self._asked

    def ask(self) -> list[MemberEffect]:
        """Send ``beat`` to the coordinator; the answer makes this client ``up_to_date`` again."""
        return self._report(self._next_beat())

    def _on(self, message: to_member.ToMember, now: float) -> None:
        if isinstance(message, to_member.Kill):
            self.condemned |= {message.worker, *from_runs(message.together)}
        super()._on(message, now)

    def late_message(self, message: to_member.ToMember) -> None:
        """Record a revoke that an abandoned coordinator had sent. That coordinator may count on this record.

        See ``Rendezvous._acknowledged``.
        """
        if isinstance(message, to_member.Revoke) and message.term >= self.presentation.term:
            self.presentation.term = message.term
            self._opened(message)

    def _planned(self, message: to_member.Plan) -> None:
        self.planned |= message.formed().members

    def _revoked(self, message: to_member.Revoke) -> None:
        self._say(to_coordinator.Ack(message.epoch, message.term))
        self._effects.append(Notify(message))


class Orders(Protocol):
    """Orders from the coordinator to a launcher."""

    def evict(self, worker: WorkerId, reason: str) -> None:
        """Kill the complete process group of this node's ``worker``, then report ``ended``. May be called again."""

    def epoch_wanted(self) -> None:
        """React to the opening of a rendezvous, from which launched workers may be ``missing``."""

    def epoch_formed(self) -> None:
        """Note that a plan has arrived: ``NodeAgent.epoch`` is the epoch of that plan."""

    def noted(self, worker: WorkerId, text: str) -> None:
        """Write a note from this node's ``worker`` to workers.json; an empty ``text`` removes the note."""

    def draining(self, stays: bool) -> None:
        """Start no more workers, because the node is drained. May be called again.

        ``stays``: True if the drain was refused after all, so that workers may be started again.
        """


class NodeAgentEvents(Orders, Protocol):
    """Callbacks of a launcher's session. They run in the session's thread, so they must be quick."""

    def said(self, text: str) -> None:
        """Print a message from the coordinator on the console."""

    def may_host(self, world: int, lease: str | None, slack: int, witnessed: bool) -> None:
        """Receive the settings that a candidate on this node would need. Each new coordinator sends them again.

        ``world``: number of launched workers. ``lease``: path of the lease; None: no lease. ``slack``: slack of the
        lease. ``witnessed``: whether the run has a witness.
        """


class NodeAgent:
    """Session of one node's launcher. While the launcher sends messages, its workers are not evicted for silence.

    The coordinator relies on the reports: report ``ended`` only for a process that executes no user code any more,
    since it has ended or SIGKILL has been sent to all of its threads (docs/membership.md).
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        node: str,
        secret: Secret,
        events: NodeAgentEvents,
        settings: Settings | None = None,
        *,
        late: bool = False,
    ) -> None:
        """Start the session. ``late``: True if this launcher joins a run that has begun."""
        self._events = events
        incarnation, now = secrets.token_hex(16), time.monotonic()
        self._core = NodeAgentClient(node, incarnation, len(addresses), settings or Settings(), now, late=late)
        self._client = Client(self._core, addresses, secret, self._notified)
        self._client.start()

    @property
    def out(self) -> MembershipError | None:
        """Reason why this session is over: the run has ended, or no coordinator is reached. None: it is not over."""
        return self._core.out

    @property
    def connected_to(self) -> Address | None:
        """Address of the candidate dialed last; None: none yet."""
        with self._client.condition:
            return self._client.addresses[self._core.candidate] if self._core.candidate >= 0 else None

    @property
    def epoch(self) -> int:
        """Number of the last formed epoch that this launcher knows; 0: none."""
        return max(self._core.presentation.formed.epoch, self._core.last_epoch)

    @property
    def planned(self) -> Workers:
        """Workers that were in any plan that this launcher has received."""
        return self._core.planned

    @property
    def condemned(self) -> Workers:
        """Workers that the coordinator has evicted, on any node, as far as this launcher knows."""
        return self._core.condemned

    @property
    def left(self) -> Workers:
        """Workers that have left normally, as the coordinator last reported. Complete after the end of the run."""
        return self._core.presentation.left

    @property
    def taken(self) -> Workers:
        """Worker ids that no newcomer may have, because this launcher knows that they were used in the run."""
        return self._core.planned | self._core.presentation.mentioned

    @property
    def had_all(self) -> bool:
        """True if this launcher ran all workers of the last plan, and all have ended, so no worker continues."""
        with self._client.condition:
            formed = self._core.presentation.formed
            return formed.epoch > 0 and formed.members <= self._core.ends.keys()

    def missing(self, world: int) -> Workers:
        """Return launched workers (below ``world``) that are not in the open rendezvous and have not left normally."""
        with self._client.condition:
            opened, left = self._core.presentation.opened, self._core.presentation.left
            return first_workers(world) - opened.members - left if opened is not None else frozenset()

    def wait_led(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until a coordinator leads or this session is over. Return ``led``."""
        with self._client.condition:
            self._client.condition.wait_for(lambda: self.led or self._core.out is not None, timeout)
            return self.led

    @property
    def attached(self) -> bool:
        """True once this launcher has reached a candidate of the run, whether that candidate leads or not."""
        return self._core.attached

    @property
    def refused_seconds(self) -> float:
        """Seconds for which the hosts of all candidates have answered that no process listens; 0: not all have."""
        with self._client.condition:
            return max(0.0, time.monotonic() - self._core.all_refused_since)

    @property
    def led(self) -> bool:
        """True if any coordinator has led the run so far, that is, enough workers had attached to it."""
        return self._core.presentation.term > 0

    def spawned(self, worker: WorkerId, pid: int) -> None:
        """Report a worker that this launcher has started, for the event log."""
        self._client.call(self._core.spawned, worker, pid)

    @property
    def addresses(self) -> Sequence[Address]:
        """Addresses of all known candidates, in the order in which members try them."""
        with self._client.condition:
            return tuple(self._client.addresses)

    def hosts(self, address: Address) -> None:
        """Report a candidate of this launcher that was started after the launch."""
        self._client.call(self._core.hosts, address)

    def stopping(self, signal: int, timeout: float) -> None:
        """Report the signal that orders this launcher to stop its workers; wait at most ``timeout`` seconds."""
        self._client.call(self._core.stopping, signal)
        self.catch_up(timeout)

    def ended(self, worker: WorkerId, how: str) -> None:
        """Report that a worker's process has ended, ``how`` in a few words ("SIGKILL", "exit code 1")."""
        self._client.call(self._core.ended, worker, how[:256])

    def run_over(self, code: int, what: str) -> None:
        """End this session because a candidate on this node has ended the run, and no other process may report that.

        ``code``: exit code. ``what``: reason.
        """
        self._client.give_up(CoordinatorLost(f"the run has ended: {what}", code, reported=True))

    def catch_up(self, timeout: float | None = None) -> None:
        """Wait at most ``timeout`` seconds until all messages that the coordinator has sent so far have arrived."""
        with self._client.condition:
            self._client.call(self._core.ask)
            self._client.condition.wait_for(lambda: self._core.out is not None or self._core.up_to_date, timeout)

    def wait_out(self, timeout: float | None = None) -> MembershipError | None:
        """Wait at most ``timeout`` seconds until ``out`` is known. Return it; None after the timeout."""
        with self._client.condition:
            self._client.condition.wait_for(lambda: self._core.out is not None, timeout)
            return self._core.out

    def close(self) -> None:
        """Close the session; the coordinator then knows that this launcher reports nothing more."""
        self._client.close()

    def _notified(self, notice: Notify) -> None:
        match notice.message:
            case to_member.Kill(worker, reason):
                self._events.evict(worker, reason)
            case to_member.Revoke():
                self._events.epoch_wanted()
            case to_member.Plan():
                self._events.epoch_formed()
            case to_member.Note(worker, text):
                self._events.noted(worker, text)
            case to_member.Tell(text):
                self._events.said(text)
            case to_member.Drain(stays):
                self._events.draining(stays)
            case to_member.Candidates(_, world, lease, slack, witnessed):
                self._events.may_host(world, lease, slack, witnessed)


class NoAgent:
    """Stand-in for a ``NodeAgent`` while there is no session: it knows no worker, sends nothing and never waits."""

    out: MembershipError | None = None
    connected_to: Address | None = None
    addresses: Sequence[Address] = ()
    epoch = 0
    refused_seconds = 0.0
    planned = condemned = taken = left = Workers()
    led = attached = had_all = False

    def missing(self, world: int) -> Workers:
        """Return an empty set, because no rendezvous is open."""
        return frozenset()

    def _nothing(self, *_: object) -> None:
        """Do nothing."""

    spawned = ended = stopping = hosts = run_over = catch_up = wait_led = wait_out = close = _nothing
