"""For tests: a transport that does not report a dead neighbour but hangs, as NCCL does, until it is aborted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from recover_megatron.collectives.epoch import Revocation
from recover_megatron.collectives.errors import PeerLost
from recover_megatron.collectives.transport import Arrival, Pending, Transport


class _Never:
    """A message to or from a dead neighbour."""

    done = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class HangingTransport(Transport):
    def __init__(self, inner: Transport, revocation: Revocation) -> None:
        self._inner = inner
        self._revocation = revocation
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
        self._revocation.wait()
        raise self._revocation.error()

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
