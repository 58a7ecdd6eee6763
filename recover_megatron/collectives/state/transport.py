"""Transport of a state's bytes between the memory of two workers; only this part of a transfer depends on the device.

    holder     send(parts)     -> checksum of the sent bytes        parts: pieces of tensors, contiguous, uint8
    receiver   receive(parts)  -> checksum of the received bytes

`holder` and `receiver` choose the pieces, compare the checksums and handle the loss of a holder; the transport only
transfers bytes.  ``SocketTransport`` sends through host memory, `nccl.pairs` from device to device.  The checksums
(``check_sum``, ``Digest``) detect accidental changes, not deliberate ones.
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
from recover_megatron.network.connection import is_path_error

_SMALL = 64 << 10
"""Size in bytes below which zlib is faster than a torch call."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a flat tensor: a view if the tensor is contiguous, else a copy."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


_ROW = 1 << 15
"""Number of words in a row, each with its own factor; so few that the factors stay in a processor's cache."""
_ROWS = 32
"""Number of rows per torch call, for which a GPU needs as much additional memory."""
_STEP = 0x100000001B3
_MASK = (1 << 64) - 1


class Digest:
    """Digest of 64 bits of a sequence of tensors: of every bit and of their order; equal on all kinds of device.

    The 64-bit words of a tensor, each multiplied by a distinct odd factor, are summed in rows modulo 2**64.  The sums
    of the rows, the length and the digest of the previous tensors form a polynomial in an odd number, so a change of
    one bit always changes the digest.  It detects accidental changes, not deliberate ones.
    """

    def __init__(self) -> None:
        self._state = 1
        self._factors = torch.empty(0, dtype=torch.int64)

    @property
    def value(self) -> int:
        """Digest of the tensors added so far, as a signed number that fits in an int64 tensor."""
        return self._state - (1 << 64) if self._state >> 63 else self._state

    def add(self, tensor: torch.Tensor) -> None:
        view = bytes_of(tensor)
        if view.storage_offset() % 8:
            view = view.clone()  # align the words
        complete = view.numel() // 8
        rest = torch.zeros(8, dtype=torch.uint8, device=view.device)
        rest[: view.numel() % 8].copy_(view[8 * complete :])
        words, found = view[: 8 * complete].view(torch.int64), [torch.empty(0, dtype=torch.int64, device=view.device)]
        if self._factors.device != view.device or not self._factors.numel():
            self._factors = torch.arange(1, 2 * _ROW, 2, device=view.device) * 0x9E3779B1
        for at in range(0, complete, _ROWS * _ROW):
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
    """Return for each row the sum of its words times ``factors``, modulo 2**64 by integer overflow."""
    if rows.device.type == "cpu":  # four times as fast as torch.mv
        return torch.stack([torch.dot(row, factors) for row in rows])
    return (rows * factors).sum(1)  # CUDA has no torch.dot for integers


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
    """Return an unsigned 64-bit checksum of ``parts`` (bytes on the host); it depends on where the parts are cut.

    It is three times as fast as CRC-32, the fastest function of zlib and hashlib.
    """
    found = 1
    for part in parts:
        own = zlib.crc32(part.numpy().data) if part.numel() < _SMALL else digest([part])
        found = (found * _STEP + own + part.numel()) & _MASK
    return found


_WORD = 64
_MOST_PIECES = 512
"""Maximum number of buffers in one system call; the kernel's limit is 1,024."""


class StateTransport(Protocol):
    """Transport between two workers; at each end one thread uses it.

    Both ends must send and receive parts of equal sizes in equal order.  Both methods raise ``PeerLost``.  ``parts``:
    one-dimensional, contiguous, uint8.
    """

    def send(self, parts: Sequence[torch.Tensor]) -> int:
        """Send ``parts``; return their unsigned 64-bit checksum."""

    def receive(self, parts: Sequence[torch.Tensor], ask: Callable[[], None]) -> int:
        """Fill ``parts``; return their checksum.  ``ask``: called, if necessary, to request them from the other end."""


class SocketTransport:
    """Transport over a TCP connection, without copies for host tensors; GPU tensors go through pinned memory.

    When the connection was opened, the peer proved that it knows the run's secret.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def send(self, parts: Sequence[torch.Tensor]) -> int:
        on_host = self._staged(parts)
        for buffer, part in zip(on_host, parts, strict=True):
            if buffer is not part:
                buffer.copy_(part, non_blocking=True)
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
        """Fill ``parts``; return their checksum.  ``ask`` is not called, since the chunk was requested earlier."""
        on_host = self._staged(parts)
        try:
            receive_into(self._socket, [memory_of(part) for part in on_host])
        except OSError as error:
            raise lost(error) from error
        found = check_sum(on_host)
        for buffer, part in zip(on_host, parts, strict=True):
            if buffer is not part:
                part.copy_(buffer, non_blocking=True)
        _synchronize(parts)
        return found

    def _staged(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return ``parts`` if all are on the host, else pinned host buffers of equal sizes."""
        if all(part.device.type == "cpu" for part in parts):
            return parts
        total = sum(part.numel() for part in parts)
        if self._pinned.numel() < total:
            self._pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        return list(self._pinned[:total].split([part.numel() for part in parts]))


def _synchronize(parts: Sequence[torch.Tensor]) -> None:
    """Wait for the copies on this thread's streams; after that the pinned memory may be sent or overwritten."""
    for device in {part.device for part in parts if part.device.type == "cuda"}:
        drained(device, within())


def memory_of(part: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor as bytes; valid only as long as the tensor lives."""
    return memoryview((ctypes.c_char * part.nbytes).from_address(part.data_ptr())).cast("B")


def lost(error: OSError | None) -> PeerLost:
    """Return a ``PeerLost`` for the ``error`` of a connection; None: the peer closed the connection."""
    return PeerLost(str(error or "the peer closed the connection"), unreachable=is_path_error(error))


def _send_all(sock: socket.socket, views: Sequence[memoryview]) -> None:
    left = list(views)
    while left:
        sent = sock.sendmsg(left[:_MOST_PIECES])
        left = _after(left, sent)


def receive_into(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill all ``views`` from ``sock``.  Raises OSError; ``ConnectionResetError`` if the peer closes it first."""
    left = [view for view in views if len(view)]
    while left:
        received = sock.recvmsg_into(left[:_MOST_PIECES], 0, socket.MSG_WAITALL)[0]
        if not received:
            raise ConnectionResetError("the peer closed the connection")
        left = _after(left, received)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return ``views`` without their first ``count`` bytes."""
    left = iter(views)
    for view in left:
        if count < len(view):
            return [view[count:], *left]
        count -= len(view)
    return []


def cut(sizes: Sequence[int], limit: int, most: int = 256) -> Iterator[list[tuple[int, int, int]]]:
    """Cut tensors of ``sizes`` bytes, in order, into chunks of at most ``limit`` bytes and ``most`` pieces.

    A piece is (number of the tensor, first byte, byte behind the last).
    """
    chunk: list[tuple[int, int, int]] = []
    room = limit
    for number, size in enumerate(sizes):
        at = 0
        while at < size:
            part = min(size - at, room)
            if at + part < size and part > _WORD:
                part -= part % _WORD  # aligns the next piece to a word
                room = part
            chunk.append((number, at, at + part))
            at, room = at + part, room - part
            if not room or len(chunk) == most:
                yield chunk
                chunk, room = [], limit
    if chunk:
        yield chunk
