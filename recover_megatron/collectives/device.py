"""Asynchronous devices (GPUs): waits of the host for the device, and streams that order our operations.

    compute   ---- gradients ---- event ------------------------------- waits on the host ---- the optimizer
                                    |                                            ^
    the host                        '--> done?, cancelled?                       |
                                              |                                  |
    our stream                                '--> operation --> done? --> operation --> done?

Two rules apply to all work enqueued on a device here; docs/gpu.md ("One operation at a time") gives the reasons:

*   Nothing is enqueued behind an unfinished collective, on any stream.  With CUDA_DEVICE_MAX_CONNECTIONS=1 the work
    would block the only hardware queue, and so all kernels of the model.
*   The host never waits inside CUDA, where a revocation cannot interrupt it.  Instead ``until`` polls the event and the
    cancel token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from recover_megatron.collectives.epoch import CancelToken

STUCK_SECONDS = 60.0
"""Seconds in which a device must finish its own copies; if it does not, it counts as stuck (``DeviceStuck``)."""
_SPINS, _PAUSE, _LONGEST_PAUSE = 20, 0.00002, 0.0005


class DeviceStuck(RuntimeError):
    """A device does not finish work that depends on no other device, so the contents of a bucket are unknown."""


def pauses() -> Iterator[None]:
    """Pace a polling loop: some iterations without a pause, then growing pauses, which release the GIL."""
    for _ in range(_SPINS):
        yield
    pause = _PAUSE
    while True:
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
        yield


def until(event: Any, check: Callable[[], None]) -> None:
    """Wait until the device has reached ``event`` (of torch.cuda).

    ``check``: called repeatedly; raises to end the wait.  Raises its errors, and CUDA's errors for a broken device.
    """
    for _ in pauses():
        if event.query():
            return
        check()


def within(seconds: float = STUCK_SECONDS, since: CancelToken | None = None) -> Callable[[], None]:
    """Return a ``check`` for ``until`` that raises ``DeviceStuck`` after ``seconds``.

    For work that depends on this device only.  The time begins at the first check; if ``since`` is given, at the first
    check after this token was cancelled.
    """
    end = math.inf

    def check() -> None:
        nonlocal end
        if since is None or since.cancelled:
            end = min(end, time.monotonic() + seconds)
            if time.monotonic() > end:
                raise DeviceStuck(f"the device has not finished its own copies within {seconds:g} s")

    return check


def drained(device: torch.device, check: Callable[[], None]) -> None:
    """Wait until all work enqueued on the current stream of ``device`` is done; raises as ``until`` does."""
    until(made_so_far(device), check)


def made_so_far(gpu: torch.device | None) -> Any:
    """Record an event on this thread's current stream, for ``beside``; return None if ``gpu`` is None."""
    return None if gpu is None else torch.cuda.current_stream(gpu).record_event()


@contextmanager
def beside(gpu: torch.device | None, made: Any, check: Callable[[], None]) -> Iterator[None]:
    """Run the copies of the body on a new stream of ``gpu``, concurrently with the computation on other streams.

    The body begins when the device has reached event ``made``; all copies are done when the context exits.  ``check``:
    as for ``until``, for the wait for ``made``.  Raises ``DeviceStuck`` if the copies do not finish.
    """
    if gpu is None:
        yield
        return
    until(made, check)
    with torch.cuda.device(gpu), torch.cuda.stream(torch.cuda.Stream(gpu)):
        try:
            yield
        finally:
            drained(gpu, within())


class Order:
    """Calls that prevent a transport or backend from reading a bucket before the device has computed it.

    This base class is for a synchronous device, the CPU, and so does nothing.
    """

    def submitted(self) -> object:
        """Return a token that ``begin`` waits for; called in the thread that submits a bucket."""
        return None

    def begun(self, token: object) -> bool:
        """Return whether ``begin(token)`` would return at once."""
        del token
        return True

    def begin(self, token: object) -> None:
        """Wait until the submitted bucket has been computed; called before the bucket is first read.

        Raises ``EpochRevoked`` if the token was cancelled before the end of the computation was seen.
        """
        del token

    def scope(self) -> AbstractContextManager[object]:
        """Return the context in which the transport or backend runs its tensor operations."""
        return nullcontext()

    def finish(self) -> None:
        """Block until all tensor operations of the collective are done; called at the end of a collective."""
        return None


class DeviceStream(Order):
    """Dedicated stream on an asynchronous device, for a group's operations; see the module's docstring.

    ``submitted`` records an event on the current stream of the thread that submits a bucket.  The host waits for the
    event, and then checks the cancel token, before anything is sent.  Reason: when a model-parallel peer dies, the
    groups inside the replica are aborted, and gradients are computed from the garbage that their kernels leave.  The
    token is cancelled before that, so a gradient is valid if its event was seen before the cancellation.  A collective
    is reported as finished only when the host has seen its last operation done; then the bucket may be used on any
    stream.

    The progress thread is a new thread, whose current CUDA device is device 0; so it runs in ``on_device``.  The
    stream has the highest priority, since its work is short and all members wait for it.

    ``device``: must have an index, else ValueError.  ``cuda``: ``torch.cuda`` or a double.  ``stream``: None: a new
    stream.
    """

    def __init__(
        self, device: torch.device, cancel_token: CancelToken, cuda: Any = torch.cuda, stream: Any = None
    ) -> None:
        if device.type == "cuda" and device.index is None:
            raise ValueError(f"device {device} has no index, so each thread could use another GPU: give its index")
        self._device = device
        self._cancel_token = cancel_token
        self._cuda = cuda
        self._stream = stream or cuda.Stream(device, priority=-1)

    def submitted(self) -> object:
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def begun(self, token: Any) -> bool:
        return bool(token.query())

    def begin(self, token: Any) -> None:
        until(token, self._cancel_token.check)
        self._cancel_token.check()  # after the event: gradients computed after a cancellation may be garbage

    def scope(self) -> AbstractContextManager[object]:
        scope: AbstractContextManager[object] = self._cuda.stream(self._stream)
        return scope

    def finish(self) -> None:
        """Wait for all work on this stream.

        A revocation does not interrupt the wait, since the work is local and may be writing a bucket.  If the work is
        not done ``STUCK_SECONDS`` after the revocation, raises ``DeviceStuck``.
        """
        until(self._event(), within(since=self._cancel_token))

    def _event(self) -> Any:
        """Record an event behind all work enqueued on the stream so far."""
        event = self._cuda.Event()
        event.record(self._stream)
        return event
