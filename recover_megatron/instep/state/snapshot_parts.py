"""Parts of a snapshot in host memory: trees of tensors that a background thread copies, with check sums."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from recover_megatron.collectives.state.holder import chunks_of
from recover_megatron.collectives.state.transport import bytes_of, check_sum
from recover_megatron.collectives.state.trees import Path, Place, at, flatten, in_place, new_memory, unflatten
from recover_megatron.errors import Disagreement


def checks_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return one check sum for each chunk of a state's ``tensors``, in the order of the chunks."""
    parts = [bytes_of(tensor) for tensor in tensors]
    chunks, _ = chunks_of([part.numel() for part in parts], 0)
    return [check_sum([parts[tensor][start:stop] for tensor, start, stop in chunk]) for chunk in chunks]


def wrong_chunks(tree: dict[str, Any]) -> list[int]:
    """Return the numbers of the chunks of a snapshot whose data do not match their check sums.

    Raises Disagreement if the numbers of check sums and chunks differ.
    """
    found = checks_of(flatten(tree["state"])[1])
    if len(found) != len(tree["checks"]):
        raise Disagreement(f"a snapshot has {len(found)} chunks, but {len(tree['checks'])} check sums")
    return [number for number, pair in enumerate(zip(found, tree["checks"], strict=True)) if pair[0] != pair[1]]


class Copy:
    """Copy of a tree: plain values are copied at construction, tensors when ``make`` is called."""

    def __init__(self, tree: Any) -> None:
        self._text, self.tensors = flatten(tree)

    def make(self, place: Place, stay: Callable[[], None]) -> Any:
        """Return a copy of the tree in host tensors that ``place`` returns; ``stay`` is called often, and may raise to
        stop."""
        copied, own = unflatten(self._text, place)
        with torch.no_grad():
            for target, source in zip(own, self.tensors, strict=True):
                stay()
                target.copy_(source)
        return copied


def apart(tree: Any) -> Any:
    """Return ``tree`` with its scalar tensors copied, since an optimizer that loads the tree may keep these tensors."""
    text, tensors = flatten(tree)
    left = iter(tensors)

    def place(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = next(left)
        return tensor.clone() if tensor.dim() == 0 else tensor

    return unflatten(text, place)[0]


def room(before: Any) -> Place:
    """Return a function that allocates host tensors, and reuses the memory of the unused tree ``before`` where it fits.

    Allocating new memory is slow.  Forked processes do not inherit the memory, since a data loader would otherwise keep
    its old contents alive.
    """
    not_forked = partial(new_memory, advice=mmap.MADV_DONTFORK)

    def place(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return in_place(at(before, path), path, shape, dtype, not_forked)

    return place
