"""What a group needs of NCCL, opened for it.  NOT RUN on a GPU: on a double only.

``NcclNative``: NCCL's own collectives, on a stream of the group's own.

    reduce_scatter, all_gather, transfer --launch--> the stream --event--> over --NCCL's word--> believed

``NcclTransport``: the ring's messages by NCCL's send and receive.

    predecessor --edge: communicator of two, stream--> this member --edge: communicator of two, stream--> successor

Each edge has a communicator and a stream of its own: in one stream a send that waits for its receiver would hold up the
receive behind it, in all members alike, and a group of NCCL's in which both are does not help, since a member may have
more to send than to receive.  Each stream has one operation outstanding at most (`collectives.device` says why).

The two edges of a member are opened, and take their first message, at the same time without waiting in either: no
order of theirs can close a circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from recover_megatron.collectives.device import DeviceStream, pauses
from recover_megatron.collectives.epoch import CancelToken, KeyValue
from recover_megatron.collectives.native import Message, NativeBackend, Operation
from recover_megatron.collectives.nccl import communicator
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.nccl.communicator import Communicator
from recover_megatron.collectives.nccl.library import Library
from recover_megatron.collectives.nccl.renewal import Keeper, Opening, open_all
from recover_megatron.collectives.transport.interface import Arrival, Pending, Scratch, Transport


class NcclNative(DeviceStream, NativeBackend):
    """``its``: None where the member is alone.  ``keeper``: takes the communicator when the epoch is over."""

    def __init__(
        self,
        library: Library,
        its: Communicator | None,
        cancel_token: CancelToken,
        keeper: Keeper,
        device: torch.device,
    ) -> None:
        super().__init__(device, cancel_token, library.cuda)
        self._library = library
        self._its = its
        self._keeper = keeper

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

        return self._launch(all_of_them, *(tensor for tensor, _ in (*sends, *receives)))

    def wait(self, operation: Operation) -> None:
        assert isinstance(operation, communicator.Operation)
        assert self._its is not None
        self._its.wait(operation)

    def settle(self) -> None:
        if self._its is not None:
            self._its.settle()
        self.finish()

    def close(self) -> None:
        if self._its is not None:
            self._keeper.give(self._its)
            self._its = None

    def _launch(self, call: Callable[[Any], None], *tensors: torch.Tensor) -> Operation:
        assert self._its is not None, "a group of one member has nothing to sum"
        return self._its.launch(call, self._event, *tensors)


MAX_CTAS = 8
"""Thread blocks of a message: two are under way beside the backward pass, and a copy needs few."""


@dataclass(eq=False)
class _Message:
    """queued --launch--> in progress --enqueued--> under way --over and believed--> done"""

    edge: _Edge
    tensor: torch.Tensor
    ready: Any
    """An event of the ring's own stream: what it does with the tensor before."""
    over: bool = False

    @property
    def done(self) -> bool:
        self.edge.advance()
        return self.over


class _Edge:
    """Messages of one direction, one after the other."""

    def __init__(self, library: Library, its: Communicator, stream: Any, call: str) -> None:
        self.its = its
        self.stream = stream
        self._library = library
        self._call = call
        self._queue: deque[_Message] = deque()
        self._first: _Message | None = None
        self._operation: communicator.Operation | None = None

    def put(self, message: _Message) -> None:
        self._queue.append(message)
        self.advance()

    def advance(self) -> None:
        """Take the first message as far as it goes without waiting.  Raises ``EpochRevoked`` and ``PeerLost``."""
        while True:
            if self._first is None:
                if not self._queue:
                    return
                self._first = self._queue.popleft()
                self.stream.wait_event(self._first.ready)
                self._begin(self._first.tensor)
            if self._operation is None:
                if not self.its.begun:
                    return
                event = self._library.cuda.Event()
                event.record(self.stream)
                self._operation = self.its.launched(event, self._first.tensor)
            if not self._operation.done:
                return
            self.its.believe()
            self._first.over = True
            self._first = self._operation = None

    def _begin(self, tensor: torch.Tensor) -> None:
        other = 1 if self._call == "send" else 0
        self.its.begin(lambda handle: getattr(handle, self._call)(tensor, other, stream=self.stream))

    def clear(self) -> None:
        self._queue.clear()
        self._first = self._operation = None


class NcclTransport(DeviceStream, Transport):
    """``edges``: to the successor, in which this member has rank 0, and from the predecessor; none if it is alone."""

    lookahead = 1

    def __init__(
        self,
        library: Library,
        edges: tuple[Communicator, Communicator] | None,
        cancel_token: CancelToken,
        keeper: Keeper,
        device: torch.device,
    ) -> None:
        super().__init__(device, cancel_token, library.cuda)
        self._library = library
        self._keeper = keeper
        self._scratch = Scratch(device)
        self._edges: tuple[_Edge, ...] = ()
        if edges is not None:
            streams = [library.cuda.Stream(device, priority=-1) for _ in edges]
            self._edges = (
                _Edge(library, edges[0], streams[0], "send"), _Edge(library, edges[1], streams[1], "recv")
            )  # fmt: skip

    @property
    def scratch_peak(self) -> int:
        return self._scratch.peak

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        del tag  # NCCL matches by order
        return self._message(self._edges[0], tensor)

    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        del tag
        return self._message(self._edges[1], self._scratch.take(numel, dtype))

    def _message(self, edge: _Edge, tensor: torch.Tensor) -> _Message:
        message = _Message(edge, tensor, self._event())
        edge.put(message)
        return message

    def release(self, arrival: Arrival) -> None:
        self._scratch.give(arrival.tensor)

    def wait(self, pending: Pending) -> None:
        assert isinstance(pending, _Message)
        for _ in pauses():
            for edge in self._edges:
                edge.advance()
            if pending.over:
                return
            self._cancel_token.check()

    def abort(self) -> None:
        """The switch, which is cancelled before, wakes whoever waits; the thread that waits ends the communicators."""

    def settle(self) -> None:
        for edge in self._edges:
            edge.its.settle()
        for edge in self._edges:
            self._over(edge.stream)
        self.finish()

    def close(self) -> None:
        for edge in self._edges:
            edge.clear()
            self._keeper.give(edge.its)
        self._edges = ()


@dataclass(eq=False)
class NcclOpener:
    """Opens what a group needs of NCCL: the communicator of a native group, or the two edges of a ring's member."""

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
        return NcclNative(self._library, its, self._cancel_token, self._keeper, self._device)

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
        return open_all(openings, self._cancel_token, self._timeout)
