"""A worker's state on its way to another one: a tree of tensors and plain values, sent over a group of the two.

    donor     tree --flatten--> text (JSON: the tree, tensors by number), tensors --chunks of bytes--> receiver
    receiver  the same tree, with tensors of its own; the digest of what arrived must be that of what was sent

Nothing is unpickled.  The donor only reads: it sends from a thread of its own while its replica computes, since no
parameter changes before the step is committed, and the receiver must report that step done, too.
"""

from __future__ import annotations

import json
import math
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from recover_megatron.collectives.gloo.abort import GlooBackend
from recover_megatron.instep.errors import Disagreement

CHUNK = 8 << 20
"""Bytes of a message."""
_ALIGN = 64
"""Every tensor begins at a multiple of it, in the stream and in memory."""
MAX_TEXT = 256 << 20
"""Bytes of the text: the plain values of a state, and the shapes of its tensors."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def flatten(tree: Any) -> tuple[str, list[torch.Tensor]]:
    """The tree as text, and its tensors in the order of their numbers.

    A tree is made of dictionaries (keys: texts and integers), lists, tuples (which become lists), tensors, numbers,
    texts, booleans and None.  Raises TypeError for anything else.
    """
    tensors: list[torch.Tensor] = []
    return json.dumps(_plain(tree, tensors)), tensors


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
        return {"tensor": len(tensors) - 1, "shape": shape, "dtype": dtype}
    if isinstance(value, dict):
        if bad := [key for key in value if type(key) not in (str, int)]:
            raise TypeError(f"keys {bad} of a state are neither texts nor integers")
        return {"items": [[key, _plain(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_plain(item, tensors) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be sent as part of a state")


def unflatten(text: str, make: Callable[[Sequence[int], torch.dtype], torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """The tree of a text, with tensors that ``make`` makes; and these, in the order of their numbers."""
    tensors: list[torch.Tensor] = []

    def build(value: Any) -> Any:
        if isinstance(value, list):
            return [build(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "items" in value:
            return {key: build(item) for key, item in value["items"]}
        if value["tensor"] != len(tensors):
            raise Disagreement("the tensors of a state arrive out of order")
        tensors.append(make(value["shape"], _DTYPES[value["dtype"]]))
        return tensors[-1]

    return build(json.loads(text)), tensors


def send(tree: Any, pair: GlooBackend, to: int) -> int:
    """Send a tree to rank ``to`` of the group; the bytes that its tensors have.

    Raises ``EpochRevoked`` and ``PeerLost``.
    """
    text, tensors = flatten(tree)
    body = text.encode()
    _send(pair, to, torch.tensor([len(body), sum(_padded(tensor.nbytes) for tensor in tensors)]))
    _send(pair, to, torch.frombuffer(bytearray(body), dtype=torch.uint8))
    under_way: list[Any] = []
    with _beside_the_training(_gpu_of(tensors)):
        for chunk in _chunks(tensors):
            under_way.append(_start_send(pair, to, chunk))
            if len(under_way) > 1:  # the next chunk is put together while this one is on its way
                pair.wait(under_way.pop(0))
        for work in under_way:
            pair.wait(work)
        # Not before all are sent: what changed meanwhile must not go unnoticed.
        _send(pair, to, torch.tensor([digest(tensors)]))
    return sum(tensor.nbytes for tensor in tensors)


def receive(pair: GlooBackend, source: int, progress: Callable[[], None] = lambda: None) -> tuple[Any, int]:
    """What ``send`` sends, its tensors on the host, as parts of one piece of memory; and their bytes.

    ``progress`` is called with every chunk.

    Raises ``EpochRevoked``, ``PeerLost``, and ``Disagreement`` if what arrived is not what was sent.
    """
    sizes = torch.zeros(2, dtype=torch.int64)
    _receive(pair, source, sizes)
    length, total = sizes.tolist()
    if not 0 < length <= MAX_TEXT or total < 0:
        raise Disagreement(f"a state of {length} bytes of text and {total} of tensors was announced")
    body = torch.empty(length, dtype=torch.uint8)
    _receive(pair, source, body)
    room = _Room(total)
    tree, tensors = unflatten(body.numpy().tobytes().decode(), room.take)
    if room.left:
        raise Disagreement(f"{room.left} of the bytes that were announced are no tensor's")
    arrived, waiting, at = Digest(), deque(tensors), 0
    for here in _arrivals(pair, source, room.memory):
        progress()
        while waiting and at + waiting[0].nbytes <= here:  # while the next chunk arrives
            at += _padded(waiting[0].nbytes)
            arrived.add(waiting.popleft())
    for tensor in waiting:  # nothing arrives where all are empty
        arrived.add(tensor)
    told = torch.zeros(1, dtype=torch.int64)
    _receive(pair, source, told)
    if arrived.value != int(told):
        raise Disagreement("a state arrived that is not the one that was sent")
    return tree, sum(tensor.nbytes for tensor in tensors)


class _Room:
    """Memory for all tensors of a state, one behind the other as they are sent."""

    def __init__(self, total: int) -> None:
        # New memory costs a fault of the processor for each of its pages, which takes longer than to fill it:
        # hence few large ones, where the system has them.
        pages = mmap.mmap(-1, max(total, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)[:total]
        self.left = total

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next one."""
        size = math.prod(shape) * dtype.itemsize
        at = self.memory.numel() - self.left
        self.left -= _padded(size)
        if self.left < 0:
            raise Disagreement("the tensors of a state have more bytes than were announced")
        return self.memory[at : at + size].view(dtype).view(tuple(shape))


def _gpu_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """That on which some of them are."""
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)


@contextmanager
def _beside_the_training(gpu: torch.device | None) -> Iterator[None]:
    """Copies from ``gpu`` run on a stream of their own: on the training's they would wait for all that it computes."""
    if gpu is None:
        yield
        return
    torch.cuda.synchronize(gpu)  # whichever stream made the tensors: they are there
    with torch.cuda.stream(torch.cuda.Stream(gpu)):
        yield


def _padded(size: int) -> int:
    """Where the next tensor begins: every type may lie there."""
    return -(-size // _ALIGN) * _ALIGN


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of all tensors, on the host, in pieces of ``CHUNK``, which are good until the next but one."""
    pinned = _gpu_of(tensors) is not None
    buffer, other = (torch.zeros(CHUNK, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    filled = 0
    for tensor in tensors:
        view, at = _bytes(tensor), 0
        while at < view.numel():
            part = min(CHUNK - filled, view.numel() - at)
            buffer[filled : filled + part].copy_(view[at : at + part])
            at, filled = at + part, _padded(filled + part)
            if filled == CHUNK:
                yield buffer
                buffer, other, filled = other, buffer, 0
    if filled:
        yield buffer[:filled]


def _arrivals(pair: GlooBackend, source: int, memory: torch.Tensor) -> Iterator[int]:
    """Receive what ``_chunks`` gave at the other end; after each chunk, how many bytes are there."""
    chunks = memory.split(CHUNK) if memory.numel() else ()
    under_way = deque(_start_receive(pair, source, chunk) for chunk in chunks[:2])
    here = 0
    for number, chunk in enumerate(chunks):
        pair.wait(under_way.popleft())
        if number + 2 < len(chunks):
            under_way.append(_start_receive(pair, source, chunks[number + 2]))
        here += chunk.numel()
        yield here


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _start_send(pair: GlooBackend, to: int, tensor: torch.Tensor) -> Any:
    return pair.call(lambda gloo: gloo.send([tensor], to, 0))


def _start_receive(pair: GlooBackend, source: int, tensor: torch.Tensor) -> Any:
    return pair.call(lambda gloo: gloo.recv([tensor], source, 0))


def _send(pair: GlooBackend, to: int, tensor: torch.Tensor) -> None:
    pair.wait(_start_send(pair, to, tensor))


def _receive(pair: GlooBackend, source: int, tensor: torch.Tensor) -> None:
    pair.wait(_start_receive(pair, source, tensor))


_ROW = 1 << 15
"""Words that get a factor of their own each; it stays in a processor's cache."""
_ROWS = 256
"""Rows looked at in one call."""
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
        """The next tensor."""
        view = _bytes(tensor)
        if view.storage_offset() % 8:
            view = view.clone()  # words begin where words can
        whole = view.numel() // 8
        rest = torch.zeros(8, dtype=torch.uint8, device=view.device)
        rest[: view.numel() % 8].copy_(view[8 * whole :])
        words = view[: 8 * whole].view(torch.int64)
        if self._factors.device != view.device or not self._factors.numel():
            self._factors = torch.arange(1, 2 * _ROW, 2, device=view.device) * 0x9E3779B1
        for at in range(0, whole, _ROWS * _ROW):
            block = words[at : at + _ROWS * _ROW]
            full = block.numel() // _ROW * _ROW
            sums = _row_sums(block[:full].view(-1, _ROW), self._factors) if full else []
            last = block[full:]
            for total in (*sums, *_row_sums(last.view(1, -1), self._factors[: last.numel()])):
                self._fold(total)
        self._fold(int(rest.view(torch.int64)))
        self._fold(view.numel())

    def _fold(self, value: int) -> None:
        self._state = (self._state * _STEP + value) & _MASK


def _row_sums(rows: torch.Tensor, factors: torch.Tensor) -> list[int]:
    """Of each row the sum of its words times the factors; overflow is meant."""
    sums = torch.mv(rows, factors) if rows.device.type == "cpu" else (rows * factors).sum(1)  # CUDA has no mv for them
    return [int(total) for total in sums.tolist()]


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """``Digest`` of several tensors."""
    together = Digest()
    for tensor in tensors:
        together.add(tensor)
    return together.value
