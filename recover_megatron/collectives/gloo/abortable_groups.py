"""Abortable gloo groups: a worker creates all its groups at once, with one listener and one message for all.

    publish     a thread for each group, in which gloo publishes its address, then waits for those of the other members
    exchange    all groups have published --one message--> the job's store --one message--> each other member
    connect     gloo has the addresses of all members: it connects, and the threads end
    scan        of all sockets of this process, which finds the connections of these groups

An abort calls shutdown(2) on the connected sockets, which wakes gloo's operations (docs/ring.md).  The scan finds
exactly these sockets, because a gloo device has one listener, every connection of its groups has the address of some
member's listener at one end, and the members exchange the addresses of their listeners.

A scan of the sockets of a process costs more than a connection of two members, and every message through the store
waits for the slowest member.  So scan and exchange are done once for all groups.
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
"""Timeout of gloo's operations, long enough never to expire: a revocation ends an operation that hangs."""

Identity = tuple[int, int]
"""(device, inode) of a socket, equal for all descriptors of the socket."""

_creating = threading.Lock()
"""Lock held while a gloo device is created: two new listeners at a time could not be told apart."""

CONNECT_SECONDS = 10.0
"""Time limit in seconds for gloo to connect after all members have published their addresses."""
_DROP_SECONDS = 1.0
"""Time in seconds that ``close`` waits for the destruction of aborted groups, which a thread then continues."""


def _sockets() -> list[socket.socket]:
    """Return a duplicate of every TCP socket of this process; the caller closes the duplicates."""
    found = []
    for descriptor in open_sockets():
        with contextlib.suppress(OSError):  # closed meanwhile
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
    """Return duplicates of the connected sockets whose local or remote address is one of ``listeners``."""
    found = []
    for sock in _sockets():
        with contextlib.suppress(OSError):  # not connected
            if {sock.getsockname()[:2], sock.getpeername()[:2]} & listeners:
                found.append(sock)
                continue
        sock.close()
    return found


def shut(sockets: list[socket.socket]) -> set[Identity]:
    """Shut the connections of ``sockets`` (duplicates of gloo's sockets), close the duplicates and clear the list.

    When gloo's threads see the shutdown, they close gloo's descriptors.  Until then they may still write received data
    to the tensors of an operation.  Returns the identities of the connections: with ``open_sockets`` the caller sees
    which of them gloo has not closed yet.
    """
    identities = set[Identity]()
    for sock in sockets:
        with contextlib.suppress(OSError):  # the other end was faster, or it is closed
            status = os.fstat(sock.fileno())
            identities.add((status.st_dev, status.st_ino))
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    sockets.clear()
    return identities


def open_sockets(among: Iterable[int] | None = None) -> dict[int, Identity]:
    """Return descriptor -> identity for the sockets of this process; ``among``: check only these descriptors."""
    found: dict[int, Identity] = {}
    for name in os.listdir("/proc/self/fd") if among is None else map(str, among):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                status = os.stat(int(name))
                found[int(name)] = (status.st_dev, status.st_ino)
    return found


LOOP = "gloo_tcp_loop"
"""Name, since torch 2.13, of the threads in which gloo polls its connections."""


def loops() -> list[Path]:
    """Return the /proc folders of the threads of this process in which gloo polls its connections."""
    found = list[Path]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            if (task / "comm").read_text().strip() == LOOP:
                found.append(task)
    return found


def looks(threads: Iterable[Path]) -> dict[str, int]:
    """Return thread id -> count of polls for ``threads`` (from ``loops``); a count may be too low, never too high.

    A poll usually blocks, and the kernel counts how often a thread blocks.  While a connection has an event that gloo
    does not consume, the polls do not block.  So 10 ms of processor time count as ten polls, though the thread then
    polls far more often.
    """
    found = dict[str, int]()
    for task in threads:
        with contextlib.suppress(OSError, LookupError):  # the thread has ended; a kernel without these counts
            ticks = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
            waits = (task / "status").read_text().partition("voluntary_ctxt_switches:")[2].split()[0]
            found[task.name] = 10 * sum(map(int, ticks)) + int(waits)
    return found


def unread(descriptors: Iterable[int]) -> dict[int, int]:
    """Return descriptor -> number of received bytes that were not read yet, for these sockets of this process."""
    found = dict[int, int]()
    for descriptor in descriptors:
        count = array.array("i", [0])
        with contextlib.suppress(OSError):  # closed meanwhile
            fcntl.ioctl(descriptor, termios.FIONREAD, count)
            found[descriptor] = count[0]
    return found


class GivenUp:
    """Detects that gloo will never close some of the connections that were shut, so that waiting for it is useless.

    gloo never closes a connection if an operation was freed while it received a message over this connection.  An
    all-reduce, for example, is freed when it has lost one member, while the message of another member may be arriving.
    """

    LOOKS = 30
    """Number of polls per thread after which gloo has given up: it closes a connection at the first poll or never."""

    FIRST = 20
    """Number of first calls of ``over`` that check nothing, since gloo usually closes connections at once."""

    def __init__(self) -> None:
        self._asked = 0
        self._threads: list[Path] = []
        self._unread: dict[int, int] | None = None
        self._looks: dict[str, int] = {}

    def over(self, descriptors: Iterable[int]) -> bool:
        """Return whether gloo will never close these connections; call this repeatedly after they were shut.

        True if all of gloo's threads have polled their connections ``LOOKS`` times and have read nothing in between:
        then these threads no longer write data from the connections to a tensor.  Never true with torch before 2.13.
        """
        self._asked += 1
        if self._asked <= self.FIRST:
            return False
        if self._unread is None:  # a thread that starts later polls other connections
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
    raise RuntimeError("cannot identify gloo's listening socket: other threads of this process keep opening some")


class _Exchange:
    """Values that gloo publishes, by group and key.  gloo's threads wait only in ``wait``, which ``end`` interrupts."""

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
        """Add the values that another member has published."""
        with self.changed:
            for group, values in received.items():
                self._known |= {(group, key): bytes.fromhex(value) for key, value in values.items()}
            self.changed.notify_all()

    def wait(self, group: str, keys: Sequence[str]) -> list[bytes]:
        with self.changed:
            self.changed.wait_for(lambda: self._over or all((group, key) in self._known for key in keys))
            if self._over:
                raise ConnectionAbortedError("the creation of these gloo groups was given up")
            return [self._known[group, key] for key in keys]

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def end(self) -> None:
        """Make all present and future waits raise ``ConnectionAbortedError``."""
        with self.changed:
            self._over = True
            self.changed.notify_all()


class _Store(dist.Store):
    """Store for gloo's rendezvous of one group; its values are in ``exchange``."""

    def __init__(self, group: str, exchange: _Exchange) -> None:
        super().__init__()
        self._group, self._exchange = group, exchange

    def set(self, key: str, value: bytes) -> None:
        self._exchange.publish(self._group, key, value)

    def get(self, key: str) -> bytes:
        return self._exchange.wait(self._group, [key])[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        del timeout  # the caller limits the total time
        self._exchange.wait(self._group, keys)


class GlooGroups:
    """gloo groups of one worker, created and aborted together; ``backends``: name -> torch's gloo group."""

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
        """``groups``: name -> members in rank order, including ``me``; all members use the same name for a group.

        ``ring``: prefix of the keys in ``store``, the same on all members of these groups, and never used before.
        ``timeout``: time limit in seconds for each other member to publish its addresses.

        If it raises ``EpochRevoked``, ``TimeoutError`` or ``PeerLost``, no group exists.
        """
        self.backends: dict[str, Any] = {}
        self._cancel_token = cancel_token
        self._connected: list[socket.socket] = []
        self.shut = set[Identity]()
        """Identities of the connections that ``abort`` has shut."""
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
        """Create a group in a thread; if the thread gets stuck, it is left behind until gloo's timeout ends it."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [device]
        options._threads = 1  # two threads would write one string at once (`hostdevice.replacements`)
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
        """Make every operation of these groups fail, on this worker and on the other members; from any thread."""
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
    """Waits until a gloo operation is over or the epoch is revoked; a separate thread runs gloo's own wait.

    Only one thread may call ``wait``, so one operation is waited for at a time.

    gloo can miss that its connections were shut (docs/ring.md).  Then the separate thread waits for ever and is left
    behind; data that still arrives is written to memory that the operation keeps alive.
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
