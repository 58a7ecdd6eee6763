"""A state as something that can be sent: a tree of tensors and plain values.  And its digest.

    holder    tree --flatten--> text (JSON: the tree, tensors by number), tensors    (`state_holder` gives them)
    receiver  text --unflatten--> the same tree, with tensors of its own             (`state_receiver` fills them)

Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from recover_megatron.instep.errors import Disagreement

Path = tuple[str | int, ...]
"""The keys and places that lead to a value of a tree."""
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


def unflatten(
    text: str, make: Callable[[Path, Sequence[int], torch.dtype], torch.Tensor]
) -> tuple[Any, list[torch.Tensor]]:
    """The tree of a text, with tensors that ``make`` gives; and these, in the order of their numbers.

    ``make``: gets where in the tree the tensor is, its shape and type.  Raises Disagreement.
    """
    tensors: list[torch.Tensor] = []

    def build(value: Any, path: Path) -> Any:
        if isinstance(value, list):
            return [build(item, (*path, at)) for at, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if "items" in value:
            return {key: build(item, (*path, key)) for key, item in value["items"]}
        if value["tensor"] != len(tensors):
            raise Disagreement("the tensors of a state arrive out of order")
        tensors.append(make(path, value["shape"], _DTYPES[value["dtype"]]))
        return tensors[-1]

    return build(json.loads(text), ()), tensors


def new_memory(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """For ``unflatten``: tensors of their own, on the host."""
    del path
    return torch.empty(tuple(shape), dtype=dtype)


def at(tree: Any, path: Path) -> Any:
    """What a tree has at a place; None: nothing."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, one behind the other; its own memory where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


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
        view = bytes_of(tensor)
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
