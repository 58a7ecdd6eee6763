"""Interface of the transports, which send and receive the messages of a ring.

A transport connects one member to its two neighbours in the ring: it sends to the successor and receives from the
predecessor.  Messages arrive in the order in which they were sent.  A transport is created for one epoch and never
reused in another.

    open  --close()-->  closed
      '---abort(), from any thread-->  aborted --close()--> closed

Only the group's progress thread calls ``send``, ``recv``, ``release``, ``wait`` and ``quiesce``.  Any thread may call
``abort`` at any time.

A ring sums GPU gradients through host memory (``StagedTransport``); the copies run on a dedicated stream
(``DeviceStream``).
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
    """Message in flight; only the transport may use its tensor until ``done`` is True."""

    @property
    def done(self) -> bool:
        """True if the message is complete: a sent tensor may then be overwritten, a received tensor may be read."""


class Arrival(Pending, Protocol):
    """Message that is being received."""

    @property
    def tensor(self) -> torch.Tensor:
        """Received data, valid when ``done`` is True.  The ring may read and write it until ``Transport.release``."""


class Transport(Order, ABC):
    """Transport that sends to the successor and receives from the predecessor; see the module's docstring."""

    @property
    @abstractmethod
    def scratch_peak(self) -> int:
        """Peak size in bytes of the memory for received segments."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """Begin to send a contiguous tensor to the successor.

        ``tag``: number below 2**31, equal to the tag that the successor passes to ``recv`` for this message.
        """

    @abstractmethod
    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        """Begin to receive a message of ``numel`` elements with ``tag`` from the predecessor.

        The transport allocates the memory, which the caller returns with ``release``.
        """

    @abstractmethod
    def release(self, arrival: Arrival) -> None:
        """Return the memory of ``arrival.tensor`` to the transport; after this the caller must not use it."""

    @abstractmethod
    def wait(self, pending: Pending) -> None:
        """Block until ``pending`` is done.

        Raises ``EpochRevoked`` after ``abort``, and ``CollectiveMismatch`` if the received message has another tag or
        length than expected.  If a neighbour is dead, some transports raise ``PeerLost``, others block until ``abort``.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make ``wait`` raise ``EpochRevoked``; any thread may call this.

        When ``quiesce`` has returned after ``abort``, the transport sends no more bytes.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources.

        If this member then exits, a neighbour raises an error only if it still has to exchange messages with it.
        """

    def on_sent(self, callback: Callable[[], None]) -> None:
        """Set the function that ``wait`` calls whenever sends may have finished.

        A transport with limited memory for received messages must override this and call ``callback``, which releases
        the memory of partial sums that were sent.  Otherwise there may be no memory for the message that ``wait``
        awaits, and ``wait`` never returns.
        """

    def quiesce(self) -> None:
        """Block until this transport does not read, write or send any tensor; called after an error."""
        return None


class Scratch:
    """Pool of buffers that are as large as the largest request so far; it records the peak of its memory."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        """``pinned``: if True, allocate pinned host memory, which a GPU reads and writes directly."""
        self._device = device
        self._pinned = pinned
        self._size = 0
        self._free: list[torch.Tensor] = []
        self.bytes = 0
        """Total size in bytes of the pool's buffers, whether in use or free."""
        self.peak = 0
        """Maximum of ``bytes`` so far."""

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of ``numel`` elements with arbitrary content; the caller must pass it to ``give`` later."""
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
        """Return ``tensor``, a result of ``take``, to the pool; after this the caller must not use it."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._size:  # this buffer was allocated before a larger request: free it
            self.bytes -= storage.nbytes()
            return
        self._free.append(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))

    def _drop(self) -> None:
        self.bytes -= sum(buffer.nbytes for buffer in self._free)
        self._free.clear()


@dataclass(eq=False)
class _Sending:
    """Message that is being sent: the inner transport sends ``host``, a copy of the tensor in host memory."""

    inner: Pending
    host: torch.Tensor

    @property
    def done(self) -> bool:
        return self.inner.done


@dataclass(eq=False)
class _Landing:
    """Message that is being received; when ``StagedTransport.wait`` has returned, ``tensor`` is on the device."""

    inner: Arrival
    numel: int
    dtype: torch.dtype
    tensor: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    done: bool = False


class StagedTransport(Transport):
    """Transport for GPU tensors, which it copies to host memory; the transport ``inner`` sends the copies.

        bucket (GPU) --copy--> pinned host memory --inner transport--> host memory of the successor --copy--> its GPU

    The copies make it slower than NCCL.  It fails and aborts exactly when ``inner`` does.  ``device`` may be the CPU,
    so that tests without a GPU execute this code, too.
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
        host.copy_(tensor)  # runs on the stream of ``scope``, and blocks until the copy is complete
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
            self._order.finish()  # waits for the copy, which ``copy_`` may leave running even from unpinned memory
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

    def quiesce(self) -> None:
        self._inner.quiesce()
        self._order.finish()
