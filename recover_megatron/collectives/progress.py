"""Thread that carries out the collectives of a group, or of all groups of a device, in the order of submission.

    IDLE --submit--> RUNNING --all finished--> IDLE --close--> CLOSED
                        '--revoked, or a fault--> FAILED --close--> CLOSED

All columns of a device share a thread.  So their operations have one order, the same in all workers of a column: the
order in which buckets are submitted.  A task of another executor begins when all tasks before it are finished.

In FAILED every unfinished handle, and every later one, ends with the error.  The error is reported only when the
executor has settled: from then on these groups do not touch a bucket, a ledger or the network.  If the executor cannot
settle (its device has failed), the handles end with the error of ``settle`` instead.  That is no ``EpochRevoked``: then
the caller must not assume that the bucket is untouched or finished.

An error of torch's communication counts as a revocation: an abort by another thread and a dead member both look like
one (``_revocation``).

The work runs in this thread, never in the caller's, so that an asynchronous exception or a signal handler of the
training thread cannot strike between the copy of a segment and its mark in the ledger.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked, PeerLost

Hook = Callable[[str, int], None]
"""Hook for tests: called at every boundary of a message with the boundary's name and the message's hop.

``send`` before a message is passed to the transport, ``sent`` after; ``arrived`` when one is complete in scratch;
``written`` between the write of a finished segment and its mark; ``add``, ``finish`` or ``store`` after (``gather``
instead of ``store`` in an all-gather).
"""


class Handle:
    """Handle of a submitted collective."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether ``wait`` would return or raise at once."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the collective is finished here and its buckets may be used again.

        Raises ``EpochRevoked`` if the epoch ended first, ``CollectiveMismatch`` if the members issued different
        collectives, ``TimeoutError`` after ``timeout`` seconds (the collective continues).
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the collective was not finished within {timeout:g} s")
        if self._error is not None:
            raise _afresh(self._error)

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._finished.set()


def _afresh(error: BaseException) -> BaseException:
    """Return the error to raise in another thread.

    A revocation is raised without its traceback, whose frames would keep the connections and the memory of the old
    epoch alive until the garbage collector runs; training loops often disable it.
    """
    return EpochRevoked(error.epoch, error.reason) if isinstance(error, EpochRevoked) else error


class Executor[T: Task](ABC):
    """Carries out tasks; only the progress thread calls it."""

    @property
    @abstractmethod
    def scratch_peak(self) -> int:
        """Peak of the scratch in bytes."""

    @abstractmethod
    def add(self, task: T) -> None:
        """Add a task; it is carried out after the previous tasks, or overlapping with them."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True if a task is unfinished."""

    @abstractmethod
    def advance(self) -> None:
        """Do a part of the work, blocking if necessary, and finish the handles of finished tasks.

        Raises ``EpochRevoked``, ``PeerLost``, ``CollectiveMismatch``.
        """

    @abstractmethod
    def settle(self) -> None:
        """Return when nothing is being read, written or sent any more; called after an error of ``advance``."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and memory."""


@dataclass(eq=False)
class Task:
    """Unit of work for a progress thread, with its handle."""

    handle: Handle = field(default_factory=Handle, init=False)


@dataclass(frozen=True, slots=True)
class _HandedIn:
    executor: Executor[Any]
    task: Task


class ProgressThread:
    """Progress thread; started with the first task, stopped with the last executor."""

    def __init__(
        self,
        cancel_token: CancelToken,
        name: str,
        on_device: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``on_device``: context of the thread, in which the device of its groups is the current device."""
        self.cancel_token = cancel_token
        self._name = name
        self._on_device = on_device
        self._changed = threading.Condition()
        self._executors: list[Executor[Any]] = []
        self._at_work: Executor[Any] | None = None
        self._queue = deque[_HandedIn]()
        self._unfinished = deque[_HandedIn]()
        self._error: BaseException | None = None
        self._failing = False
        """True while the thread settles: it still uses the executors."""
        self._alive = False
        self._thread: threading.Thread | None = None
        cancel_token.on_cancel(self._wake)

    def serve(self, executor: Executor[Any]) -> None:
        """Take tasks for ``executor`` until it is closed."""
        with self._changed:
            self._executors.append(executor)

    def submit[T: Task](self, executor: Executor[T], task: T) -> Handle:
        """Submit a task.  Raises the error with which the thread failed; ``RuntimeError`` if ``executor`` is closed."""
        with self._changed:
            if executor not in self._executors:
                raise RuntimeError("the group of this epoch is closed")
            if self._error is not None:
                raise _afresh(self._error)
            if self._thread is None:
                self.cancel_token.check()
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._alive = True
                self._thread.start()
            self._queue.append(_HandedIn(executor, task))
            self._changed.notify_all()
        return task.handle

    def close(self, executor: Executor[Any]) -> None:
        """Finish the tasks of ``executor`` (or fail them, if revoked) and release its resources; idempotent."""
        with self._changed:
            if executor not in self._executors:
                return
            while self._alive and (self._failing or self._has_tasks_of(executor)):
                self._changed.wait()
            self._executors.remove(executor)
            self._changed.notify_all()
            last = not self._executors
        if last and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            # The executor holds device memory, and closed groups may be referenced for a complete step (``View``).
            self._at_work = None
        executor.close()

    def _has_tasks_of(self, executor: Executor[Any]) -> bool:
        return any(item.executor is executor for tasks in (self._unfinished, self._queue) for item in tasks)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ---- the thread

    def _run(self) -> None:
        error: BaseException
        try:
            with self._on_device():
                while self._next():
                    self._advance()
            return
        except EpochRevoked as revoked:
            error = revoked
        except (PeerLost, dist.DistError) as lost:
            error = self._revocation(lost)
        except BaseException as fault:  # noqa: BLE001  the thread's boundary: every waiting caller gets the error
            self.cancel_token.cancel(f"{type(fault).__name__}: {fault}")
            error = fault
        self._fail(error)
        del error  # its traceback holds this frame: that cycle would keep the executors' memory

    def _next(self) -> bool:
        """Pass submitted tasks to the executor whose turn it is; wait if there are none; False if closed."""
        if self._busy and not (self._queue or self.cancel_token.cancelled):
            return True  # without the lock: a task submitted now is seen at the next call
        with self._changed:
            while not (self._queue or self._busy or self.cancel_token.cancelled) and self._executors:
                self._changed.wait()
            self.cancel_token.check()
            while self._queue and (self._queue[0].executor is self._at_work or not self._busy):
                first = self._queue.popleft()
                self._unfinished.append(first)
                self._at_work = first.executor
                first.executor.add(first.task)
            return bool(self._executors)

    @property
    def _busy(self) -> bool:
        return self._at_work is not None and self._at_work.busy

    def _advance(self) -> None:
        if self._at_work is not None and self._at_work.busy:
            self._at_work.advance()
        if self._unfinished and self._unfinished[0].task.handle.done():
            with self._changed:
                while self._unfinished and self._unfinished[0].task.handle.done():
                    self._unfinished.popleft()
                self._changed.notify_all()

    def _revocation(self, lost: PeerLost | dist.DistError) -> EpochRevoked:
        """Cancel the token because of ``lost``; return its error, which keeps the reason of an earlier cancellation."""
        self.cancel_token.cancel(lost if isinstance(lost, PeerLost) else PeerLost(f"{type(lost).__name__}: {lost}"))
        return self.cancel_token.error()

    def _fail(self, error: BaseException) -> None:
        """Settle, then fail every unfinished handle."""
        with self._changed:
            self._failing = True
            executors = list(self._executors)
        try:
            with self._on_device():
                for executor in executors:
                    executor.settle()
        except BaseException as fault:  # noqa: BLE001  as above
            error = fault
        error = _afresh(error)
        with self._changed:
            self._error, self._alive = error, False
            tasks = [*self._unfinished, *self._queue]
            self._unfinished.clear()
            self._queue.clear()
            self._changed.notify_all()
        for item in tasks:
            if not item.task.handle.done():
                item.task.handle.finish(error)
