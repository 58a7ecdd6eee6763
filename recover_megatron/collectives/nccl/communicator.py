"""Non-blocking NCCL communicator that detects whether an abort at some member may have spoilt a result.

                success               launch                  all over and believed
    OPENING -------------> READY -----------------> IN_USE -----------------------> READY
       |                     |                         |
       | error, timeout,     | not kept                | the token is cancelled, or NCCL reports an error
       | token cancelled     |                         |
       '---------------------'--abort------------------'------> CLOSED

Rules of NCCL ("Fault Tolerance", "Asynchronous errors and error handling", ncclCommGetAsyncError in its user guide),
and their consequences:

* *Any call may leave the communicator in progress* (ncclInProgress).  In this state only ncclCommGetAsyncError and
  ncclCommAbort may be called, and nothing may be enqueued on the communicator's streams.  So ``launch`` returns only
  when its call is complete, and the event that it records is behind the operation.
* *After an error the state of enqueued operations is unknown*; an aborted kernel completes with garbage in its output.
  So an operation is called *over* when the device has reached the operation's event.  It is called *believed* if,
  after that, NCCL reports success and the token is not cancelled.  Only this process aborts its end of the
  communicator, and it cancels the token first, so a believed operation was not aborted at this end.
* *An aborted kernel still signals its steps to its peers*, without data (src/device/prims_simple.h: genericOp,
  postPeer).  Over P2P and shared memory the peers' kernels then complete with garbage, and NCCL reports success there.
  So operations in flight are aborted only when the tokens of all live members are cancelled
  (``CancelToken.all_heard``): from then on no member believes an operation.  An evicted member aborts nothing, but
  exits; until it learns of the eviction, it waits in ``CancelToken.in_touch`` and believes nothing.
* *Destroying or finalizing a communicator may wait for dead members.*  So ``close`` aborts the communicator, which any
  thread may do in every state.

One thread at a time owns a communicator: the thread that opens it, then the group's progress thread, then the thread
that closes the group.  Normally the owner aborts.  A second thread, the guard, aborts only if after the cancellation
the owner has been inside one NCCL call for ``STUCK`` seconds; the abort makes that call return.
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
    """Launched operation.  Only NCCL may use its tensors until ``Communicator.wait`` has returned for it."""

    event: Any
    tensors: tuple[Any, ...]
    """Tensors of the operation, kept alive because torch's allocator does not know that NCCL's stream uses them."""

    @property
    def done(self) -> bool:
        """True if the device has reached the operation's event, whether the operation succeeded or failed."""
        return bool(self.event.query())


class Communicator:
    """NCCL communicator with its state.

    ``handle``: communicator of nccl4py, whose opening has begun on the current device.  ``identity``: unique name of
    the communicator, equal at all members.
    """

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
        """Lock for changes of ``state``, so that the guard and the owner cannot both abort."""
        self._under_way: deque[Operation] = deque()
        self._handed: tuple[Any, ...] = ()
        """Tensors of an incomplete launch, kept alive because a kernel may start even if the launch raises an error."""
        self._entered: float | None = None
        self.adopt(cancel_token)

    def adopt(self, cancel_token: CancelToken) -> None:
        """Use the communicator in the epoch of ``cancel_token``.  When the token is cancelled, the guard starts."""
        self._token = cancel_token
        cancel_token.on_cancel(lambda: self._beside(GUARD, lambda: self._guard(cancel_token)))

    def release(self) -> None:
        """Detach the communicator from its epoch; no thread may use it until ``adopt`` is called."""
        self._token = CancelToken(0)

    # ---- opening

    def advance(self) -> bool:
        """Check the progress of the opening, and return whether the communicator is open; called repeatedly.

        Raises ``PeerLost`` or ``EpochRevoked``; then the communicator is closed.
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
        """Enqueue an operation: pass the handle to ``call``, which enqueues it; then record an event with ``event``.

        Returns when NCCL has enqueued the operation on its stream; the device may run it later.  ``tensors``: tensors
        that the operation uses.  Raises ``EpochRevoked`` and ``PeerLost``.
        """
        self._token.check()
        self._become(State.IN_USE)  # set before the NCCL call: if the call fails, the communicator must not be reused
        self._check()
        self._handed = tensors
        self._ask(call)
        self._check()  # the first operation connects the members: this waits until all of them have launched it
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
        """Mark all operations that are over as believed; call this before their output is read.

        Raises ``EpochRevoked`` if the token is cancelled and ``PeerLost`` if NCCL reports an error.
        """
        over = []
        while self._under_way and self._under_way[0].done:
            over.append(self._under_way.popleft())
        if over:
            self._token.in_touch()
        self._check()  # must follow the end of the operations: see the module's docstring
        for operation in over:
            operation.tensors = ()
        self.operations += len(over)
        if not self._under_way and self.state is State.IN_USE:
            self._become(State.READY)

    def _check(self) -> None:
        """Wait until NCCL reports success for the communicator; raises the errors of ``wait``."""
        self._token.check()
        if self.state is State.CLOSED:
            raise PeerLost("this NCCL communicator was aborted")
        for _ in pauses():
            if self._succeeded():
                return
            self._token.check()

    def _succeeded(self) -> bool:
        """Return True if NCCL reports ncclSuccess, False for ncclInProgress; raise ``PeerLost`` for an error."""
        result = int(self._ask(_state))
        if result not in (SUCCESS, IN_PROGRESS):
            raise PeerLost(f"NCCL reports error {result} (ncclResult_t) for its communicator")
        return result == SUCCESS

    def _ask[R](self, call: Callable[[Any], R]) -> R:
        """Return ``call(handle)``, where ``call`` makes one NCCL call; turn an error of NCCL into ``PeerLost``.

        Record the time at which the call begins, so that the guard notices a call that hangs.
        """
        self._entered = time.monotonic()
        try:
            return call(self.handle)
        except self.library.errors as error:
            self._token.check()  # after a cancellation every error counts as a consequence of the cancellation
            raise PeerLost(f"NCCL: {error}") from error
        finally:
            self._entered = None

    # ---- the end

    def quiesce(self) -> None:
        """Ensure that NCCL runs no operation of the finished epoch.  Raises the errors of ``close``.

        If this member has accepted the results of all its operations, the communicator stays READY; else it is closed.
        """
        if self.state is not State.READY:
            self.close()

    def close(self) -> None:
        """Abort the communicator; idempotent.  The abort may wait for the communicator's device.

        This device must be the thread's current device.  If an operation may be in flight, this first waits until all
        live members have cancelled their tokens.  Raises the errors of ``CancelToken.all_heard``.
        """
        if self.state is State.IN_USE:
            self._token.all_heard()
        with self._lock:
            if self.state is State.CLOSED:
                return
            self.state = State.CLOSED
            with contextlib.suppress(*self.library.errors):  # even if the abort fails, nothing uses the communicator
                self.handle.abort()

    def _become(self, state: State) -> None:
        with self._lock:
            if self.state is not State.CLOSED:
                self.state = state

    def close_beside(self) -> None:
        """Run ``close`` in a detached thread, if the communicator is not CLOSED yet."""
        if self.state is not State.CLOSED:
            self._beside("aborting an NCCL communicator", self.close)

    def _beside(self, name: str, abort: Callable[[], None]) -> None:
        def unless_out() -> None:
            with contextlib.suppress(MembershipError):  # raised if this worker is out of the run; the worker then exits
                abort()

        abort_beside(name, self.library.cuda, self._device, unless_out)

    def _guard(self, token: CancelToken) -> None:
        """Abort the communicator if its owner stays inside an NCCL call after ``token`` was cancelled."""
        since, may_abort = time.monotonic(), False
        while self._token is token and self.state is not State.CLOSED:
            entered = self._entered
            if entered is not None and time.monotonic() > max(entered, since) + STUCK:
                if may_abort:
                    return self.close()
                token.all_heard()  # blocks: the owner may return from its call in this time, so check again
                since, may_abort = time.monotonic(), True
            time.sleep(STUCK / 20)


_state = methodcaller("get_async_error")
