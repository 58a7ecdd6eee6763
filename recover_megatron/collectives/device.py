"""Waits of the host for an asynchronous device (GPU), and the stream on which a group runs its operations.

    compute stream   ---- gradients ---- event ------------------------ host waits for the sums ---- the optimizer
                                           |                                        ^
    host                                   '--> done?, cancelled?                   |
                                                     |                              |
    group's stream                                   '--> operation --> done? --> operation --> done?

Two rules apply to all work that this package enqueues on a device; docs/gpu.md ("One operation at a time") gives the
reasons:

*   Nothing is enqueued behind an unfinished collective, on any stream.  With CUDA_DEVICE_MAX_CONNECTIONS=1 such work
    would block the only hardware queue, and so all kernels of the model.
*   The host never waits inside CUDA, where a revocation cannot interrupt the wait.  Instead ``until`` polls the event
    and the cancel token.
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
"""Time limit in seconds for work that depends on one device only; then the device counts as stuck (``DeviceStuck``)."""
_SPINS, _PAUSE, _LONGEST_PAUSE = 20, 0.00002, 0.0005


class DeviceStuck(RuntimeError):
    """A device has not finished local work, such as copies, in time, so the contents of a bucket are unknown."""


def pauses() -> Iterator[None]:
    """Iterator for a polling loop: the first steps do not pause, later steps sleep for growing times.

    The sleep releases the GIL.
    """
    for _ in range(_SPINS):
        yield
    pause = _PAUSE
    while True:
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
        yield


def until(event: Any, check: Callable[[], None]) -> None:
    """Wait until the device has reached ``event``, an event of torch.cuda.

    ``check``: called repeatedly; an error that it raises ends the wait.  Raises CUDA's errors if the device is broken.
    """
    for _ in pauses():
        if event.query():
            return
        check()


def within(seconds: float = STUCK_SECONDS, since: CancelToken | None = None) -> Callable[[], None]:
    """Return a function to pass to ``until`` as ``check``; it raises ``DeviceStuck`` after ``seconds``.

    Use it for work that depends on one device only.  The time begins at the first check.  If ``since`` is given, the
    time begins at the first check after the token ``since`` was cancelled.
    """
    end = math.inf

    def check() -> None:
        nonlocal end
        if since is None or since.cancelled:
            end = min(end, time.monotonic() + seconds)
            if time.monotonic() > end:
                raise DeviceStuck(f"the device has not finished its local work within {seconds:g} s")

    return check


def drained(device: torch.device, check: Callable[[], None]) -> None:
    """Wait until all work on this thread's current stream of ``device`` is done.  Raises the errors of ``until``."""
    until(made_so_far(device), check)


def made_so_far(gpu: torch.device | None) -> Any:
    """Record an event on this thread's current stream of ``gpu`` and return it; return None if ``gpu`` is None."""
    return None if gpu is None else torch.cuda.current_stream(gpu).record_event()


@contextmanager
def beside(gpu: torch.device | None, made: Any, check: Callable[[], None]) -> Iterator[None]:
    """Context whose body runs its copies on a new stream of ``gpu``, concurrently with the computation.

    The body begins when the device has reached the event ``made``; ``check``: passed to ``until`` for this wait.  All
    copies are done when the context exits.  Raises ``DeviceStuck`` if the copies do not finish.  If ``gpu`` is None,
    the body runs at once.
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
    """Methods that prevent a transport or backend from reading a bucket before the device has computed the bucket.

    This base class is for the CPU, where a submitted bucket is always computed, so its methods do nothing.
    """

    def submitted(self) -> object:
        """Return a token for a bucket; called by the thread that submits it and has enqueued its computation."""
        return None

    def begun(self, token: object) -> bool:
        """Return whether the bucket of ``token`` is computed, so that ``begin(token)`` does not block."""
        del token
        return True

    def begin(self, token: object) -> None:
        """Wait until the bucket of ``token`` is computed; called before the bucket is read.

        Raises ``EpochRevoked`` if the epoch was revoked before the host saw the end of the computation.
        """
        del token

    def scope(self) -> AbstractContextManager[object]:
        """Return the context in which the transport or backend runs its tensor operations."""
        return nullcontext()

    def finish(self) -> None:
        """Block until all tensor operations of this object are done; called before a collective counts as finished."""
        return None


class DeviceStream(Order):
    """Dedicated stream of a GPU for a group's operations; see the module's docstring.

    ``submitted`` records an event on the current stream of the thread that submits a bucket.  Before anything is sent,
    the host waits for this event and then checks the cancel token.  The check is needed because gradients may be
    garbage: when a model-parallel peer dies, the groups inside the replica are aborted, and their kernels leave garbage
    in their outputs.  The token is cancelled before the abort, so gradients are valid if the host saw the event before
    the cancellation.  When a collective is finished, the host has seen its last operation done, so the bucket may be
    used on any stream.

    In a new thread such as the progress thread, device 0 is current, so it must run in ``group_factory.on_device``.
    The stream has the highest priority, because its work is short and all members wait for it.

    ``device``: must have an index, otherwise ``ValueError`` is raised.  ``cuda``: ``torch.cuda`` or a double.
    ``stream``: stream to use; None: a new stream.
    """

    def __init__(
        self, device: torch.device, cancel_token: CancelToken, cuda: Any = torch.cuda, stream: Any = None
    ) -> None:
        if device.type == "cuda" and device.index is None:
            raise ValueError(f"device {device} has no index, so each thread could use another GPU: pass the index")
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
        self._cancel_token.check()  # must follow the wait: gradients computed after a cancellation may be garbage

    def scope(self) -> AbstractContextManager[object]:
        scope: AbstractContextManager[object] = self._cuda.stream(self._stream)
        return scope

    def finish(self) -> None:
        """Wait for all work on this stream.

        A revocation does not interrupt the wait, because the work is local and may be writing a bucket.  Raises
        ``DeviceStuck`` if the work is not done ``STUCK_SECONDS`` after a revocation.
        """
        until(self._event(), within(since=self._cancel_token))

    def _event(self) -> Any:
        """Record an event behind all work that is enqueued on the stream, and return the event."""
        event = self._cuda.Event()
        event.record(self._stream)
        return event
