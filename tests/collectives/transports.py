"""Groups over transports that only tests use, beside those of ``opening``.

gloo      the ring over gloo's point-to-point messages: another implementation of the interface
hanging   any transport, made to hang on a dead neighbour instead of reporting it, as NCCL does
staged    the copies between device and host memory, on the CPU
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from recover_megatron.collectives import group_factory
from recover_megatron.collectives.epoch import CancelToken, Epoch
from recover_megatron.collectives.errors import PeerLost
from recover_megatron.collectives.gloo.abort import GlooBackend
from recover_megatron.collectives.gloo.native import GlooNative
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.native.group import NativeGroup
from recover_megatron.collectives.ring.group import RingGroup, Tuning
from recover_megatron.collectives.ring.scratch import Scratch
from recover_megatron.collectives.transport.host_staged import StagedNative, StagedTransport
from recover_megatron.collectives.transport.interface import Arrival, Pending, Transport
from recover_megatron.collectives.transport.tcp import TcpTransport
from tests.harness.patience import patient

CPU = torch.device("cpu")


def open_group(
    epoch: Epoch,
    store: Any,
    *,
    collective: str = "ring",
    transport_kind: Any = None,
    hanging: bool = False,
    staged: bool = False,
    communicators: Any = None,
    **options: Any,
) -> Group:
    """As ``group_factory.open_group``, and with the transports of this module.

    ``transport`` may be ``gloo`` for a ring, too.  ``hanging``: hang on a dead neighbour.  ``staged``: copy on the CPU,
    too.
    """
    if not (hanging or staged or (collective == "ring" and transport_kind == "gloo")):
        return group_factory.open_group(
            epoch, store, collective=collective, transport_kind=transport_kind, communicators=communicators, **options
        )
    cancel_token = group_factory.cancel_token_of(epoch)
    with group_factory.lost_revokes(cancel_token):
        return _open(epoch, store, cancel_token, collective, transport_kind or "tcp", hanging, staged, **options)


def _open(
    epoch: Epoch,
    store: Any,
    cancel_token: CancelToken,
    collective: str,
    transport_kind: str,
    hanging: bool,
    staged: bool,
    *,
    name: str,
    secret: bytes,
    timeout: float = patient(60),
    device: torch.device = CPU,
    tuning: Tuning | None = None,
    hook: Any = None,
) -> Group:
    rank, size = list(epoch.members).index(epoch.me), len(epoch.members)
    place, tuning = {"ring": f"ring/{name}/{epoch.number}", "timeout": timeout}, tuning or Tuning()
    if transport_kind == "gloo":
        backend = GlooBackend(rank, size, store, cancel_token, **place)
        if collective == "native":
            native = StagedNative(GlooNative(backend), device)
            return NativeGroup(epoch, cancel_token, native, device=device)
        transport: Transport = GlooTransport(rank, size, backend)
    else:
        slots = (tuning.slots, tuning.segment_bytes) if transport_kind == "tcp" else None
        transport = TcpTransport(rank, size, store, cancel_token, secret=secret, slots=slots, **place)
    if hanging:
        transport = HangingTransport(transport, cancel_token)
    if staged or device.type != "cpu":
        transport = StagedTransport(transport, device)
    return RingGroup(epoch, cancel_token, transport, device=device, tuning=tuning, hook=hook)


class _Message:
    """A work of gloo's is waited for exactly once: a second wait would never return."""

    __slots__ = ("done", "tensor", "work")

    def __init__(self, tensor: torch.Tensor, work: Any) -> None:
        self.tensor = tensor
        self.work = work
        self.done = False


class GlooTransport(Transport):
    """Messages are done when they were waited for: gloo does not tell of a send that has gone by itself."""

    def __init__(self, rank: int, size: int, backend: GlooBackend) -> None:
        self._after, self._before = (rank + 1) % size, (rank - 1) % size
        self._backend = backend
        self._scratch = Scratch(torch.device("cpu"))
        self._under_way: list[_Message] = []
        """Whatever becomes of them, gloo's threads may read and write their tensors."""

    @property
    def scratch_peak(self) -> int:
        return self._scratch.peak

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        return self._begin(tensor, lambda gloo: gloo.send([tensor], self._after, tag))

    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        tensor = self._scratch.take(numel, dtype)
        return self._begin(tensor, lambda gloo: gloo.recv([tensor], self._before, tag))

    def _begin(self, tensor: torch.Tensor, start: Callable[[Any], Any]) -> _Message:
        message = _Message(tensor, self._backend.call(start))
        self._under_way.append(message)
        return message

    def release(self, arrival: Arrival) -> None:
        self._scratch.give(arrival.tensor)

    def wait(self, pending: Pending) -> None:
        assert isinstance(pending, _Message)
        self._under_way.remove(pending)
        try:
            self._backend.wait(pending.work)
        finally:
            pending.done = True

    def settle(self) -> None:
        """Nothing is sent any more when the connections are shut."""
        self.abort()

    def abort(self) -> None:
        self._backend.abort()

    def close(self) -> None:
        self._under_way.clear()
        self._backend.close()


class _Never:
    """A message to or from a dead neighbour."""

    done = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class HangingTransport(Transport):
    """Does not report a dead neighbour but waits until it is aborted."""

    def __init__(self, inner: Transport, cancel_token: CancelToken) -> None:
        self._inner = inner
        self._cancel_token = cancel_token
        self.lookahead = inner.lookahead
        self.hung = 0
        """How many times an operation hung on a dead neighbour."""

    @property
    def scratch_peak(self) -> int:
        return self._inner.scratch_peak

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        try:
            return self._inner.send(tensor, tag)
        except PeerLost:
            return _Never(tensor)

    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        try:
            return self._inner.recv(numel, dtype, tag)
        except PeerLost:
            return _Never(torch.empty(numel, dtype=dtype))

    def release(self, arrival: Arrival) -> None:
        self._inner.release(arrival)

    def wait(self, pending: Pending) -> None:
        try:
            if not isinstance(pending, _Never):
                self._inner.wait(pending)
                return
        except PeerLost:
            pass
        self.hung += 1
        self._cancel_token.wait()
        raise self._cancel_token.error()

    def on_sent(self, callback: Callable[[], None]) -> None:
        self._inner.on_sent(callback)

    def submitted(self) -> object:
        return self._inner.submitted()

    def begin(self, token: object) -> None:
        self._inner.begin(token)

    def scope(self) -> AbstractContextManager[object]:
        return self._inner.scope()

    def finish(self) -> None:
        self._inner.finish()

    def settle(self) -> None:
        self._inner.settle()

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()
