"""A fault of the transport tcp: it hangs on a dead neighbour instead of telling of it, as NCCL does."""

from __future__ import annotations

import torch

from recover_megatron.collectives.epoch import PeerLost
from recover_megatron.collectives.transport.interface import Arrival, Pending
from recover_megatron.collectives.transport.tcp import TcpTransport


class _Never:
    """A message to or from a dead neighbour."""

    done = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class HangingTransport(TcpTransport):
    """Does not report a dead neighbour but waits until it is aborted."""

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        try:
            return super().send(tensor, tag)
        except PeerLost:
            return _Never(tensor)

    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        try:
            return super().recv(numel, dtype, tag)
        except PeerLost:
            return _Never(torch.empty(numel, dtype=dtype))

    def wait(self, pending: Pending) -> None:
        try:
            if not isinstance(pending, _Never):
                super().wait(pending)
                return
        except PeerLost:
            pass
        self._cancel_token.wait()
        raise self._cancel_token.error()
