"""Interface of the transports that carry the messages of a ring.

A transport connects one member to its two neighbours in one epoch: it sends to the successor and receives from the
predecessor, both in order.  A transport is created for one epoch and cancelled with that epoch; it is never reused.

    open  --close()-->  closed
      '---abort(), from any thread-->  aborted --close()--> closed

Only the group's progress thread calls ``send``, ``recv``, ``release``, ``wait`` and ``settle``; ``abort`` may come from
any thread at any time.  On an asynchronous device the ring uses a dedicated stream (``DeviceStream``).

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
    """Message in flight; its tensor belongs to the transport until ``done`` is True."""

    @property
    def done(self) -> bool:
        """True when the message is complete: a sent tensor may be overwritten, a received tensor may be read."""


class Arrival(Pending, Protocol):
    """Message being received."""

    @property
    def tensor(self) -> torch.Tensor:
        """Received data, once ``done`` is True; until ``release`` the ring may read and write it."""


class Transport(Order, ABC):
    """Sends messages to the successor and receives messages from the predecessor; see the module's docstring."""

    @property
    @abstractmethod
    def scratch_peak(self) -> int:
        """Peak size in bytes of the memory for received segments."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """Begin to send a contiguous tensor to the successor.  ``tag`` (31 bits) must equal the receiver's tag."""

    @abstractmethod
    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        """Begin to receive ``numel`` elements with ``tag`` from the predecessor, into memory of the transport."""

    @abstractmethod
    def release(self, arrival: Arrival) -> None:
        """Return the memory of ``arrival.tensor`` to the transport; the caller no longer uses it."""

    @abstractmethod
    def wait(self, pending: Pending) -> None:
        """Block until ``pending`` is done.

        Raises ``EpochRevoked`` after ``abort``, and ``CollectiveMismatch`` if the received message is not the expected
        message.  If a neighbour is dead, raises ``PeerLost`` or blocks until ``abort``, depending on the transport.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make ``wait`` raise ``EpochRevoked``.  When ``settle`` returns after that, no more bytes are sent."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; after this the neighbours may exit without an error at this member."""

    def on_sent(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` from within ``wait`` whenever sends may have finished.

        A transport with limited receive memory must call it.  The callback releases the memory of partial sums that
        were sent; without it the predecessor may have no memory for the message that ``wait`` is waiting for.
        """

    def settle(self) -> None:
        """Block until this transport no longer reads, writes or sends any tensor; called after an error."""
        return None


class Scratch:
    """Pool of buffers of equal size, the size of the largest request so far; it records its peak memory."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        """``pinned``: use pinned host memory, which a GPU reads and writes directly."""
        self._device = device
        self._pinned = pinned
        self._size = 0
        self._free: list[torch.Tensor] = []
        self.bytes = 0
        """Number of bytes that are allocated now, in use or free."""
        self.peak = 0
        """Maximum of ``bytes`` so far."""

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
        """Return a tensor of ``take`` to the pool, when nothing reads or writes it any more."""
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
    """Message being sent, whose payload was copied to the host; the inner transport sends the copy."""

    inner: Pending
    host: torch.Tensor

    @property
    def done(self) -> bool:
        return self.inner.done


@dataclass(eq=False)
class _Landing:
    """Message being received; when ``wait`` has returned, its payload is on the device, in ``tensor``."""

    inner: Arrival
    numel: int
    dtype: torch.dtype
    tensor: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    done: bool = False


class StagedTransport(Transport):
    """Transport for a device's tensors, which go through host memory; ``inner`` transports the CPU tensors.

        bucket (device) --copy--> host memory, pinned --inner transport--> host memory --copy--> scratch (device)

    It is slower than NCCL by the cost of the copies.  It fails and aborts exactly when the inner transport does.  With
    the CPU as device the same copies run without a stream, so that tests without a GPU execute this code, too.
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
        host.copy_(tensor)  # returns when the copy is complete; it runs on the stream of ``scope``
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
            self._order.finish()  # the copy may still be running, even from memory that is not pinned
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
