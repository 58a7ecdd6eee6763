"""NCCL's own collectives for a backend group, on a stream of the group's own.  NOT RUN on a GPU: on a double only.

    reduce_scatter, all_gather, transfer --launch--> the stream, in order --event--> over --NCCL's word--> believed

A copy that is queued behind a failed operation in the same stream would copy garbage, so copies to a bucket are the
group's to order, after ``wait``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recover_megatron.collectives.native.backend import Message, NativeBackend, Operation
from recover_megatron.collectives.nccl import communicator
from recover_megatron.collectives.nccl.communicator import Communicator
from recover_megatron.collectives.nccl.library import Library
from recover_megatron.collectives.nccl.renewal import Keeper
from recover_megatron.collectives.transport.interface import DeviceStream


class NcclNative(DeviceStream, NativeBackend):
    """``its``: None where the member is alone.  ``keeper``: takes the communicator when ``epoch`` is over."""

    def __init__(
        self, library: Library, its: Communicator | None, keeper: Keeper, epoch: int, device: torch.device
    ) -> None:
        super().__init__(device, library.cuda)
        self._library = library
        self._its = its
        self._keeper = keeper
        self._epoch = epoch

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        total = self._library.core.NcclRedOp.SUM
        return self._launch(
            lambda handle: handle.reduce_scatter(source, output, total, stream=self._stream), output, source
        )

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        return self._launch(lambda handle: handle.allgather(source, output, stream=self._stream), output, source)

    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        """One launch: NCCL carries out all of a group at the same time, so no order of theirs matters."""

        def all_of_them(handle: Any) -> None:
            with self._library.core.group():
                for tensor, rank in sends:
                    handle.send(tensor, rank, stream=self._stream)
                for tensor, rank in receives:
                    handle.recv(tensor, rank, stream=self._stream)

        if not sends and not receives:
            return communicator.Operation(self._event(), ())
        return self._launch(all_of_them, *(tensor for tensor, _ in (*sends, *receives)))

    def wait(self, operation: Operation) -> None:
        assert isinstance(operation, communicator.Operation)
        assert self._its is not None
        self._its.wait(operation)

    def settle(self) -> None:
        if self._its is not None:
            self._its.settle()
        self._stream.synchronize()

    def close(self) -> None:
        if self._its is not None:
            self._keeper.give(self._its, self._epoch)
            self._its = None

    def _launch(self, call: Callable[[Any], None], *tensors: torch.Tensor) -> Operation:
        assert self._its is not None, "a group of one member has nothing to sum"
        return self._its.launch(call, self._event, *tensors)

    def _event(self) -> Any:
        event = self._library.cuda.Event()
        event.record(self._stream)
        return event
