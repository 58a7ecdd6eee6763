"""The thread that carries out a group's collectives, in the order in which they were handed in.

    IDLE --submit--> RUNNING --all finished--> IDLE --close--> CLOSED
                        '--revoked, or a fault--> FAILED --close--> CLOSED

In FAILED every handle that is not finished, and every later one, ends with the error.  The error is told only when the
executor has settled: from then on nothing of this group touches a bucket, a ledger or the network.  Where it cannot
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
from dataclasses import dataclass, field

import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked, PeerLost


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


@dataclass(eq=False)
class Task:
    """What a progress thread is given: a unit of work with its handle."""

    handle: Handle = field(default_factory=Handle, init=False)


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
    def advance(self) -> float:
        """Do a piece of the work, blocking where it must; finishes the handles of finished tasks.

        Returns the seconds that may pass until the next call where nothing is handed in meanwhile.

        Raises ``EpochRevoked``, ``PeerLost``, ``CollectiveMismatch``.
        """

    @abstractmethod
    def settle(self) -> None:
        """After an error of ``advance``: return when nothing is being read, written or sent any more."""

    @abstractmethod
    def close(self) -> None:
        """Give back connections and memory."""


class ProgressThread[T: Task]:
    """The thread; started with the first task."""

    def __init__(self, executor: Executor[T], cancel_token: CancelToken, name: str) -> None:
        self.executor = executor
        self._cancel_token = cancel_token
        self._name = name
        self._wakeup = threading.Condition()
        self._queue = deque[T]()
        self._unfinished = deque[T]()
        self._error: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        cancel_token.on_cancel(self._wake)

    def submit(self, task: T) -> Handle:
        """Hand in a task.  Raises what the group failed with, if it did; ``RuntimeError`` when it is closed."""
        with self._wakeup:
            if self._closing:
                raise RuntimeError("the group of this epoch is closed")
            if self._error is not None:
                raise _afresh(self._error)
            if self._thread is None:
                self._cancel_token.check()
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._queue.append(task)
            self._wakeup.notify()
        return task.handle

    def quiesce(self) -> None:
        """After the token was cancelled: return when the thread has settled."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def close(self) -> None:
        """Finish what was handed in (or fail it, if revoked), end the thread, give everything back; idempotent."""
        with self._wakeup:
            first, self._closing = not self._closing, True
            self._wakeup.notify()
        self.quiesce()
        if first:
            self.executor.close()

    def _wake(self) -> None:
        with self._wakeup:
            self._wakeup.notify()

    def _run(self) -> None:
        error: BaseException
        try:
            pause = 0.0
            while self._next(pause):
                pause = self.executor.advance()
                while self._unfinished and self._unfinished[0].handle.done():
                    self._unfinished.popleft()
            return
        except EpochRevoked as revoked:
            error = revoked
        except (PeerLost, dist.DistError) as lost:
            error = self._revocation(lost)
        except BaseException as fault:  # noqa: BLE001  the thread's boundary: told to whoever waits, nobody is left hanging
            self._cancel_token.cancel(f"{type(fault).__name__}: {fault}")
            error = fault
        self._fail(self._settled(error))

    def _revocation(self, lost: PeerLost | dist.DistError) -> EpochRevoked:
        """The end of the epoch that ``lost`` is, or a consequence of: once the switch is thrown, its reason stands."""
        self._cancel_token.cancel(lost if isinstance(lost, PeerLost) else PeerLost(f"{type(lost).__name__}: {lost}"))
        return self._cancel_token.error()

    def _settled(self, error: BaseException) -> BaseException:
        """Settle after ``error``, and return what the handles end with."""
        try:
            self.executor.settle()
        except BaseException as fault:  # noqa: BLE001  as above
            return fault
        return _afresh(error)

    def _next(self, pause: float) -> bool:
        """Move what was handed in to the executor, waiting while there is nothing to do; False: closed."""
        if self.executor.busy and not (pause or self._queue or self._cancel_token.cancelled):
            return True  # without the lock: whatever comes now is seen at the next call
        with self._wakeup:
            if pause and not (self._queue or self._cancel_token.cancelled):
                self._wakeup.wait(pause)
            while not (self._queue or self.executor.busy or self._closing or self._cancel_token.cancelled):
                self._wakeup.wait()
            self._cancel_token.check()
            fresh, closing = list(self._queue), self._closing
            self._unfinished += fresh
            self._queue.clear()
        for task in fresh:  # without the lock: it may wait for the device that computes the bucket
            self.executor.add(task)
        self._cancel_token.check()  # what was computed since is not to be sent: see ``DeviceStream``
        return self.executor.busy or not closing

    def _fail(self, error: BaseException) -> None:
        with self._wakeup:
            self._error = error
            tasks = [*self._unfinished, *self._queue]
            self._unfinished.clear()
            self._queue.clear()
        for task in tasks:
            if not task.handle.done():
                task.handle.finish(error)
