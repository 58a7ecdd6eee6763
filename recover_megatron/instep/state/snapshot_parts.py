"""The parts of a snapshot in memory: trees that a thread copies while the training goes on, with their check sums."""

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
    """A check sum of each chunk of a state's tensors."""
    parts = [bytes_of(tensor) for tensor in tensors]
    chunks, _ = chunks_of([part.numel() for part in parts], 0)
    return [check_sum([parts[tensor][start:stop] for tensor, start, stop in chunk]) for chunk in chunks]


def wrong_chunks(tree: dict[str, Any]) -> list[int]:
    """The numbers of those chunks of a snapshot that are not what was taken."""
    found = checks_of(flatten(tree["state"])[1])
    if len(found) != len(tree["checks"]):
        raise Disagreement(f"a snapshot has {len(found)} chunks, and {len(tree['checks'])} check sums")
    return [number for number, pair in enumerate(zip(found, tree["checks"], strict=True)) if pair[0] != pair[1]]


class Copy:
    """A tree that is to be copied: its plain values as they are now, its tensors as they are when they are copied."""

    def __init__(self, tree: Any) -> None:
        self._text, self.tensors = flatten(tree)

    def make(self, place: Place, stay: Callable[[], None]) -> Any:
        """The same tree on the host, in the tensors that ``place`` gives; ``stay`` raises to give up."""
        copied, own = unflatten(self._text, place)
        with torch.no_grad():
            for mine, its in zip(own, self.tensors, strict=True):
                stay()
                mine.copy_(its)
        return copied


def apart(tree: Any) -> Any:
    """The same tree to be loaded from: what an optimizer may keep as it is (numbers in tensors) is a copy."""
    text, tensors = flatten(tree)
    left = iter(tensors)

    def place(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = next(left)
        return tensor.clone() if tensor.dim() == 0 else tensor

    return unflatten(text, place)[0]


def room(before: Any) -> Place:
    """The memory of a tree that is of no use any more, where it fits: new memory takes longer to get than to fill.

    No process that is forked has it: a loader would keep what was there then, beside all that is written over it.
    """
    not_forked = partial(new_memory, advice=mmap.MADV_DONTFORK)

    def place(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return in_place(at(before, path), path, shape, dtype, not_forked)

    return place
