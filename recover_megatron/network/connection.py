"""Blocking connection to another worker's ``PeerStoreServer``: framed, mutually authenticated, with bounded waits.

A frame is a 4-byte big-endian length and a JSON object in UTF-8. No incoming data is trusted: the length is checked
before a byte of the body is kept, and a body is parsed only when it is complete. An error is a ``WireError``, and it
costs only the connection that it came from.

Proof of the job's secret: a mutual HMAC-SHA256 challenge with fresh nonces on both sides.

    server -> client   its nonce
    client -> server   its nonce, and the proof of the client's role for both nonces
    server -> client   the proof of the server's role for both nonces

The role in the text prevents a proof from being reflected, the purpose prevents its use in another protocol of the run.
Before it has the other side's proof, a server does nothing for a connection, and a client uses nothing from it. The
secret itself is never sent. Later traffic is neither encrypted nor signed (docs/security.md).

An address of a worker is text: "host port".
"""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from recover_megatron.network.system import is_silent, watch

if TYPE_CHECKING:
    import asyncio


_HEADER = struct.Struct(">I")


class WireError(Exception):
    """The other side sent data that is not a message of this protocol."""


def encode(message: Mapping[str, Any], limit: int) -> bytes:
    """Return the frame of one message. Raises ``ValueError`` if it is not JSON or longer than ``limit`` bytes."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > limit:
        raise ValueError(f"message {message.get('type')!r} has {len(body)} bytes, more than the limit of {limit}")
    return _HEADER.pack(len(body)) + body


def _no_constant(name: str) -> NoReturn:
    raise WireError(f"{name} is not JSON")


def parse(body: bytes) -> dict[str, Any]:
    """Return the object of a frame. Raises ``WireError`` for anything else."""
    try:
        message = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {type(error).__name__}") from error
    if type(message) is not dict:
        raise WireError("not a JSON object")
    return message


def _length(header: bytes | bytearray, limit: int) -> int:
    (length,) = _HEADER.unpack_from(header)
    if length > limit:
        raise WireError(f"a message of {length} bytes is longer than the limit of {limit}")
    return int(length)


class Decoder:
    """Splits a byte stream into frames.

    ``limit`` (bytes of a body) may be changed between frames: it applies to frames whose length has not been read yet.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """Return the body of the next complete frame, None if there is none yet. A ``WireError`` ends the stream."""
        if len(self._buffer) < _HEADER.size:
            return None
        end = _HEADER.size + _length(self._buffer, self.limit)
        if len(self._buffer) < end:
            return None
        return self._cut(end)[_HEADER.size :]

    def take(self, size: int) -> bytes | None:
        """Return the next ``size`` raw bytes, announced by a frame; None if not all have arrived."""
        return self._cut(size) if len(self._buffer) >= size else None

    def _cut(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


async def read(reader: asyncio.StreamReader, limit: int) -> dict[str, Any] | None:
    """Return the next message of a stream, None at its end. Raises ``WireError``; ``limit``: bytes of its body."""
    try:
        header = await reader.readexactly(_HEADER.size)
        return parse(await reader.readexactly(_length(header, limit)))
    except EOFError:  # asyncio.IncompleteReadError
        return None


def nonce() -> str:
    return secrets.token_hex(32)


def mac(secret: bytes, *parts: str) -> bytes:
    """Return the proof (32 bytes) of knowing ``secret`` for ``parts``: purpose, role, then the agreed values."""
    return hmac.digest(secret, "|".join(parts).encode(), "sha256")


def proves(received: object, expected: str | bytes) -> bool:
    """Return whether ``received`` (any value) is the proof ``expected``, compared in constant time."""
    if isinstance(received, str) and isinstance(expected, str):
        return hmac.compare_digest(received.encode(errors="replace"), expected.encode())
    if isinstance(received, bytes) and isinstance(expected, bytes):
        return hmac.compare_digest(received, expected)
    return False


@dataclass(frozen=True)
class Challenge:
    """Challenge of the peer stores; in messages, proofs are hex."""

    secret: bytes = field(repr=False)

    def of_client(self, server_nonce: str, client_nonce: str) -> str:
        """Return a client's answer to a server's nonce."""
        return mac(self.secret, "peer-store", "client", server_nonce, client_nonce).hex()

    def of_server(self, server_nonce: str, client_nonce: str) -> str:
        """Return the server's answer to a client's nonce."""
        return mac(self.secret, "peer-store", "server", server_nonce, client_nonce).hex()


def family_of(host: str) -> socket.AddressFamily:
    """Return IPv6 for an address with colons, and for a name that has only IPv6 addresses; else IPv4."""
    if ":" in host:
        return socket.AF_INET6
    try:
        found = {family for family, *_ in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return socket.AF_INET  # using the host raises the error in the caller
    return socket.AF_INET6 if found == {socket.AF_INET6} else socket.AF_INET


def listen(host: str, backlog: int) -> tuple[socket.socket, str]:
    """Return a listener at a free port of ``host`` (this machine's reachable address), and its address as text."""
    listener = socket.create_server((host, 0), family=family_of(host), backlog=backlog)
    return listener, f"{host} {listener.getsockname()[1]}"


def connect(address: str, timeout: float) -> socket.socket:
    """Return a connection with TCP_NODELAY, watched for silence. Raises OSError; ValueError for a bad address."""
    host, port = address.split(" ")
    sock = socket.create_connection((host, int(port)), timeout=timeout)
    watch(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


HANDSHAKE_SECONDS = 5.0
LONGEST_MESSAGE = 1 << 20
POLL_SECONDS = 0.25
"""Seconds without data after which ``patience`` is called."""

_PATH_ERRORS = {
    errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES, errno.EPERM,
}  # fmt: skip


def is_path_error(error: OSError | None) -> bool:
    """Return whether the error of an established connection concerns the network path, not the other process."""
    return error is not None and (isinstance(error, TimeoutError) or error.errno in _PATH_ERRORS)


class Unreachable(ConnectionError):
    """No process that knows the secret answers. ``unreachable``: the network path failed, not the peer."""

    def __init__(self, text: str, *, unreachable: bool = False) -> None:
        super().__init__(text)
        self.unreachable = unreachable


class Connection:
    """Connection to ``address``, authenticated on both sides by the constructor. All methods raise ``Unreachable``.

    ``patience``: called whenever nothing has arrived for ``POLL_SECONDS``; it raises to end the wait (a stopped process
    answers nothing and closes nothing); None: wait for as long as the connection lasts.
    """

    def __init__(self, address: str, challenge: Challenge, patience: Callable[[], None] | None = None) -> None:
        self._decoder = Decoder(LONGEST_MESSAGE)
        self._patience = patience
        try:
            self._socket = connect(address, HANDSHAKE_SECONDS)
        except (OSError, ValueError) as error:
            raise Unreachable(str(error), unreachable=isinstance(error, OSError)) from error
        try:
            if patience is not None:
                self._socket.settimeout(POLL_SECONDS)
            self._prove(challenge)
            if patience is None:
                self._socket.settimeout(None)
        except BaseException:
            self.close()
            raise

    def send(self, *messages: Mapping[str, Any]) -> None:
        """Send all messages at once, from any thread, but only from one thread at a time."""
        data = b"".join(encode(message, LONGEST_MESSAGE) for message in messages)
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise Unreachable(str(error)) from error

    def receive(self) -> dict[str, Any]:
        try:
            while (body := self._decoder.next()) is None:
                self._more()
            return parse(body)
        except WireError as error:
            raise Unreachable(str(error)) from error

    def receive_bytes(self, size: int) -> bytes:
        """Return the ``size`` bytes that the last message announced."""
        while (data := self._decoder.take(size)) is None:
            self._more()
        return data

    def detach(self, message: Mapping[str, Any]) -> socket.socket:
        """Send ``message``, wait for its echo, and return the blocking socket, for use by another protocol.

        All data after the echo is still unread.
        """
        self.send(message)
        echo = encode(message, LONGEST_MESSAGE)
        while self._decoder.pending < len(echo):
            self._more(len(echo) - self._decoder.pending)
        if self._decoder.take(len(echo)) != echo:
            raise Unreachable("the peer sent an unexpected answer to a stream request")
        self._socket.settimeout(None)
        return self._socket

    def shutdown(self) -> None:
        """Wake the thread that waits in ``receive``; from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side has closed it already

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _prove(self, challenge: Challenge) -> None:
        own, remote = nonce(), str(self.receive().get("nonce"))
        self.send({"nonce": own, "mac": challenge.of_client(remote, own)})
        if not proves(self.receive().get("mac"), challenge.of_server(remote, own)):
            raise Unreachable("the peer does not know the run's secret")

    def _more(self, limit: int = 1 << 20) -> None:
        while True:
            try:
                data = self._socket.recv(limit)
            except TimeoutError as error:
                if self._patience is None:
                    raise Unreachable(f"no proof within {HANDSHAKE_SECONDS:g} s", unreachable=True) from error
                self._patience()
                continue
            except OSError as error:
                raise Unreachable(str(error), unreachable=is_path_error(error)) from error
            if not data:
                raise Unreachable("the peer closed the connection", unreachable=is_silent(self._socket))
            self._decoder.feed(data)
            return
