"""The thread that carries out the collectives of a group, or of all groups of a device, in the order handed in.

    IDLE --submit--> RUNNING --all finished--> IDLE --close--> CLOSED
                        '--revoked, or a fault--> FAILED --close--> CLOSED

All columns of a device share a thread, so that there is one order of their operations, which is the same in all workers
of a column: that in which buckets are handed in.  A task of another executor is begun when those before are finished.

In FAILED every handle that is not finished, and every later one, ends with the error.  The error is told only when the
executor has settled: from then on nothing of these groups touches a bucket, a ledger or the network.  Where it cannot
settle (its device has failed) they end with what it raised instead, which is no ``EpochRevoked``: nobody may take the
bucket for untouched or finished then.

An error of torch's communication is a revocation: an abort by another thread looks like one, and so does a member that
is gone (``_revocation``).

The work runs in a thread of its own, never in the caller's, so that an asynchronous exception or a signal handler of
the training thread can't strike between the copy of a segment and its mark in the ledger.
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
"""For tests: called at every boundary of a message with its name and its hop.

``send`` before a message is handed to the transport, ``sent`` after; ``arrived`` when one is complete in scratch;
``written`` between the write of a finished segment and its mark; ``add``, ``finish`` or ``store`` after (``gather``
instead of ``store`` in an all-gather).
"""


class Handle:
    """A collective under way."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the collective is finished here and its buckets may be used again.

        Raises ``EpochRevoked`` when the epoch ended first, ``CollectiveMismatch`` when the members disagree on what
        they are doing, ``TimeoutError`` after ``timeout`` seconds (the collective goes on).
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the collective was not finished within {timeout:g} s")
        if self._error is not None:
            raise _afresh(self._error)

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._finished.set()


def _afresh(error: BaseException) -> BaseException:
    """The error to raise in one more place.

    A revocation is told without its history, whose frames would keep the connections and the memory of the old epoch
    alive until the garbage collector comes by, which training loops like to switch off.
    """
    return EpochRevoked(error.epoch, error.reason) if isinstance(error, EpochRevoked) else error


class Executor[T: Task](ABC):
    """Carries tasks out; used by the progress thread alone."""

    @property
    @abstractmethod
    def scratch_peak(self) -> int:
        """The most bytes of scratch that it ever had."""

    @abstractmethod
    def add(self, task: T) -> None:
        """Take on one more task; it is carried out after those before it, or overlapping with them."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a task is unfinished."""

    @abstractmethod
    def advance(self) -> None:
        """Do a piece of the work, blocking where it must; finishes the handles of finished tasks.

        Raises ``EpochRevoked``, ``PeerLost``, ``CollectiveMismatch``.
        """

    @abstractmethod
    def settle(self) -> None:
        """After an error of ``advance``: return when nothing is being read, written or sent any more."""

    @abstractmethod
    def close(self) -> None:
        """Give back connections and memory."""


@dataclass(eq=False)
class Task:
    """What a progress thread is given: a unit of work with its handle."""

    handle: Handle = field(default_factory=Handle, init=False)


@dataclass(frozen=True, slots=True)
class _HandedIn:
    executor: Executor[Any]
    task: Task


class ProgressThread:
    """The thread; started with the first task, ended with the last executor."""

    def __init__(
        self,
        cancel_token: CancelToken,
        name: str,
        on_device: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``on_device``: the context of the thread, in which the device of its groups is the current one."""
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
        """It settles: the executors are still its own."""
        self._alive = False
        self._thread: threading.Thread | None = None
        cancel_token.on_cancel(self._wake)

    def serve(self, executor: Executor[Any]) -> None:
        """Take tasks for ``executor`` until it is closed."""
        with self._changed:
            self._executors.append(executor)

    def submit[T: Task](self, executor: Executor[T], task: T) -> Handle:
        """Hand in a task.  Raises what the thread has failed with; ``RuntimeError`` when ``executor`` is closed."""
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
        """Finish what was handed in for ``executor`` (or fail it, if revoked), give everything back; idempotent."""
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
            # Its memory is the device's, and closed groups may be held for a whole step (``View``).
            self._at_work = None
        executor.close()

    def _has_tasks_of(self, executor: Executor[Any]) -> bool:
        return any(its.executor is executor for tasks in (self._unfinished, self._queue) for its in tasks)

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
        except BaseException as fault:  # noqa: BLE001  the thread's boundary: told to whoever waits, nobody is left hanging
            self.cancel_token.cancel(f"{type(fault).__name__}: {fault}")
            error = fault
        self._fail(error)
        del error  # its traceback holds this frame: that cycle would keep the executors' memory

    def _next(self) -> bool:
        """Give what was handed in to the executor whose turn it is; waits while there is nothing; False: closed."""
        if self._busy and not (self._queue or self.cancel_token.cancelled):
            return True  # without the lock: whatever comes now is seen at the next call
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
        """The end of the epoch that ``lost`` is, or a consequence of: once the switch is thrown, its reason stands."""
        self.cancel_token.cancel(lost if isinstance(lost, PeerLost) else PeerLost(f"{type(lost).__name__}: {lost}"))
        return self.cancel_token.error()

    def _fail(self, error: BaseException) -> None:
        """Settle, then tell every handle."""
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
        for its in tasks:
            if not its.task.handle.done():
                its.task.handle.finish(error)
