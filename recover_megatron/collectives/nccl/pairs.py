"""The bytes of a state from device to device, by a communicator of two that is made for it.

    receiver                                              holder
       | -- NCCL's unique id -------------------------->     |    both open it
       | -- CONNECT: no other receive is under way here ->   |    both launch a message, which connects them
       |    receive, launched                                |
       | -- number of a chunk -------------------------->     |    packed into one piece, and its digest
       |    over  <===== send, which finds its receive ===   |    over
       | <-- trailer: the digest ------------------------    |
       |    digest of what arrived, copies to the tensors    |

A chunk is asked for when its receive is in the stream of its device: a send finds it there, needs nobody's host, and so
is no operation that holds up a queue (`collectives.device`).  The holder's device computes meanwhile.  Each worker has
one send and one receive under way at a time, whatever the number of connections; only who receives waits for its turn
at both ends, so nobody waits in a circle.

The connection is the switch: when it ends here or there, or a message takes too long, what is under way is aborted at
this end, at once.  Nobody has to have heard of it: a message that the other end's abort has completed with garbage has
no trailer, and is not believed (`collectives.state.receiver`).  It has written to memory of the pair's own, which lives
until the abort is over.  What was not fetched is asked for by way of the hosts, over another connection, or of others.
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
"""The latter at the holder, when the receiver connects already."""
SENDING_SECONDS, RECEIVING_SECONDS = 5.0, 15.0
"""Of a message, which takes some ms.  A receive lasts longer: its send may stand behind one that is given up."""
LOOK_MILLISECONDS = 50
ID_BYTES = 128
"""NCCL_UNIQUE_ID_BYTES (nccl.h)."""
_RECEIVER, _HOLDER = 0, 1
_DIGESTS = 1 << 64
"""A trailer has it unsigned."""


class _Connection(CancelToken):
    """A switch that the end of a connection cancels, or the end of the time that its user has set.

    A thread of its own looks, until it is cancelled: its user may be inside a call of NCCL's, which the switch ends.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(0)
        self.deadline = time.monotonic() + OPENING_SECONDS
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        threading.Thread(target=self._look, args=(poll,), name="switch of a pair", daemon=True).start()

    def _look(self, poll: select.poll) -> None:
        while not self.cancelled:
            if poll.poll(LOOK_MILLISECONDS):
                self.cancel("the connection between the two has ended")
            elif time.monotonic() > self.deadline:
                self.cancel("what NCCL was asked for does not come to an end")


@dataclass(eq=False)
class _Lane:
    """One direction of a worker: its operations take turns."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    stream: Any = None


@dataclass(frozen=True, eq=False)
class Pairs:
    """Those of one worker, whose tensors are on ``device``."""

    device: torch.device
    _lanes: tuple[_Lane, _Lane] = field(default_factory=lambda: (_Lane(), _Lane()), init=False)

    def unique_id(self) -> bytes:
        """For both ends of a pair: made by the receiver, in the process that opens it.  Raises ``PeerLost``."""
        with _as_lost():
            return bytes.fromhex(libraries.load().unique_id())

    def open(self, sock: socket.socket, unique_id: bytes, *, receives: bool) -> Pair:
        """One end, to be connected; the other end does the same.  Raises ``PeerLost``."""
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
    """One end of an open one; a ``StateTransport``.  Used by one thread.

    It raises ``PeerLost``, after which it is of no use, whether or not the other end is there.
    """

    _library: Library
    _communicator: Communicator
    _connection: _Connection
    _lane: _Lane
    _device: torch.device
    _room: torch.Tensor = field(init=False)

    def connect(self, room: int, ask: Callable[[], None] = lambda: None) -> None:
        """Exchange a byte: the first message is in progress until both have called it.

        ``room``: bytes of the largest message.  ``ask``: has the holder call this; not before it is this one's turn
        here, since the holder gives nobody else anything meanwhile.
        """
        with _as_lost():
            self._room = torch.empty(room, dtype=torch.uint8, device=self._device)
            if self._communicator.rank == _HOLDER:
                return self._exchange(self._room[:1], CONNECTING_SECONDS)
            self._drained()  # kernels of whoever had this memory before
            self._exchange(self._room[:1], OPENING_SECONDS, before=ask)

    def send(self, parts: Sequence[torch.Tensor]) -> int:
        """As ``StateTransport``.  What is sent is a copy, so ``parts`` may change as soon as it is made."""
        with _as_lost():
            packed = self._packed(parts)
            for mine, part in zip(_pieces(packed, parts), parts, strict=True):
                mine.copy_(part, non_blocking=True)
            found = digest([packed]) % _DIGESTS  # for which the host has waited, and so for the copies
            self._exchange(packed, SENDING_SECONDS)
        return found

    def receive(self, parts: Sequence[torch.Tensor], ask: Callable[[], None]) -> int:
        with _as_lost():
            packed = self._packed(parts)
            self._exchange(packed, RECEIVING_SECONDS, launched=ask)
            found = digest([packed]) % _DIGESTS
            for mine, part in zip(_pieces(packed, parts), parts, strict=True):
                part.copy_(mine, non_blocking=True)
            self._drained()
        return found

    def close(self) -> None:
        """Abort what is under way, in a thread that nobody waits for; its memory lives as long."""
        self._connection.cancel("it is closed")
        self._communicator.close_beside()

    def _drained(self) -> None:
        """Return when this thread's stream has carried out what it was given."""
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
        """One message; return when it is over and NCCL reports success.  ``before``: called when it is its turn."""
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
                lane.stream = None  # which stands still until the abort is over
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
    """All that ends a pair is ``PeerLost``: a device without memory for it, too, since there is another way.

    Without the frames of what it was: they hold the pair, and here on to each other.
    """
    try:
        yield
    except (EpochRevoked, OSError, torch.OutOfMemoryError, *libraries.load().errors) as error:
        reason = error.reason if isinstance(error, EpochRevoked) else error
        raise PeerLost(str(reason)) from error.with_traceback(None)
