"""What a model does with the device beside the sums: collectives inside its replica."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import torch

from recover_megatron.collectives.nccl.library import IN_PROGRESS, SUCCESS, Library


class TensorParallel:
    """A replica's communicator, of which operations are launched by the thread that computes, as in torch 2.13:

        compute   --GEMM-- event                waits -- what is launched later
                              |                   |
        its own            waits -- all-gather -- event        (ProcessGroupNCCL::collective, WorkNCCL::synchronize)

    The host waits for nothing but the launch.  After an error or an abort nothing is launched any more.
    """

    def __init__(self, library: Library, unique_id: Any, rank: int, size: int, device: torch.device) -> None:
        self._library, self._device = library, device
        self._stream = library.cuda.Stream(device)
        self._source, self._output = torch.zeros(1), torch.zeros(size)
        self._communicator = library.core.Communicator.init(size, rank, unique_id, library.config())
        with suppress(*library.errors):
            self._succeeds()

    def launch(self) -> None:
        cuda = self._library.cuda
        compute, before, after = cuda.current_stream(self._device), cuda.Event(), cuda.Event()
        with suppress(*self._library.errors):
            before.record(compute)
            self._stream.wait_event(before)
            self._communicator.allgather(self._source, self._output, stream=self._stream)
            if self._succeeds():
                after.record(self._stream)
                compute.wait_event(after)

    def abort(self) -> None:
        self._communicator.abort()

    def _succeeds(self) -> bool:
        while (state := self._communicator.get_async_error()) == IN_PROGRESS:
            time.sleep(0.0002)
        return bool(state == SUCCESS)
