"""One non-blocking communicator of NCCL's, and what may be asked of it when.

                success               launch                  all over and believed
    OPENING -------------> READY -----------------> IN_USE -----------------------> READY
       |                     |                         |
       | error, timeout,     | nobody keeps it         | the switch is cancelled, or NCCL reports an error
       | switch cancelled    |                         |
       '---------------------'--abort------------------'------> CLOSED

What NCCL's user guide says ("Fault Tolerance", "Asynchronous errors and error handling", ncclCommGetAsyncError) and
what is made of it here:

* Any call may leave the communicator *in progress*; until that is over nothing but ncclCommGetAsyncError and
  ncclCommAbort may be called, and nothing may be enqueued on its streams.  ``launch`` returns only when it is over, so
  the event that it records is recorded behind the operation.
* *After an error nothing can be assumed* of what was enqueued; a kernel that was aborted completes, with garbage in its
  output.  So an operation is *over* when its event is, and *believed* if, after that, NCCL reports success and the
  switch is not cancelled: the token is cancelled before this process, and nobody else, aborts this end.
* *An aborted kernel still posts* its steps to its peers, with nothing in them (src/device/prims_simple.h: genericOp,
  postPeer).  Over P2P and shared memory theirs then complete with garbage, and NCCL reports success there.  So what is
  under way is aborted only when the switches of all members that live are cancelled (``CancelToken.all_heard``): who
  still believes has no aborted kernel among its peers.  A member that is out of the run aborts nothing, but ends; one
  that does not know it yet is not in touch (``CancelToken.in_touch``), and believes nothing.
* Nothing is ever destroyed or finalized here, which may wait for members that are dead: ``close`` aborts, which is
  allowed in every state, at any time, from any thread.

One thread at a time owns a communicator: whoever opens it, then the group's progress thread, then whoever closes the
group.  The owner aborts.  Only if it has been inside one call of NCCL's for ``STUCK`` seconds after the switch was
cancelled does another thread do so; the call then returns.
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
    """Something launched: a point in a stream.  Its tensors belong to NCCL until it was waited for."""

    event: Any
    tensors: tuple[Any, ...]
    """Kept alive: torch's allocator knows nothing of the stream that uses them."""

    @property
    def done(self) -> bool:
        """Whether it is over; says nothing of success."""
        return bool(self.event.query())


class Communicator:
    """``handle``: of NCCL's, being opened, on the device that is current."""

    def __init__(
        self, library: Library, handle: Any, identity: str, cancel_token: CancelToken, *, rank: int, size: int
    ) -> None:
        self.library = library
        self.handle = handle
        self.rank, self.size = rank, size
        self.identity = identity
        """The same at all members, and of no other communicator."""
        self.operations = 0
        """Believed ones."""
        self._device: int = library.cuda.current_device()
        self.state = State.OPENING
        self._lock = threading.Lock()
        """Of the state's end: the guard and the owner must not abort both."""
        self._under_way: deque[Operation] = deque()
        self._handed: tuple[Any, ...] = ()
        """Tensors of a launch that is not an operation yet: it may become a kernel though it was given up."""
        self._entered: float | None = None
        self.adopt(cancel_token)

    def adopt(self, cancel_token: CancelToken) -> None:
        """Belong to another epoch from now on."""
        self._token = cancel_token
        cancel_token.on_cancel(lambda: self._beside(GUARD, lambda: self._guard(cancel_token)))

    def release(self) -> None:
        """Belong to no epoch: nobody is in a call of NCCL's, nobody makes one until it is adopted."""
        self._token = CancelToken(0)

    # ---- opening

    def advance(self) -> bool:
        """Whether it is open by now; to be asked again and again, by one thread.

        Raises ``PeerLost`` and ``EpochRevoked``, after which it is closed.
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
        """Enqueue what ``call`` does with the handle; ``event`` records an event on the same stream afterwards.

        Returns when NCCL has enqueued it, which is before it has been carried out.
        """
        self._token.check()
        self._become(State.IN_USE)  # before NCCL is asked: one that reports an error must not be kept
        self._check()
        self._handed = tensors
        self._ask(call)
        self._check()  # the first operation connects the members, and is in progress until the others have called it
        operation = Operation(event(), tensors)
        self._under_way.append(operation)
        self._handed = ()
        return operation

    def wait(self, operation: Operation) -> None:
        """Block the host until ``operation``, and what was launched before it, is over and believed.

        Raises ``EpochRevoked`` when the switch is cancelled, ``PeerLost`` when NCCL reports an error.
        """
        for _ in pauses():
            if operation.done:
                break
            self._check()
        self.believe()

    def believe(self) -> None:
        """All operations that are over are believed, or an error is raised: call it before their output is read."""
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
        """Return when nothing is in progress; raises as ``wait`` does."""
        self._token.check()
        if self.state is State.CLOSED:
            raise PeerLost("this communicator of NCCL's was ended")
        for _ in pauses():
            if self._succeeded():
                return
            self._token.check()

    def _succeeded(self) -> bool:
        """NCCL's word on its state: success, or in progress; ``PeerLost`` if it is an error."""
        result = int(self._ask(_state))
        if result not in (SUCCESS, IN_PROGRESS):
            raise PeerLost(f"NCCL reports error {result} of its communicator")
        return result == SUCCESS

    def _ask[R](self, call: Callable[[Any], R]) -> R:
        """Every call of NCCL's: the guard sees how long it takes, and its errors are ``PeerLost``."""
        self._entered = time.monotonic()
        try:
            return call(self.handle)
        except self.library.errors as error:
            self._token.check()  # whatever it says after the switch, it is the switch
            raise PeerLost(f"NCCL: {error}") from error
        finally:
            self._entered = None

    # ---- the end

    def settle(self) -> None:
        """The epoch is over: return when nothing of it runs in NCCL any more.  Raises as ``close`` does.

        A communicator all of whose operations here are over and believed stays READY; any other one is closed.
        """
        if self.state is not State.READY:
            self.close()

    def close(self) -> None:
        """Abort, unless that was done.  May wait for the device, which must be the current one of the thread.

        Where something may be under way it waits until all members have heard, and raises as ``all_heard`` does.
        """
        if self.state is State.IN_USE:
            self._token.all_heard()
        with self._lock:
            if self.state is State.CLOSED:
                return
            self.state = State.CLOSED
            with contextlib.suppress(*self.library.errors):  # it is of no use any more in any case
                self.handle.abort()

    def _become(self, state: State) -> None:
        with self._lock:
            if self.state is not State.CLOSED:
                self.state = state

    def close_beside(self) -> None:
        """``close`` in a thread that nobody waits for."""
        if self.state is not State.CLOSED:
            self._beside("aborting a communicator of NCCL's", self.close)

    def _beside(self, name: str, abort: Callable[[], None]) -> None:
        def unless_out() -> None:
            with contextlib.suppress(MembershipError):  # this process ends
                abort()

        abort_beside(name, self.library.cuda, self._device, unless_out)

    def _guard(self, token: CancelToken) -> None:
        """While the owner is in NCCL after the switch was cancelled: abort in its place when it stays there."""
        since, may_abort = time.monotonic(), False
        while self._token is token and self.state is not State.CLOSED:
            entered = self._entered
            if entered is not None and time.monotonic() > max(entered, since) + STUCK:
                if may_abort:
                    return self.close()
                token.all_heard()  # meanwhile the owner may have come out, and given the communicator on
                since, may_abort = time.monotonic(), True
            time.sleep(STUCK / 20)


_state = methodcaller("get_async_error")
