"""Buckets on a device, messages over the host: how a column without Megatron sums a GPU's gradients.

    bucket (device) --copy--> host memory, pinned --inner transport--> host memory --copy--> scratch (device)

It is slower than NCCL by what the copies cost; it fails and is aborted as the inner transport does.

On the CPU the same copies are made without a stream, so the tests of the ring run this code too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from recover_megatron.collectives.ring.executor import Scratch
from recover_megatron.collectives.transport.interface import Arrival, DeviceStream, Order, Pending, Transport


class _Sending:
    """A message whose payload was copied to the host; the inner transport sends that."""

    def __init__(self, inner: Pending, host: torch.Tensor) -> None:
        self.inner = inner
        self.host = host

    @property
    def done(self) -> bool:
        return self.inner.done


class _Landing:
    """A message being received; on the device once it was waited for."""

    def __init__(self, inner: Arrival, numel: int, dtype: torch.dtype) -> None:
        self.inner = inner
        self.numel = numel
        self.dtype = dtype
        self.tensor = torch.empty(0, dtype=dtype)
        self.done = False


class StagedTransport(Transport):
    """Carries a device's tensors by copies in host memory, in the device's order.  ``inner`` carries CPU tensors."""

    def __init__(self, inner: Transport, device: torch.device) -> None:
        self._order = DeviceStream(device) if device.type == "cuda" else Order()
        self._inner = inner
        self.lookahead = inner.lookahead
        self._host = Scratch(torch.device("cpu"), pinned=device.type == "cuda")
        self._scratch = Scratch(device)
        self._sending: deque[_Sending] = deque()

    @property
    def scratch_peak(self) -> int:
        return self._inner.scratch_peak + self._host.peak + self._scratch.peak

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        self._reap()
        host = self._host.take(tensor.numel(), tensor.dtype)
        host.copy_(tensor)  # returns when the bytes are there: the current stream is that of ``scope``
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
            self._order.finish()  # from memory that is not pinned, too, a copy may still be under way
            self._inner.release(pending.inner)
            pending.done = True

    def release(self, arrival: Arrival) -> None:
        self._scratch.give(arrival.tensor)

    def on_sent(self, callback: Callable[[], None]) -> None:
        self._inner.on_sent(callback)

    def _reap(self) -> None:
        """Take back host memory whose message has gone."""
        while self._sending and self._sending[0].done:
            self._host.give(self._sending.popleft().host)

    def submitted(self) -> object:
        return self._order.submitted()

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
