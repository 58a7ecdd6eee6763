"""Blocking connection to another worker's ``PeerStoreServer``: framed, mutually authenticated, with bounded waits.

A frame is a 4-byte big-endian length and a JSON object in UTF-8. No incoming data is trusted: the receiver checks the
length before it stores the body, and parses only complete bodies. Invalid data raises ``WireError``, and only the
connection that carried it is closed.

Both sides prove that they know the job's secret, by an HMAC-SHA256 challenge with fresh nonces:

    server -> client   its nonce
    client -> server   its nonce, and the proof of the client's role for both nonces
    server -> client   the proof of the server's role for both nonces

A proof contains the role, so that no peer can send it back as its own proof, and the purpose, so that it is useless
in other protocols of the run. A server processes no request, and a client uses no data, before the other side has
proved that it knows the secret. The secret itself is never sent. Later traffic is neither encrypted nor signed
(docs/security.md).

A worker's address is the text "host port".
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
    """Error for received data that is no message of this protocol."""


def encode(message: Mapping[str, Any], limit: int) -> bytes:
    """Return the frame of ``message``. Raises ValueError if a number in it is infinite or NaN, or if the frame's body
    exceeds ``limit`` bytes."""
    return frame(json.dumps(message, separators=(",", ":"), allow_nan=False).encode(), limit, message.get("type"))


def frame(body: bytes, limit: int, kind: object) -> bytes:
    """Return the frame of a message's ``body``. Raises ValueError if the body exceeds ``limit`` bytes."""
    if len(body) > limit:
        raise ValueError(f"message {kind!r} has {len(body)} bytes, more than the limit of {limit}")
    return _HEADER.pack(len(body)) + body


def _no_constant(name: str) -> NoReturn:
    raise WireError(f"{name} is not JSON")


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object in the body of a frame. Raises ``WireError`` if the body is not a JSON object."""
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
    """Splitter of a byte stream into frames.

    ``limit``: greatest number of bytes in a frame's body; may be changed between two calls of ``next``.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """Return the body of the next frame; None if the frame is incomplete.

        Raises ``WireError`` if the body is longer than ``limit``: the rest of the stream is then unusable.
        """
        if len(self._buffer) < _HEADER.size:
            return None
        end = _HEADER.size + _length(self._buffer, self.limit)
        if len(self._buffer) < end:
            return None
        return self._cut(end)[_HEADER.size :]

    def take(self, size: int) -> bytes | None:
        """Return the next ``size`` bytes, which were sent without a frame; None if fewer bytes have arrived."""
        return self._cut(size) if len(self._buffer) >= size else None

    def _cut(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


async def read(reader: asyncio.StreamReader, limit: int) -> dict[str, Any] | None:
    """Return the next message; None at the end of the stream.

    Raises ``WireError`` for invalid data, or a body of more than ``limit`` bytes.
    """
    try:
        header = await reader.readexactly(_HEADER.size)
        return parse(await reader.readexactly(_length(header, limit)))
    except EOFError:  # asyncio.IncompleteReadError
        return None


def nonce() -> str:
    return secrets.token_hex(32)


def mac(secret: bytes, *parts: str) -> bytes:
    """Return the HMAC-SHA256 (32 bytes), with the key ``secret``, of ``parts``: the purpose, the role, the nonces."""
    return hmac.digest(secret, "|".join(parts).encode(), "sha256")


def proves[Proof: (str, bytes)](received: Proof, expected: Proof) -> bool:
    """Return whether ``received`` equals the proof ``expected``; compares in constant time."""
    sent, own = (each.encode(errors="replace") if isinstance(each, str) else each for each in (received, expected))
    return hmac.compare_digest(sent, own)


@dataclass(frozen=True)
class Challenge:
    """Proofs, in hexadecimal, that the two ends of a peer-store connection exchange."""

    secret: bytes = field(repr=False)

    def of_client(self, server_nonce: str, client_nonce: str) -> str:
        """Return the proof that a client sends."""
        return mac(self.secret, "peer-store", "client", server_nonce, client_nonce).hex()

    def of_server(self, server_nonce: str, client_nonce: str) -> str:
        """Return the proof that a server sends."""
        return mac(self.secret, "peer-store", "server", server_nonce, client_nonce).hex()


def family_of(host: str) -> socket.AddressFamily:
    """Return AF_INET6 if ``host`` is an IPv6 address, or a name that has only IPv6 addresses; otherwise AF_INET."""
    if ":" in host:
        return socket.AF_INET6
    try:
        found = {family for family, *_ in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return socket.AF_INET  # the caller gets the error when it uses the host
    return socket.AF_INET6 if found == {socket.AF_INET6} else socket.AF_INET


def listen(host: str, backlog: int) -> tuple[socket.socket, str]:
    """Return a listening socket at a free port, and its address as the text "host port".

    ``host``: an address of this machine that the other workers can reach.
    """
    listener = socket.create_server((host, 0), family=family_of(host), backlog=backlog)
    return listener, f"{host} {listener.getsockname()[1]}"


def connect(address: str, timeout: float) -> socket.socket:
    """Return a connection to ``address``, with TCP_NODELAY. ``Watch`` shuts it down if the other host stops answering.

    ``timeout``: seconds allowed for connecting, and then for each wait of the returned socket. Raises OSError if no
    connection can be made, ValueError if the address is not "host port".
    """
    host, port = address.split(" ")
    sock = socket.create_connection((host, int(port)), timeout=timeout)
    watch(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


HANDSHAKE_SECONDS = 5.0
LONGEST_MESSAGE = 1 << 20
POLL_SECONDS = 0.25
"""Seconds between two calls of ``patience`` while no data arrives."""

_PATH_ERRORS = {
    errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES, errno.EPERM,
}  # fmt: skip


def is_path_error(error: OSError | None) -> bool:
    """Return whether ``error``, of an established connection, shows that the network path to the other host failed.

    Returns False if ``error`` is None, or shows that the other process closed the connection.
    """
    return error is not None and (isinstance(error, TimeoutError) or error.errno in _PATH_ERRORS)


class Unreachable(ConnectionError):
    """Error for a connection that failed, or whose peer does not know the secret or sent invalid data.

    ``unreachable``: True if the network path failed, or no connection could be made; the peer may still be live.
    """

    def __init__(self, text: str, *, unreachable: bool = False) -> None:
        super().__init__(text)
        self.unreachable = unreachable


class Connection:
    """Connection to ``address``; the constructor authenticates both sides.

    The constructor, and all methods that send or receive, raise ``Unreachable``.

    ``patience``: called whenever no data has arrived for ``POLL_SECONDS``; it raises an exception to end the wait. If
    ``patience`` is None, each wait of the constructor is limited to ``HANDSHAKE_SECONDS``; a later wait ends only when
    data arrives or the connection ends. With a stopped peer, neither may ever happen.
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
        """Send all messages in one write. Any thread may call this, but only one thread at a time."""
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
        """Return the next ``size`` bytes, which the peer sends without a frame, after a message that announces them."""
        while (data := self._decoder.take(size)) is None:
            self._more()
        return data

    def detach(self, message: Mapping[str, Any]) -> socket.socket:
        """Send ``message``, wait until the peer echoes it, and return the blocking socket, for use by another protocol.

        Data that the peer sends after the echo remains unread in the socket.
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
        """Shut the connection down, which wakes a thread that waits in ``receive``. Any thread may call this."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the connection has ended

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _prove(self, challenge: Challenge) -> None:
        own, remote = nonce(), str(self.receive().get("nonce"))
        self.send({"nonce": own, "mac": challenge.of_client(remote, own)})
        if not proves(str(self.receive().get("mac")), challenge.of_server(remote, own)):
            raise Unreachable("the peer does not know the run's secret")

    def _more(self, limit: int = 1 << 20) -> None:
        while True:
            try:
                data = self._socket.recv(limit)
            except TimeoutError as error:
                if self._patience is None:
                    raise Unreachable(f"the peer was silent for {HANDSHAKE_SECONDS:g} s", unreachable=True) from error
                self._patience()
                continue
            except OSError as error:
                raise Unreachable(str(error), unreachable=is_path_error(error)) from error
            if not data:
                raise Unreachable("the peer closed the connection", unreachable=is_silent(self._socket))
            self._decoder.feed(data)
            return
