"""What a snapshot in memory is made of: trees that a thread copies while the training goes on, with their check sums.

``available_memory``: how much memory of the host there still is for copies.
"""

from __future__ import annotations

import mmap
import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from recover_megatron.collectives.state_transport import bytes_of, check_sum
from recover_megatron.instep.faults import Disagreement
from recover_megatron.instep.state.holder import Path, Place, at, chunks_of, flatten, in_place, new_memory, unflatten
from recover_megatron.network.system import control_groups


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


def available_memory(
    proc: pathlib.Path = pathlib.Path("/proc"), cgroup: pathlib.Path = pathlib.Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes: what the kernel has to give, or a control group of this process may have, if less; None: not known."""
    groups = control_groups("memory", proc / "self" / "cgroup", cgroup)
    found = [size for size in (_of_kernel(proc / "meminfo"), *map(_of_group, groups)) if size is not None]
    return min(found, default=None)


def _of_kernel(path: pathlib.Path) -> int | None:
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _of_group(folder: pathlib.Path) -> int | None:
    """None: it has no limit, or there is no such folder."""
    for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        if (folder / most).exists() and (folder / used).exists():
            if (limit := (folder / most).read_text().strip()) == "max":
                return None
            return max(0, int(limit) - int((folder / used).read_text()) + _given_back(folder / "memory.stat"))
    return None


def _given_back(path: pathlib.Path) -> int:
    """Bytes of files that the kernel drops before it refuses memory: a run that reads its data fills its group so."""
    if not path.exists():
        return 0
    fields = (line.split() for line in path.read_text().splitlines())
    sizes = {name: int(value) for name, value in fields}
    return max(sum(sizes.get(f"{whose}{kind}_file", 0) for kind in ("inactive", "active")) for whose in ("total_", ""))
