"""A blocking connection to a ``store.Server`` of another worker: framed, proved on both sides, given up in time."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping
from typing import Any

from recover_megatron.network import frames, proof
from recover_megatron.network.addresses import connect
from recover_megatron.network.silence import is_silent

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
    """A connection to ``address``, proved on both sides when the constructor returns.

    ``patience``: called whenever nothing has come for ``POLL_SECONDS``, and raises when the wait is to end (a process
    that is stopped answers nothing and closes nothing); None: wait for as long as the connection lasts.  All methods
    raise ``Unreachable``.
    """

    def __init__(self, address: str, challenge: proof.Challenge, patience: Callable[[], None] | None = None) -> None:
        self._decoder = frames.Decoder(LONGEST_MESSAGE)
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
        data = b"".join(frames.encode(message, LONGEST_MESSAGE) for message in messages)
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise Unreachable(str(error)) from error

    def receive(self) -> dict[str, Any]:
        """The next message."""
        try:
            while (body := self._decoder.next()) is None:
                self._more()
            return frames.parse(body)
        except frames.WireError as error:
            raise Unreachable(str(error)) from error

    def receive_bytes(self, size: int) -> bytes:
        """The ``size`` bytes that the last message announced."""
        while (data := self._decoder.take(size)) is None:
            self._more()
        return data

    def detach(self, message: Mapping[str, Any]) -> socket.socket:
        """The connection itself, blocking, for another protocol: after this message has gone and has come back.

        What follows it is left in the connection.
        """
        self.send(message)
        echo = frames.encode(message, LONGEST_MESSAGE)
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

    def _prove(self, challenge: proof.Challenge) -> None:
        mine, theirs = proof.nonce(), str(self.receive().get("nonce"))
        self.send({"nonce": mine, "mac": challenge.of_client(theirs, mine)})
        if not proof.proves(self.receive().get("mac"), challenge.of_server(theirs, mine)):
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
