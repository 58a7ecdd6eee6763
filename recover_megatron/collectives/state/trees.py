"""Conversion of a state, a tree of plain values and tensors, to a text and a list of tensors, and back.

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
"""Keys and indices that lead from the root of a tree to a value in it."""
Place = Callable[[Path, Sequence[int], torch.dtype], torch.Tensor]
"""Function (path, shape, dtype) -> contiguous tensor into which the tensor at this path of a tree is received."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def flatten(tree: Any) -> tuple[str, list[torch.Tensor]]:
    """Return the tree as JSON text, in which a number stands for each tensor, and the list of these tensors.

    The number of a tensor is its index in the list.  Tuples become lists.  Raises TypeError if the tree contains
    anything else than dictionaries (keys: strings and integers), lists, tuples, tensors, numbers, strings, booleans and
    None.
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
    """Return the tree that ``flatten`` has converted to ``text``, and its tensors, which ``place`` has returned.

    Raises ``Disagreement`` if the text numbers the tensors out of order.
    """
    tensors: list[torch.Tensor] = []
    return _built(json.loads(text), (), place, tensors), tensors


def _built(value: Any, path: Path, place: Place, tensors: list[torch.Tensor]) -> Any:
    """Return the value at ``path`` of the tree; append its tensors to ``tensors``.

    This is no nested function, because a recursive nested function is a reference cycle that keeps the tensors alive.
    """
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
"""Minimum size in bytes of a tensor for which ``new_memory`` creates a separate memory mapping."""


def new_memory(path: Path, shape: Sequence[int], dtype: torch.dtype, advice: int | None = None) -> torch.Tensor:
    """Allocate a tensor on the host; usable as the argument ``place`` of ``unflatten``.

    A large tensor gets a separate memory mapping, which is returned to the system when the tensor is freed; malloc
    would keep most of the memory.  ``advice``: argument of madvise for the mapping; None: no call of madvise.
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
    """Return ``used`` if it is a contiguous tensor with this shape and dtype, else a new tensor from ``make``."""
    fits = isinstance(used, torch.Tensor) and (list(used.shape), used.dtype) == (list(shape), dtype)
    return used if fits and used.is_contiguous() else make(path, shape, dtype)


def at(tree: Any, path: Path) -> Any:
    """Return the value at ``path`` in ``tree``; None if the tree has no such path."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree
