"""The coordinator's I/O: one thread, one event loop, non-blocking sockets, and the event log.

The state machine ``Coordinator`` makes all decisions; no decision depends on the log.

A connection goes through

    CHALLENGED (nonce sent, waits for the proof) -> PROVED (own proof sent) -> messages for the state machine

and has ``HANDSHAKE_SECONDS`` for the first step, however slowly its data arrives. If more than ``2 * world + 1024``
connections have not proved the secret, the oldest of them is closed, so that silent connections keep no worker out.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import sys
import time
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from recover_megatron.log_writer import LogWriter, open_to_append
from recover_megatron.logger import get_logger
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
from recover_megatron.membership.io.lease import Lease
from recover_megatron.membership.io.testimony import WitnessThread
from recover_megatron.membership.messages import to_coordinator, to_member
from recover_megatron.membership.records import Json, WorkerId
from recover_megatron.membership.wire import TO_COORDINATOR, Secret
from recover_megatron.network import messages
from recover_megatron.network.connection import nonce
from recover_megatron.network.event_loop import EventLoop
from recover_megatron.network.system import all_delivered, unacknowledged, use_all_descriptors

log = get_logger(__name__)

EventSink = Callable[[Mapping[str, Json]], None]

HANDSHAKE_SECONDS = 5.0
DRAIN_SECONDS = 2.0
"""Seconds that a closing connection has to send its queue."""
MAX_BACKLOG = 128 << 20
"""Maximum bytes queued for one member. If a member reads so slowly that more are queued, its connection is closed."""
_MOST_READS = 64
MOST_IN_A_PERIOD, PERIOD_SECONDS = 10, 10.0
"""Limit for events that unauthenticated peers cause: at most ``MOST_IN_A_PERIOD`` events of each kind are logged in
``PERIOD_SECONDS``. Further events are only counted, and their number is logged after the period."""


class _Connection:
    timer: TimerHandle
    """Limit for the proof of the secret; when the connection is closing, for its queue."""

    def __init__(self, number: int, sock: socket.socket, peer: str) -> None:
        self.number = number
        self.sock = sock
        self.descriptor = sock.fileno()  # given a socket, ``selectors`` formats it in vain at each look-up that fails
        self.peer = peer
        self.nonce = nonce()
        self.proved = False
        self.closing = False
        self.decoder = messages.Decoder()
        self.out: deque[memoryview] = deque()
        self.queued = 0


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
        self._strangers: dict[str, tuple[float, int]] = {}
        """Kind of event that unauthenticated peers cause -> start of its period, and number of events in the period."""
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
                    if (connection := self._connections.get(session)) is not None:
                        delivered = not connection.out and all_delivered(connection.sock)
                        self._handle(Acknowledged(session, unacknowledged(connection.sock), delivered))
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
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._unproved:
                    self._reject(next(iter(self._unproved.values())), "too many open files")
                    continue
                self._log_limited("accept_failed", reason=str(error))
                # Else waiting connections would wake this loop all the time. The next tick adds the listener again.
                self._loop.remove_reader(self._listener)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._numbers += 1
            connection = _Connection(self._numbers, sock, f"{address[0]}:{address[1]}")
            self._connections[connection.number] = connection
            self._unproved[connection.number] = connection
            late = f"no proof of the secret within {HANDSHAKE_SECONDS:.0f} s"
            connection.timer = self._loop.call_later(HANDSHAKE_SECONDS, self._reject, connection, late)
            self._loop.add_reader(connection.descriptor, self._read, connection)
            self._write(connection, messages.encode(messages.Challenge(messages.PROTOCOL_VERSION, connection.nonce)))
            if len(self._unproved) > self._max_unproved:
                self._reject(next(iter(self._unproved.values())), "too many connections without proof")

    def _reject(self, connection: _Connection, reason: str) -> None:
        self._log_limited("rejected", peer=connection.peer, reason=reason)
        self._drop(connection)

    def _log_limited(self, kind: str, **record: Json) -> None:
        """Log an event that any peer can cause, at a limited rate: floods of connections must not fill the disk."""
        now = time.monotonic()
        start, count = self._strangers.get(kind, (now, 0))
        if now - start > PERIOD_SECONDS:
            if count > MOST_IN_A_PERIOD:
                self._log({"event": kind, "suppressed": count - MOST_IN_A_PERIOD})
            start, count = now, 0
        self._strangers[kind] = (start, count + 1)
        if count < MOST_IN_A_PERIOD:
            self._log({"event": kind, **record})

    def _prove(self, connection: _Connection, message: messages.Auth) -> None:
        proof = self._secret.accept(connection.nonce, message)
        if proof is None:
            self._reject(connection, "does not know the job's secret")
            return
        connection.proved = True
        connection.timer.cancel()
        del self._unproved[connection.number]
        self._write(connection, messages.encode(proof))

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(connection, error)
            return
        if not data:
            self._lost(connection, None)
            return
        if connection.closing:
            return
        connection.decoder.feed(data)
        try:
            while connection.number in self._connections and not connection.closing:
                if not connection.proved:
                    if (auth := connection.decoder.message(messages.AUTH)) is None:
                        return
                    self._prove(connection, auth)
                    continue
                if (message := connection.decoder.message(TO_COORDINATOR)) is None:
                    return
                if isinstance(message, to_coordinator.Ended):
                    self._read_rest(message.worker)
                self._handle(Received(connection.number, message))
        except messages.WireError as error:
            self._reject(connection, f"malformed: {error}")
            self._handle(Closed(connection.number, False, f"it sent a malformed message ({error})"))

    def _read_rest(self, number: WorkerId) -> None:
        """Read all messages from a worker whose end its launcher reports, because the report may close the session.

        The worker may have reported why the run must end (``give_up``), or a finished step. Worker and launcher are on
        one host, so the worker's messages have arrived, but the two connections are read in any order.
        """
        worker = self.coordinator.roster.workers.get(number)
        for _ in range(_MOST_READS):
            connection = self._connections.get(worker.session) if worker and worker.session is not None else None
            if connection is None:
                return
            try:
                if not connection.sock.recv(1, socket.MSG_PEEK):
                    return  # end of file: the launcher's report has more information
            except OSError:  # no more data has arrived, or the connection has failed
                return
            self._read(connection)

    def _lost(self, connection: _Connection, error: OSError | None) -> None:
        """Close a connection that the other side or the network has ended, and report the end to the coordinator."""
        if not connection.proved:
            self._log_limited("unproved_closed", peer=connection.peer)
        self._drop(connection)
        ended = error is None or error.errno in (errno.ECONNRESET, errno.EPIPE)
        reason = "its connection was closed" if error is None else f"its connection failed: {error.strerror}"
        self._handle(Closed(connection.number, ended, reason))

    # -- writing ------------------------------------------------------------------------------------------------------

    def _send(self, sessions: tuple[int, ...], message: to_member.ToMember) -> None:
        frame = messages.encode(message)
        for session in sessions:
            connection = self._connections.get(session)
            if connection is None or connection.closing or (connection.out and isinstance(message, to_member.View)):
                continue  # an observer that has not read its last view gets no new one
            self._write(connection, frame)

    def _write(self, connection: _Connection, frame: bytes) -> None:
        view = memoryview(frame)
        if not connection.out:
            try:
                view = view[connection.sock.send(view) :]
            except BlockingIOError:
                pass  # the code below queues the frame
            except OSError:
                return  # the next read reports the reason: end of file or reset
        if view:
            connection.out.append(view)
            connection.queued += len(view)
            if connection.queued > MAX_BACKLOG:
                self._drop(connection)
                self.post(Closed(connection.number, False, "it does not read its messages"))
            elif len(connection.out) == 1:
                self._loop.add_writer(connection.descriptor, self._flush, connection)

    def _flush(self, connection: _Connection) -> None:
        while connection.out:
            try:
                sent = connection.sock.send(connection.out[0])
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(connection, error)
                return
            connection.queued -= sent
            if sent < len(connection.out[0]):
                connection.out[0] = connection.out[0][sent:]
                return
            connection.out.popleft()
        self._loop.remove_writer(connection.descriptor)
        if connection.closing:
            self._drop(connection)

    # -- closing ------------------------------------------------------------------------------------------------------

    def _finish(self, connection: _Connection) -> None:
        """Close a connection after its queue has been sent, or after ``DRAIN_SECONDS``."""
        connection.closing = True
        connection.timer.cancel()
        connection.timer = self._loop.call_later(DRAIN_SECONDS, self._drop, connection)
        if not connection.out:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is not None:
            self._unproved.pop(connection.number, None)
            connection.timer.cancel()
            self._loop.remove_reader(connection.descriptor)
            self._loop.remove_writer(connection.descriptor)
            connection.sock.close()

    def _drain(self) -> None:
        """Send the queues of all connections, then close them."""
        assert self.coordinator.state is State.STOPPED
        until = time.monotonic() + DRAIN_SECONDS
        for connection in list(self._connections.values()):
            self._finish(connection)
        while self._connections and (left := until - time.monotonic()) > 0:
            self._loop.run_once(left)


class Journal:
    """Event log for people: writes records to a file or stderr, one JSON object a line.

    Adds ``time`` (wall clock) and ``mono`` (monotonic), in seconds. A failing disk neither blocks nor terminates
    the caller (``log_writer``).
    """

    def __init__(self, path: Path | None = None) -> None:
        self._needed: dict[str, bytes] = {}
        """Kind of event -> its last line in the log, for the kinds that readers of the log need to find the run."""
        self._file = LogWriter(
            path or Path("/dev/stderr"),
            lambda text: log.warning(f"coordinator: {text}"),
            open_to_append if path is not None else lambda _: os.dup(sys.stderr.fileno()),
            gap=lambda lines: _line({"event": "dropped", "lines": lines}),
        )

    def __call__(self, record: Mapping[str, Json]) -> None:
        line = _line(record)
        if (event := str(record.get("event"))) in ("listening", "lead", "plan"):
            self._needed[event] = line
            self._file.head = b"".join(self._needed.values())
        self._file.put(line)

    def close(self) -> None:
        """Write the remaining lines, as long as the disk accepts them."""
        self._file.flush()
        self._file.close()


def _line(record: Mapping[str, Json]) -> bytes:
    times = {"time": round(time.time(), 6), "mono": round(time.monotonic(), 6)}
    return (json.dumps({**times, **record}, separators=(",", ":")) + "\n").encode()
