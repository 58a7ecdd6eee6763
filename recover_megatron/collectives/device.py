"""Asynchronous devices: how the host waits for one, and the order of our operations and the model's computation.

    compute   ---- gradients ---- event ------------------------------- waits on the host ---- the optimizer
                                    |                                            ^
    the host                        '--> done?, cancelled?                       |
                                              |                                  |
    our stream                                '--> operation --> done? --> operation --> done?

Two rules apply to all work enqueued on a device here; docs/gpu.md ("One operation at a time") gives the reasons:

*   Nothing is enqueued behind an unfinished collective, on any stream.  With CUDA_DEVICE_MAX_CONNECTIONS=1 it would
    wait in the only hardware queue, and all kernels of the model behind it.
*   No wait for the device is left to CUDA, where a revocation cannot interrupt it: ``until`` polls the event and the
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
"""Time after the cancellation in which a device must finish its own copies; afterwards it counts as stuck."""
_SPINS, _PAUSE, _LONGEST_PAUSE = 20, 0.00002, 0.0005


class DeviceStuck(RuntimeError):
    """A device does not finish work that depends on no other device: the contents of a bucket are unknown."""


def pauses() -> Iterator[None]:
    """Pace a polling loop: some turns without a pause, then growing pauses, in which other threads have the GIL."""
    for _ in range(_SPINS):
        yield
    pause = _PAUSE
    while True:
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
        yield


def until(event: Any, check: Callable[[], None]) -> None:
    """Return when the device has reached ``event`` (of torch.cuda); ``check`` raises to give up the wait.

    Raises what ``check`` raises, and what CUDA raises for a broken device.
    """
    for _ in pauses():
        if event.query():
            return
        check()


def within(seconds: float = STUCK_SECONDS, since: CancelToken | None = None) -> Callable[[], None]:
    """Return a ``check`` for work that depends on the device alone: it raises ``DeviceStuck`` after ``seconds``.

    ``since``: the time counts from the first check after this token was cancelled.
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
    """Return when all work enqueued on the current stream of ``device`` is done; raises as ``until``."""
    until(made_so_far(device), check)


def made_so_far(gpu: torch.device | None) -> Any:
    """Record an event on this thread's current stream, for ``beside``; None if there is no GPU."""
    return None if gpu is None else torch.cuda.current_stream(gpu).record_event()


@contextmanager
def beside(gpu: torch.device | None, made: Any, check: Callable[[], None]) -> Iterator[None]:
    """Run copies from ``gpu`` on a separate stream, in another thread, without waiting for the computation.

    The body begins when the device has reached event ``made``; all copies are done when the context exits.  ``check``:
    as for ``until``.  Raises ``DeviceStuck``.
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
    """Calls that keep a transport or native backend from reading or using a bucket too early.

    This class serves a synchronous device, the CPU.
    """

    def submitted(self) -> object:
        """Return a token for ``begin`` to wait for; runs in the caller's thread, which hands over a bucket."""
        return None

    def begun(self, token: object) -> bool:
        """Return whether ``begin`` would return at once."""
        del token
        return True

    def begin(self, token: object) -> None:
        """Return when the bucket has been computed; called before the bucket is first read.

        Raises ``EpochRevoked`` unless this was seen before the cancellation.
        """
        del token

    def scope(self) -> AbstractContextManager[object]:
        """Return the context in which tensor operations run."""
        return nullcontext()

    def finish(self) -> None:
        """Block until the last tensor operation of a collective is done; called when the collective is over."""
        return None


class DeviceStream(Order):
    """Stream of our own on an asynchronous device; see above.

    The event is recorded in the thread that hands over a bucket, on the current stream of that thread.  The host waits
    for the event, and then checks the cancel token, before anything is sent.  Reason: when a model-parallel peer dies,
    the groups inside the replica are aborted, and gradients are computed from the garbage that their kernels leave.
    The token is cancelled before that, so a gradient whose event was seen before the cancellation is valid.  A
    collective is reported as over only when the host has seen its last operation done; then the bucket may be used on
    any stream.

    The progress thread is a new thread, whose current CUDA device is device 0; so it runs in ``on_device``.  The
    stream has the highest priority: its work is short, and all members wait for it.

    ``device``: with its index, else ValueError.  ``cuda``: ``torch.cuda`` or a double.  ``stream``: default: a new one.
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
        """Wait for this stream.  A revocation does not interrupt: the work is local, and the bucket is being written.

        Raises ``DeviceStuck``.
        """
        until(self._event(), within(since=self._cancel_token))

    def _event(self) -> Any:
        """Record an event behind all work enqueued on the stream so far."""
        event = self._cuda.Event()
        event.record(self._stream)
        return event
