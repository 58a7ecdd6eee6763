"""Transport of a state's bytes between two workers through host memory (``SocketTransport``).

    holder     send(parts)     -> checksum of the sent bytes        parts: pieces of tensors, contiguous, uint8
    receiver   receive(parts)  -> checksum of the received bytes

`nccl.pairs` has a second transport, from GPU to GPU.  A transport only transfers bytes: the modules `holder` and
`receiver` choose the pieces, compare checksums and recover from the loss of a holder.  The checksums (``check_sum``,
``Digest``) detect accidental changes, but no deliberate ones.
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
"""Size in bytes below which ``check_sum`` uses zlib, which is then faster than a torch call."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a flat tensor: a view if the tensor is contiguous, else a copy."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


_ROW = 1 << 15
"""Number of 64-bit words in a row of ``Digest``; so small that a row of factors fits in a processor's cache."""
_ROWS = 32
"""Number of rows that one torch call sums; on a GPU the call needs as much additional memory as these rows."""
_STEP = 0x100000001B3
_MASK = (1 << 64) - 1


class Digest:
    """64-bit digest of the bytes and the order of a sequence of tensors; it does not depend on the kind of device.

    A tensor is divided into rows of 64-bit words.  Each word of a row is multiplied by a different odd factor, and the
    products are summed modulo 2**64.  The digest is the value of a polynomial at an odd number; its coefficients are,
    for each tensor, the sums of its rows, the bytes after its last complete word, and its length.  So the change of a
    single bit always changes the digest.  It detects accidental changes, but no deliberate ones.
    """

    def __init__(self) -> None:
        self._state = 1
        self._factors = torch.empty(0, dtype=torch.int64)

    @property
    def value(self) -> int:
        """Digest of the tensors added so far, as a signed 64-bit integer."""
        return self._state - (1 << 64) if self._state >> 63 else self._state

    def add(self, tensor: torch.Tensor) -> None:
        view = bytes_of(tensor)
        if view.storage_offset() % 8:
            view = view.clone()  # 64-bit words must be aligned to 8 bytes
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
    """Return the product of the matrix ``rows`` and the vector ``factors``, modulo 2**64 by integer overflow."""
    if rows.device.type == "cpu":  # torch.dot is four times as fast as torch.mv
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
    """Return an unsigned 64-bit checksum of ``parts``, tensors of bytes on the host.

    If equal bytes are divided into different parts, the checksum differs.  The function is three times as fast as
    CRC-32, the fastest checksum of zlib and hashlib.
    """
    found = 1
    for part in parts:
        own = zlib.crc32(part.numpy().data) if part.numel() < _SMALL else digest([part])
        found = (found * _STEP + own + part.numel()) & _MASK
    return found


_WORD = 64
_MOST_PIECES = 512
"""Maximum number of buffers that one system call sends or receives; the kernel's limit is 1,024."""


class StateTransport(Protocol):
    """End of a transport between two workers; only one thread may use it.

    ``parts``: one-dimensional, contiguous uint8 tensors.  The receiver's parts must have the same sizes and order as
    the sender's.  Both methods raise ``PeerLost``.
    """

    def send(self, parts: Sequence[torch.Tensor]) -> int:
        """Send ``parts``; return their unsigned 64-bit checksum."""

    def receive(self, parts: Sequence[torch.Tensor], ask: Callable[[], None]) -> int:
        """Fill ``parts`` with the received bytes; return their unsigned 64-bit checksum.

        ``ask``: function that requests ``parts`` from the other end.  A transport calls it only if its receives must
        begin before the other end sends.
        """


class SocketTransport:
    """Transport over a TCP connection.

    Host tensors are sent and received without a copy, GPU tensors through pinned host memory.  ``sock``: connection
    over which the peer has proved that it knows the run's secret.
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
        """Fill ``parts``; return their checksum.  ``ask`` is not called, because the caller has requested ``parts``."""
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
    """Wait for the copies of ``parts`` on this thread's streams; then pinned memory may be sent or overwritten."""
    for device in {part.device for part in parts if part.device.type == "cuda"}:
        drained(device, within())


def memory_of(part: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor as bytes; valid only as long as the tensor lives."""
    return memoryview((ctypes.c_char * part.nbytes).from_address(part.data_ptr())).cast("B")


def lost(error: OSError | None) -> PeerLost:
    """Return the ``PeerLost`` for a connection that failed with ``error`` or, if it is None, was closed by the peer."""
    return PeerLost(str(error or "the peer closed the connection"), unreachable=is_path_error(error))


def _send_all(sock: socket.socket, views: Sequence[memoryview]) -> None:
    left = list(views)
    while left:
        sent = sock.sendmsg(left[:_MOST_PIECES])
        left = _after(left, sent)


def receive_into(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Receive bytes from ``sock`` until all ``views`` are filled.

    Raises OSError; if the peer closes the connection too early, ``ConnectionResetError``.
    """
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

    A chunk is a list of pieces.  A piece is (index of the tensor in ``sizes``, first byte, last byte + 1).
    """
    chunk: list[tuple[int, int, int]] = []
    room = limit
    for number, size in enumerate(sizes):
        at = 0
        while at < size:
            part = min(size - at, room)
            if at + part < size and part > _WORD:
                part -= part % _WORD  # so that the next piece of this tensor is aligned to ``_WORD`` bytes
                room = part
            chunk.append((number, at, at + part))
            at, room = at + part, room - part
            if not room or len(chunk) == most:
                yield chunk
                chunk, room = [], limit
    if chunk:
        yield chunk
