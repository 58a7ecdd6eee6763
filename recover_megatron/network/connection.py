"""Blocking connection to another worker's ``PeerStoreServer``: mutually authenticated, with bounded waits.

Both sides of each connection, to a peer store or to a coordinator, prove that they know the job's secret, by an
HMAC-SHA256 challenge with fresh nonces (``network.messages`` has the messages):

    server -> client   Challenge(version, nonce Ns)
    client -> server   Auth(nonce Nc, mac = HMAC(secret, purpose | "client" | Ns | Nc))
    server -> client   Proof(mac = HMAC(secret, purpose | "server" | Ns | Nc))

A proof contains the role, so that no peer can send it back as its own proof, and the purpose, so that it is useless
in other protocols of the run. A server processes no request, and a client uses no data, before the other side has
proved that it knows the secret. The secret itself is never sent. Later traffic is neither encrypted nor signed
(docs/security.md).

A worker's address is the text "host port".
"""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress

from recover_megatron.network import messages
from recover_megatron.network.messages import Auth, Challenge, Message, Proof, Schema, WireError, encode
from recover_megatron.network.system import is_silent, watch

PEER_STORE = "peer-store"
"""Purpose of the proofs on connections to peer stores."""


def nonce() -> str:
    return secrets.token_hex(32)


def mac(secret: bytes, *parts: str) -> bytes:
    """Return the HMAC-SHA256 (32 bytes), with the key ``secret``, of ``parts``: the purpose, the role, the nonces."""
    return hmac.digest(secret, "|".join(parts).encode(), "sha256")


def proves[Proof: (str, bytes)](received: Proof, expected: Proof) -> bool:
    """Return whether ``received`` equals the proof ``expected``; compares in constant time."""
    sent, own = (each.encode(errors="replace") if isinstance(each, str) else each for each in (received, expected))
    return hmac.compare_digest(sent, own)


def answer(secret: bytes, purpose: str, challenge: Challenge) -> tuple[Auth, str]:
    """Return a client's answer to ``challenge``, and the MAC that the server must send then."""
    nonces = challenge.nonce, nonce()
    return Auth(nonces[1], _proof(secret, purpose, "client", *nonces)), _proof(secret, purpose, "server", *nonces)


def accept(secret: bytes, purpose: str, challenged: str, auth: Auth) -> Proof | None:
    """Return the server's proof for a client that has answered the nonce ``challenged`` with ``auth``.

    Returns None if the client does not know the secret.
    """
    if not proves(auth.mac, _proof(secret, purpose, "client", challenged, auth.nonce)):
        return None
    return Proof(_proof(secret, purpose, "server", challenged, auth.nonce))


def _proof(secret: bytes, purpose: str, role: str, server_nonce: str, client_nonce: str) -> str:
    return mac(secret, purpose, role, server_nonce, client_nonce).hex()


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

    def __init__(self, address: str, secret: bytes, patience: Callable[[], None] | None = None) -> None:
        self._decoder = messages.Decoder()
        self._patience = patience
        try:
            self._socket = connect(address, HANDSHAKE_SECONDS)
        except (OSError, ValueError) as error:
            raise Unreachable(str(error), unreachable=isinstance(error, OSError)) from error
        try:
            if patience is not None:
                self._socket.settimeout(POLL_SECONDS)
            self._prove(secret)
            if patience is None:
                self._socket.settimeout(None)
        except BaseException:
            self.close()
            raise

    def send(self, frames: bytes) -> None:
        """Send encoded messages. Any thread may call this, but only one thread at a time."""
        try:
            self._socket.sendall(frames)
        except OSError as error:
            raise Unreachable(str(error)) from error

    def receive[T](self, schema: Schema[T]) -> T:
        try:
            while (message := self._decoder.message(schema)) is None:
                self._more()
            return message
        except WireError as error:
            raise Unreachable(str(error)) from error

    def receive_bytes(self, size: int) -> bytes:
        """Return the next ``size`` bytes, which the peer sends without a frame, after a message that announces them."""
        while (data := self._decoder.take(size)) is None:
            self._more()
        return data

    def detach(self, request: Message, expected: Message) -> socket.socket:
        """Send ``request``, wait for the answer ``expected``, and return the blocking socket, for another protocol.

        Data that the peer sends after its answer remains unread in the socket.
        """
        self.send(encode(request))
        frame = encode(expected)
        while (answer := self._decoder.take(len(frame))) is None:
            self._more(1)  # the data after the answer must remain in the socket
        if answer != frame:
            raise Unreachable("the peer sent an unexpected answer to a stream request")
        self._socket.settimeout(None)
        return self._socket

    def shutdown(self) -> None:
        """Shut the connection down, which wakes a thread that waits in ``receive``. Any thread may call this."""
        with suppress(OSError):  # the connection has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _prove(self, secret: bytes) -> None:
        challenge = self.receive(messages.CHALLENGE)
        if challenge.version != messages.PROTOCOL_VERSION:
            raise Unreachable(f"the peer has protocol version {challenge.version}, not {messages.PROTOCOL_VERSION}")
        auth, expected = answer(secret, PEER_STORE, challenge)
        self.send(encode(auth))
        if not proves(self.receive(messages.PROOF).mac, expected):
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
