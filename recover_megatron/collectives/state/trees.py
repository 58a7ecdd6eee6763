"""Serialization of states, trees of plain values and tensors, to text and tensors, and back.

A tree consists of dictionaries (keys: strings and integers), lists, tuples, tensors, numbers, strings, booleans and
None.  Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recover_megatron.errors import Disagreement

Path = tuple[str | int, ...]
"""Keys and indices that lead to a value of a tree."""
Place = Callable[[Path, Sequence[int], torch.dtype], torch.Tensor]
"""Returns the tensor for this path of a tree: contiguous, with this shape and dtype."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def flatten(tree: Any) -> tuple[str, list[torch.Tensor]]:
    """Return the tree as text, and its tensors in the order of their numbers.

    A tree consists of dictionaries (keys: strings and integers), lists, tuples (which become lists), tensors, numbers,
    strings, booleans and None.  Raises TypeError for anything else.
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
            raise TypeError(f"keys {bad} of a state are neither strings nor integers")
        return {"items": [[key, _plain(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_plain(item, tensors) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be sent as part of a state")


def unflatten(text: str, place: Place) -> tuple[Any, list[torch.Tensor]]:
    """Return the tree of a text, with tensors from ``place``, and these tensors in order.  Raises Disagreement."""
    tensors: list[torch.Tensor] = []
    return _built(json.loads(text), (), place, tensors), tensors


def _built(value: Any, path: Path, place: Place, tensors: list[torch.Tensor]) -> Any:
    """Build a value.  Not a nested function: its reference cycle would keep the tensors alive."""
    if isinstance(value, list):
        return [_built(item, (*path, at), place, tensors) for at, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "items" in value:
        return {key: _built(item, (*path, key), place, tensors) for key, item in value["items"]}
    if value["tensor"] != len(tensors):
        raise Disagreement("the text of a state numbers its tensors out of order")
    tensors.append(place(path, value["shape"], _DTYPES[value["dtype"]]))
    return tensors[-1]


MAPPED = 128 << 10
"""Bytes from which on ``new_memory`` gives a tensor a separate mapping."""


def new_memory(path: Path, shape: Sequence[int], dtype: torch.dtype, advice: int | None = None) -> torch.Tensor:
    """Allocate a tensor on the host, for ``unflatten``.

    The memory goes back to the system when the tensor is freed; the C library would keep most of it.
    ``advice``: madvise for the memory of large tensors.
    """
    del path
    size = math.prod(shape) * dtype.itemsize
    if size < MAPPED:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advice is not None:
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)


def in_place(used: Any, path: Path, shape: Sequence[int], dtype: torch.dtype, make: Place = new_memory) -> torch.Tensor:
    """Return ``used`` if it is a contiguous tensor of this shape and dtype; otherwise a tensor from ``make``."""
    fits = isinstance(used, torch.Tensor) and (list(used.shape), used.dtype) == (list(shape), dtype)
    return used if fits and used.is_contiguous() else make(path, shape, dtype)


def at(tree: Any, path: Path) -> Any:
    """Return the value at ``path`` of a tree; None if there is none."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree
