"""A worker's state on its way to another one: a tree of tensors and plain values, sent over a group of the two.

    donor     tree --flatten--> text (JSON: the tree, tensors by number), tensors --chunks of bytes--> receiver
    receiver  the same tree, with tensors of its own; the digest of what arrived must be that of what was sent

Nothing is unpickled.  The donor only reads: it sends from a thread of its own while its replica computes, since no
parameter changes before the step is committed, and the receiver must report that step done, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from recover_megatron.collectives.gloo import GlooBackend
from recover_megatron.instep.errors import Disagreement

CHUNK = 8 << 20
"""Bytes of a message."""
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
    """Send a tree to rank ``to`` of the group; returns the bytes that its tensors have.

    Raises ``EpochRevoked`` and ``PeerLost``.
    """
    text, tensors = flatten(tree)
    body = text.encode()
    _send(pair, to, torch.tensor([len(body)]))
    _send(pair, to, torch.frombuffer(bytearray(body), dtype=torch.uint8))
    for chunk in _chunks(tensors):
        _send(pair, to, chunk)
    _send(pair, to, torch.tensor([digest(tensors)]))
    return sum(tensor.nbytes for tensor in tensors)


def receive(pair: GlooBackend, source: int, progress: Callable[[], None] = lambda: None) -> tuple[Any, int]:
    """What ``send`` sends, its tensors on the host; and their bytes.  ``progress`` is called with every message.

    Raises ``EpochRevoked``, ``PeerLost``, and ``Disagreement`` if what arrived is not what was sent.
    """
    size = torch.zeros(1, dtype=torch.int64)
    _receive(pair, source, size)
    if not 0 < int(size) <= MAX_TEXT:
        raise Disagreement(f"a state of {int(size)} bytes of text was announced")
    body = torch.empty(int(size), dtype=torch.uint8)
    _receive(pair, source, body)
    text = body.numpy().tobytes().decode()
    tree, tensors = unflatten(text, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    total = sum(tensor.nbytes for tensor in tensors)
    views = [_bytes(tensor) for tensor in tensors if tensor.nbytes]
    buffer = torch.empty(min(CHUNK, total), dtype=torch.uint8)
    filled = left = 0
    for view in views:
        at = 0
        while at < view.numel():
            if filled == left:
                filled, left = 0, min(CHUNK, total)
                total -= left
                _receive(pair, source, buffer[:left])
                progress()
            part = min(left - filled, view.numel() - at)
            view[at : at + part].copy_(buffer[filled : filled + part])
            at, filled = at + part, filled + part
    told = torch.zeros(1, dtype=torch.int64)
    _receive(pair, source, told)
    if digest(tensors) != int(told):
        raise Disagreement("a state arrived that is not the one that was sent")
    return tree, sum(tensor.nbytes for tensor in tensors)


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of all tensors, on the host, in pieces of ``CHUNK``."""
    buffer = torch.empty(CHUNK, dtype=torch.uint8)
    filled = 0
    for tensor in tensors:
        view = _bytes(tensor)
        at = 0
        while at < view.numel():
            part = min(CHUNK - filled, view.numel() - at)
            buffer[filled : filled + part].copy_(view[at : at + part])
            at, filled = at + part, filled + part
            if filled == CHUNK:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _send(pair: GlooBackend, to: int, tensor: torch.Tensor) -> None:
    pair.wait(pair.call(lambda gloo: gloo.send([tensor], to, 0)))


def _receive(pair: GlooBackend, source: int, tensor: torch.Tensor) -> None:
    pair.wait(pair.call(lambda gloo: gloo.recv([tensor], source, 0)))


_BLOCK = 1 << 20


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """64 bits that change with any bit of any tensor, and with their order; the same on every kind of device.

    A sum of the words, each times an odd number of its own, modulo 2**64: a check against accidents, not against
    anybody who wants to deceive.
    """
    state = 0
    for tensor in tensors:
        view = _bytes(tensor)
        words = view[: view.numel() // 4 * 4].view(torch.int32)
        total = int(view[words.numel() * 4 :].to(torch.int64).sum()) if view.numel() % 4 else 0
        for at in range(0, words.numel(), _BLOCK):
            block = words[at : at + _BLOCK].to(torch.int64)
            factors = torch.arange(at, at + block.numel(), device=block.device) * 2 + 1
            total += int((block * (factors * 0x9E3779B1 | 1)).sum())
        state = (state * 0x100000001B3 + total + view.numel()) & ((1 << 63) - 1)
    return state
