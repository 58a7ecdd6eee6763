"""States as trees of plain values and tensors: as text and tensors to be sent, and built again from them.

A tree is made of dictionaries (keys: texts and integers), lists, tuples, tensors, numbers, texts, booleans and None.
Nothing is pickled.
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
"""The keys and places that lead to a value of a tree."""
Place = Callable[[Path, Sequence[int], torch.dtype], torch.Tensor]
"""Gives the tensor at this place of a tree: contiguous, of this shape and type."""

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


def unflatten(text: str, place: Place) -> tuple[Any, list[torch.Tensor]]:
    """The tree of a text, with tensors that ``place`` gives; and these, in their order.  Raises Disagreement."""
    tensors: list[torch.Tensor] = []
    return _built(json.loads(text), (), place, tensors), tensors


def _built(value: Any, path: Path, place: Place, tensors: list[torch.Tensor]) -> Any:
    """Not a function within another one: that would hold on to itself, and so to the tensors."""
    if isinstance(value, list):
        return [_built(item, (*path, at), place, tensors) for at, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "items" in value:
        return {key: _built(item, (*path, key), place, tensors) for key, item in value["items"]}
    if value["tensor"] != len(tensors):
        raise Disagreement("the tensors of a state arrive out of order")
    tensors.append(place(path, value["shape"], _DTYPES[value["dtype"]]))
    return tensors[-1]


MAPPED = 128 << 10
"""Bytes from which on a tensor of ``new_memory`` is a mapping of its own."""


def new_memory(path: Path, shape: Sequence[int], dtype: torch.dtype, advice: int | None = None) -> torch.Tensor:
    """For ``unflatten``: tensors of their own, on the host.

    Their memory goes back to the system when they are dropped.  The C library keeps most of what it frees of a state.
    ``advice``: to the kernel, on the memory of large ones.
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
    """``used``, where it is a tensor for which ``Place`` may be asked so; otherwise what ``make`` gives."""
    fits = isinstance(used, torch.Tensor) and (list(used.shape), used.dtype) == (list(shape), dtype)
    return used if fits and used.is_contiguous() else make(path, shape, dtype)


def at(tree: Any, path: Path) -> Any:
    """What a tree has at a place; None: nothing."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree
