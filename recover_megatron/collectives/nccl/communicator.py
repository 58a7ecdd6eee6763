"""Non-blocking NCCL communicator whose results are believed only if no member can have aborted.

                success               launch                  all over and believed
    OPENING -------------> READY -----------------> IN_USE -----------------------> READY
       |                     |                         |
       | error, timeout,     | not kept                | the token is cancelled, or NCCL reports an error
       | token cancelled     |                         |
       '---------------------'--abort------------------'------> CLOSED

Rules of NCCL's user guide ("Fault Tolerance", "Asynchronous errors and error handling", ncclCommGetAsyncError), and
their consequences here:

* Any call may leave the communicator *in progress* (ncclInProgress).  In this state only ncclCommGetAsyncError and
  ncclCommAbort may be called, and nothing may be enqueued on its streams.  ``launch`` returns only when the call is
  complete, so the event that ``launch`` records is behind the operation.
* *After an error nothing can be assumed* about enqueued operations; an aborted kernel completes, with garbage in its
  output.  So an operation is *over* when the device has reached its event, and *believed* if, after that, NCCL reports
  success and the token is not cancelled.  This is safe against an abort at this end: only this process aborts this
  end, and it cancels the token first.
* *An aborted kernel still posts* its steps to its peers, without data (src/device/prims_simple.h: genericOp,
  postPeer).  Over P2P and shared memory the kernels of the peers then complete with garbage, and the peers' NCCL
  reports success.
  So operations in flight are aborted only when the tokens of all live members are cancelled
  (``CancelToken.all_heard``): while a member still believes operations, no peer of it has an aborted kernel.  An
  evicted member aborts nothing, but exits.  Until it learns of the eviction, ``CancelToken.in_touch`` does not return,
  so it believes nothing.
* This module never destroys or finalizes a communicator, which may wait for dead members: ``close`` aborts, which is
  allowed in every state, at any time, from any thread.

One thread at a time owns a communicator: the thread that opens it, then the group's progress thread, then the thread
that closes the group.  The owner aborts.  Another thread (the guard) aborts only if, after the cancellation, the owner
has been inside one NCCL call for ``STUCK`` seconds; the abort makes that call return.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from recover_megatron.collectives.device import pauses
from recover_megatron.collectives.epoch import CancelToken, EpochRevoked, PeerLost
from recover_megatron.collectives.nccl.library import IN_PROGRESS, SUCCESS, Library, abort_beside
from recover_megatron.membership.records import MembershipError

STUCK = 1.0
GUARD = "guard of a communicator"


class State(enum.Enum):
    OPENING = enum.auto()
    READY = enum.auto()
    IN_USE = enum.auto()
    CLOSED = enum.auto()


@dataclass(slots=True, eq=False)
class Operation:
    """Launched operation, with an event behind it.  Its tensors belong to NCCL until ``wait(operation)`` returns."""

    event: Any
    tensors: tuple[Any, ...]
    """Tensors that must stay alive: torch's allocator does not know that NCCL's stream uses them."""

    @property
    def done(self) -> bool:
        """True if the operation is over, successful or not."""
        return bool(self.event.query())


class Communicator:
    """NCCL communicator with its state; ``handle``: nccl4py's communicator, which is opening on the current device."""

    def __init__(
        self, library: Library, handle: Any, identity: str, cancel_token: CancelToken, *, rank: int, size: int
    ) -> None:
        self.library = library
        self.handle = handle
        self.rank, self.size = rank, size
        self.identity = identity
        """Unique name of the communicator, equal at all members."""
        self.operations = 0
        """Number of operations that this member has believed."""
        self._device: int = library.cuda.current_device()
        self.state = State.OPENING
        self._lock = threading.Lock()
        """Protects the transition to CLOSED: the guard and the owner must not both abort."""
        self._under_way: deque[Operation] = deque()
        self._handed: tuple[Any, ...] = ()
        """Tensors of an incomplete launch; kept alive, since a kernel may start even if the caller gives up."""
        self._entered: float | None = None
        self.adopt(cancel_token)

    def adopt(self, cancel_token: CancelToken) -> None:
        """Use the communicator in the epoch of ``cancel_token``, whose cancellation starts the guard."""
        self._token = cancel_token
        cancel_token.on_cancel(lambda: self._beside(GUARD, lambda: self._guard(cancel_token)))

    def release(self) -> None:
        """Detach the communicator from its epoch; until ``adopt`` no thread may make NCCL calls with it."""
        self._token = CancelToken(0)

    # ---- opening

    def advance(self) -> bool:
        """Return whether the communicator is open; the opening thread calls this repeatedly.

        If it raises ``PeerLost`` or ``EpochRevoked``, the communicator is closed.
        """
        try:
            self._token.check()
            if self.state is State.OPENING and self._succeeded():
                self._become(State.READY)
        except (PeerLost, EpochRevoked):
            self.close()
            raise
        return self.state is State.READY

    # ---- use

    def launch(self, call: Callable[[Any], None], event: Callable[[], Any], *tensors: Any) -> Operation:
        """Enqueue an operation: ``call`` starts it on the handle, then ``event`` records an event on its stream.

        Returns when NCCL has enqueued the operation; the device runs it later.  ``tensors``: used by the operation.
        """
        self._token.check()
        self._become(State.IN_USE)  # before the NCCL call: if the call fails, the communicator must not be kept
        self._check()
        self._handed = tensors
        self._ask(call)
        self._check()  # the first operation connects the members, so it is in progress until all have launched it
        operation = Operation(event(), tensors)
        self._under_way.append(operation)
        self._handed = ()
        return operation

    def wait(self, operation: Operation) -> None:
        """Block the host until ``operation``, and all operations before it, are over and believed.

        Raises ``EpochRevoked`` if the token is cancelled and ``PeerLost`` if NCCL reports an error.
        """
        for _ in pauses():
            if operation.done:
                break
            self._check()
        self.believe()

    def believe(self) -> None:
        """Mark all operations that are over as believed, or raise as ``wait``; called before their output is read."""
        over = []
        while self._under_way and self._under_way[0].done:
            over.append(self._under_way.popleft())
        if over:
            self._token.in_touch()
        self._check()  # after they are over: see the module's docstring
        for operation in over:
            operation.tensors = ()
        self.operations += len(over)
        if not self._under_way and self.state is State.IN_USE:
            self._become(State.READY)

    def _check(self) -> None:
        """Wait until the communicator is not in progress; raise as ``wait`` does."""
        self._token.check()
        if self.state is State.CLOSED:
            raise PeerLost("this NCCL communicator was aborted")
        for _ in pauses():
            if self._succeeded():
                return
            self._token.check()

    def _succeeded(self) -> bool:
        """Return True if NCCL reports success, False if it reports in progress; raise ``PeerLost`` for an error."""
        result = int(self._ask(_state))
        if result not in (SUCCESS, IN_PROGRESS):
            raise PeerLost(f"NCCL reports error {result} (ncclResult_t) for its communicator")
        return result == SUCCESS

    def _ask[R](self, call: Callable[[Any], R]) -> R:
        """Return the result of an NCCL call; the guard sees how long it takes, and its errors become ``PeerLost``."""
        self._entered = time.monotonic()
        try:
            return call(self.handle)
        except self.library.errors as error:
            self._token.check()  # after a cancellation every error counts as a consequence of the cancellation
            raise PeerLost(f"NCCL: {error}") from error
        finally:
            self._entered = None

    # ---- the end

    def settle(self) -> None:
        """Wait until NCCL runs no operation of the finished epoch any more.  Raises as ``close`` does.

        If all operations of this member are over and believed, the communicator stays READY; otherwise it is closed.
        """
        if self.state is not State.READY:
            self.close()

    def close(self) -> None:
        """Abort the communicator; idempotent.  May wait for its device, which must be the thread's current device.

        If an operation may be in flight, this first waits until all members have cancelled, and raises as
        ``CancelToken.all_heard`` does.
        """
        if self.state is State.IN_USE:
            self._token.all_heard()
        with self._lock:
            if self.state is State.CLOSED:
                return
            self.state = State.CLOSED
            with contextlib.suppress(*self.library.errors):  # the communicator is unusable in any case
                self.handle.abort()

    def _become(self, state: State) -> None:
        with self._lock:
            if self.state is not State.CLOSED:
                self.state = state

    def close_beside(self) -> None:
        """Run ``close`` in a detached thread."""
        if self.state is not State.CLOSED:
            self._beside("aborting an NCCL communicator", self.close)

    def _beside(self, name: str, abort: Callable[[], None]) -> None:
        def unless_out() -> None:
            with contextlib.suppress(MembershipError):  # this worker is out of the run and exits
                abort()

        abort_beside(name, self.library.cuda, self._device, unless_out)

    def _guard(self, token: CancelToken) -> None:
        """Abort in place of the owner, if the owner stays inside an NCCL call after the cancellation."""
        since, may_abort = time.monotonic(), False
        while self._token is token and self.state is not State.CLOSED:
            entered = self._entered
            if entered is not None and time.monotonic() > max(entered, since) + STUCK:
                if may_abort:
                    return self.close()
                token.all_heard()  # meanwhile the owner may have returned, and passed the communicator on
                since, may_abort = time.monotonic(), True
            time.sleep(STUCK / 20)


_state = methodcaller("get_async_error")
