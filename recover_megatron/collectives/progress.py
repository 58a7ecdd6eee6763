"""Thread that carries out the collectives of a group, or of all groups of a device, in the order of submission.

    IDLE --submit--> RUNNING --all finished--> IDLE --close--> CLOSED
                        '--revoked, or a fault--> FAILED --close--> CLOSED

All columns of a device share a thread, so all workers of a column run their operations in the same order: the order in
which buckets are submitted.  If a task belongs to another executor than the task before it, it begins only when all
tasks before it are finished.

In FAILED every unfinished handle, and every later submission, raises the error.  It is raised only after ``settle`` of
all executors has returned: from then on these groups do not touch a bucket, a ledger or the network.  If ``settle``
fails (the device has failed), the handles raise the error of ``settle`` instead.  Since this error is no
``EpochRevoked``, the caller must not assume that a bucket is untouched or finished.

An error of torch's communication counts as a revocation (``_revocation``), since an abort by another thread and a dead
member both appear as such an error.

The work runs in this thread, never in the caller's thread, so that an asynchronous exception or a signal handler of
the training thread cannot interrupt between the copy of a segment and its mark in the ledger.
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
"""Hook for tests: called with the name of a point in the processing of a message, and the message's hop.

``send``: before a message is passed to the transport; ``sent``: after that.  ``arrived``: a message is complete in
scratch.  ``written``: a finished segment is written but not marked yet.  ``add``, ``finish`` or ``store``: the message
was processed (``gather`` instead of ``store`` in an all-gather).
"""


class Handle:
    """Handle with which a caller waits for a submitted collective."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether ``wait`` would return, or raise, without blocking."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the collective is finished here and its buckets may be used again.

        Raises ``EpochRevoked`` if the epoch ended first, ``CollectiveMismatch`` if the members issued different
        collectives, ``TimeoutError`` if ``timeout`` seconds pass (the collective then continues), and any other error
        with which the progress thread failed.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the collective was not finished within {timeout:g} s")
        if self._error is not None:
            raise _afresh(self._error)

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._finished.set()


def _afresh(error: BaseException) -> BaseException:
    """Return the error to raise in a waiting thread for the progress thread's ``error``.

    For a revocation this is a copy without traceback: the traceback's frames would keep the connections and the memory
    of the old epoch alive until the garbage collector runs, and training loops often disable the collector.
    """
    return EpochRevoked(error.epoch, error.reason) if isinstance(error, EpochRevoked) else error


class Executor[T: Task](ABC):
    """Carries out the tasks of one group; only the progress thread calls it."""

    @property
    @abstractmethod
    def scratch_peak(self) -> int:
        """Peak size of the scratch memory in bytes."""

    @abstractmethod
    def add(self, task: T) -> None:
        """Add a task; the executor may overlap it with the previous tasks, or run it after them."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True while an added task is unfinished."""

    @abstractmethod
    def advance(self) -> None:
        """Do one part of the added tasks, blocking if necessary, and finish the handles of tasks that are complete.

        Raises ``EpochRevoked``, ``PeerLost``, ``CollectiveMismatch``.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until this executor no longer reads, writes or sends a tensor; called after an error of ``advance``."""

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
    """Progress thread of one or several executors; started by the first task, stopped when the last executor closes."""

    def __init__(
        self,
        cancel_token: CancelToken,
        name: str,
        on_device: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``on_device``: returns the context of the thread, in which the groups' device is the current device."""
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
        """True while the thread calls ``settle`` of the executors after an error: they must not be closed yet."""
        self._alive = False
        self._thread: threading.Thread | None = None
        cancel_token.on_cancel(self._wake)

    def serve(self, executor: Executor[Any]) -> None:
        """Accept tasks for ``executor`` until ``close(executor)``."""
        with self._changed:
            self._executors.append(executor)

    def submit[T: Task](self, executor: Executor[T], task: T) -> Handle:
        """Submit a task; return its handle.  Raises the thread's error; ``RuntimeError`` if ``executor`` is closed."""
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
        """Finish the tasks of ``executor`` (fail them if the epoch is revoked), then close it; idempotent."""
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
        """Pass tasks to their executor when its turn comes; wait while no task exists.  False: all are closed."""
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
        """Cancel the token because of ``lost``; return the token's error, with the reason of the first cancellation."""
        self.cancel_token.cancel(lost if isinstance(lost, PeerLost) else PeerLost(f"{type(lost).__name__}: {lost}"))
        return self.cancel_token.error()

    def _fail(self, error: BaseException) -> None:
        """Settle all executors, then finish every unfinished handle with ``error``, or with the error of ``settle``."""
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
