"""A blocking connection to the ``PeerStoreServer`` of another worker: framed, proved on both sides, given up in time.

A frame is a 4-byte big-endian length and a JSON object in UTF-8.  Nothing that arrives is trusted: the length is
checked before a byte of the body is kept, and a body is parsed only when it is complete.  An error is a ``WireError``,
and the only thing it ever costs is the connection it came from.

Proof of the job's secret: a mutual HMAC-SHA256 challenge with fresh nonces on both sides.

    server -> client   its nonce
    client -> server   its nonce, and the proof of the client's role for both nonces
    server -> client   the proof of the server's role for both nonces

The role in the text keeps a proof from being sent back as one's own, the purpose from being used in another protocol of
the run. A server does nothing for a connection, and a client believes nothing, before it has the other's proof. The
secret itself never travels. What follows is neither encrypted nor signed (docs/security.md).

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
    """The other side sent something that is no message of this protocol."""


def encode(message: Mapping[str, Any], limit: int) -> bytes:
    """The frame of one message. ``ValueError`` if it is no JSON or longer than ``limit`` bytes."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > limit:
        raise ValueError(f"message {message.get('type')!r} has {len(body)} bytes, more than the limit of {limit}")
    return _HEADER.pack(len(body)) + body


def _no_constant(name: str) -> NoReturn:
    raise WireError(f"{name} is no JSON")


def parse(body: bytes) -> dict[str, Any]:
    """The object of a frame. ``WireError`` for anything else."""
    try:
        message = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {type(error).__name__}") from error
    if type(message) is not dict:
        raise WireError("not a JSON object")
    return message


def _length(header: bytes | bytearray, limit: int) -> int:
    (length,) = _HEADER.unpack_from(header)
    if length > limit:
        raise WireError(f"a message of {length} bytes is longer than the limit of {limit}")
    return int(length)


class Decoder:
    """Cuts a byte stream into frames.

    ``limit`` (bytes of a body) may be changed between frames: it holds for all whose length has not been read yet.
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
        """The body of the next complete frame, None if there is none yet. ``WireError`` ends the stream."""
        if len(self._buffer) < _HEADER.size:
            return None
        end = _HEADER.size + _length(self._buffer, self.limit)
        if len(self._buffer) < end:
            return None
        return self._cut(end)[_HEADER.size :]

    def take(self, size: int) -> bytes | None:
        """The next ``size`` bytes as they are, None if not all have arrived: what a frame said would follow it."""
        return self._cut(size) if len(self._buffer) >= size else None

    def _cut(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


async def read(reader: asyncio.StreamReader, limit: int) -> dict[str, Any] | None:
    """The next message of a stream, None at its end. ``WireError``; ``limit``: bytes of its body."""
    try:
        header = await reader.readexactly(_HEADER.size)
        return parse(await reader.readexactly(_length(header, limit)))
    except EOFError:  # asyncio.IncompleteReadError
        return None


def nonce() -> str:
    return secrets.token_hex(32)


def mac(secret: bytes, *parts: str) -> bytes:
    """The proof (32 bytes) of knowing ``secret`` for ``parts``: purpose, role, then what was agreed on."""
    return hmac.digest(secret, "|".join(parts).encode(), "sha256")


def proves(told: object, expected: str | bytes) -> bool:
    """Whether ``told`` (whatever came over the network) is the proof ``expected``, compared in constant time."""
    if isinstance(told, str) and isinstance(expected, str):
        return hmac.compare_digest(told.encode(errors="replace"), expected.encode())
    if isinstance(told, bytes) and isinstance(expected, bytes):
        return hmac.compare_digest(told, expected)
    return False


@dataclass(frozen=True)
class Challenge:
    """The challenge of the peers' stores; in messages, proofs are hex."""

    secret: bytes = field(repr=False)

    def of_client(self, server_nonce: str, client_nonce: str) -> str:
        """What a client answers to a server's nonce."""
        return mac(self.secret, "peer-store", "client", server_nonce, client_nonce).hex()

    def of_server(self, server_nonce: str, client_nonce: str) -> str:
        """What the server then answers."""
        return mac(self.secret, "peer-store", "server", server_nonce, client_nonce).hex()


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons, and for a name that has no other; else IPv4."""
    if ":" in host:
        return socket.AF_INET6
    try:
        found = {family for family, *_ in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return socket.AF_INET  # whoever uses it meets the error
    return socket.AF_INET6 if found == {socket.AF_INET6} else socket.AF_INET


def listen(host: str, backlog: int) -> tuple[socket.socket, str]:
    """A listener at a free port of ``host`` (this machine's address that others reach), and its address as text."""
    listener = socket.create_server((host, 0), family=family_of(host), backlog=backlog)
    return listener, f"{host} {listener.getsockname()[1]}"


def connect(address: str, timeout: float) -> socket.socket:
    """A connection without delays, watched for silence. ``OSError``; ``ValueError`` for what is no address."""
    host, port = address.split(" ")
    sock = socket.create_connection((host, int(port)), timeout=timeout)
    watch(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


HANDSHAKE_SECONDS = 5.0
LONGEST_MESSAGE = 1 << 20
POLL_SECONDS = 0.25
"""How long an answer is waited for before ``patience`` is asked."""

_ROAD = {
    errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES, errno.EPERM,
}  # fmt: skip


def is_of_the_road(error: OSError | None) -> bool:
    """Whether what a connection that was made failed with speaks of the way, not of who is at its other end."""
    return error is not None and (isinstance(error, TimeoutError) or error.errno in _ROAD)


class Unreachable(ConnectionError):
    """Nobody answers who knows the secret. ``road``: nothing gets there, or nothing comes back; it did not hang up."""

    def __init__(self, text: str, *, road: bool = False) -> None:
        super().__init__(text)
        self.road = road


class Connection:
    """A connection to ``address``, proved on both sides when the constructor returns. All of it raises ``Unreachable``.

    ``patience``: called whenever nothing has come for ``POLL_SECONDS``, and raises when the wait is to end (a process
    that is stopped answers nothing and closes nothing); None: wait for as long as the connection lasts.
    """

    def __init__(self, address: str, challenge: Challenge, patience: Callable[[], None] | None = None) -> None:
        self._decoder = Decoder(LONGEST_MESSAGE)
        self._patience = patience
        try:
            self._socket = connect(address, HANDSHAKE_SECONDS)
        except (OSError, ValueError) as error:
            raise Unreachable(str(error), road=isinstance(error, OSError)) from error
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
        """All of them at once; from any thread that no other sends beside."""
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
        """The ``size`` bytes that the last message announced."""
        while (data := self._decoder.take(size)) is None:
            self._more()
        return data

    def detach(self, message: Mapping[str, Any]) -> socket.socket:
        """The connection itself, blocking, for another protocol: after this message has gone and has come back, with
        all that follows it still to be read."""
        self.send(message)
        echo = encode(message, LONGEST_MESSAGE)
        while self._decoder.pending < len(echo):
            self._more(len(echo) - self._decoder.pending)
        if self._decoder.take(len(echo)) != echo:
            raise Unreachable("it does not speak of what it was asked for")
        self._socket.settimeout(None)
        return self._socket

    def shutdown(self) -> None:
        """Wake whoever waits in ``receive``; from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was faster

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _prove(self, challenge: Challenge) -> None:
        mine, theirs = nonce(), str(self.receive().get("nonce"))
        self.send({"nonce": mine, "mac": challenge.of_client(theirs, mine)})
        if not proves(self.receive().get("mac"), challenge.of_server(theirs, mine)):
            raise Unreachable("whoever answers does not know the run's secret")

    def _more(self, limit: int = 1 << 20) -> None:
        while True:
            try:
                came = self._socket.recv(limit)
            except TimeoutError as error:
                if self._patience is None:
                    raise Unreachable(f"no proof within {HANDSHAKE_SECONDS:g} s", road=True) from error
                self._patience()
                continue
            except OSError as error:
                raise Unreachable(str(error), road=is_of_the_road(error)) from error
            if not came:
                raise Unreachable("it closed the connection", road=is_silent(self._socket))
            self._decoder.feed(came)
            return
