"""Interface between the ring and its transport.

A transport connects one member to its two neighbours in one epoch: it sends to the successor and receives from the
predecessor, each in order.  It is created for one epoch and cancelled with it; it is never reused.

    open  --close()-->  closed
      '---abort(), from any thread-->  aborted --close()--> closed

Only the group's progress thread calls ``send``, ``recv``, ``release``, ``wait`` and ``settle``; ``abort`` may come from
any thread at any time.  On an asynchronous device the ring has a dedicated stream (``DeviceStream``).

A column without Megatron sums a GPU's gradients through host memory (``StagedTransport``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from recover_megatron.collectives.device import DeviceStream, Order
from recover_megatron.collectives.epoch import CancelToken


class Pending(Protocol):
    """Message in flight; its tensor belongs to the transport until ``done``."""

    @property
    def done(self) -> bool:
        """True if the tensor may be used again (sent: reused; received: read)."""


class Arrival(Pending, Protocol):
    """Message being received."""

    @property
    def tensor(self) -> torch.Tensor:
        """Received tensor, once ``done``; the ring may write to it until ``release``."""


class Transport(Order, ABC):
    """Messages to the successor and from the predecessor; see above."""

    @property
    @abstractmethod
    def scratch_peak(self) -> int:
        """Peak memory of received segments, in bytes."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """Begin to send a contiguous tensor to the successor.  ``tag`` (31 bits) must equal the receiver's tag."""

    @abstractmethod
    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        """Begin to receive ``numel`` elements from the predecessor, into memory of the transport."""

    @abstractmethod
    def release(self, arrival: Arrival) -> None:
        """Release ``arrival.tensor``: nothing reads it any more."""

    @abstractmethod
    def wait(self, pending: Pending) -> None:
        """Block until ``pending`` is done.

        Raises ``PeerLost`` if a neighbour is dead (a transport may instead block), ``EpochRevoked`` after ``abort``,
        ``CollectiveMismatch`` if the received message is not the expected one.
        """

    @abstractmethod
    def abort(self) -> None:
        """Wake a thread in ``wait``.  Once ``settle`` has returned after it, no more bytes are sent."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; afterwards the neighbours may exit, too."""

    def on_sent(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` from within ``wait`` whenever sends may have finished.

        A transport with limited receive memory must do so: a sent partial sum releases its memory in the callback, and
        otherwise the predecessor could not send the message that ``wait`` is waiting for.
        """

    def settle(self) -> None:
        """Block until this transport no longer reads, writes or sends a tensor; called after an error."""
        return None


class Scratch:
    """Pool of equal buffers; grows to the largest request, and records its peak."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        """``pinned``: pinned host memory, which a GPU copies from and to directly."""
        self._device = device
        self._pinned = pinned
        self._size = 0
        self._free: list[torch.Tensor] = []
        self.bytes = 0
        """Bytes allocated now."""
        self.peak = 0
        """Peak of the allocated bytes."""

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of ``numel`` elements with arbitrary content; return it with ``give``."""
        needed = numel * dtype.itemsize
        if needed > self._size:
            self._drop()
            self._size = needed
        if not self._free:
            self._free.append(torch.empty(self._size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned))
            self.bytes += self._size
            self.peak = max(self.peak, self.bytes)
        return self._free.pop()[:needed].view(dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Take back a tensor from ``take``, when nothing reads or writes it any more."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._size:  # allocated before the buffers grew
            self.bytes -= storage.nbytes()
            return
        self._free.append(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))

    def _drop(self) -> None:
        self.bytes -= sum(buffer.nbytes for buffer in self._free)
        self._free.clear()


@dataclass(eq=False)
class _Sending:
    """Message whose payload was copied to the host; the inner transport sends the copy."""

    inner: Pending
    host: torch.Tensor

    @property
    def done(self) -> bool:
        return self.inner.done


@dataclass(eq=False)
class _Landing:
    """Message being received; on the device once ``wait`` has returned."""

    inner: Arrival
    numel: int
    dtype: torch.dtype
    tensor: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    done: bool = False


class StagedTransport(Transport):
    """Transport of a device's tensors through host memory, in stream order.  ``inner`` transports CPU tensors.

        bucket (device) --copy--> host memory, pinned --inner transport--> host memory --copy--> scratch (device)

    It is slower than NCCL by the cost of the copies; it fails and is aborted as the inner transport is.  On the CPU the
    same copies run without a stream, so the tests of the ring cover this code, too.
    """

    def __init__(self, inner: Transport, device: torch.device, cancel_token: CancelToken) -> None:
        self._order = DeviceStream(device, cancel_token) if device.type == "cuda" else Order()
        self._inner = inner
        self._host = Scratch(torch.device("cpu"), pinned=device.type == "cuda")
        self._scratch = Scratch(device)
        self._sending: deque[_Sending] = deque()

    @property
    def scratch_peak(self) -> int:
        return self._inner.scratch_peak + self._host.peak + self._scratch.peak

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        self._reap()
        host = self._host.take(tensor.numel(), tensor.dtype)
        host.copy_(tensor)  # returns when the copy is complete: the current stream is the one of ``scope``
        sending = _Sending(self._inner.send(host, tag), host)
        self._sending.append(sending)
        return sending

    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        return _Landing(self._inner.recv(numel, dtype, tag), numel, dtype)

    def wait(self, pending: Pending) -> None:
        assert isinstance(pending, (_Sending, _Landing))
        self._inner.wait(pending.inner)
        if isinstance(pending, _Landing):
            pending.tensor = self._scratch.take(pending.numel, pending.dtype)
            pending.tensor.copy_(pending.inner.tensor)
            self._order.finish()  # even from memory that is not pinned a copy may still be running
            self._inner.release(pending.inner)
            pending.done = True

    def release(self, arrival: Arrival) -> None:
        self._scratch.give(arrival.tensor)

    def on_sent(self, callback: Callable[[], None]) -> None:
        self._inner.on_sent(callback)

    def _reap(self) -> None:
        while self._sending and self._sending[0].done:
            self._host.give(self._sending.popleft().host)

    def submitted(self) -> object:
        return self._order.submitted()

    def begun(self, token: object) -> bool:
        return self._order.begun(token)

    def begin(self, token: object) -> None:
        self._order.begin(token)

    def scope(self) -> AbstractContextManager[object]:
        return self._order.scope()

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()
        self._sending.clear()

    def finish(self) -> None:
        self._inner.finish()
        self._order.finish()

    def settle(self) -> None:
        self._inner.settle()
        self._order.finish()
