"""Waiting for an operation of gloo's in a way that can be left, for groups whose connections were shut (`groups`).

Even that gloo can miss: its thread that reads a neighbour's request finds the connection shut when it answers, and
forgets the message it answered with.  A thread that waits for that message waits for ever (seen in up to one in eight
aborts of a busy group).  So the waiting is done by a thread that can be left behind; what arrives there goes to memory
that its operation keeps alive.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.errors import PeerLost
from recover_megatron.collectives.gloo.groups import NO_TIMEOUT


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
