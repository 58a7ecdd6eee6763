"""Connections on which a host has fallen silent: nothing is acknowledged any more, and nobody is told.

A death closes connections, which is noticed at once.  A broken cable, a wrong route or a filter between two hosts that
are well closes nothing: TCP alone would try for a quarter of an hour.  So one thread of the process looks at the
connections that it was given:

    something is under way, and for ``SECONDS`` the other kernel has acknowledged nothing --> shut: who waits is woken
    nothing is under way: the kernel asks (keepalive), and ends the connection itself

The other kernel answers whatever its process does: one that is stopped, or that reads nothing, is not silent.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref

from recover_megatron.network.forks import close_in_children
from recover_megatron.network.kernel import unacknowledged

SECONDS = 5.0
INTERVAL = 1.0
"""Between two looks."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, int(SECONDS) - 2))


class Watch:
    """Looks at connections, and shuts the silent ones; there is one, ``watch`` and ``is_silent`` are its methods."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._since: weakref.WeakKeyDictionary[socket.socket, float | None] = weakref.WeakKeyDictionary()
        """By connection: since when it is silent, for all that was seen."""
        self._silent: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def watch(self, sock: socket.socket) -> None:
        """Look at this connection from now on, until it is closed."""
        with contextlib.suppress(OSError):  # it has ended already
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._lock:
            self._since[sock] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="recover-silence", daemon=True)
                self._thread.start()

    def close_in_child(self) -> None:
        """A forked process has no such thread, and its parent's connections are none of its own."""
        self._begin()
        close_in_children(self)

    def is_silent(self, sock: socket.socket) -> bool:
        """Whether it was shut because nothing was acknowledged."""
        with self._lock:
            return sock in self._silent

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(INTERVAL)
            now = time.monotonic()
            self.look(now, late=now - last > 3 * INTERVAL)
            last = now

    def look(self, now: float, *, late: bool) -> None:
        """``late``: this process, or its host, did not run for a while: what was seen before says nothing."""
        with self._lock:
            for sock, since in list(self._since.items()):
                try:
                    silent = unacknowledged(sock) > INTERVAL
                except OSError:  # it has been closed
                    del self._since[sock]
                    continue
                self._since[sock] = (since if since is not None and not late else now) if silent else None
                if silent and now - (self._since[sock] or now) >= SECONDS:
                    del self._since[sock]
                    self._silent.add(sock)
                    with contextlib.suppress(OSError):  # the other end was faster
                        sock.shutdown(socket.SHUT_RDWR)


_watch = Watch()
close_in_children(_watch)


def watch(sock: socket.socket) -> None:
    """As ``Watch.watch``."""
    _watch.watch(sock)


def is_silent(sock: socket.socket) -> bool:
    """As ``Watch.is_silent``."""
    return _watch.is_silent(sock)
