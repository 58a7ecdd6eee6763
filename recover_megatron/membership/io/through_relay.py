"""A member's use of its node's relay (``io.relay``).

The kernel closes a TCP connection when the last process that has a copy of it closes its copy or ends. The relay gives
each worker a copy of its connection to the candidate, which the worker only keeps. So that connection ends when the
relay and all workers that use it have ended: a node whose processes are all killed is known at once, and the end of the
relay alone is no worker's end. A worker that connects directly keeps its copy until the candidate has answered.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

from recover_megatron.membership.records import Address

RELAY_SECONDS = 1.5
"""Seconds of silence after which a member leaves its relay, which sends a message every half second."""


class ThroughRelay:
    """State of one member. ``name``: abstract name of the relay's Unix socket; empty: there is none, or it has failed.

    ``active``: True if the current connection goes through the relay.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.active = False
        self.has_copy = False
        """True if this member has a copy of the connection that the relay uses for it now."""
        self._heard = 0.0  # time of the relay's last data, or of the first attempt to connect to it since then
        self._answered = True  # False if it has sent nothing since that attempt
        self._copies: dict[Address, int] = {}  # candidate -> copy of the relay's connection to it

    def connect(self) -> socket.socket | None:
        """Return a new connection to the relay; None, for good, if there is none."""
        if not self.name:
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect("\0" + self.name)
        except OSError:
            sock.close()
            self.name = ""
            return None
        self.active, self.has_copy = True, False
        if self._answered:
            self._heard, self._answered = time.monotonic(), False
        return sock

    def receive(self, sock: socket.socket, most: int, candidate: Address) -> bytes:
        """Return received data, and keep the copy that may come with it. Raises OSError."""
        data, copies, _, _ = socket.recv_fds(sock, most, 1, socket.MSG_CMSG_CLOEXEC)
        for copy in copies:
            self.release(candidate)
            self._copies[candidate], self.has_copy = copy, True
        if data:
            self._heard, self._answered = time.monotonic(), True
        return data

    def release(self, candidate: Address) -> None:
        """Close the copy of the connection to a candidate that has this member's new connection, or is lost."""
        if (copy := self._copies.pop(candidate, None)) is not None:
            os.close(copy)

    def is_silent(self, now: float, limit: float, *, late: bool) -> bool:
        """Return whether to leave the relay because it has sent nothing for ``limit`` seconds, at least RELAY_SECONDS.

        ``late``: this thread has not run for some time, and perhaps the relay has not, too.
        """
        self._heard = now if late else self._heard
        return self.active and now - self._heard > max(RELAY_SECONDS, limit)

    def close_in_child(self) -> None:
        for copy in self._copies.values():
            with suppress(OSError):
                os.close(copy)
