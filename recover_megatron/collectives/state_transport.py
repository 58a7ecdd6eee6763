"""How the bytes of a state get from the memory of one worker into that of another: the one thing that devices change.

    holder     send(parts)     -> check sum of what was sent        parts: pieces of tensors, contiguous, of bytes
    receiver   receive(parts)  -> check sum of what arrived

Who holds what, which pieces are asked for, whether the two sums agree and what happens when a holder is lost is not the
transport's business (`instep.state_holder`, `instep.state_receiver`): a transport from device to device needs these two
methods and nothing else.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from recover_megatron.collectives.digest import check_sum
from recover_megatron.collectives.errors import PeerLost, is_of_the_road

_WORD = 64
_MOST_PIECES = 512
"""In one call of the kernel, whose limit is 1,024."""


class StateTransport(Protocol):
    """Between two workers; each end is used by one thread.

    Both ends name the same sizes in the same order.  Both raise ``PeerLost``.  ``parts``: one-dimensional, contiguous,
    uint8.
    """

    def send(self, parts: Sequence[torch.Tensor]) -> int:
        """Send; the check sum of what was sent, 64 bits, unsigned."""

    def receive(self, parts: Sequence[torch.Tensor]) -> int:
        """Fill ``parts``; the check sum of what they hold then."""


class SocketTransport:
    """Over a connection, between the kernel and the tensors' own memory; those of a GPU by way of pinned memory.

    The check sum (``digest.check_sum``) is one against accidents; that the bytes come from somebody who knows the run's
    secret was proved when the connection was made.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def send(self, parts: Sequence[torch.Tensor]) -> int:
        on_host = self._staged(parts)
        for mine, part in zip(on_host, parts, strict=True):
            if mine is not part:
                mine.copy_(part, non_blocking=True)
        _synchronize(parts)
        found, views = check_sum(on_host), [memory_of(part) for part in on_host]
        try:
            if len(views) == 1:
                self._socket.sendall(views[0])
            else:
                _send_all(self._socket, views)
        except OSError as error:
            raise lost(error) from error
        return found

    def receive(self, parts: Sequence[torch.Tensor]) -> int:
        on_host = self._staged(parts)
        try:
            receive_into(self._socket, [memory_of(part) for part in on_host])
        except OSError as error:
            raise lost(error) from error
        found = check_sum(on_host)
        for mine, part in zip(on_host, parts, strict=True):
            if mine is not part:
                part.copy_(mine, non_blocking=True)
        _synchronize(parts)
        return found

    def _staged(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The parts themselves; for those of a GPU, room in pinned memory."""
        if all(part.device.type == "cpu" for part in parts):
            return parts
        total = sum(part.numel() for part in parts)
        if self._pinned.numel() < total:
            self._pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        return list(self._pinned[:total].split([part.numel() for part in parts]))


def _synchronize(parts: Sequence[torch.Tensor]) -> None:
    """Wait for the copies of this thread's stream: what is in pinned memory may be sent or written over."""
    for device in {part.device for part in parts if part.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def memory_of(part: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host; valid as long as the tensor lives."""
    return memoryview((ctypes.c_char * part.nbytes).from_address(part.data_ptr())).cast("B")


def lost(error: OSError | None) -> PeerLost:
    """``error`` of a connection, or its end, in the words of this package."""
    return PeerLost(str(error or "it closed the connection"), road=is_of_the_road(error))


def _send_all(sock: socket.socket, views: Sequence[memoryview]) -> None:
    left = list(views)
    while left:
        sent = sock.sendmsg(left[:_MOST_PIECES])
        left = _after(left, sent)


def receive_into(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill all of them.  Raises OSError, ``ConnectionResetError`` where the connection ends before."""
    left = [view for view in views if len(view)]
    while left:
        came = sock.recvmsg_into(left[:_MOST_PIECES], 0, socket.MSG_WAITALL)[0]
        if not came:
            raise ConnectionResetError("it closed the connection")
        left = _after(left, came)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of them behind the first ``count`` bytes."""
    left = iter(views)
    for view in left:
        if count < len(view):
            return [view[count:], *left]
        count -= len(view)
    return []


def cut(sizes: Sequence[int], limit: int, most: int = 256) -> Iterator[list[tuple[int, int, int]]]:
    """Tensors of ``sizes`` bytes in chunks of at most ``limit`` bytes and ``most`` pieces, in order.

    A piece: (number of the tensor, first byte, byte behind the last).
    """
    chunk: list[tuple[int, int, int]] = []
    room = limit
    for number, size in enumerate(sizes):
        at = 0
        while at < size:
            part = min(size - at, room)
            if at + part < size and part > _WORD:
                part -= part % _WORD  # so that the next piece begins where words begin
                room = part
            chunk.append((number, at, at + part))
            at, room = at + part, room - part
            if not room or len(chunk) == most:
                yield chunk
                chunk, room = [], limit
    if chunk:
        yield chunk
