"""Abortable gloo groups, created several at a time: one listener and one message for all of them.

    every worker    a listener; for each group a thread in which gloo publishes its address, then waits
                    all groups have published --one message--> the job's store --one message--> each other member
    gloo            has received the addresses of all members: it connects, and the threads end
    one scan        of the sockets of this process: the connections of these groups

shutdown(2) of the connected sockets wakes an operation (docs/ring.md).  These sockets are identified exactly: a gloo
device has one listener, every connection of its groups has the address of some member's listener at one end, and the
members exchange the addresses of their listeners.

A scan of the sockets of a process costs more than a connection of two members, and every message through the store
waits for the slowest member.  So both are done once for all groups.
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
"""gloo's own timeout must never fire: a revocation ends an operation that hangs."""

Identity = tuple[int, int]
"""Device and inode of a socket: the same for all descriptors of it."""

_creating = threading.Lock()
"""Held while a device is created: with two at the same time their listeners would be indistinguishable."""

CONNECT_SECONDS = 10.0
"""Time limit for gloo to connect once all members have published their addresses."""
_DROP_SECONDS = 1.0
"""Time limit for the destruction of aborted groups; afterwards a thread is left behind."""


def _sockets() -> list[socket.socket]:
    """Return a duplicate of every TCP socket of this process; the caller closes them."""
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
    """Return duplicates of the connected sockets that have one of ``listeners`` at an end."""
    found = []
    for sock in _sockets():
        with contextlib.suppress(OSError):  # not connected
            if {sock.getsockname()[:2], sock.getpeername()[:2]} & listeners:
                found.append(sock)
                continue
        sock.close()
    return found


def shut(sockets: list[socket.socket]) -> set[Identity]:
    """Shut the connections of which ``sockets`` are duplicates, close the duplicates and clear the list.

    gloo's threads close gloo's descriptors when they see the shutdown.  Until then they may still write received data
    to the tensors of an operation: with the returned identities the caller sees which are open (``open_sockets``).
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
    """Return the sockets of this process, by descriptor.  ``among``: only these descriptors, which is faster."""
    found: dict[int, Identity] = {}
    for name in os.listdir("/proc/self/fd") if among is None else map(str, among):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                status = os.stat(int(name))
                found[int(name)] = (status.st_dev, status.st_ino)
    return found


LOOP = "gloo_tcp_loop"
"""Name of the threads in which gloo polls its connections, since torch 2.13."""


def loops() -> list[Path]:
    """Return the threads of this process in which gloo polls its connections, as folders of /proc."""
    found = list[Path]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            if (task / "comm").read_text().strip() == LOOP:
                found.append(task)
    return found


def looks(threads: Iterable[Path]) -> dict[str, int]:
    """Return a count for each of these threads (``loops``); it grows by at most one per poll of the connections.

    A poll usually blocks, and the kernel counts that.  A thread never blocks while a connection has an event that gloo
    does not consume; then its processor time counts, ten per 10 ms, in which it polls far more often.
    """
    found = dict[str, int]()
    for task in threads:
        with contextlib.suppress(OSError, LookupError):  # the thread has ended; a kernel without these counts
            ticks = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
            waits = (task / "status").read_text().partition("voluntary_ctxt_switches:")[2].split()[0]
            found[task.name] = 10 * sum(map(int, ticks)) + int(waits)
    return found


def unread(descriptors: Iterable[int]) -> dict[int, int]:
    """Return the number of received bytes that were not read yet, for each of these sockets of this process."""
    found = dict[int, int]()
    for descriptor in descriptors:
        count = array.array("i", [0])
        with contextlib.suppress(OSError):  # closed meanwhile
            fcntl.ioctl(descriptor, termios.FIONREAD, count)
            found[descriptor] = count[0]
    return found


class GivenUp:
    """Detects that gloo will never close connections that were shut.

    gloo never closes one if an operation was freed in the middle of a message that it was receiving.  An all-reduce,
    for example, frees its memory when it has lost one member, while the message of another member may be arriving.
    """

    LOOKS = 30
    """Polls of each thread after which gloo has given up: it closes a connection at the first poll, or never."""

    FIRST = 20
    """Calls of ``over`` that check nothing: gloo usually closes at once."""

    def __init__(self) -> None:
        self._asked = 0
        self._threads: list[Path] = []
        self._unread: dict[int, int] | None = None
        self._looks: dict[str, int] = {}

    def over(self, descriptors: Iterable[int]) -> bool:
        """Return whether gloo has given up these connections; call it repeatedly after they were shut.

        True if all of gloo's threads have polled their connections ``LOOKS`` times and have read nothing in between:
        then they no longer write data from these connections.  Never true with torch before 2.13.
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
    """Create a gloo device; return it with the address of its listener."""
    with _creating:
        for _ in range(8):
            before = _listeners()
            device = dist.ProcessGroupGloo.create_device(hostname=host)
            new = _listeners() - before
            if len(new) == 1:
                return device, new.pop()
    raise RuntimeError("cannot identify gloo's listening socket: other threads of this process keep opening some")


class _Exchange:
    """Values that gloo publishes, by group and key.  gloo's threads wait only here, where the wait can be ended."""

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
    """Store of one group's rendezvous, as gloo uses it."""

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
    """gloo groups of one worker, created and aborted together.  ``backends``: torch's gloo groups, by name."""

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
        """``groups``: name -> members in rank order, including ``me``; all members of a group give it the same name.

        ``ring``: prefix of the keys, the same on all members of these groups, and never used before.

        Raises ``EpochRevoked``, ``TimeoutError``, ``PeerLost``: then no group exists.
        """
        self.backends: dict[str, Any] = {}
        self._cancel_token = cancel_token
        self._connected: list[socket.socket] = []
        self.shut = set[Identity]()
        """Connections that ``abort`` has shut."""
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
        """Create a group in a thread, which is left behind if it gets stuck: gloo's timeout ends it."""
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
        """Make every operation fail, here and at the other ends; from any thread."""
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
    """Waits for one gloo operation at a time, in a separate thread, or for the revocation.

    Only one thread may use it: it waits for the next operation when the previous one is over or was abandoned.

    gloo can miss that its connections were shut (docs/ring.md).  Then the separate thread waits for ever and is left
    behind; data that still arrives goes to memory that the operation keeps alive.
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
