"""Transfer of a state from device to device, over an NCCL communicator of two members.

    receiver                                              holder
       | -- NCCL's unique id -------------------------->     |    both open the communicator
       | -- CONNECT, at the receiver's turn ------------->   |    both launch a message, which connects them
       |    receive, launched                                |
       | -- number of a chunk -------------------------->     |    packed into one buffer, and its digest
       |    over  <===== send, which finds its receive ===   |    over
       | <-- trailer: the digest ------------------------    |
       |    digest of the received data, copies to tensors   |

The receiver requests a chunk only when the receive is in the stream of the receiver's device.  So the send runs at once
and does not block a hardware queue (`collectives.device`).  The holder's device computes meanwhile.  Each worker has at
most one send and one receive in flight, whatever the number of connections.  Only the receiver waits for its turn, at
both ends, so no cyclic wait is possible.

The connection acts as cancel token: when it closes at either end, or a message takes too long, the operation is aborted
at this end at once.  The other end need not agree first.  If the abort completes a message at the other end with
garbage, the message has no trailer, so it is not believed (`collectives.state.receiver`).  The garbage is in a buffer
of the pair, which lives until the abort is over.  The receiver then requests missing chunks through host memory, over
another connection, or from other workers.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from recover_megatron.collectives.device import pauses, until, within
from recover_megatron.collectives.epoch import CancelToken, EpochRevoked, PeerLost
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.nccl.communicator import Communicator
from recover_megatron.collectives.nccl.library import Library
from recover_megatron.collectives.state.transport import digest

OPENING_SECONDS, CONNECTING_SECONDS = 20.0, 10.0
"""Time limits in seconds to open a pair: for the receiver; for the holder, when the receiver is connecting already."""
SENDING_SECONDS, RECEIVING_SECONDS = 5.0, 15.0
"""Time limits in seconds of a message, which takes some ms; a receive may wait while its holder gives up a send."""
LOOK_MILLISECONDS = 50
"""Time in milliseconds between two checks of a pair's deadline."""
ID_BYTES = 128
"""Size of NCCL's unique id in bytes: NCCL_UNIQUE_ID_BYTES (nccl.h)."""
_RECEIVER, _HOLDER = 0, 1
_DIGESTS = 1 << 64
"""Modulus that makes a digest unsigned, as in a trailer."""


class _Connection(CancelToken):
    """Cancel token that is cancelled when a connection closes or a deadline passes.

    A separate thread polls both, since the thread that uses the pair may be blocked in an NCCL call, which the
    cancellation ends.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(0)
        self.deadline = time.monotonic() + OPENING_SECONDS
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        threading.Thread(target=self._look, args=(poll,), name="cancel token of a pair", daemon=True).start()

    def _look(self, poll: select.poll) -> None:
        while not self.cancelled:
            if poll.poll(LOOK_MILLISECONDS):
                self.cancel("the connection between receiver and holder was closed")
            elif time.monotonic() > self.deadline:
                self.cancel("an NCCL operation did not finish in time")


@dataclass(eq=False)
class _Lane:
    """Lock and stream for one direction of a worker's pairs (send or receive): one operation runs at a time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    stream: Any = None


@dataclass(frozen=True, eq=False)
class Pairs:
    """Factory for the pairs of one worker; ``device``: device of the tensors that are sent or received."""

    device: torch.device
    _lanes: tuple[_Lane, _Lane] = field(default_factory=lambda: (_Lane(), _Lane()), init=False)

    def unique_id(self) -> bytes:
        """Return a new unique id for both ends of a pair; only the receiver calls this.  Raises ``PeerLost``."""
        with _as_lost():
            return bytes.fromhex(libraries.load().unique_id())

    def open(self, sock: socket.socket, unique_id: bytes, *, receives: bool) -> Pair:
        """Open this worker's end of a pair, when the other worker opens the other end.  Raises ``PeerLost``."""
        library, rank = libraries.load(), _RECEIVER if receives else _HOLDER
        with _as_lost(), library.cuda.device(self.device):
            handle = library.core.Communicator.init(2, rank, library.read_unique_id(unique_id.hex()), library.config())
            connection = _Connection(sock)
            communicator = Communicator(library, handle, unique_id.hex(), connection, rank=rank, size=2)
            pair = Pair(library, communicator, connection, self._lanes[rank], self.device)
            try:
                for _ in pauses():
                    if communicator.advance():
                        break
            except BaseException:
                pair.close()
                raise
        connection.deadline = math.inf
        return pair


@dataclass(eq=False)
class Pair:
    """End of an open pair at one worker, a ``StateTransport``; only one thread may use it.

    After a ``PeerLost`` the pair is unusable, even if the other worker is alive.
    """

    _library: Library
    _communicator: Communicator
    _connection: _Connection
    _lane: _Lane
    _device: torch.device
    _room: torch.Tensor = field(init=False)

    def connect(self, room: int, ask: Callable[[], None] = lambda: None) -> None:
        """Connect both ends by a message of one byte, which is complete when both workers have called ``connect``.

        ``room``: size of the largest message in bytes.  ``ask``: makes the holder call ``connect``; a receiver calls
        ``ask`` only when the message has its turn, since the holder serves no other receiver meanwhile.
        """
        with _as_lost():
            self._room = torch.empty(room, dtype=torch.uint8, device=self._device)
            if self._communicator.rank == _HOLDER:
                return self._exchange(self._room[:1], CONNECTING_SECONDS)
            self._drained()  # wait for kernels that still use this memory for its previous owner
            self._exchange(self._room[:1], OPENING_SECONDS, before=ask)

    def send(self, parts: Sequence[torch.Tensor]) -> int:
        """Send ``parts`` as ``StateTransport`` does, but from a copy: ``parts`` may change after the copy."""
        with _as_lost():
            packed = self._packed(parts)
            for piece, part in zip(_pieces(packed, parts), parts, strict=True):
                piece.copy_(part, non_blocking=True)
            found = digest([packed]) % _DIGESTS  # the host waits for the digest, and so for the copies
            self._exchange(packed, SENDING_SECONDS)
        return found

    def receive(self, parts: Sequence[torch.Tensor], ask: Callable[[], None]) -> int:
        with _as_lost():
            packed = self._packed(parts)
            self._exchange(packed, RECEIVING_SECONDS, launched=ask)
            found = digest([packed]) % _DIGESTS
            for piece, part in zip(_pieces(packed, parts), parts, strict=True):
                part.copy_(piece, non_blocking=True)
            self._drained()
        return found

    def close(self) -> None:
        """Abort the communicator in a detached thread; the pair's buffer lives until the abort is over."""
        self._connection.cancel("the pair was closed")
        self._communicator.close_beside()

    def _drained(self) -> None:
        """Wait until all work on this thread's current stream is done."""
        cuda = self._library.cuda
        until(_recorded(cuda, cuda.current_stream(self._device)), within())

    def _packed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._room[: sum(part.numel() for part in parts)]

    def _exchange(
        self,
        packed: torch.Tensor,
        seconds: float,
        *,
        before: Callable[[], None] = lambda: None,
        launched: Callable[[], None] = lambda: None,
    ) -> None:
        """Send or receive one message; return when it is over and believed.

        ``before``: called when the message has its turn.  ``launched``: called when the message is in the stream.
        """
        other, cuda, lane = 1 - self._communicator.rank, self._library.cuda, self._lane
        with lane.lock, cuda.device(self._device):
            stream = lane.stream = lane.stream or cuda.Stream(self._device)
            self._connection.deadline = time.monotonic() + seconds

            def message(handle: Any) -> None:
                transfer = handle.recv if other == _HOLDER else handle.send
                transfer(packed, other, stream=stream)

            try:
                before()
                operation = self._communicator.launch(message, lambda: _recorded(cuda, stream), packed)
                launched()
                self._communicator.wait(operation)
            except BaseException:
                lane.stream = None  # the stream is blocked until the abort is over
                raise
            self._connection.deadline = math.inf


def _recorded(cuda: Any, stream: Any) -> Any:
    event = cuda.Event()
    event.record(stream)
    return event


def _pieces(packed: torch.Tensor, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return packed.split([part.numel() for part in parts])


@contextmanager
def _as_lost() -> Iterator[None]:
    """Turn every error that ends a pair into ``PeerLost``, so that the transfer continues through host memory.

    That includes lack of device memory.  The error has no traceback, whose frames would hold the pair in a cycle.
    """
    try:
        yield
    except (EpochRevoked, OSError, torch.OutOfMemoryError, *libraries.load().errors) as error:
        reason = error.reason if isinstance(error, EpochRevoked) else error
        raise PeerLost(str(reason)) from error.with_traceback(None)
