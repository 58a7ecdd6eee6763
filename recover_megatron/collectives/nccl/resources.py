"""NCCL backend of a group: NCCL's collectives, on a dedicated stream.

NCCL connects members on the same GPU only over sockets (docs/reference/gpu_results.md).

    reduce_scatter, all_gather, transfer --launch--> the stream --event--> over --NCCL reports success--> believed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recover_megatron.collectives.device import DeviceStream
from recover_megatron.collectives.epoch import CancelToken, KeyValue
from recover_megatron.collectives.native import Message, NativeBackend, Operation
from recover_megatron.collectives.nccl import communicator
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.nccl.communicator import Communicator
from recover_megatron.collectives.nccl.library import Library
from recover_megatron.collectives.nccl.renewal import Keeper, Opening, opened


class NcclNative(DeviceStream, NativeBackend):
    """Backend with NCCL's collectives.

    ``comm``: communicator of the group; None if the group has only one member.  ``keeper``: pool that gets the
    communicator when the backend is closed.
    """

    def __init__(
        self,
        library: Library,
        comm: Communicator | None,
        cancel_token: CancelToken,
        keeper: Keeper,
        device: torch.device,
    ) -> None:
        super().__init__(device, cancel_token, library.cuda, keeper.stream)
        self._library = library
        self._comm = comm
        self._keeper = keeper

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        total = self._library.core.NcclRedOp.SUM
        return self._launch(
            lambda handle: handle.reduce_scatter(source, output, total, stream=self._stream), output, source
        )

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        return self._launch(lambda handle: handle.allgather(source, output, stream=self._stream), output, source)

    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        """Exchange all messages in one NCCL group call, which runs them concurrently."""

        def all_of_them(handle: Any) -> None:
            with self._library.core.group():
                for tensor, rank in sends:
                    handle.send(tensor, rank, stream=self._stream)
                for tensor, rank in receives:
                    handle.recv(tensor, rank, stream=self._stream)

        return self._launch(all_of_them, *(tensor for tensor, _ in (*sends, *receives)))

    def wait(self, operation: Operation) -> None:
        assert isinstance(operation, communicator.Operation)
        assert self._comm is not None
        self._comm.wait(operation)

    def quiesce(self) -> None:
        if self._comm is not None:
            self._comm.quiesce()
        self.finish()

    def close(self) -> None:
        if self._comm is not None:
            self._keeper.give(self._comm)
            self._comm = None

    def _launch(self, call: Callable[[Any], None], *tensors: torch.Tensor) -> Operation:
        assert self._comm is not None, "a group of one member has nothing to sum"
        return self._comm.launch(call, self._event, *tensors)


def open_native(
    rank: int,
    size: int,
    store: KeyValue,
    cancel_token: CancelToken,
    keeper: Keeper,
    prefix: str,
    device: torch.device,
    timeout: float,
) -> NcclNative:
    """Open the NCCL backend of a group.

    ``keeper``: pool of communicators to reuse.  ``prefix``: prefix of the group's keys in ``store``.  ``timeout``:
    seconds in which all members must have joined.  Raises the errors of ``renewal.opened``.
    """
    library = libraries.load()
    keeper.stream = keeper.stream or library.cuda.Stream(device, priority=-1)
    comm = None if size == 1 else opened(Opening(library, keeper, store, cancel_token, prefix, rank, size), timeout)
    return NcclNative(library, comm, cancel_token, keeper, device)
