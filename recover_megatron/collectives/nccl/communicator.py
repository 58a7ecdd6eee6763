"""Non-blocking NCCL communicator, and the calls that each of its states allows.

                success               launch                  all over and believed
    OPENING -------------> READY -----------------> IN_USE -----------------------> READY
       |                     |                         |
       | error, timeout,     | not kept                | the token is cancelled, or NCCL reports an error
       | token cancelled     |                         |
       '---------------------'--abort------------------'------> CLOSED

Rules of NCCL's user guide ("Fault Tolerance", "Asynchronous errors and error handling", ncclCommGetAsyncError), and
their consequences here:

* Any call may leave the communicator *in progress*; until that is over only ncclCommGetAsyncError and ncclCommAbort
  may be called, and nothing may be enqueued on its streams.  ``launch`` returns only when it is over, so the event that
  it records is behind the operation.
* *After an error nothing can be assumed* about enqueued operations; an aborted kernel completes, with garbage in its
  output.  So an operation is *over* when its event is, and *believed* if, after that, NCCL reports success and the
  token is not cancelled: only this process aborts this end, and it cancels the token first.
* *An aborted kernel still posts* its steps to its peers, with no data in them (src/device/prims_simple.h: genericOp,
  postPeer).  Over P2P and shared memory the peers' kernels then complete with garbage, and NCCL reports success there.
  So operations in flight are aborted only when the tokens of all live members are cancelled
  (``CancelToken.all_heard``): a member that still believes operations has no aborted kernel among its peers.  A member
  that was evicted aborts nothing, but exits; until it learns of the eviction it is not in touch
  (``CancelToken.in_touch``), and believes nothing.
* Nothing is ever destroyed or finalized here, since that may wait for dead members: ``close`` aborts, which is allowed
  in every state, at any time, from any thread.

One thread at a time owns a communicator: the thread that opens it, then the group's progress thread, then the thread
that closes the group.  The owner aborts.  Another thread does so only if the owner has been inside one NCCL call for
``STUCK`` seconds after the cancellation; that call then returns.
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
    """Launched operation: a point in a stream.  Its tensors belong to NCCL until ``wait`` for it has returned."""

    event: Any
    tensors: tuple[Any, ...]
    """Tensors that must stay alive: torch's allocator does not know the stream that uses them."""

    @property
    def done(self) -> bool:
        """True if the operation is over, successful or not."""
        return bool(self.event.query())


class Communicator:
    """NCCL communicator with its state; ``handle``: nccl4py's communicator, being opened on the current device."""

    def __init__(
        self, library: Library, handle: Any, identity: str, cancel_token: CancelToken, *, rank: int, size: int
    ) -> None:
        self.library = library
        self.handle = handle
        self.rank, self.size = rank, size
        self.identity = identity
        """Name of the communicator: the same at all members, and unique."""
        self.operations = 0
        """Number of believed operations."""
        self._device: int = library.cuda.current_device()
        self.state = State.OPENING
        self._lock = threading.Lock()
        """Protects the transition to CLOSED: the guard and the owner must not both abort."""
        self._under_way: deque[Operation] = deque()
        self._handed: tuple[Any, ...] = ()
        """Tensors of a launch that is not an operation yet: it may become a kernel even if the caller gave up."""
        self._entered: float | None = None
        self.adopt(cancel_token)

    def adopt(self, cancel_token: CancelToken) -> None:
        """Assign the communicator to another epoch."""
        self._token = cancel_token
        cancel_token.on_cancel(lambda: self._beside(GUARD, lambda: self._guard(cancel_token)))

    def release(self) -> None:
        """Detach from the epoch: no thread is in an NCCL call, and none makes one until ``adopt``."""
        self._token = CancelToken(0)

    # ---- opening

    def advance(self) -> bool:
        """Return whether the communicator is open; one thread calls this repeatedly.

        Raises ``PeerLost`` and ``EpochRevoked``; the communicator is then closed.
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
        """Enqueue the operation that ``call`` starts on the handle; ``event`` then records an event on the same stream.

        Returns when NCCL has enqueued the operation, before the device has run it.
        """
        self._token.check()
        self._become(State.IN_USE)  # before the NCCL call: a communicator with an error must not be kept
        self._check()
        self._handed = tensors
        self._ask(call)
        self._check()  # the first operation connects the members, and is in progress until the others have called it
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
        """Mark all operations that are over as believed, or raise; call this before their output is read."""
        over = []
        while self._under_way and self._under_way[0].done:
            over.append(self._under_way.popleft())
        if over:
            self._token.in_touch()
        self._check()  # after they are over: see above
        for operation in over:
            operation.tensors = ()
        self.operations += len(over)
        if not self._under_way and self.state is State.IN_USE:
            self._become(State.READY)

    def _check(self) -> None:
        """Return when the communicator is not in progress; raises as ``wait`` does."""
        self._token.check()
        if self.state is State.CLOSED:
            raise PeerLost("this NCCL communicator was aborted")
        for _ in pauses():
            if self._succeeded():
                return
            self._token.check()

    def _succeeded(self) -> bool:
        """Return True if NCCL reports success, False for in progress; raise ``PeerLost`` for an error."""
        result = int(self._ask(_state))
        if result not in (SUCCESS, IN_PROGRESS):
            raise PeerLost(f"NCCL reports error {result} (ncclResult_t) for its communicator")
        return result == SUCCESS

    def _ask[R](self, call: Callable[[Any], R]) -> R:
        """Make an NCCL call: the guard sees how long it takes, and an error becomes ``PeerLost``."""
        self._entered = time.monotonic()
        try:
            return call(self.handle)
        except self.library.errors as error:
            self._token.check()  # after a cancellation every error counts as its consequence
            raise PeerLost(f"NCCL: {error}") from error
        finally:
            self._entered = None

    # ---- the end

    def settle(self) -> None:
        """Return when no operation of the finished epoch runs in NCCL any more.  Raises as ``close`` does.

        If all operations here are over and believed, the communicator stays READY; otherwise it is closed.
        """
        if self.state is not State.READY:
            self.close()

    def close(self) -> None:
        """Abort, unless that was done.  May wait for the device, which must be the thread's current device.

        If an operation may be in flight, this waits until all members have cancelled, and raises as ``all_heard`` does.
        """
        if self.state is State.IN_USE:
            self._token.all_heard()
        with self._lock:
            if self.state is State.CLOSED:
                return
            self.state = State.CLOSED
            with contextlib.suppress(*self.library.errors):  # it is unusable in any case
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
            with contextlib.suppress(MembershipError):  # this process exits
                abort()

        abort_beside(name, self.library.cuda, self._device, unless_out)

    def _guard(self, token: CancelToken) -> None:
        """Abort in place of the owner if it stays inside an NCCL call after the cancellation."""
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
