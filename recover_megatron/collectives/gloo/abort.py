"""torch's gloo backend, and the part that gloo lacks: to be aborted (see `groups`).

Even shutting its connections gloo can miss: its thread that reads a neighbour's request finds the connection shut
when it answers, and forgets the message it answered with. Whoever waits for that message waits for ever (seen in up
to one in eight aborts of a busy group). So the waiting is done by a thread that can be left behind, and the group is
dropped by one too. What is left behind reads and writes no bucket: its connections are shut, and what arrives goes to
scratch that its operation keeps alive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.errors import PeerLost
from recover_megatron.collectives.gloo.groups import NO_TIMEOUT, GlooGroups


class GlooBackend:
    """A gloo group of its own for one epoch, that can be aborted."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        cancel_token: CancelToken,
        *,
        ring: str,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
    ) -> None:
        """Raises ``EpochRevoked``, ``TimeoutError``, ``PeerLost``."""
        self._cancel_token = cancel_token
        self._groups = GlooGroups(
            rank, {"all": range(size)}, store, cancel_token, ring=ring, host=host, timeout=timeout
        )
        self._waiter = Waiter(cancel_token)
        self._under_way: dict[int, Any] = {}
        """Operations that nobody has seen end, with all that they hold: gloo's threads may use their tensors."""
        self.backend = self._groups.backends["all"]

    def wait(self, work: Any) -> None:
        """Block until ``work`` is done; raises ``EpochRevoked`` after ``abort``, ``PeerLost`` when a member is gone."""
        self._waiter.wait(work)
        self._under_way.pop(id(work), None)

    def call(self, start: Callable[[Any], Any]) -> Any:
        """Begin an operation: ``start`` gets the backend.  What it refers to lives until the operation has ended."""
        self._cancel_token.check()
        try:
            work = start(self.backend)
        except RuntimeError as error:
            self._cancel_token.check()
            raise PeerLost(f"gloo: {error}") from error
        self._under_way[id(work)] = work, start
        return work

    def abort(self) -> None:
        self._groups.abort()

    def close(self) -> None:
        """Drop the group."""
        self._waiter.close()
        self.backend = None
        self._groups.close(self._under_way)


class _Job:
    def __init__(self, work: Any) -> None:
        self.work = work
        self.over = threading.Event()
        self.error: RuntimeError | None = None


class Waiter:
    """Waits for one operation of gloo's at a time, in a thread of its own, or for the revocation.

    For one thread: the next operation is waited for when the last one is over or has been left.
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
