"""Transports over NCCL.  NOT RUN: written to NCCL's and torch's documented behaviour, never executed on a GPU.

What NCCL does that the design must answer:

- It reports no dead peer: a kernel spins until the communicator is aborted.  ``wait`` therefore polls, and ``abort``,
  from other threads, ends the communicators of this group (non-blocking ones, so that abort is legal at any time).
- An abort may wait: for a lock that a call of torch's holds, or for the device, on which a kernel of another
  communicator spins that was to be aborted next.  Hence each is aborted in a thread of its own, and whoever throws the
  switch goes on.
- Opening a communicator waits in the store for what its first member publishes, which no switch ends.  So the members
  meet first, in a way that can be ended; one that dies in the moment between is waited for as long as the store waits.
- "If an error occurs, nothing can be assumed about the completion or correctness of operations enqueued."  A kernel
  that was aborted counts as completed, with garbage in its output.  So a receive is believed only if it was complete
  when the switch was *not yet* cancelled (the token is cancelled before anything is aborted) and the communicator tells
  no error; only then does the ring enqueue the copy to the bucket.
- The first message between two members connects them, and the host waits in it until the other one asks for that
  message: members that all begin by sending would wait in a circle.  So every edge is greeted over when it is opened,
  in an order in which nobody waits for who waits for him (``edges_in_order``).
- Sends and receives of one communicator share a stream, where a send that waits for its receiver blocks the receives
  behind it.  Every edge of the ring has its own communicator, so the two directions of a member never wait for each
  other, in a ring of two as well.

The ring's additions and copies run on a side stream (see streams); ``finish`` waits for it, so a finished handle and a
raised ``EpochRevoked`` both mean that the device is done with the bucket.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.errors import PeerLost
from recover_megatron.collectives.native.backend import Message, NativeBackend, Operation
from recover_megatron.collectives.rendezvous import await_key
from recover_megatron.collectives.ring.scratch import Scratch
from recover_megatron.collectives.torch_nccl import abort_beside, make_backend
from recover_megatron.collectives.transport.interface import Arrival, Pending, Transport
from recover_megatron.collectives.transport.streams import DeviceStream

_PAUSE = 20e-6


def edges_in_order(rank: int, size: int) -> list[tuple[int, int]]:
    """(edge, this member's rank in it) of the two edges of a ring's member, in the order in which to open them.

    Edge r leads from member r, rank 0, to its successor, rank 1.  Even edges first, then odd ones, and where the number
    of members is odd the last one by itself: the two edges of a member are never of one turn, so all edges of a turn
    can be opened at the same time, and no turn depends on a later one.
    """

    def turn(edge: int) -> int:
        return 2 if size % 2 and edge == size - 1 else edge % 2

    return sorted([(rank, 0), ((rank - 1) % size, 1)], key=lambda its: turn(its[0]))


class _Communicators:
    """The communicators of one group: waiting on and aborting them."""

    def __init__(self, cancel_token: CancelToken) -> None:
        self.cancel_token = cancel_token
        self.all: list[Any] = []
        cancel_token.on_cancel(self.abort)

    def open(self, store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> Any:
        store.set(f"here/{rank}", "1")
        for other in range(size):
            await_key(store, f"here/{other}", self.cancel_token, timeout)
        try:
            backend = make_backend(store, rank, size)
            self.all.append(backend)
            backend.eager_connect_single_device(device)
        except RuntimeError as error:
            self.cancel_token.check()
            raise PeerLost(f"NCCL: {error}") from error
        if self.cancel_token.cancelled:  # abort came while this one was made
            abort_beside([backend])
            raise self.cancel_token.error()
        return backend

    def wait(self, work: Any) -> None:
        """Block the host until ``work`` has completed on the device, unaborted and without error."""
        while not work.is_completed():
            self.cancel_token.check()
            time.sleep(_PAUSE)
        self.cancel_token.check()
        if any(int(backend.get_error()) for backend in self.all):
            raise PeerLost("NCCL reports an error of its communicator")

    def abort(self) -> None:
        abort_beside(list(self.all))

    def close(self) -> None:
        if not self.cancel_token.cancelled:
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


class NcclTransport(DeviceStream, Transport):
    lookahead = 2

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        cancel_token: CancelToken,
        *,
        ring: str,
        device: torch.device,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(device)
        self._scratch = Scratch(device)
        self._communicators = _Communicators(cancel_token)
        self._out: Any = None
        self._in: Any = None
        if size == 1:
            return
        for edge, mine in edges_in_order(rank, size):
            prefix = dist.PrefixStore(f"{ring}/edge{edge}", store)
            backend = self._communicators.open(prefix, mine, 2, device, timeout)
            if mine == 0:
                self._out = backend
            else:
                self._in = backend
            self._greet(backend, mine)

    def _greet(self, backend: Any, mine: int) -> None:
        with self.scope():
            word = torch.zeros(1, device=self._device)
            try:
                work = backend.send([word], 1, 0) if mine == 0 else backend.recv([word], 0, 0)
            except RuntimeError as error:
                self._communicators.cancel_token.check()
                raise PeerLost(f"NCCL: {error}") from error
            self._communicators.wait(work)

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

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


class NcclNative(DeviceStream, NativeBackend):
    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        cancel_token: CancelToken,
        *,
        ring: str,
        device: torch.device,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(device)
        self._communicators = _Communicators(cancel_token)
        prefix = dist.PrefixStore(f"{ring}/nccl", store)
        self._backend = self._communicators.open(prefix, rank, size, device, timeout)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        return _Message(output, self._backend._reduce_scatter_base(output, source))

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        return _Message(output, self._backend._allgather_base(output, source))

    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        raise NotImplementedError("the messages of shadows over torch's NCCL groups")

    def wait(self, operation: Operation) -> None:
        assert isinstance(operation, _Message)
        self._communicators.wait(operation.work)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._communicators.close()
