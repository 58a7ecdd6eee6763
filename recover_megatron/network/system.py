"""What this host's kernel tells of connections, and what is asked of it for a process of a run.

Silence (``Watch``): nothing is acknowledged any more, and nobody is told.  A death closes connections, which is noticed
at once.  A broken cable, a wrong route or a filter between two hosts that are well closes nothing: TCP alone would try
for a quarter of an hour.  So one thread of the process looks at the connections that it was given:

    something is under way, and for ``SECONDS`` the other kernel has acknowledged nothing --> shut: who waits is woken
    nothing is under way: the kernel asks (keepalive), and ends the connection itself

The other kernel answers whatever its process does: one that is stopped, or that reads nothing, is not silent.

Forks (``close_in_children``): a forked process, such as a data loader, closes what its parent holds open. Else a
worker's connections would stay open after its death, and nobody would see an end. Sockets are closed, never shut down:
that would reach the parent's connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import struct
import termios
import threading
import time
import weakref
from typing import Protocol

_PROBES, _UNACKED, _LAST_ACK = 3, 24, 56  # in ``struct tcp_info`` of linux/tcp.h, whose layout is stable


def unacknowledged(sock: socket.socket) -> float:
    """Seconds for which the other host's kernel has acknowledged nothing, while there is something to acknowledge.

    Packets under way, or more than one question for room that nobody answered: where this host has no route any more
    nothing is under way, and a host whose process reads nothing answers each.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    (unacked,) = struct.unpack_from("I", info, _UNACKED)
    (last_ack,) = struct.unpack_from("I", info, _LAST_ACK)
    return last_ack / 1000 if unacked or info[_PROBES] > 1 else 0.0


def all_delivered(sock: socket.socket) -> bool:
    """Whether the other host's kernel has all that was written, and no word that it sent before that is unread here."""
    if fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)) != bytes(4):
        return False
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass  # it has failed, which reading tells
    return False


def use_all_descriptors() -> None:
    """Raise the limit of open files as far as this process may: strangers' connections count against it, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Forked(Protocol):
    """What holds connections or threads that a forked process does not have or must not keep."""

    def close_in_child(self) -> None:
        """Called in a forked process, by its only thread. Closes descriptors; must not wait for a lock."""


_known: weakref.WeakKeyDictionary[Forked, threading.Condition | None] = weakref.WeakKeyDictionary()
_held: list[threading.Condition] = []


def close_in_children(owner: Forked, lock: threading.Condition | None = None) -> None:
    """Call ``owner.close_in_child`` in every process forked from now on, as long as ``owner`` lives.

    ``lock``: held while this process forks, so that ``owner`` is whole in the child. (It is the child's to replace.)
    """
    _known[owner] = lock


def forget(owner: Forked) -> None:
    """It is closed already. Harmless for one that is not known."""
    _known.pop(owner, None)


def _before_fork() -> None:
    for lock in list(_known.values()):
        if lock is not None:
            lock.acquire()
            _held.append(lock)


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().release()


def _after_fork_in_child() -> None:
    _held.clear()
    owners = list(_known)
    _known.clear()  # a child of this process closes what this one opens; who is reset, not closed, says so again
    for owner in owners:
        with contextlib.suppress(OSError):  # it was closed already: the others must be closed all the same
            owner.close_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


SECONDS = 5.0
INTERVAL = 1.0
"""Between two looks."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, int(SECONDS) - 2))


class Watch:
    """Looks at connections, and shuts the silent ones; there is one for all of the process."""

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
watch, is_silent = _watch.watch, _watch.is_silent
