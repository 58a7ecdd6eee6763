"""gloo groups that can be aborted.

A worker creates all its groups together, in four phases:

    publish     one thread per group: gloo publishes this member's addresses, and waits for the other members' addresses
    exchange    this worker writes all its addresses to the job's store, and reads the other members' addresses
    connect     gloo has all addresses and connects; the threads end
    scan        this worker searches all sockets of its process for the connections of these groups

An abort calls shutdown(2) on the connections, which makes gloo's operations fail (docs/ring.md).  The scan recognizes
the connections by their addresses: all groups of a worker share one gloo device with one listening socket, the members
exchange the addresses of these sockets, and every connection has one of these addresses at one end.

A scan costs more than a connection between two members, and every exchange through the store waits for the slowest
member.  So there is one scan and one exchange for all groups.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import queue
import socket
import termios
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken, PeerLost, await_key
from recover_megatron.network.system import watch

Address = tuple[str, int]

NO_TIMEOUT = timedelta(days=7)
"""Timeout of gloo's operations, so long that it never expires: only a revocation ends an operation that hangs."""

Identity = tuple[int, int]
"""(device, inode) of a socket; all descriptors of one socket have equal values."""

_creating = threading.Lock()
"""Lock held while a gloo device is created, because concurrently created listeners could not be distinguished."""

CONNECT_SECONDS = 10.0
"""Time limit in seconds for gloo to connect after all members have published their addresses."""
_DROP_SECONDS = 1.0
"""Maximum number of seconds that ``close`` waits for the destruction of aborted groups; a thread continues it then."""


def _sockets() -> list[socket.socket]:
    """Return a duplicate of every TCP socket of this process; the caller closes the duplicates."""
    found = []
    for descriptor in open_sockets():
        with contextlib.suppress(OSError):  # another thread has closed the socket
            sock = socket.socket(fileno=os.dup(descriptor))
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                found.append(sock)
            else:
                sock.close()
    return found


def _listeners() -> set[Address]:
    found = set()
    for sock in _sockets():
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(sock.getsockname()[:2])
    return found


def _connections(listeners: set[Address]) -> list[socket.socket]:
    """Return duplicates of this process's connected sockets whose local or remote address is in ``listeners``."""
    found = []
    for sock in _sockets():
        with contextlib.suppress(OSError):  # the socket is not connected
            if {sock.getsockname()[:2], sock.getpeername()[:2]} & listeners:
                found.append(sock)
                continue
        sock.close()
    return found


def shut(sockets: list[socket.socket]) -> set[Identity]:
    """Shut down the connections of ``sockets``, which duplicate gloo's sockets; close the duplicates, clear the list.

    When gloo's threads notice the shutdown, they close gloo's descriptors.  Before that, they may still write
    received data to the tensors of an operation.  Returns the identities of the connections; compare them with
    ``open_sockets`` to learn which connections gloo has not closed yet.
    """
    identities = set[Identity]()
    for sock in sockets:
        with contextlib.suppress(OSError):  # the other end has shut the connection first, or the socket is closed
            status = os.fstat(sock.fileno())
            identities.add((status.st_dev, status.st_ino))
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    sockets.clear()
    return identities


def open_sockets(among: Iterable[int] | None = None) -> dict[int, Identity]:
    """Return descriptor -> identity for sockets of this process: those in ``among``, or all sockets if it is None."""
    found: dict[int, Identity] = {}
    for name in os.listdir("/proc/self/fd") if among is None else map(str, among):
        with contextlib.suppress(OSError):  # another thread has closed the descriptor
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                status = os.stat(int(name))
                found[int(name)] = (status.st_dev, status.st_ino)
    return found


LOOP = "gloo_tcp_loop"
"""Name of the threads in which gloo polls its connections; torch before 2.13 does not set the name."""


def loops() -> list[Path]:
    """Return the /proc folders of the threads of this process in which gloo polls its connections."""
    found = list[Path]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            if (task / "comm").read_text().strip() == LOOP:
                found.append(task)
    return found


def looks(threads: Iterable[Path]) -> dict[str, int]:
    """Return thread id -> estimated number of polls so far, for each of ``threads`` (a result of ``loops``).

    The estimate is never too high.  Usually a poll blocks, and the kernel counts how often a thread blocks.  While a
    connection has an event that gloo does not consume, polls do not block.  Therefore each 10 ms of a thread's
    processor time add ten to the estimate; in fact the thread polls far more often in that time.
    """
    found = dict[str, int]()
    for task in threads:
        with contextlib.suppress(OSError, LookupError):  # the thread has ended, or the kernel has no such counts
            ticks = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
            waits = (task / "status").read_text().partition("voluntary_ctxt_switches:")[2].split()[0]
            found[task.name] = 10 * sum(map(int, ticks)) + int(waits)
    return found


def unread(descriptors: Iterable[int]) -> dict[int, int]:
    """Return descriptor -> number of received bytes that this process has not read yet, for the given sockets."""
    found = dict[int, int]()
    for descriptor in descriptors:
        count = array.array("i", [0])
        with contextlib.suppress(OSError):  # another thread has closed the socket
            fcntl.ioctl(descriptor, termios.FIONREAD, count)
            found[descriptor] = count[0]
    return found


class GivenUp:
    """Detector of connections that were shut down but that gloo will never close; no caller should wait for them.

    gloo never closes a connection if an operation is freed while a message for it arrives over this connection.  For
    example, an all-reduce that has lost one member is freed although the message of another member may be arriving.
    """

    LOOKS = 30
    """Number of polls of each thread after which gloo never closes a connection that is still open.

    gloo closes a connection at the first poll or never.
    """

    FIRST = 20
    """Number of calls of ``over`` that check nothing: by then gloo has usually closed its connections."""

    def __init__(self) -> None:
        self._asked = 0
        self._threads: list[Path] = []
        self._unread: dict[int, int] | None = None
        self._looks: dict[str, int] = {}

    def over(self, descriptors: Iterable[int]) -> bool:
        """Return whether gloo will never close the connections ``descriptors``; call this repeatedly after ``shut``.

        The result is True if each of gloo's threads has polled ``LOOKS`` times and none has read from the connections
        meanwhile.  Then these threads write no more data to a tensor.  With torch before 2.13 the result is always
        False.
        """
        self._asked += 1
        if self._asked <= self.FIRST:
            return False
        if self._unread is None:  # threads that start later do not poll these connections, so list threads once
            self._threads = loops()
        before, self._unread = self._unread, unread(descriptors)
        now = looks(self._threads)
        if before != self._unread:
            self._looks = now
        past = self._looks
        return bool(past) and all(now.get(thread, inf) - count >= self.LOOKS for thread, count in past.items())


def _device(host: str) -> tuple[Any, Address]:
    """Create a gloo device; return the device and the address of its listener."""
    with _creating:
        for _ in range(8):
            before = _listeners()
            device = dist.ProcessGroupGloo.create_device(hostname=host)
            new = _listeners() - before
            if len(new) == 1:
                return device, new.pop()
    raise RuntimeError("cannot identify gloo's listening socket, because other threads open listening sockets, too")


class _Exchange:
    """Values that gloo publishes while groups are created, by group and key.

    Until gloo connects, the threads that create the groups block only in ``wait``, and ``end`` interrupts ``wait``.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.own: dict[str, dict[str, str]] = {}
        self._known: dict[tuple[str, str], bytes] = {}
        self._over = False

    def publish(self, group: str, key: str, value: bytes) -> None:
        with self.changed:
            self.own.setdefault(group, {})[key] = value.hex()
            self._known[group, key] = value
            self.changed.notify_all()

    def tell(self, received: Mapping[str, Mapping[str, str]]) -> None:
        """Add values that another member has published: group -> key -> value in hexadecimal."""
        with self.changed:
            for group, values in received.items():
                self._known |= {(group, key): bytes.fromhex(value) for key, value in values.items()}
            self.changed.notify_all()

    def wait(self, group: str, keys: Sequence[str]) -> list[bytes]:
        with self.changed:
            self.changed.wait_for(lambda: self._over or all((group, key) in self._known for key in keys))
            if self._over:
                raise ConnectionAbortedError("the creation of the gloo groups of this epoch was aborted")
            return [self._known[group, key] for key in keys]

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def end(self) -> None:
        """Make all present and future calls of ``wait`` raise ``ConnectionAbortedError``."""
        with self.changed:
            self._over = True
            self.changed.notify_all()


class _Store(dist.Store):
    """torch store that gloo uses to connect the members of one group; ``exchange`` contains its values."""

    def __init__(self, group: str, exchange: _Exchange) -> None:
        super().__init__()
        self._group, self._exchange = group, exchange

    def set(self, key: str, value: bytes) -> None:
        self._exchange.publish(self._group, key, value)

    def get(self, key: str) -> bytes:
        return self._exchange.wait(self._group, [key])[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        del timeout  # ``GlooGroups`` limits the time of the complete creation
        self._exchange.wait(self._group, keys)


class GlooGroups:
    """gloo groups of one worker, created and aborted together; ``backends``: group name -> ``ProcessGroupGloo``."""

    def __init__(
        self,
        me: int,
        groups: Mapping[str, Sequence[int]],
        store: dist.Store,
        cancel_token: CancelToken,
        *,
        ring: str,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
    ) -> None:
        """Create all groups.  Raises ``EpochRevoked``, ``TimeoutError`` or ``PeerLost``; then no group exists.

        ``me``: number of this worker, an id or a position.  ``groups``: group name -> numbers of the members in rank
        order, including ``me``; all members of a group use the same name for it.  ``ring``: prefix of the keys in
        ``store``, the same on all members of these groups, used only once.  ``timeout``: time limit in seconds for each
        other member to publish its addresses.
        """
        self.backends: dict[str, Any] = {}
        self._cancel_token = cancel_token
        self._connected: list[socket.socket] = []
        self.shut = set[Identity]()
        """Identities of the connections that ``abort`` has shut down."""
        self._closing = threading.Lock()
        self._exchange = _Exchange()
        self._failed: list[Exception] = []
        cancel_token.on_cancel(self._exchange.wake)
        device, listener = _device(host)
        self._listeners = {listener}
        try:
            for name, members in groups.items():
                self._build(name, list(members).index(me), len(members), device, timeout)
            self._wait_until(lambda: len(self._exchange.own) == len(groups))
            published = {"listener": listener, "groups": self._exchange.own}
            store.set(f"{ring}/{me}", json.dumps(published))
            for other in sorted({member for members in groups.values() for member in members} - {me}):
                received = json.loads(await_key(store, f"{ring}/{other}", cancel_token, timeout))
                self._listeners.add((received["listener"][0], received["listener"][1]))
                self._exchange.tell({name: received["groups"][name] for name in groups if other in groups[name]})
            self._wait_until(lambda: len(self.backends) == len(groups), min(timeout, CONNECT_SECONDS))
            self._connected = _connections(self._listeners)
            for sock in self._connected:
                watch(sock)
            missing = sum(len(members) - 1 for members in groups.values()) - len(self._connected)
            if missing > 0:
                raise PeerLost(f"{missing} of gloo's connections were lost while its groups were being created")
        except BaseException:
            self._exchange.end()
            self._connected += _connections(self._listeners)
            self.abort()
            self.close()
            raise
        cancel_token.on_cancel(self.abort)

    def _build(self, name: str, rank: int, size: int, device: Any, timeout: float) -> None:
        """Create a group in a thread, which is not joined: if gloo hangs, gloo's timeout ends the thread."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [device]
        options._threads = 1  # two threads of gloo would write one string concurrently (`hostdevice.replacements`)
        store = _Store(name, self._exchange)

        def build() -> None:
            made: Any = None
            try:
                made = dist.ProcessGroupGloo(store, rank, size, options)
                made._set_default_timeout(NO_TIMEOUT)
            except Exception as error:  # noqa: BLE001  the caller raises it
                self._failed.append(error)
            with self._exchange.changed:
                if made is not None:
                    self.backends[name] = made
                self._exchange.changed.notify_all()

        threading.Thread(target=build, name=f"creating gloo group {name}", daemon=True).start()

    def _wait_until(self, done: Callable[[], bool], seconds: float | None = None) -> None:
        changed = self._exchange.changed
        with changed:
            in_time = changed.wait_for(lambda: done() or bool(self._failed) or self._cancel_token.cancelled, seconds)
        self._cancel_token.check()
        if self._failed:
            raise PeerLost(f"gloo could not connect: {self._failed[0]}", unreachable=True) from self._failed[0]
        if not in_time:
            raise PeerLost(f"gloo did not connect to all members within {seconds:g} s", unreachable=True)

    def abort(self) -> None:
        """Make every operation of these groups fail, on this worker and on the other members.

        Any thread may call this.
        """
        with self._closing:
            self.shut |= shut(self._connected)

    def close(self) -> None:
        last, self.backends = self.backends, {}
        dropping = threading.Thread(target=last.clear, name="destroying gloo groups", daemon=True)
        dropping.start()
        dropping.join(_DROP_SECONDS if self._cancel_token.cancelled else None)
        with self._closing:
            for sock in self._connected:
                sock.close()
            self._connected.clear()


class _Job:
    def __init__(self, work: Any) -> None:
        self.work = work
        self.over = threading.Event()
        self.error: RuntimeError | None = None


class Waiter:
    """Interruptible wait for gloo operations.

    ``wait`` returns when the operation is over.  It raises ``EpochRevoked`` when the token is cancelled, and
    ``PeerLost`` if the operation fails.

    A separate thread runs gloo's own wait, which cannot be interrupted.  Only one thread may call ``wait``.

    gloo may fail to notice that its connections were shut down (docs/ring.md).  Then the separate thread waits for ever
    and is abandoned.  The operation keeps its memory alive, so data that still arrives does no harm.
    """

    def __init__(self, cancel_token: CancelToken) -> None:
        self._cancel_token = cancel_token
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._current: _Job | None = None
        self._thread: threading.Thread | None = None
        cancel_token.on_cancel(self._interrupt)

    def wait(self, work: Any) -> None:
        job = self._current = _Job(work)
        self._cancel_token.check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="waiting for gloo", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        job.over.wait()
        self._cancel_token.check()
        if job.error is not None:
            raise PeerLost(f"gloo: {job.error}") from job.error

    def close(self) -> None:
        self._current = None
        self._jobs.put(None)

    def _interrupt(self) -> None:
        job = self._current
        if job is not None:
            job.over.set()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.work.wait(NO_TIMEOUT)
            except RuntimeError as error:
                job.error = error
            job.over.set()
            del job
