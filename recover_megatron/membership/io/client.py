"""Members' I/O: a thread that keeps the connection to the coordinator; and a blocking client for observers.

The state machine ``Follower`` makes all decisions.

    Dial -> CONNECTING -> CHALLENGED (waits for the nonce) -> PROVING (proof sent, waits for the answer) -> OPEN

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
from recover_megatron.membership.messages import fields, to_coordinator, to_member
from recover_megatron.membership.records import AuthenticationError, MembershipError
from recover_megatron.membership.sides.follower import Follower, Stage
from recover_megatron.membership.wire import MAX_TO_COORDINATOR, TO_MEMBER, Secret
from recover_megatron.network import messages
from recover_megatron.network.connection import proves
from recover_megatron.network.system import close_in_children

Address = tuple[str, int]
MAX_REJECTIONS = 10
"""The secret is considered wrong after this many refused proofs in a row, if none was ever accepted."""
MAX_SLEEP = 60.0


class Client:
    """Runs the state machine ``core`` over TCP in a daemon thread, from ``start`` on.

    The thread calls ``notify`` with the core's ``Notify`` effects, without holding ``condition``. ``condition`` guards
    the core: hold it to read or call the core, wait on it for a change.
    """

    def __init__(
        self, core: Follower, addresses: Sequence[Address], secret: Secret, notify: Callable[[Notify], None]
    ) -> None:
        self.core = core
        self.condition = threading.Condition(threading.RLock())
        self._launched = tuple(addresses)
        self.addresses = list(addresses)
        """Addresses of all known candidates, in the order in which they are tried; hold ``condition``."""
        self._secret = secret
        self._notify = notify
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
        """Send the queue, then stop the thread. The socket stays open until the process exits."""
        until = time.monotonic() + flush_seconds
        with self.condition:
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
        while not self._closed and (self.core.stage is not Stage.OUT or self._out):
            with self.condition:
                timeout = min(max(0.0, self.core.deadline - time.monotonic()), MAX_SLEEP)
            ready = self._selector.select(timeout)
            with self.condition:
                for key, mask in ready:
                    self._ready(key.fileobj, mask)
                now = time.monotonic()
                if now >= self.core.deadline and not self._closed:
                    # This thread may not have run for some time. Read all messages that arrived before ``now``, so
                    # that the tick does not find the coordinator silent by mistake.
                    for key, mask in self._selector.select(0):
                        self._ready(key.fileobj, mask)
                    self._carry_out(self.core.handle(Tick(), now))
                self.condition.notify_all()
                notices, self._notices = self._notices, []
            for notice in notices:
                self._notify(notice)

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

    def _handle(self, event: Accepted | Connected | Lost | Heard) -> None:
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
        host, port = self.addresses[candidate]
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            self._handle(Lost(f"{host}:{port}: {error.strerror}"))
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._state = sock, "connecting"
        self._out.clear()
        self._selector.register(sock, selectors.EVENT_WRITE)
        try:
            sock.connect(address)
        except BlockingIOError:
            pass  # the selector reports when it is connected
        except OSError as error:
            self._fail(f"{host}:{port}: {error.strerror}", refused=error.errno == errno.ECONNREFUSED)

    def _connected(self) -> None:
        assert self._sock is not None
        if error := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._fail(os.strerror(error), refused=error == errno.ECONNREFUSED)
            return
        self._state = "challenged"
        self._handle(Accepted())
        self._decoder = messages.Decoder()
        self._watch()

    def _challenged(self, message: messages.Challenge) -> None:
        if message.version != messages.PROTOCOL_VERSION:
            self._fail(f"the coordinator has protocol version {message.version}, not {messages.PROTOCOL_VERSION}")
            return
        auth, self._expected_proof = self._secret.answer(message)
        self._state = "proving"
        self._say(auth)

    def _proved(self, message: messages.Proof) -> None:
        if not proves(message.mac, self._expected_proof):
            self._fail("the coordinator does not know the job's secret")
            return
        self._state, self._rejections = "open", -(1 << 30)
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
            data = sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(f"the connection to the coordinator failed: {error.strerror}")
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
        decoder = self._decoder
        if self._state == "open" and (message := decoder.message(TO_MEMBER)) is not None:
            if isinstance(message, to_member.Candidates):  # leave out those that this process has known since its start
                added = [address for address in message.added if address not in self._launched]
                message = replace(message, added=added)
            self._handle(Heard(message))
        elif self._state == "challenged" and (challenge := decoder.message(messages.CHALLENGE)) is not None:
            self._challenged(challenge)
        elif self._state == "proving" and (proof := decoder.message(messages.PROOF)) is not None:
            self._proved(proof)
        else:
            return False
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
        except BlockingIOError:
            pass  # the selector reports when the socket is writable
        except OSError:
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
                    self.core.late_message(message)
        self._selector.modify(self._sock, selectors.EVENT_READ)
        self._abandoned.append(self._sock)
        self._sock = None

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
            self._sock = None

    # -- fork ---------------------------------------------------------------------------------------------------------

    def close_in_child(self) -> None:
        self._forked = True
        self.condition = threading.Condition(threading.RLock())
        for sock in [*self._abandoned, *([self._sock] if self._sock else [])]:
            sock.close()  # a shutdown would affect the parent's connection
        self._selector.close()
        os.close(self._wake_in)
        os.close(self._wake_out)


ANSWER_SECONDS = 10.0
"""Default time limit for a candidate's answer to an observer."""


class NoAnswer(MembershipError):
    """The candidate does not run, or does not answer like a coordinator; the message says which."""


class OtherVersion(NoAnswer):
    """A coordinator answers, but has another version of the protocol."""


class Observer:
    """Connection to the candidate at ``address``. All calls block, for at most ``timeout`` seconds each.

    Raises ``NoAnswer``, and ``AuthenticationError`` if the secret is not the run's secret.
    """

    def __init__(self, address: Address, secret: Secret, timeout: float = ANSWER_SECONDS) -> None:
        self.name = f"{address[0]}:{address[1]}"
        self._timeout = timeout
        self._decoder = messages.Decoder()
        try:
            self._sock = socket.create_connection(address, timeout)
        except OSError as error:
            raise NoAnswer(f"{self.name}: {error.strerror or error}") from error
        try:
            self._shake_hands(secret)
        except BaseException:
            self.close()
            raise

    def ask(self, drain: str | None = None) -> to_member.View | to_member.Stop:
        """Return the answer; ``Stop`` if the run has ended (or ends on this side of a partition).

        ``drain``: also request a drain of the node or host of that name; a candidate that does not lead ignores it.
        """
        self._send(to_coordinator.Observe() if drain is None else to_coordinator.Drain(drain))
        message = self._hear(TO_MEMBER)
        if isinstance(message, to_member.Refused):
            raise NoAnswer(f"{self.name}: {message.reason}")
        if not isinstance(message, to_member.View | to_member.Stop):
            raise NoAnswer(f"{self.name} sent an unexpected {message.kind!r}")
        return message

    def close(self) -> None:
        """Close the connection. This has no effect on the run."""
        self._sock.close()

    def _shake_hands(self, secret: Secret) -> None:
        challenge = self._hear(messages.CHALLENGE)
        if challenge.version != messages.PROTOCOL_VERSION:
            text = f"{self.name} has protocol version {challenge.version}, this program {messages.PROTOCOL_VERSION}"
            raise OtherVersion(f"{text}: use the recover-status that belongs to the run")
        auth, expected = secret.answer(challenge)
        self._send(auth)
        try:
            proof = self._hear(messages.PROOF)
        except NoAnswer as error:
            if "closed the connection" not in str(error):
                raise
            raise AuthenticationError(f"{self.name} rejects the secret: it is not the secret of this run") from error
        if not proves(proof.mac, expected):
            raise AuthenticationError(f"{self.name} does not know the secret: it is not a coordinator of this run")

    def _send(self, message: fields.Message) -> None:
        try:
            self._sock.settimeout(self._timeout)
            self._sock.sendall(messages.encode(message, messages.MAX_HANDSHAKE))
        except OSError as error:
            # Messages that the candidate sent before it closed must still be read: one may be ``stop``.
            if not isinstance(error, ConnectionError):
                raise NoAnswer(f"{self.name}: {error.strerror or error}") from error

    def _hear[T](self, schema: messages.Schema[T]) -> T:
        until = time.monotonic() + self._timeout
        try:
            while (message := self._decoder.message(schema)) is None:
                self._sock.settimeout(max(0.001, until - time.monotonic()))
                data = self._sock.recv(1 << 18)
                if not data:
                    raise NoAnswer(f"{self.name} closed the connection")
                self._decoder.feed(data)
        except TimeoutError as error:
            raise NoAnswer(f"{self.name} did not answer within {self._timeout:.0f} s") from error
        except ConnectionError as error:
            raise NoAnswer(f"{self.name} closed the connection ({error.strerror})") from error
        except messages.WireError as error:
            raise NoAnswer(f"{self.name} is not a coordinator: {error}") from error
        except OSError as error:
            raise NoAnswer(f"{self.name}: {error.strerror or error}") from error
        return message
