"""The ring's stream on a device that works asynchronously, and its order against the stream that computes.

    compute   ---- gradients ---- event ------------------------------- waits on the host ---- the optimizer
                                    |                                            ^
    the host                        '--> synchronize, the switch                 |
                                              |                                  |
    ring's stream                             '--> additions and copies --> synchronize

The event is recorded in the thread that hands a bucket over, on the stream that is current there.  It is the host that
waits for it, and then looks at the switch, before anything is sent: when a mate dies, the groups inside the replica are
aborted, and what their kernels leave is garbage, from which the gradients behind them are computed to the end.  The
switch is thrown before that, so a gradient that was seen computed before the switch is one.  (An operation that the
device began by itself after the event would send the garbage to members who have not heard of the death yet.)

A collective is told to be over only when the host has seen its last operation done, so whoever waited for it may use
the bucket on any stream.

The progress thread is a new thread, in which CUDA's current device is the first one: only what runs in ``scope``, and
tensors made with a device that has an index, are on the right one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Order:
    """What a transport and a native backend are asked for, so that nothing is read or used too early.

    As it is: a device that has carried out an operation when the call returns, which is the CPU.
    """

    def submitted(self) -> object:
        """Called in the caller's thread when it hands over a bucket: what ``begin`` must wait for."""
        return None

    def begin(self, token: object) -> None:
        """Called before that bucket is first read: block until it has been computed.

        Whoever calls it looks at the switch afterwards, and before anything of the bucket is sent.
        """
        del token

    def scope(self) -> AbstractContextManager[object]:
        """The context in which tensor operations run."""
        return nullcontext()

    def finish(self) -> None:
        """Called when a collective is over: block until its last tensor operation has been carried out."""
        return None


class DeviceStream(Order):
    """That of a device that works asynchronously.  ``device``: with its index.  ``cuda``: ``torch.cuda``, or a double.

    The stream has the highest priority: what it does is little, and all members wait for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        if device.type == "cuda" and device.index is None:
            raise ValueError(f"{device} could be another one in each thread: name its number")
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device, priority=-1)

    def submitted(self) -> object:
        event = self._cuda.Event(blocking=True)  # who waits gives the processor away, and the GIL
        event.record(self._cuda.current_stream(self._device))
        return event

    def begin(self, token: Any) -> None:
        token.synchronize()

    def scope(self) -> AbstractContextManager[object]:
        scope: AbstractContextManager[object] = self._cuda.stream(self._stream)
        return scope

    def finish(self) -> None:
        self._stream.synchronize()
