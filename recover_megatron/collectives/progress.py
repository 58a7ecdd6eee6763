"""Thread that runs the collectives of a group, or of all groups of a device, in the order of submission.

    IDLE --submit--> RUNNING --all finished--> IDLE --close--> CLOSED
                        '--revoked, or an error--> FAILED --close--> CLOSED

All groups of a device may share one thread.  All workers of a column submit buckets in the same order, and the thread
runs the operations in this order.  A task begins only when every earlier task of another executor is finished.

In state FAILED, every unfinished handle and every later submission raises the error that stopped the thread.  Before
the thread enters this state, it calls ``quiesce`` of all executors, and so waits until the groups no longer access a
bucket, a ledger or the network.  If ``quiesce`` fails because the device has failed, the handles raise the error of
``quiesce``.  This error is no ``EpochRevoked``, because the contents of the buckets are then unknown.

An error of torch's communication (``DistError``) counts as a revocation, because it may mean that another thread has
aborted the group or that a member is dead.

Collectives do not run in the caller's thread, where an asynchronous exception or a signal handler could interrupt
between the copy of a segment and the segment's mark in the ledger.
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
"""Callback for tests: called with a step's name and the message's hop while the message is processed.

``send``, ``sent``: before and after the message is passed to the transport.  ``arrived``: the message is complete in
scratch.  ``written``: a finished segment is written to the bucket, but not marked yet.  ``add``, ``finish``, ``store``:
this action on the message is done (in an all-gather, the name is ``gather`` instead of ``store``).
"""


class Handle:
    """Handle of a submitted collective, with which the caller waits until the collective is finished."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether the collective has finished or failed, so that ``wait`` does not block."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the collective is finished on this worker; then the caller may use its bucket again.

        Raises ``EpochRevoked`` if the epoch ended first, ``CollectiveMismatch`` if the members issued different
        collectives, and any other error of the progress thread.  Raises ``TimeoutError`` after ``timeout`` seconds;
        then the collective continues.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the collective was not finished within {timeout:g} s")
        if self._error is not None:
            raise _afresh(self._error)

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._finished.set()


def _afresh(error: BaseException) -> BaseException:
    """Return the exception that a waiting thread raises when the progress thread has failed with ``error``.

    For ``EpochRevoked`` this is a copy without traceback.  The traceback's frames would keep the connections and the
    memory of the old epoch alive until the garbage collector runs, and training loops often disable the collector.
    """
    return EpochRevoked(error.epoch, error.reason) if isinstance(error, EpochRevoked) else error


class Executor[T: Task](ABC):
    """Interface of an object that runs the tasks of one group; only the progress thread calls its methods."""

    @property
    @abstractmethod
    def scratch_peak(self) -> int:
        """Peak size of the scratch memory in bytes."""

    @abstractmethod
    def add(self, task: T) -> None:
        """Add ``task`` behind the tasks that were added before; the executor may run several tasks concurrently."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True while an added task is unfinished."""

    @abstractmethod
    def advance(self) -> None:
        """Do the next part of the added tasks, and finish the handles of complete tasks; the call may block.

        Raises ``EpochRevoked``, ``PeerLost``, ``CollectiveMismatch``.
        """

    @abstractmethod
    def quiesce(self) -> None:
        """Wait until this executor does not read, write or send any tensor; called when the thread has failed."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and memory."""


@dataclass(eq=False)
class Task:
    """Collective that a progress thread runs, with the handle of the waiting caller."""

    handle: Handle = field(default_factory=Handle, init=False)


@dataclass(frozen=True, slots=True)
class _HandedIn:
    executor: Executor[Any]
    task: Task


class ProgressThread:
    """Progress thread for one or several executors.

    The first submitted task starts the thread; it ends when the last executor is closed.
    """

    def __init__(
        self,
        cancel_token: CancelToken,
        name: str,
        on_device: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``on_device``: returns a context that makes the groups' device the current device of the thread."""
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
        """True while the thread calls ``quiesce`` of the executors after an error; no executor may be closed then."""
        self._alive = False
        self._thread: threading.Thread | None = None
        cancel_token.on_cancel(self._wake)

    def serve(self, executor: Executor[Any]) -> None:
        """Accept tasks for ``executor`` until ``close(executor)``."""
        with self._changed:
            self._executors.append(executor)

    def submit[T: Task](self, executor: Executor[T], task: T) -> Handle:
        """Submit ``task`` for ``executor``; return its handle.

        If the thread has failed, raises the thread's error.  Raises ``RuntimeError`` if ``executor`` is closed.
        """
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
        """Wait until the tasks of ``executor`` are finished or have failed, then close the executor; idempotent."""
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
            # A closed group and this object may stay referenced for a complete step: release the executor's memory.
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
        del error  # the error's traceback refers to this frame: the cycle would keep the executors' memory alive

    def _next(self) -> bool:
        """Wait for a task, and pass the oldest submitted tasks to their executor unless another executor is busy.

        Returns False when all executors are closed.  Raises ``EpochRevoked`` when the token is cancelled.
        """
        if self._busy and not (self._queue or self.cancel_token.cancelled):
            return True  # checked without the lock; if a task is submitted now, the next call sees it
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
        """Cancel the token because of ``lost``; return the error to raise.

        If the token was cancelled earlier, the error has the reason of that cancellation.
        """
        self.cancel_token.cancel(lost if isinstance(lost, PeerLost) else PeerLost(f"{type(lost).__name__}: {lost}"))
        return self.cancel_token.error()

    def _fail(self, error: BaseException) -> None:
        """Call ``quiesce`` of all executors, then finish every unfinished handle with ``error``.

        If ``quiesce`` raises, the handles get that error instead.
        """
        with self._changed:
            self._failing = True
            executors = list(self._executors)
        try:
            with self._on_device():
                for executor in executors:
                    executor.quiesce()
        except BaseException as fault:  # noqa: BLE001  the thread's boundary: every waiting caller gets the error
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
