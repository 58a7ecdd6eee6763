"""One non-blocking communicator of NCCL's, and what may be asked of it when.

                success               launch                  all over and believed
    OPENING -------------> READY -----------------> IN_USE -----------------------> READY
       |                     |                         |
       | error, timeout,     | revoke()                | revoke(): the switch is cancelled, or NCCL reports an error
       | switch cancelled    v                         v
       |                 REVOKING <--------------------'
       |                     |   '--error, no quiescence in time, NCCL without revoke: abort--> CLOSED
       |                     v quiescent
       |                 REVOKED --parent of a shrink, then close()--> CLOSED
       '--abort------------------------------------------------------> CLOSED

What NCCL's user guide says ("Fault Tolerance", "Asynchronous errors and error handling", ncclCommGetAsyncError) and
what is made of it here:

* Any call may leave the communicator *in progress*; until that is over nothing but ncclCommGetAsyncError may be called,
  and nothing may be enqueued on its streams.  ``launch`` returns only when it is over, so the event that it records is
  recorded behind the operation.  A communicator in progress is aborted, not revoked.
* *After an error nothing can be assumed* of what was enqueued; a kernel that was revoked or aborted completes, with
  garbage in its output.  So an operation is *over* when its event is, and *believed* if, after that, NCCL reports
  success and the switch is not cancelled: the token is cancelled before anything is revoked, and nobody but this
  process revokes this end.
* ncclCommRevoke makes the communicator in progress until it is quiescent; then it may be shrunk or aborted, not
  finalized.  Nothing is ever destroyed or finalized here, which may wait for members that are dead: ``close`` aborts.

One thread at a time owns a communicator: whoever opens it, then the group's progress thread, then whoever closes the
group.  The owner revokes.  Only if it has been inside one call of NCCL's for ``STUCK`` seconds after the switch was
cancelled does another thread abort, which NCCL allows at any time; the call then returns.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked, PeerLost
from recover_megatron.collectives.nccl.library import IN_PROGRESS, SUCCESS, Library

STUCK = 1.0
QUIESCENT = 5.0
"""Seconds in which a revoked communicator must be quiescent; it is aborted after that."""
GUARD = "guard of a communicator"
_SPINS, _PAUSE, _LONGEST_PAUSE = 20, 0.00002, 0.0005


class State(enum.Enum):
    OPENING = enum.auto()
    READY = enum.auto()
    IN_USE = enum.auto()
    REVOKING = enum.auto()
    REVOKED = enum.auto()
    CLOSED = enum.auto()


class Operation:
    """Something launched: a point in a stream.  Its tensors belong to NCCL until it was waited for."""

    __slots__ = ("event", "tensors")

    def __init__(self, event: Any, tensors: tuple[Any, ...]) -> None:
        self.event = event
        self.tensors: tuple[Any, ...] = tensors
        """Kept alive: torch's allocator knows nothing of the stream that uses them."""

    @property
    def done(self) -> bool:
        """Whether it is over; says nothing of success."""
        return bool(self.event.query())


class Communicator:
    """``handle``: of NCCL's, being opened.  ``parent``: what it is made from, which is in progress as long."""

    def __init__(
        self,
        library: Library,
        handle: Any,
        identity: str,
        cancel_token: CancelToken,
        *,
        rank: int,
        size: int,
        parent: Communicator | None = None,
    ) -> None:
        self.library = library
        self.handle = handle
        self.rank, self.size = rank, size
        """Known here: NCCL is asked nothing of a communicator that is revoked."""
        self.identity = identity
        """The same at all members, and of no other communicator."""
        self.operations = 0
        """Believed ones."""
        self._parent = parent
        self._state = State.OPENING
        self._lock = threading.Lock()
        """Of the state's end: the guard and the owner must not abort both."""
        self._under_way: deque[Operation] = deque()
        self._in_progress = False
        """Of a call that ``begin`` made."""
        self._entered: float | None = None
        self._guarded = False
        self._token = cancel_token
        self.adopt(cancel_token)

    @property
    def state(self) -> State:
        return self._state

    @property
    def idle(self) -> bool:
        """Whether it can be kept for another epoch as it is."""
        return self._state is State.READY

    def adopt(self, cancel_token: CancelToken) -> None:
        """Belong to another epoch from now on."""
        self._token, self._guarded = cancel_token, True
        cancel_token.on_cancel(lambda: self._start_guard(cancel_token))

    def release(self) -> None:
        """Belong to no epoch: nobody is in a call of NCCL's, nobody makes one until it is adopted."""
        self._guarded = False

    # ---- opening

    def advance(self) -> bool:
        """Whether it is open by now; to be asked again and again, by one thread.

        Raises ``PeerLost`` and ``EpochRevoked``, after which it is closed.
        """
        try:
            self._token.check()
            if self._state is State.OPENING and self._opened():
                self._become(State.READY)
                self._parent = None
        except (PeerLost, EpochRevoked):
            self.close()
            raise
        return self._state is State.READY

    def _opened(self) -> bool:
        # The pointer of a child is filled in while its parent is in progress (nccl4py: ``_children_in_progress``).
        if self._parent is not None and self._result(self._parent.handle) == IN_PROGRESS:
            return False
        return bool(self.handle.is_valid) and self._result(self.handle) == SUCCESS

    def manage(self, call: Callable[[Any], Any]) -> Any:
        """Make another communicator of this one, which may be in progress afterwards, until that one is open."""
        self._token.check()
        with self._inside():
            return call(self.handle)

    # ---- use

    def launch(self, call: Callable[[Any], None], event: Callable[[], Any], *tensors: Any) -> Operation:
        """Enqueue what ``call`` does with the handle; ``event`` records an event on the same stream afterwards.

        Returns when NCCL has enqueued it, which is before it has been carried out.
        """
        self.begin(call)
        for _ in pauses():
            if self.begun:
                break
        return self.launched(event(), *tensors)

    def begin(self, call: Callable[[Any], None]) -> None:
        """The first part of ``launch``, which does not block: who has several communicators must not wait in one.

        (The first operation connects the members, and is in progress until the others have called it, too.)
        """
        self._check()
        self._become(State.IN_USE)
        self._in_progress = True  # before the call: it may be interrupted with the operation enqueued
        with self._inside():
            call(self.handle)

    @property
    def begun(self) -> bool:
        """Whether what ``begin`` called is in the stream; asked until it is."""
        self._token.check()
        if self._in_progress and self._result(self.handle) == SUCCESS:
            self._in_progress = False
        return not self._in_progress

    def launched(self, event: Any, *tensors: Any) -> Operation:
        """The last part: ``event`` was recorded after ``begun``."""
        operation = Operation(event, tensors)
        self._under_way.append(operation)
        return operation

    def wait(self, operation: Operation) -> None:
        """Block the host until ``operation``, and what was launched before it, is over and believed.

        Raises ``EpochRevoked`` when the switch is cancelled, ``PeerLost`` when NCCL reports an error.
        """
        for _ in pauses():
            self._check()
            if operation.done:
                break
        self.believe()

    def believe(self) -> None:
        """All operations that are over are believed, or an error is raised: call it before their output is read."""
        over = []
        while self._under_way and self._under_way[0].done:
            over.append(self._under_way.popleft())
        self._check()  # after they are over: see above
        for operation in over:
            operation.tensors = ()
        self.operations += len(over)
        if not self._under_way and self._state is State.IN_USE:
            self._become(State.READY)

    def _check(self) -> None:
        self._token.check()
        if self._state in (State.REVOKING, State.REVOKED, State.CLOSED):
            raise PeerLost("this communicator of NCCL's was ended")
        self._leave_progress()

    def _leave_progress(self) -> None:
        """Return when NCCL reports success; raises ``PeerLost`` if it reports anything but that and *in progress*."""
        for _ in pauses():
            if self._result(self.handle) == SUCCESS:
                return
            self._token.check()

    def _result(self, handle: Any) -> int:
        """NCCL's word on its state: success or in progress; ``PeerLost`` if it is an error."""
        with self._inside():
            result = int(handle.get_async_error())
        if result not in (SUCCESS, IN_PROGRESS):
            raise PeerLost(f"NCCL reports error {result} of its communicator")
        return result

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Around every call of NCCL's: the guard sees how long it takes, and its errors are ``PeerLost``."""
        self._entered = time.monotonic()
        try:
            yield
        except self.library.errors as error:
            self._token.check()  # whatever it says after the switch, it is the switch
            raise PeerLost(f"NCCL: {error}") from error
        finally:
            self._entered = None

    # ---- the end

    def settle(self) -> None:
        """The epoch is over: return when nothing of it runs in NCCL any more.

        A communicator all of whose operations here are over and believed stays READY.
        """
        if self._state is not State.READY:
            self.revoke()

    def revoke(self) -> None:
        """End what is under way, here: REVOKED, or CLOSED where NCCL cannot do that or does not in time."""
        with self._lock:
            if self._state in (State.REVOKED, State.CLOSED):
                return
            if not self.library.revokes_and_grows or self._state is State.OPENING or self._in_progress:
                return self._abort()  # in progress only aborting is sure to be allowed
            self._state = State.REVOKING
        try:
            with self._inside():
                self.handle.revoke()
            deadline = time.monotonic() + QUIESCENT
            for _ in pauses():
                if self._result(self.handle) == SUCCESS:
                    self._become(State.REVOKED)
                    return
                if time.monotonic() > deadline:
                    return self.close()
        except (PeerLost, EpochRevoked):
            self.close()

    def close(self) -> None:
        """Abort, unless that was done; idempotent.  May wait for the device."""
        with self._lock:
            self._abort()

    def _abort(self) -> None:
        """With the lock."""
        if self._state is State.CLOSED:
            return
        self._state = State.CLOSED
        with contextlib.suppress(*self.library.errors):  # it is of no use any more in any case
            self.handle.abort()
        self._parent = None

    def _become(self, state: State) -> None:
        with self._lock:
            if self._state is not State.CLOSED:
                self._state = state

    # ---- the guard

    def _start_guard(self, token: CancelToken) -> None:
        if self._guards(token):
            threading.Thread(target=self._guard, args=(token,), name=GUARD, daemon=True).start()

    def _guards(self, token: CancelToken) -> bool:
        return self._guarded and self._token is token and self._state not in (State.REVOKED, State.CLOSED)

    def _guard(self, token: CancelToken) -> None:
        """While the owner is in NCCL after the switch was cancelled: abort in its place when it stays there."""
        cancelled = time.monotonic()
        while self._guards(token):
            entered = self._entered
            if entered is not None and time.monotonic() > max(entered, cancelled) + STUCK:
                return self.close()
            time.sleep(STUCK / 20)


def pauses() -> Iterator[None]:
    """Turns of a loop that waits: some at once, then with growing pauses, in which other threads have the GIL."""
    for _ in range(_SPINS):
        yield
    pause = _PAUSE
    while True:
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
        yield
