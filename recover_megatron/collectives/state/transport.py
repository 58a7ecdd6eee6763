"""How the bytes of a state get from the memory of one worker into that of another: the one thing that devices change.

    holder     send(parts)     -> check sum of what was sent        parts: pieces of tensors, contiguous, of bytes
    receiver   receive(parts)  -> check sum of what arrived

The transport does not know who holds what, which pieces are asked for, whether the two sums agree or what happens when
a holder is lost (`holder` and `receiver` do).  ``SocketTransport`` goes by way of the hosts, `nccl.pairs` from device
to device.  The check sums (``check_sum``, ``Digest``) notice what accidents have changed.
"""

from __future__ import annotations

import ctypes
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from recover_megatron.collectives.device import drained, within
from recover_megatron.collectives.epoch import PeerLost
from recover_megatron.network.connection import is_of_the_road

_SMALL = 64 << 10
"""Bytes below which a call of torch costs more than zlib takes."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, one behind the other; its own memory where it is contiguous."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


_ROW = 1 << 15
"""Words that get a factor of their own each; it stays in a processor's cache."""
_ROWS = 32
"""Rows looked at in one call: a device takes as much memory again for it."""
_STEP = 0x100000001B3
_MASK = (1 << 64) - 1


class Digest:
    """64 bits that change with any bit of any tensor, and with their order; the same on every kind of device.

    A tensor's words of 64 bits, each times an odd number of its own, are summed in rows modulo 2**64, and the sums of
    the rows, its length and the digest of the tensors before are a polynomial in an odd number: what one bit adds to it
    is never zero.  A check against accidents, not against anybody who wants to deceive.
    """

    def __init__(self) -> None:
        self._state = 1
        self._factors = torch.empty(0, dtype=torch.int64)

    @property
    def value(self) -> int:
        """As a signed number, which is what a tensor can hold."""
        return self._state - (1 << 64) if self._state >> 63 else self._state

    def add(self, tensor: torch.Tensor) -> None:
        view = bytes_of(tensor)
        if view.storage_offset() % 8:
            view = view.clone()  # words begin where words can
        whole = view.numel() // 8
        rest = torch.zeros(8, dtype=torch.uint8, device=view.device)
        rest[: view.numel() % 8].copy_(view[8 * whole :])
        words, found = view[: 8 * whole].view(torch.int64), [torch.empty(0, dtype=torch.int64, device=view.device)]
        if self._factors.device != view.device or not self._factors.numel():
            self._factors = torch.arange(1, 2 * _ROW, 2, device=view.device) * 0x9E3779B1
        for at in range(0, whole, _ROWS * _ROW):
            block = words[at : at + _ROWS * _ROW]
            full = block.numel() // _ROW * _ROW
            last = block[full:]
            found += [_row_sums(block[:full].view(-1, _ROW), self._factors)] if full else []
            found += [_row_sums(last.view(1, -1), self._factors[: last.numel()])]
        for total in (*_on_host(torch.cat([*found, rest.view(torch.int64)])), view.numel()):
            self._fold(total)

    def _fold(self, value: int) -> None:
        self._state = (self._state * _STEP + value) & _MASK


def _row_sums(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Of each row the sum of its words times the factors; overflow is meant."""
    if rows.device.type == "cpu":  # four times as fast as mv
        return torch.stack([torch.dot(row, factors) for row in rows])
    return (rows * factors).sum(1)  # CUDA has no dot for them


def _on_host(numbers: torch.Tensor) -> list[int]:
    if numbers.device.type == "cuda":
        pinned = torch.empty_like(numbers, device="cpu", pin_memory=True)
        pinned.copy_(numbers, non_blocking=True)
        drained(numbers.device, within())
        numbers = pinned
    return [int(number) for number in numbers.tolist()]


def digest(tensors: Iterable[torch.Tensor]) -> int:
    together = Digest()
    for tensor in tensors:
        together.add(tensor)
    return together.value


def check_sum(parts: Sequence[torch.Tensor]) -> int:
    """64 bits, unsigned, of pieces of bytes on the host; pieces that are cut elsewhere may give others.

    Three times as fast as CRC-32, which is as fast as anything of zlib's and hashlib's.
    """
    found = 1
    for part in parts:
        own = zlib.crc32(part.numpy().data) if part.numel() < _SMALL else digest([part])
        found = (found * _STEP + own + part.numel()) & _MASK
    return found


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

    def receive(self, parts: Sequence[torch.Tensor], ask: Callable[[], None]) -> int:
        """Fill ``parts``; the check sum of what they hold then.  ``ask``: has the other end send them."""


class SocketTransport:
    """Over a connection, between the kernel and the tensors' own memory; those of a GPU by way of pinned memory.

    That the bytes come from somebody who knows the run's secret was proved when the connection was made.
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

    def receive(self, parts: Sequence[torch.Tensor], ask: Callable[[], None] = lambda: None) -> int:
        """``ask``: not called, since it was asked ahead."""
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
        drained(device, within())


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
