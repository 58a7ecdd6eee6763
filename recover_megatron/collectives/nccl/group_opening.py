"""Opens what a group needs of NCCL: the communicator of a native group, or the two edges of a ring's member."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.nccl.communicator import Communicator
from recover_megatron.collectives.nccl.library import Library
from recover_megatron.collectives.nccl.native import NcclNative
from recover_megatron.collectives.nccl.renewal import Keeper, Opening, open_all
from recover_megatron.collectives.nccl.ring import MAX_CTAS, NcclTransport
from recover_megatron.collectives.rendezvous import KeyValue


@dataclass(eq=False)
class NcclOpener:
    _rank: int
    _size: int
    _store: KeyValue
    _cancel_token: CancelToken
    _keeper: Keeper
    _prefix: str
    """Of the group's keys in the store."""
    _device: torch.device
    _timeout: float
    """Seconds in which all members must have come."""
    _library: Library = field(default_factory=lambda: libraries.load(), init=False)  # what stands there then: a double

    def native(self) -> NcclNative:
        its = None if self._size == 1 else self._open(self._opening("all", self._rank, self._size))[0]
        return NcclNative(self._library, its, self._keeper, self._cancel_token.epoch, self._device)

    def ring(self) -> NcclTransport:
        """Edge r leads from member r, rank 0 in it, to its successor, rank 1."""
        edges = None
        if self._size > 1:
            after = self._opening(f"edge{self._rank}", 0, 2, MAX_CTAS)
            before = self._opening(f"edge{(self._rank - 1) % self._size}", 1, 2, MAX_CTAS)
            out, into = self._open(after, before)
            edges = out, into
        return NcclTransport(self._library, edges, self._cancel_token, self._keeper, self._device)

    def _opening(self, name: str, rank: int, size: int, max_ctas: int | None = None) -> Opening:
        return Opening(
            self._library, self._keeper, self._store, self._cancel_token,
            prefix=f"{self._prefix}/{name}", rank=rank, size=size, max_ctas=max_ctas,
        )  # fmt: skip

    def _open(self, *openings: Opening) -> list[Communicator]:
        with self._library.cuda.device(self._device):
            return open_all(openings, self._cancel_token, self._timeout)
