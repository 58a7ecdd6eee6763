"""A state as something that can be sent: a tree of tensors and plain values.

    holder    tree --flatten--> text (JSON: the tree, tensors by number), tensors    (`state_holder` gives them)
    receiver  text --unflatten--> the same tree, with tensors of its own             (`state_receiver` fills them)

Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recover_megatron.instep.errors import Disagreement

Path = tuple[str | int, ...]
"""The keys and places that lead to a value of a tree."""
Make = Callable[[Path, Sequence[int], torch.dtype], torch.Tensor]
"""Gives the tensor of a place: of this shape and type."""
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


def unflatten(text: str, make: Make) -> tuple[Any, list[torch.Tensor]]:
    """The tree of a text, with tensors that ``make`` gives; and these, in the order of their numbers.

    ``make``: gets where in the tree the tensor is, its shape and type.  Raises Disagreement.
    """
    tensors: list[torch.Tensor] = []
    return _built(json.loads(text), (), make, tensors), tensors


def _built(value: Any, path: Path, make: Make, tensors: list[torch.Tensor]) -> Any:
    """Not a function within another one: that would hold on to itself, and so to the tensors."""
    if isinstance(value, list):
        return [_built(item, (*path, at), make, tensors) for at, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "items" in value:
        return {key: _built(item, (*path, key), make, tensors) for key, item in value["items"]}
    if value["tensor"] != len(tensors):
        raise Disagreement("the tensors of a state arrive out of order")
    tensors.append(make(path, value["shape"], _DTYPES[value["dtype"]]))
    return tensors[-1]


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
