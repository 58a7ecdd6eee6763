"""The interface between the ring and whatever carries its messages, and the order of both against what computes.

A transport joins one member to its two neighbours of one epoch: it sends to the successor and receives from the
predecessor, each in order.  It is made for one epoch and cancelled away with it; nothing of it is used again.

    open  --close()-->  closed
      '---abort(), from any thread-->  aborted --close()--> closed

Only the group's progress thread calls ``send``, ``recv``, ``release``, ``wait`` and ``settle``; ``abort`` may come from
any thread at any time.  On a device that works asynchronously the ring has a stream of its own (``DeviceStream``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

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

        The caller looks at the switch afterwards, and before anything of the bucket is sent.
        """
        del token

    def scope(self) -> AbstractContextManager[object]:
        """The context in which tensor operations run."""
        return nullcontext()

    def finish(self) -> None:
        """Called when a collective is over: block until its last tensor operation has been carried out."""
        return None


class DeviceStream(Order):
    """The ring's stream on a device that works asynchronously, and its order against the stream that computes.

        compute   ---- gradients ---- event ------------------------------- waits on the host ---- the optimizer
                                        |                                            ^
        the host                        '--> synchronize, the switch                 |
                                                  |                                  |
        ring's stream                             '--> additions and copies --> synchronize

    The event is recorded in the thread that hands a bucket over, on the stream that is current there.  It is the host
    that waits for it, and then looks at the switch, before anything is sent: when a mate dies, the groups inside the
    replica are aborted, and what their kernels leave is garbage, from which the gradients behind them are computed to
    the end.  The switch is thrown before that, so a gradient that was seen computed before the switch is one.  (An
    operation that the device began by itself after the event would send the garbage to members who have not heard of
    the death yet.)  A collective is told to be over only when the host has seen its last operation done, so the bucket
    may then be used on any stream.

    The progress thread is a new thread, in which CUDA's current device is the first one: only what runs in ``scope``,
    and tensors made with a device that has an index, are on the right one.  The stream has the highest priority: what
    it does is little, and all members wait for it.

    ``device``: with its index, else ValueError.  ``cuda``: ``torch.cuda``, or a double.
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


class Pending(Protocol):
    """A message under way; the tensor given belongs to the transport until ``done``."""

    @property
    def done(self) -> bool:
        """Whether the tensor may be used again (sent: reused; received: read)."""


class Arrival(Pending, Protocol):
    """A message being received."""

    @property
    def tensor(self) -> torch.Tensor:
        """What arrived, once ``done``; the ring may write to it, until it gives it back with ``release``."""


class Transport(Order, ABC):
    """Messages to the successor and from the predecessor; see above."""

    lookahead: int = 1
    """How many receives are worth posting ahead of the one that is waited for."""

    @property
    @abstractmethod
    def scratch_peak(self) -> int:
        """The most bytes of memory that arriving segments ever took."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """Begin to send a contiguous tensor to the successor.  ``tag`` (31 bits) must be what the receiver names."""

    @abstractmethod
    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        """Begin to receive ``numel`` elements from the predecessor, into memory of the transport's own."""

    @abstractmethod
    def release(self, arrival: Arrival) -> None:
        """Nothing reads ``arrival.tensor`` any more."""

    @abstractmethod
    def wait(self, pending: Pending) -> None:
        """Block until ``pending`` is done.

        Raises ``PeerLost`` when a neighbour is gone (a transport may also just hang then), ``EpochRevoked`` after
        ``abort``, ``CollectiveMismatch`` when what arrives is not what was asked for.
        """

    @abstractmethod
    def abort(self) -> None:
        """Wake whoever is in ``wait``.  When ``settle`` has returned after it, not one more byte is sent."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; after this the neighbours may be gone too."""

    def on_sent(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` from within ``wait`` whenever sends may have finished.

        A transport whose receive memory is limited must: a partial sum that has been sent gives its memory back there,
        and without that the predecessor could not send what ``wait`` is waiting for.
        """

    def settle(self) -> None:
        """Called after an error: block until nothing of this transport reads, writes or sends a tensor any more."""
        return None
