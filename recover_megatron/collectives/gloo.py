"""Transport over torch's gloo backend, and the part that gloo lacks: to be aborted.

gloo can't abort an operation; dropping a group with an operation in flight blocks until its timeout.  What wakes it is
shutdown(2) of its connected sockets, and those are found exactly: a device of gloo has one listener, every connection
of the group has the address of some member's listener at one of its ends, and the members tell each other theirs.

Even that gloo can miss: now and then (seen about once in forty aborts) an operation on a broken connection is told
nothing, and its wait never returns.  So the waiting is done by a thread that can be left behind, and the group is
dropped by one too.  What is left behind reads and writes no bucket: its connections are shut, and what arrives goes to
scratch that its operation keeps alive.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import Revocation
from recover_megatron.collectives.errors import PeerLost
from recover_megatron.collectives.rendezvous import await_key
from recover_megatron.collectives.scratch import Scratch
from recover_megatron.collectives.transport import Arrival, Pending, Transport

_creating = threading.Lock()
"""Two groups made at the same time could not tell their listeners apart."""
NO_TIMEOUT = timedelta(days=7)
"""gloo's own timeout must never fire: what hangs is ended by a revocation."""

_DROP_SECONDS = 1.0
"""How long to wait for an aborted group to go; then it is left behind."""


def _sockets() -> dict[int, socket.socket]:
    """A duplicate of every TCP socket of this process, by descriptor; the caller closes them."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                sock = socket.socket(fileno=os.dup(int(name)))
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    found[int(name)] = sock
                else:
                    sock.close()
    return found


def _listeners() -> set[tuple[str, int]]:
    found = set()
    for sock in _sockets().values():
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(sock.getsockname()[:2])
    return found


def _connections(listeners: set[tuple[str, int]]) -> list[socket.socket]:
    """Duplicates of the connected sockets that have one of ``listeners`` at an end."""
    found = []
    for sock in _sockets().values():
        with contextlib.suppress(OSError):  # not connected
            if {sock.getsockname()[:2], sock.getpeername()[:2]} & listeners:
                found.append(sock)
                continue
        sock.close()
    return found


class GlooBackend:
    """A gloo group of its own for one epoch, that can be aborted."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        revocation: Revocation,
        *,
        ring: str,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
    ) -> None:
        """Raises ``EpochRevoked``, ``TimeoutError``, ``PeerLost``."""
        self._revocation = revocation
        self._connected: list[socket.socket] = []
        self._closing = threading.Lock()
        self._waiter = _Waiter(revocation)
        self.backend: Any = None
        with _creating:
            device, listener = self._device(host)
        store.set(f"{ring}/{rank}", f"{listener[0]} {listener[1]}")
        # Everybody is there before gloo's own rendezvous begins: that one can't be interrupted.
        told = [await_key(store, f"{ring}/{other}", revocation, timeout).rsplit(" ", 1) for other in range(size)]
        self._make(rank, size, store, ring, device, timeout)
        self._connected = _connections({(address, int(port)) for address, port in told})
        if len(self._connected) < size - 1:
            self.close()
            raise PeerLost(f"{size - 1 - len(self._connected)} of gloo's connections are gone already")
        revocation.on_throw(self.abort)

    @staticmethod
    def _device(host: str) -> tuple[Any, tuple[str, int]]:
        for _ in range(8):
            before = _listeners()
            device = dist.ProcessGroupGloo.create_device(hostname=host)
            new = _listeners() - before
            if len(new) == 1:
                return device, new.pop()
        raise RuntimeError("this process opens listening sockets all the time: gloo's could not be told from others")

    def _make(self, rank: int, size: int, store: dist.Store, ring: str, device: Any, timeout: float) -> None:
        """Build the group in a thread that is left behind if the epoch ends meanwhile; it ends by its own timeout."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [device]
        made: list[Any] = []
        failed: list[RuntimeError] = []
        over = threading.Event()

        def build() -> None:
            try:
                made.append(dist.ProcessGroupGloo(dist.PrefixStore(f"{ring}/gloo", store), rank, size, options))
            except RuntimeError as error:
                failed.append(error)
            over.set()

        threading.Thread(target=build, name=f"gloo of {ring}", daemon=True).start()
        while not over.wait(0.002):
            self._revocation.check()
        if failed:
            self._revocation.check()
            raise PeerLost(f"gloo could not connect: {failed[0]}") from failed[0]
        self.backend = made.pop()

    def wait(self, work: Any) -> None:
        """Block until ``work`` is done; raises ``EpochRevoked`` after ``abort``, ``PeerLost`` when a member is gone."""
        self._waiter.wait(work)

    def call(self, start: Callable[[Any], Any]) -> Any:
        """Begin an operation: ``start`` gets the backend."""
        self._revocation.check()
        try:
            return start(self.backend)
        except RuntimeError as error:
            self._revocation.check()
            raise PeerLost(f"gloo: {error}") from error

    def abort(self) -> None:
        with self._closing:
            for sock in self._connected:
                with contextlib.suppress(OSError):  # the other end was faster
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Drop the group."""
        self._waiter.close()
        last, self.backend = [self.backend], None
        dropping = threading.Thread(target=last.clear, name="dropping a group of gloo", daemon=True)
        dropping.start()
        dropping.join(_DROP_SECONDS if self._revocation.thrown else None)
        with self._closing:
            for sock in self._connected:
                sock.close()
            self._connected.clear()


class _Job:
    def __init__(self, work: Any) -> None:
        self.work = work
        self.over = threading.Event()
        self.error: RuntimeError | None = None


class _Waiter:
    """Waits for one operation of gloo's at a time, in a thread of its own, or for the revocation."""

    def __init__(self, revocation: Revocation) -> None:
        self._revocation = revocation
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._current: _Job | None = None
        self._thread: threading.Thread | None = None
        revocation.on_throw(self._interrupt)

    def wait(self, work: Any) -> None:
        job = self._current = _Job(work)
        self._revocation.check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="waiting for gloo", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        job.over.wait()
        self._revocation.check()
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


class _Message:
    """A work of gloo's is waited for exactly once: a second wait would never return."""

    __slots__ = ("done", "tensor", "work")

    def __init__(self, tensor: torch.Tensor, work: Any) -> None:
        self.tensor = tensor
        self.work = work
        self.done = False


class GlooTransport(Transport):
    """Messages are done when they were waited for: gloo does not tell of a send that has gone by itself."""

    def __init__(self, rank: int, size: int, backend: GlooBackend) -> None:
        self._after, self._before = (rank + 1) % size, (rank - 1) % size
        self._backend = backend
        self._scratch = Scratch(torch.device("cpu"))
        self._under_way: list[_Message] = []
        """Whatever becomes of them, gloo's threads may read and write their tensors."""

    @property
    def scratch_peak(self) -> int:
        return self._scratch.peak

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        return self._begin(tensor, lambda gloo: gloo.send([tensor], self._after, tag))

    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        tensor = self._scratch.take(numel, dtype)
        return self._begin(tensor, lambda gloo: gloo.recv([tensor], self._before, tag))

    def _begin(self, tensor: torch.Tensor, start: Callable[[Any], Any]) -> _Message:
        message = _Message(tensor, self._backend.call(start))
        self._under_way.append(message)
        return message

    def release(self, arrival: Arrival) -> None:
        self._scratch.give(arrival.tensor)

    def wait(self, pending: Pending) -> None:
        assert isinstance(pending, _Message)
        self._under_way.remove(pending)
        try:
            self._backend.wait(pending.work)
        finally:
            pending.done = True

    def settle(self) -> None:
        """Nothing is sent any more when the connections are shut."""
        self.abort()

    def abort(self) -> None:
        self._backend.abort()

    def close(self) -> None:
        self._under_way.clear()
        self._backend.close()
