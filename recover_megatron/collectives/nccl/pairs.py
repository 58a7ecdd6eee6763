"""Transfer of a state between the GPUs of two workers (a *pair*), over an NCCL communicator with two members.

    receiver                                              holder of the state
       | -- NCCL's unique id -------------------------->     |    both open the communicator
       | -- CONNECT, when the receiver has its turn ---->    |    both launch a first message, which connects them
       |    launch a receive                                 |
       | -- number of a chunk -------------------------->     |    pack the chunk into one buffer, compute its digest
       |    receive is over <======= chunk ==============    |    send is over
       | <-- trailer: the digest ------------------------    |
       |    check the digest, copy to the tensors            |

The receiver requests a chunk only when its receive is in the stream of its device.  So the holder's send runs at once
and does not block a hardware queue of the holder's device, which continues to compute (`collectives.device`).  In
each direction the pairs of a worker take turns, so a worker has at most one send and one receive in flight.  A send
waits only for earlier sends, whose receivers already have their turn, so workers cannot wait for each other in a cycle.

When the TCP connection between the workers closes, or a message takes too long, this end cancels the pair's token and
aborts its operation at once, without an agreement with the other end.  The abort may complete a message at the other
end with garbage.  No trailer follows that message, so the receiver does not use it (`collectives.state.receiver`).  The
garbage is in a buffer of the pair, which lives until the abort is over.  The receiver then requests the missing chunks
through host memory, over another connection, or from other workers; it does not wait for the abort.
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
"""Time limits in seconds: for ``open`` and the receiver's ``connect``, and for the holder's ``connect``."""
SENDING_SECONDS, RECEIVING_SECONDS = 5.0, 15.0
"""Time limits in seconds to send and to receive a message, which takes some ms.

A receive may also have to wait until an earlier send of the holder has failed.
"""
LOOK_MILLISECONDS = 50
"""Time in milliseconds between two checks of a pair's deadline."""
ID_BYTES = 128
"""Size of NCCL's unique id in bytes: NCCL_UNIQUE_ID_BYTES (nccl.h)."""
_RECEIVER, _HOLDER = 0, 1
_DIGESTS = 1 << 64
"""Modulus that turns a signed digest into the unsigned number that a trailer contains."""


class _Connection(CancelToken):
    """Cancel token of a pair, which is cancelled when the connection ``sock`` closes or ``deadline`` passes.

    A separate thread checks both, because the thread that uses the pair may be blocked in an NCCL call.  The
    cancellation ends this call.
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
    """Lock and CUDA stream for one direction, which all pairs of a worker share: one send or receive runs at a time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    stream: Any = None


@dataclass(frozen=True, eq=False)
class Pairs:
    """Factory for the pairs of one worker (see ``Pair``); ``device``: device of the tensors to send or receive."""

    device: torch.device
    _lanes: tuple[_Lane, _Lane] = field(default_factory=lambda: (_Lane(), _Lane()), init=False)

    def unique_id(self) -> bytes:
        """Return a new unique id for both ends of a pair; only the receiver calls this.  Raises ``PeerLost``."""
        with _as_lost():
            return bytes.fromhex(libraries.load().unique_id())

    def open(self, sock: socket.socket, unique_id: bytes, *, receives: bool) -> Pair:
        """Open this worker's end of a pair; waits until the other worker opens its end.  Raises ``PeerLost``.

        ``sock``: connection to the other worker.  ``unique_id``: equal at both ends.
        """
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
    """End of an open pair at this worker: a ``StateTransport`` from GPU to GPU.  Only one thread may use it.

    After ``PeerLost`` the pair is unusable, even if the other worker is alive.
    """

    _library: Library
    _communicator: Communicator
    _connection: _Connection
    _lane: _Lane
    _device: torch.device
    _room: torch.Tensor = field(init=False)

    def connect(self, room: int, ask: Callable[[], None] = lambda: None) -> None:
        """Connect both ends by a message of one byte; returns when both workers have called ``connect``.

        ``room``: size of the largest message in bytes.  ``ask``: function that makes the holder call ``connect``.  The
        receiver calls it only when no other receive is running on this worker, because until the receiver's end is
        connected the holder can send to no other receiver.
        """
        with _as_lost():
            self._room = torch.empty(room, dtype=torch.uint8, device=self._device)
            if self._communicator.rank == _HOLDER:
                return self._exchange(self._room[:1], CONNECTING_SECONDS)
            self._drained()  # earlier kernels may still use this memory, which torch's allocator has reused
            self._exchange(self._room[:1], OPENING_SECONDS, before=ask)

    def send(self, parts: Sequence[torch.Tensor]) -> int:
        """Copy ``parts`` into the pair's buffer and send the copy; return its unsigned 64-bit checksum."""
        with _as_lost():
            packed = self._packed(parts)
            for piece, part in zip(_pieces(packed, parts), parts, strict=True):
                piece.copy_(part, non_blocking=True)
            found = digest([packed]) % _DIGESTS  # waits for the digest on the host, and so for the copies
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
        """Cancel the pair's token, and abort the communicator in a detached thread.

        The pair's buffer lives until the abort is over.
        """
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
        """Send ``packed`` (at the holder) or receive into it (at the receiver); return when this is over and believed.

        ``seconds``: time limit.  ``before``: called when no other transfer in this direction is running on this worker.
        ``launched``: called when the operation is in the stream.
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
                lane.stream = None  # this stream is blocked until the abort is over; the next message gets a new one
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
    """Context that turns errors of a pair, also lack of GPU memory, into ``PeerLost``.

    On ``PeerLost`` the caller continues the transfer through host memory.  The error's cause has no traceback, because
    its frames would keep the pair alive in a reference cycle.
    """
    try:
        yield
    except (EpochRevoked, OSError, torch.OutOfMemoryError, *libraries.load().errors) as error:
        reason = error.reason if isinstance(error, EpochRevoked) else error
        raise PeerLost(str(reason)) from error.with_traceback(None)
