"""Transports over NCCL.  NOT RUN: written to NCCL's and torch's documented behaviour, never executed on a GPU.

What NCCL does that the design must answer:

- It reports no dead peer: a kernel spins until the communicator is aborted.  ``wait`` therefore polls, and ``abort``,
  from another thread, ends the communicators of this group (non-blocking ones, so that abort is legal at any time).
- "If an error occurs, nothing can be assumed about the completion or correctness of operations enqueued."  A kernel
  that was aborted counts as completed, with garbage in its output.  So a receive is believed only if it was complete
  when the switch was *not yet* thrown (the switch is thrown before anything is aborted) and the communicator tells no
  error; only then does the ring enqueue the copy to the bucket.
- Sends and receives of one communicator share a stream, where a send that waits for its receiver blocks the receives
  behind it.  Every edge of the ring has its own communicator, so the two directions of a member never wait for each
  other, in a ring of two as well.

The ring's additions and copies run on a side stream; ``finish`` waits for it, so a finished handle and a raised
``EpochRevoked`` both mean that the device is done with the bucket.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import Revocation
from recover_megatron.collectives.errors import PeerLost
from recover_megatron.collectives.native import NativeBackend
from recover_megatron.collectives.scratch import Scratch
from recover_megatron.collectives.transport import Arrival, Pending, Transport

_PAUSE = 20e-6
_NO_TIMEOUT = timedelta(days=7)
_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""torch's own watchdog would end the process: faults are this package's to handle."""


def _communicator(store: dist.Store, rank: int, size: int, device: torch.device) -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    options._timeout = _NO_TIMEOUT
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
    return backend


class _Communicators:
    """The communicators of one group: waiting on and aborting them."""

    def __init__(self, revocation: Revocation) -> None:
        self.revocation = revocation
        self.all: list[Any] = []
        revocation.on_throw(self.abort)

    def open(self, store: dist.Store, rank: int, size: int, device: torch.device) -> Any:
        backend = _communicator(store, rank, size, device)
        self.all.append(backend)
        if self.revocation.thrown:  # abort came while this one was made
            backend.abort()
            raise self.revocation.error()
        return backend

    def wait(self, work: Any) -> None:
        """Block the host until ``work`` has completed on the device, unaborted and without error."""
        while not work.is_completed():
            self.revocation.check()
            time.sleep(_PAUSE)
        self.revocation.check()
        if any(int(backend.get_error()) for backend in self.all):
            raise PeerLost("NCCL reports an error of its communicator")

    def abort(self) -> None:
        for backend in list(self.all):
            backend.abort()

    def close(self) -> None:
        if not self.revocation.thrown:
            for backend in self.all:
                backend.shutdown()
        self.all.clear()


class _Message:
    def __init__(self, tensor: torch.Tensor, work: Any) -> None:
        self.tensor = tensor
        self.work = work

    @property
    def done(self) -> bool:
        return bool(self.work.is_completed())


class NcclTransport(Transport):
    lookahead = 2

    def __init__(
        self, rank: int, size: int, store: dist.Store, revocation: Revocation, *, ring: str, device: torch.device
    ) -> None:
        self._device = device
        self._scratch = Scratch(device)
        self._stream = torch.cuda.Stream(device)
        self._communicators = _Communicators(revocation)
        self._out: Any = None
        self._in: Any = None
        if size == 1:
            return
        edges = {rank: 0, (rank - 1) % size: 1}  # edge r leads from rank r, its sender, to r + 1
        for edge in sorted(edges):
            prefix = dist.PrefixStore(f"{ring}/edge{edge}", store)
            backend = self._communicators.open(prefix, edges[edge], 2, device)
            if edges[edge] == 0:
                self._out = backend
            else:
                self._in = backend

    @property
    def scratch_peak(self) -> int:
        return self._scratch.peak

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        del tag  # NCCL matches by order
        return _Message(tensor, self._out.send([tensor], 1, 0))

    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        del tag
        tensor = self._scratch.take(numel, dtype)
        return _Message(tensor, self._in.recv([tensor], 0, 0))

    def release(self, arrival: Arrival) -> None:
        self._scratch.give(arrival.tensor)

    def wait(self, pending: Pending) -> None:
        assert isinstance(pending, _Message)
        self._communicators.wait(pending.work)

    def abort(self) -> None:
        self._communicators.abort()

    def close(self) -> None:
        self.settle()
        self._communicators.close()

    def submitted(self) -> object:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self, token: object) -> None:
        assert isinstance(token, torch.cuda.Event)
        self._stream.wait_event(token)

    def scope(self) -> AbstractContextManager[object]:
        scope: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return scope

    def finish(self) -> None:
        self._stream.synchronize()

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


class NcclNative(NativeBackend):
    def __init__(
        self, rank: int, size: int, store: dist.Store, revocation: Revocation, *, ring: str, device: torch.device
    ) -> None:
        self._device = device
        self._communicators = _Communicators(revocation)
        self._backend = self._communicators.open(dist.PrefixStore(f"{ring}/nccl", store), rank, size, device)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> None:
        self._communicators.wait(self._backend._reduce_scatter_base(output, source))

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        self._communicators.wait(self._backend._allgather_base(output, source))

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._communicators.close()
