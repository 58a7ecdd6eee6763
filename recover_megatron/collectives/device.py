"""A device that works asynchronously: how the host waits for it, and the order of our operations against what computes.

    compute   ---- gradients ---- event ------------------------------- waits on the host ---- the optimizer
                                    |                                            ^
    the host                        '--> over?, the switch                       |
                                              |                                  |
    our stream                                '--> operation --> over? --> operation --> over?

Two rules hold for all that is put to a device here, and docs/gpu.md ("One operation at a time") argues them:

*   Nothing is put behind an unfinished operation with other members, on any stream.  With
    CUDA_DEVICE_MAX_CONNECTIONS=1 it would stand in the only queue of the hardware, and all kernels of the model behind.
*   No wait for the device is left to CUDA, where no revocation reaches it: ``until`` looks at the event and at the
    switch.
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
"""A device that has not carried out a copy of its own for so long after the switch will not."""
_SPINS, _PAUSE, _LONGEST_PAUSE = 20, 0.00002, 0.0005


class DeviceStuck(RuntimeError):
    """A device does not come to the end of what only it has to do: whether a bucket was written is not known."""


def pauses() -> Iterator[None]:
    """Turns of a loop that waits: some at once, then with growing pauses, in which other threads have the GIL."""
    for _ in range(_SPINS):
        yield
    pause = _PAUSE
    while True:
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
        yield


def until(event: Any, check: Callable[[], None]) -> None:
    """Return when the device has reached ``event`` (of torch.cuda); ``check`` raises to give it up.

    Raises what ``check`` raises, and what CUDA raises of a broken device.
    """
    for _ in pauses():
        if event.query():
            return
        check()


def within(seconds: float = STUCK_SECONDS, since: CancelToken | None = None) -> Callable[[], None]:
    """A ``check`` for what only the device has to do: raises ``DeviceStuck`` after ``seconds``.

    ``since``: they count from the first look after it was cancelled.
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
    """Return when all that the current stream of ``device`` has been given is carried out; as ``until``."""
    until(made_so_far(device), check)


def made_so_far(gpu: torch.device | None) -> Any:
    """The point that this thread has come to with its device's stream, for ``beside``; None: there is no GPU."""
    return None if gpu is None else torch.cuda.current_stream(gpu).record_event()


@contextmanager
def beside(gpu: torch.device | None, made: Any, check: Callable[[], None]) -> Iterator[None]:
    """For another thread: what it copies from ``gpu`` has a stream of its own, and does not wait for what computes.

    It begins when the device has come to ``made``, and all copies are over when it is left.  ``check``: as for
    ``until``.  Raises ``DeviceStuck``.
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
    """What a transport and a native backend are asked for, so that nothing is read or used too early.

    As it is: a device that has carried out an operation when the call returns, which is the CPU.
    """

    def submitted(self) -> object:
        """Called in the caller's thread when it hands over a bucket: what ``begin`` must wait for."""
        return None

    def begun(self, token: object) -> bool:
        """Whether ``begin`` would return at once."""
        del token
        return True

    def begin(self, token: object) -> None:
        """Called before that bucket is first read: return when it has been computed, seen before the switch.

        Raises ``EpochRevoked``.
        """
        del token

    def scope(self) -> AbstractContextManager[object]:
        """The context in which tensor operations run."""
        return nullcontext()

    def finish(self) -> None:
        """Called when a collective is over: block until its last tensor operation has been carried out."""
        return None


class DeviceStream(Order):
    """Our stream on a device that works asynchronously; see above.

    The event is recorded in the thread that hands a bucket over, on the stream that is current there.  It is the host
    that waits for it, and then looks at the switch, before anything is sent: when a mate dies, the groups inside the
    replica are aborted, and gradients are computed from the garbage that their kernels leave.  The switch is thrown
    before that, so a gradient that was seen computed before the switch is one.  A collective is told to be over only
    when the host has seen its last operation done, so the bucket may then be used on any stream.

    The progress thread is a new thread, in which CUDA's current device is the first one: it runs in ``on_device``.  The
    stream has the highest priority: what it does is little, and all members wait for it.

    ``device``: with its index, else ValueError.  ``cuda``: ``torch.cuda``, or a double.  ``stream``: default: a new.
    """

    def __init__(
        self, device: torch.device, cancel_token: CancelToken, cuda: Any = torch.cuda, stream: Any = None
    ) -> None:
        if device.type == "cuda" and device.index is None:
            raise ValueError(f"{device} could be another one in each thread: name its number")
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
        self._cancel_token.check()  # after the event: what was computed since may be garbage

    def scope(self) -> AbstractContextManager[object]:
        scope: AbstractContextManager[object] = self._cuda.stream(self._stream)
        return scope

    def finish(self) -> None:
        """No revocation ends it: what is waited for is this device's alone, and the bucket is being written.

        Raises ``DeviceStuck``.
        """
        until(self._event(), within(since=self._cancel_token))

    def _event(self) -> Any:
        """What the stream has been given by now."""
        event = self._cuda.Event()
        event.record(self._stream)
        return event
