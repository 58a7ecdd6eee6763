"""The coordinator's I/O: one thread, one event loop, non-blocking sockets.

The state machine ``Coordinator`` makes all decisions.

A connection goes through

    CHALLENGED (nonce sent, waits for the proof) -> PROVED (own proof sent) -> messages for the state machine

and has ``HANDSHAKE_SECONDS`` for the first step, however slowly its data arrives. If more than ``2 * world + 1024``
connections have not proved the secret, the oldest of them is closed, so that silent connections keep no worker out.

In a large run the workers of a node share the connection of a relay (``io.relay``): it proves the secret like a member,
and then carries their connections as its channels. The state machine knows nothing of it.
"""

from __future__ import annotations

import errno
import secrets
import socket
import time
from asyncio import TimerHandle
from functools import partial

from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.events import (
    Acknowledged,
    AskForLease,
    AskWitness,
    Close,
    Closed,
    CoordinatorEvent,
    Exit,
    Log,
    Probe,
    Received,
    Send,
    Settle,
    State,
    StepDown,
    Tick,
)
from recover_megatron.membership.io.journal import EventSink, LimitedLog
from recover_megatron.membership.io.lease import Lease
from recover_megatron.membership.io.testimony import WitnessThread
from recover_megatron.membership.messages import relayed, to_coordinator, to_member
from recover_megatron.membership.records import WorkerId
from recover_megatron.membership.wire import FROM_RELAY, MAX_TO_COORDINATOR, TO_COORDINATOR, Secret
from recover_megatron.network import messages
from recover_megatron.network.connection import nonce
from recover_megatron.network.event_loop import EventLoop
from recover_megatron.network.line import Line
from recover_megatron.network.system import all_delivered, unacknowledged, use_all_descriptors

HANDSHAKE_SECONDS = 5.0
DRAIN_SECONDS = 2.0
"""Seconds that a closing connection has to send its queue."""
READ_SECONDS = 0.5
"""Seconds for which the report of a worker's end waits for the relay to pass on what the worker has sent."""
MAX_BACKLOG = 128 << 20
"""Maximum bytes queued for one member, or for a relay. If it reads more slowly, its connection is closed."""
_MOST_READS = 64


class _Connection:
    """Connection of one peer: ``line`` is its own, or that of a relay, which carries many as its channels."""

    timer: TimerHandle
    """Limit for the proof of the secret; when the connection is closing, for its queue."""

    def __init__(self, number: int, peer: str, line: Line, relay: _Relay | None = None, channel: int = 0) -> None:
        self.number = number
        self.peer = peer
        self.line = line
        self.relay = relay
        """The relay that carries this connection; None: the line is its own."""
        self.channel = channel
        self.nonce = nonce()
        self.proved = False
        self.closing = False
        self.carries: _Relay | None = None
        """State of a relay's own connection; None: the peer is no relay."""

    def send(self, frame: bytes) -> None:
        if self.relay is None:
            self.line.send(frame)
        else:
            self.line.gather(messages.encode(relayed.To([self.channel])), frame)


class _Relay:
    """Channels of a relay. ``connection``: the relay's own."""

    def __init__(self, connection: _Connection) -> None:
        self.connection = connection
        self.line = connection.line
        self.channels: dict[int, _Connection] = {}
        self.source: int | None = None
        """Channel from which the next frame comes; None: the next frame is a message of the relay."""
        self.reading: dict[int, list[Received]] = {}
        """Channel that the relay must read -> messages to handle when it has done so."""


class CoordinatorServer:
    """Serves one ``Coordinator`` on a bound, listening socket until the coordinator stops.

    ``log`` receives every event record (see docs/membership.md for the schema). If the run has a lease or a witness,
    the caller sets ``lease`` or ``witness`` before ``serve_forever``; their threads report through ``post``.
    """

    def __init__(self, coordinator: Coordinator, listener: socket.socket, secret: Secret, log: EventSink) -> None:
        self.coordinator = coordinator
        self._listener = listener
        self._secret = secret
        self._log = log
        self._log_limited = LimitedLog(log)
        self.lease: Lease | None = None
        self.witness: WitnessThread | None = None
        self._loop = EventLoop()
        self._connections: dict[int, _Connection] = {}
        self._unproved: dict[int, _Connection] = {}  # oldest first
        self._max_unproved = 1024 + 2 * len(coordinator.roster.workers)
        self._numbers = 0
        self._exit: Exit | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)
        use_all_descriptors()

    def post(self, event: CoordinatorEvent) -> None:
        """Queue an event for the coordinator. May be called from any thread."""
        self._loop.call_from_thread(self._handle, event)

    def serve_forever(self) -> int:
        """Serve until the run is over or may not continue on this side of a partition. Return the exit code."""
        while self._exit is None:
            self._loop.run_once(max(0.0, self.coordinator.deadline - time.monotonic()))
            now = time.monotonic()
            if now >= self.coordinator.deadline:
                # This process may not have run for some time. Read everything that arrived before ``now``, so that
                # no member is considered silent by mistake.
                self._loop.run_once(0)
                self._handle(Tick(), now)
                self._loop.add_reader(self._listener, self._accept)
            self._handle(Settle())
        self._drain()
        return self._exit.code

    def close(self) -> None:
        """Close every socket, and stop asking for the lease."""
        if self.lease is not None:
            self.lease.close()
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._loop.close()
        self._listener.close()

    # -- the state machine --------------------------------------------------------------------------------------------

    def _handle(self, event: CoordinatorEvent, now: float | None = None) -> None:
        if self._loop.errors:
            return  # a callback of this round has failed, so this process is about to end and decides nothing more
        for effect in self.coordinator.handle(event, time.monotonic() if now is None else now):
            match effect:
                case Send(sessions, message):
                    self._send(sessions, message)
                case Close(session):
                    if (connection := self._connections.get(session)) is not None:
                        self._finish(connection)
                case Log(record):
                    self._log(record)
                case Probe(session):
                    if (connection := self._connections.get(session)) is not None and connection.line.is_open:
                        line = connection.line
                        delivered = not line.queued and all_delivered(line.sock)
                        self._handle(Acknowledged(session, unacknowledged(line.sock), delivered))
                case AskForLease():
                    if self.lease is not None:
                        self.lease.ask(effect)
                case AskWitness(nodes):
                    if self.witness is not None:
                        self.witness.ask(nodes)
                case StepDown():
                    self.coordinator = self.coordinator.fresh(secrets.randbits(32), time.monotonic())
                    if self.lease is not None:
                        self.lease.forget()
                case Exit():
                    self._exit = effect

    # -- accepting ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(256):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                own_socket = next((c for c in self._unproved.values() if c.relay is None), None)
                if error.errno in (errno.EMFILE, errno.ENFILE) and own_socket is not None:
                    self._reject(own_socket, "too many open files")
                    continue
                self._log_limited("accept_failed", reason=str(error))
                # Else waiting connections would wake this loop all the time. The next tick adds the listener again.
                self._loop.remove_reader(self._listener)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = Line(self._loop, sock)
            line.on_data(self._read, self._begin(f"{address[0]}:{address[1]}", line))

    def _begin(self, peer: str, line: Line, relay: _Relay | None = None, channel: int = 0) -> _Connection:
        """Register a new connection, and send it the challenge."""
        self._numbers += 1
        connection = _Connection(self._numbers, peer, line, relay, channel)
        self._connections[connection.number] = connection
        self._unproved[connection.number] = connection
        late = f"no proof of the secret within {HANDSHAKE_SECONDS:.0f} s"
        connection.timer = self._loop.call_later(HANDSHAKE_SECONDS, self._reject, connection, late)
        connection.send(messages.encode(messages.Challenge(messages.PROTOCOL_VERSION, connection.nonce)))
        if len(self._unproved) > self._max_unproved:
            self._reject(next(iter(self._unproved.values())), "too many connections without proof")
        return connection

    def _reject(self, connection: _Connection, reason: str) -> None:
        self._log_limited("rejected", peer=connection.peer, reason=reason)
        self._drop(connection)

    def _prove(self, connection: _Connection, message: messages.Auth) -> None:
        proof = self._secret.accept(connection.nonce, message)
        if proof is None:
            self._reject(connection, "does not know the job's secret")
            return
        connection.proved = True
        connection.timer.cancel()
        del self._unproved[connection.number]
        connection.send(messages.encode(proof))

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, connection: _Connection) -> None:
        line = connection.line
        try:
            is_open = line.receive()
        except OSError as error:
            self._lost(connection, error)
            return
        if not is_open:
            self._lost(connection, None)
            return
        try:
            while connection.number in self._connections and not connection.closing:
                body = line.decoder.next(MAX_TO_COORDINATOR if connection.proved else messages.MAX_HANDSHAKE)
                if body is None:
                    return
                if connection.carries is None:
                    self._take(connection, body)
                else:
                    self._take_from_relay(connection, connection.carries, body)
        except messages.WireError as error:
            self._malformed(connection, error)

    def _malformed(self, connection: _Connection, error: messages.WireError) -> None:
        self._log_limited("rejected", peer=connection.peer, reason=f"malformed: {error}")
        self._end(connection, False, f"it sent a malformed message ({error})")

    def _take(self, connection: _Connection, body: bytes) -> None:
        """Process one frame of a peer. Raises WireError if it is malformed."""
        if not connection.proved:
            self._prove(connection, messages.AUTH.parse(body))
            return
        message = TO_COORDINATOR.parse(body)
        if isinstance(message, relayed.Relay):
            if connection.relay is not None or connection.number in self.coordinator.roster.sessions:
                raise messages.WireError("a member, or a relay behind a relay, must not be a relay")
            connection.carries = _Relay(connection)
            return
        if isinstance(message, to_coordinator.Heartbeat) and self._record(connection, message, time.monotonic()):
            self._send((connection.number,), to_member.Beat(message.number))
            return
        received = Received(connection.number, message)
        if not isinstance(message, to_coordinator.Ended) or not self._read_first(message.worker, received):
            self._handle(received)
        if isinstance(message, to_coordinator.Bye) and connection.relay is not None:
            self._end(connection, True, "it has left")  # the worker waits for this, since its relay may fail

    def _read_first(self, number: WorkerId, received: Received) -> bool:
        """Read all messages from a worker whose end its launcher reports, because the report may close the session.

        The worker may have reported why the run must end (``give_up``), or a finished step. Worker and launcher are on
        one host, so the worker's messages have arrived on that host, but the connections are read in any order. Return
        True if a relay must read them first; it then handles ``received``.
        """
        worker = self.coordinator.roster.workers.get(number)
        for _ in range(_MOST_READS):
            connection = self._connections.get(worker.session) if worker and worker.session is not None else None
            if connection is None:
                return False
            if (relay := connection.relay) is not None:
                relay.reading.setdefault(connection.channel, []).append(received)
                relay.line.gather(messages.encode(relayed.Read(connection.channel)))
                self._loop.call_later(READ_SECONDS, self._was_read, relay, connection.channel)
                return True
            try:
                if not connection.line.sock.recv(1, socket.MSG_PEEK):
                    return False  # end of file: the launcher's report has more information
            except OSError:  # no more data has arrived, or the connection has failed
                return False
            self._read(connection)
        return False

    def _record(self, connection: _Connection, beat: to_coordinator.Heartbeat, now: float) -> bool:
        """Record a heartbeat; return True if it must be answered now, False if the coordinator must ``handle`` it."""
        return not self._loop.errors and self.coordinator.heartbeat(connection.number, beat, now)

    def _was_read(self, relay: _Relay, channel: int) -> None:
        for received in relay.reading.pop(channel, []):
            self._handle(received)

    def _take_from_relay(self, connection: _Connection, relay: _Relay, body: bytes) -> None:
        """Process one frame from a relay: its own message, or the frame of a channel. Raises WireError."""
        if relay.source is not None:
            source, relay.source = relay.channels.get(relay.source), None
            if source is not None:  # else this process has closed the channel
                self._take_from(source, body)
            return
        match FROM_RELAY.parse(body):
            case relayed.From(channel):
                relay.source = channel
            case relayed.Beats(beats):
                now, answers = time.monotonic(), []
                for channel, beat in beats:
                    if (source := relay.channels.get(channel)) is not None and source.proved:
                        if self._record(source, beat, now):
                            answers.append((channel, beat.number))
                        else:
                            self._handle(Received(source.number, beat), now)
                if answers:
                    relay.line.send(messages.encode(relayed.Answers(answers)))
                    self._check_backlog(connection)
            case relayed.Opened(channel):
                if channel in relay.channels or len(relay.channels) >= relayed.MOST_CHANNELS:
                    raise messages.WireError(f"channel {channel} cannot be opened")
                relay.channels[channel] = self._begin(f"{connection.peer} (relay)", connection.line, relay, channel)
            case relayed.Closed(channel, ended, reason):
                self._was_read(relay, channel)
                if (source := relay.channels.pop(channel, None)) is not None:
                    self._drop(source)
                    self._handle(Closed(source.number, ended, reason))
            case relayed.WasRead(channel):
                self._was_read(relay, channel)

    def _take_from(self, source: _Connection, body: bytes) -> None:
        try:
            if not source.proved and len(body) > messages.MAX_HANDSHAKE:
                raise messages.WireError(f"a message of {len(body)} bytes before the proof of the secret")
            self._take(source, body)
        except messages.WireError as error:
            self._malformed(source, error)

    def _lost(self, connection: _Connection, error: OSError | None) -> None:
        """Close a connection that the other side or the network has ended, and report the end to the coordinator."""
        if not connection.proved:
            self._log_limited("unproved_closed", peer=connection.peer)
        ended = error is None or error.errno in (errno.ECONNRESET, errno.EPIPE)
        reason = "its connection was closed" if error is None else f"its connection failed: {error.strerror}"
        self._end(connection, ended, reason)

    def _end(self, connection: _Connection, ended: bool, reason: str) -> None:
        """Close a connection, and report its end to the coordinator.

        A relay's workers have copies of its connection (``io.through_relay``). So its kernel closes that only when they
        have ended, too. After another end of the connection they connect directly; until then they count as silent.
        """
        self._drop(connection)
        if (relay := connection.carries) is None:
            self._handle(Closed(connection.number, ended, reason))
            return
        if self.coordinator.state is not State.STOPPED:
            self._log({"event": "relay_lost", "peer": connection.peer, "reason": reason})
        for channel in list(relay.reading):
            self._was_read(relay, channel)
        for carried in relay.channels.values():
            carried.relay = None
            if ended or carried.number not in self.coordinator.roster.sessions:
                self._drop(carried)
                self._handle(Closed(carried.number, ended, reason))

    # -- writing ------------------------------------------------------------------------------------------------------

    def _send(self, sessions: tuple[int, ...], message: to_member.ToMember) -> None:
        frame, by_relay = b"", dict[_Relay, list[int]]()
        for session in sessions:
            connection = self._connections.get(session)
            if connection is None or connection.closing:
                continue
            frame = frame or messages.encode(message)
            if (relay := connection.relay) is None:
                if connection.line.queued and isinstance(message, to_member.View):
                    continue  # an observer that has not read its last view gets no new one
                connection.line.send(frame)
                self._check_backlog(connection)
            else:
                by_relay.setdefault(relay, []).append(connection.channel)
        for relay, channels in by_relay.items():
            relay.line.gather(messages.encode(relayed.To(channels)), frame)
            self._check_backlog(relay.connection)

    def _check_backlog(self, connection: _Connection) -> None:
        if connection.line.queued > MAX_BACKLOG and not connection.closing:
            connection.closing = True
            self._loop.call_soon(self._end, connection, False, "it does not read its messages")

    # -- closing ------------------------------------------------------------------------------------------------------

    def _finish(self, connection: _Connection) -> None:
        """Close a connection after its queue has been sent, or after ``DRAIN_SECONDS``."""
        if connection.relay is not None or not connection.line.queued:
            self._drop(connection)
            return
        connection.closing = True
        connection.timer.cancel()
        connection.timer = self._loop.call_later(DRAIN_SECONDS, self._drop, connection)
        connection.line.when_sent = partial(self._drop, connection)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._unproved.pop(connection.number, None)
        connection.timer.cancel()
        if connection.relay is None:
            connection.line.close()
        elif connection.relay.channels.pop(connection.channel, None) is not None:
            connection.line.gather(messages.encode(relayed.Close(connection.channel)))

    def _drain(self) -> None:
        """Send the queues of all connections, then close them."""
        assert self.coordinator.state is State.STOPPED
        until = time.monotonic() + DRAIN_SECONDS
        for connection in list(self._connections.values()):
            self._finish(connection)
        while self._connections and (left := until - time.monotonic()) > 0:
            self._loop.run_once(left)
