"""Members' I/O: a thread that keeps the connection to the coordinator.

The state machine ``Follower`` makes all decisions.

    Dial -> CONNECTING -> CHALLENGED (waits for the nonce) -> PROVING (proof sent, waits for the answer) -> OPEN

In a large run a worker's connection goes through its node's relay (``io.relay``), after the state RELAYING in place of
CONNECTING. If the relay fails, the worker connects directly, and never again through it.

A socket is closed only after the other side has closed it, or before the member has attached (see ``follower``). An
abandoned socket stays open, and its data is discarded, until the other side closes it.

The kernel reports a process's death to the coordinator only when the last copy of the socket is closed. So a forked
child (a data loader's worker) closes its copy right away, and a fork waits until no socket is being created.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from recover_megatron.membership.events import (
    Abandon,
    Accepted,
    Challenged,
    Connected,
    Dial,
    Hangup,
    Heard,
    Look,
    Lost,
    MemberEffect,
    Notify,
    Say,
    Tick,
)
from recover_megatron.membership.io.observer import leave_directly
from recover_megatron.membership.io.through_relay import RELAY_SECONDS, ThroughRelay
from recover_megatron.membership.messages import fields, relayed, to_coordinator, to_member
from recover_megatron.membership.messages.relayed import ToWorker
from recover_megatron.membership.records import Address, AuthenticationError, MembershipError
from recover_megatron.membership.sides.follower import Follower, Stage
from recover_megatron.membership.wire import MAX_TO_COORDINATOR, TO_MEMBER, Secret
from recover_megatron.network import messages
from recover_megatron.network.connection import proves
from recover_megatron.network.line import LATER
from recover_megatron.network.system import close_in_children

MAX_REJECTIONS = 10
"""The secret is considered wrong after this many refused proofs in a row, if none was ever accepted."""
MAX_SLEEP = 60.0
BYE_SECONDS = 10.0
"""Longest wait of a member that leaves until its last messages have arrived."""
_STAGES: dict[str, messages.Schema[Any]] = {
    "relaying": messages.Schema(ToWorker, messages.MAX_HANDSHAKE),
    "challenged": messages.Schema(messages.Challenge | ToWorker, messages.MAX_HANDSHAKE),
    "proving": messages.Schema(messages.Proof | ToWorker, messages.MAX_HANDSHAKE),
    "open": TO_MEMBER,
}


class Client:
    """Runs the state machine ``core`` over TCP in a daemon thread, from ``start`` on.

    The thread calls ``notify`` with the core's ``Notify`` effects, without holding ``condition``. ``condition`` guards
    the core: hold it to read or call the core, wait on it for a change.
    """

    def __init__(
        self,
        core: Follower,
        addresses: Sequence[Address],
        secret: Secret,
        notify: Callable[[Notify], None],
        relay: str = "",
    ) -> None:
        self.core = core
        self.condition = threading.Condition(threading.RLock())
        self._launched = tuple(addresses)
        self.addresses = list(addresses)
        """Addresses of all known candidates, in the order in which they are tried; hold ``condition``."""
        self._secret = secret
        self._notify = notify
        self._via = ThroughRelay(relay)
        self._address: Address = "", 0  # of the candidate dialed last
        self._sock: socket.socket | None = None
        self._state = ""
        self._expected_proof = ""
        self._decoder = messages.Decoder()
        self._out = bytearray()
        self._abandoned: list[socket.socket] = []
        self._rejections = 0
        self._notices: list[Notify] = []
        self._forked = False
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        close_in_children(self, self.condition)
        self._thread = threading.Thread(target=self._run, name="recover-session", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- for the owner, any thread ------------------------------------------------------------------------------------

    def call(self, method: Callable[..., Sequence[MemberEffect]], *arguments: object) -> None:
        """Call a method of the core, and send the messages that it returns."""
        with self.condition:
            effects = method(*arguments)
            if self._forked:
                raise RuntimeError("this session belongs to the parent process: a forked child cannot use it")
            for effect in effects:
                assert isinstance(effect, Say)
                self._say(effect.message)
            if self._out or self.core.deadline == -math.inf:
                self._wake()

    def give_up(self, reason: MembershipError) -> None:
        """Put the core into stage OUT for the owner's ``reason``, unless it is out or this client is closed."""
        with self.condition:
            if self.core.stage is not Stage.OUT and not self._closed:
                self.core.give_up(reason)
            self._wake()
            self.condition.notify_all()

    def close(self, flush_seconds: float = 2.0) -> None:
        """Send the queue, then stop the thread. The socket stays open until the process exits.

        A member that has left waits until the coordinator has closed its connection through a relay.
        """
        until = time.monotonic() + flush_seconds
        with self.condition:
            self.condition.wait_for(lambda: not self._says_goodbye, BYE_SECONDS)
            while self._out and self._sock is not None and (left := until - time.monotonic()) > 0:
                self.condition.wait(left)
            self._closed = True
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=flush_seconds)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # also after an error in a callback, so that no caller waits for a thread that has ended
            self.give_up(MembershipError("the session's thread has failed; see the error that it printed"))

    def _serve(self) -> None:
        while not self._closed and (self.core.stage is not Stage.OUT or self._out or self._says_goodbye):
            with self.condition:
                timeout = max(0.0, self.core.deadline - time.monotonic())
                timeout = min(timeout, RELAY_SECONDS if self._via.active else MAX_SLEEP)
            ready = self._selector.select(timeout)
            with self.condition:
                for key, mask in ready:
                    self._ready(key.fileobj, mask)
                now = time.monotonic()
                late = now - self.core.deadline > self.core.settings.heartbeat_interval  # this thread has not run
                if now >= self.core.deadline and not self._closed:
                    # This thread may not have run for some time. Read all messages that arrived before ``now``, so
                    # that the tick does not find the coordinator silent by mistake.
                    for key, mask in self._selector.select(0):
                        self._ready(key.fileobj, mask)
                    self._carry_out(self.core.handle(Tick(), now))
                self._check_relay(now, late)
                self.condition.notify_all()
                notices, self._notices = self._notices, []
            for notice in notices:
                self._notify(notice)

    @property
    def _says_goodbye(self) -> bool:
        return self._via.active and self.core.leaving  # the relay may fail before it has passed ``bye`` on

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the thread will wake anyway
            os.write(self._wake_out, b"x")

    def _ready(self, fileobj: Any, mask: int) -> None:
        if fileobj == self._wake_in:
            os.read(self._wake_in, 4096)
            self._watch()
        elif fileobj is not self._sock:
            self._drain(fileobj)
        elif self._state == "connecting":
            self._connected()
        else:
            if mask & selectors.EVENT_WRITE:
                self._flush()
            if mask & selectors.EVENT_READ:
                self._read()

    def _handle(self, event: Accepted | Challenged | Connected | Lost | Heard) -> None:
        self._carry_out(self.core.handle(event, time.monotonic()))

    def _carry_out(self, effects: Sequence[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case Say(message):
                    self._say(message)
                case Dial(candidate):
                    self._drop()
                    self._dial(candidate)
                case Abandon(reason):
                    self._abandon(reason)
                case Hangup():
                    self._drop()
                case Look(added):
                    self.addresses[len(self._launched) :] = added
                case Notify():
                    self._notices.append(effect)

    # -- connecting ---------------------------------------------------------------------------------------------------

    def _dial(self, candidate: int) -> None:
        host, port = self._address = self.addresses[candidate]
        self._out.clear()
        if self._dial_relay():
            return
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            self._handle(Lost(f"{host}:{port}: {error.strerror}"))
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._state = sock, "connecting"
        self._selector.register(sock, selectors.EVENT_WRITE)
        try:
            sock.connect(address)
        except BlockingIOError:
            pass  # the selector reports when it is connected
        except OSError as error:
            self._fail(f"{host}:{port}: {error.strerror}", refused=error.errno == errno.ECONNREFUSED)

    def _dial_relay(self) -> bool:
        """Let the relay dial a candidate. Return False, for good, if there is no relay."""
        sock = self._via.connect()
        if sock is None:
            return False
        self._sock, self._state = sock, "relaying"
        self._decoder = messages.Decoder()
        self._selector.register(sock, selectors.EVENT_READ)
        self._say(relayed.Dial(self._address))
        return True

    def _check_relay(self, now: float, late: bool) -> None:
        limit = self.core.settings.heartbeat_timeout / 2 if self._state == "open" else 0.0
        if self._via.is_silent(now, limit, late=late):
            self._leave_relay("the relay of this node is silent")

    def _leave_relay(self, reason: str) -> None:
        """Dial the same candidate directly, or repeat the ``bye``. The coordinator closes the old connection then."""
        self._via.name = ""
        self._set_aside()
        if self.core.leaving:
            leave_directly(self._address, self._secret, self.core.farewell())
        else:
            self._handle(Lost(reason, again=True))

    def _connected(self) -> None:
        assert self._sock is not None
        if error := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._fail(os.strerror(error), refused=error == errno.ECONNREFUSED)
            return
        self._decoder = messages.Decoder()
        self._accepted()
        self._watch()

    def _accepted(self) -> None:
        self._state = "challenged"
        self._handle(Accepted())

    def _challenged(self, message: messages.Challenge) -> None:
        if message.version != messages.PROTOCOL_VERSION:
            self._fail(f"the coordinator has protocol version {message.version}, not {messages.PROTOCOL_VERSION}")
            return
        auth, self._expected_proof = self._secret.answer(message)
        self._state = "proving"
        self._handle(Challenged())
        self._say(auth)

    def _proved(self, message: messages.Proof) -> None:
        if not proves(message.mac, self._expected_proof):
            self._fail("the coordinator does not know the job's secret")
            return
        self._state, self._rejections = "open", -(1 << 30)
        self.core.in_step = self._via.active
        self._handle(Connected())

    def _fail(self, reason: str, *, refused: bool = False) -> None:
        """Drop a connection that the other side has closed or that could not be established."""
        if self._state == "proving":
            self._rejections += 1
            reason = f"{reason} (during the proof of the secret: do all processes use the same secret?)"
        self._drop()
        if self._rejections >= MAX_REJECTIONS:
            self._carry_out(self.core.give_up(AuthenticationError(f"the coordinator refuses this process: {reason}")))
        else:
            self._handle(Lost(reason, refused))

    # -- the socket ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        sock = self._sock
        assert sock is not None
        try:
            data = self._via.receive(sock, 1 << 18, self._address) if self._via.active else sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            if self._via.active:
                self._leave_relay(f"the connection to the relay of this node failed: {error.strerror}")
            else:
                self._fail(f"the connection to the coordinator failed: {error.strerror}")
            return
        if not data and self._via.active:
            self._leave_relay("the relay of this node has ended")
            return
        if not data:
            self._fail("the coordinator closed the connection")
            return
        self._decoder.feed(data)
        try:
            while self._sock is sock and self._take_message():
                pass
        except messages.WireError as error:
            if self._state == "open":
                self._abandon(f"malformed message: {error}")
                self._handle(Lost(f"the coordinator sent a malformed message: {error}"))
            else:
                self._fail(f"not a coordinator: {error}")

    def _take_message(self) -> bool:
        """Process the next message. Return False if it is not complete yet."""
        match self._decoder.message(_STAGES[self._state]):
            case None:
                return False
            case relayed.Relaying(reached):
                if reached and self._state == "relaying" and not self._via.has_copy:
                    self._leave_relay("this process has no descriptor left for the relay's connection")
                elif reached and self._state == "relaying":
                    self._accepted()
            case relayed.Unreached(reason, refused):
                self._fail(reason, refused=refused)
            case messages.Challenge() as challenge:
                self._challenged(challenge)
            case messages.Proof() as proof:
                self._proved(proof)
            case to_member.Candidates() as message:  # leave out those that this process has known since its start
                added = [address for address in message.added if address not in self._launched]
                self._handle(Heard(replace(message, added=added)))
            case message:
                if not self._via.active:  # the coordinator uses this connection in place of the relay's
                    self._via.release(self._address)
                self._handle(Heard(message))
        return True

    def _say(self, message: fields.Message) -> None:
        if self._sock is not None:
            self._out += messages.encode(message, MAX_TO_COORDINATOR)
            self._flush()

    def _flush(self) -> None:
        if self._sock is None:
            return
        try:
            sent = self._sock.send(self._out)
            del self._out[:sent]
        except OSError as error:
            if error.errno not in LATER:  # else the selector reports when the socket is writable
                self._out.clear()  # the next read of the socket reports the error
        if threading.current_thread() is self._thread:
            self._watch()

    def _watch(self) -> None:
        if self._sock is not None and self._state != "connecting":
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
            self._selector.modify(self._sock, mask)

    def _abandon(self, reason: str) -> None:
        if self._sock is None:
            return
        self._say(to_coordinator.Abandon(reason[:2000]))
        with contextlib.suppress(OSError, messages.WireError):
            while self._state == "open" and (data := self._sock.recv(1 << 18)):
                self._decoder.feed(data)
                while (message := self._decoder.message(TO_MEMBER)) is not None:
                    if not isinstance(message, ToWorker):
                        self.core.late_message(message)
        self._set_aside()

    def _set_aside(self) -> None:
        """Leave the connection open, and discard its data, until the other side closes it."""
        if self._sock is not None:
            self._selector.modify(self._sock, selectors.EVENT_READ)
            self._abandoned.append(self._sock)
            self._sock, self._via.active = None, False

    def _drain(self, sock: socket.socket) -> None:
        """Discard data from an abandoned coordinator. Close the socket if the coordinator has closed it."""
        try:
            if sock.recv(1 << 18):
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # a reset by the other side counts like an end of file
        self._selector.unregister(sock)
        self._abandoned.remove(sock)
        sock.close()

    def _drop(self) -> None:
        if self._sock is not None:
            self._selector.unregister(self._sock)
            self._sock.close()
            if self._via.active:
                self._via.release(self._address)
            self._sock, self._via.active = None, False

    # -- fork ---------------------------------------------------------------------------------------------------------

    def close_in_child(self) -> None:
        self._forked = True
        self.condition = threading.Condition(threading.RLock())
        for sock in [*self._abandoned, *([self._sock] if self._sock else [])]:
            sock.close()  # a shutdown would affect the parent's connection
        self._selector.close()
        self._via.close_in_child()
        os.close(self._wake_in)
        os.close(self._wake_out)
