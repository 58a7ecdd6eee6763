"""A gradient bucket with its ledger, and what a caller may do with parts of it between two epochs."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch

from recover_megatron.collectives.aside import Memory
from recover_megatron.collectives.ledger import Ledger, Span


class Bucket:
    """A contiguous tensor that is reduced as a whole, seen as flat, and its ledger.

    Between ``submit`` and the end of ``wait`` of a collective the bucket belongs to the group; otherwise to the caller.
    """

    def __init__(self, tensor: torch.Tensor, ledger: Ledger | None = None) -> None:
        if not tensor.is_contiguous():
            raise ValueError("a bucket must be contiguous in memory")
        self.flat = tensor.detach().view(-1)
        self.ledger = Ledger(self.flat.numel()) if ledger is None else ledger

    @classmethod
    def of_gradients(cls, parameters: Iterable[torch.Tensor], extra: int = 0) -> Self:
        """A bucket that is the memory of the parameters' ``grad``, in order, and ``extra`` elements behind them.

        All parameters must have the first one's type and device.  ``backward`` then accumulates into the bucket, and an
        optimizer steps with it.  (``zero_grad`` must not be called: it would take the gradients out of the bucket.)
        Of a distributed parameter, as ``fully_shard`` makes them, it is this worker's shard.
        """
        tensors = list(parameters)
        shards = [_shard(parameter) for parameter in tensors]
        flat = torch.zeros(sum(s.numel() for s in shards) + extra, dtype=tensors[0].dtype, device=tensors[0].device)
        at = 0
        for parameter, shard in zip(tensors, shards, strict=True):
            gradient = flat[at : at + shard.numel()].view_as(shard)
            parameter.grad = _laid_out_as(parameter, gradient)
            at += shard.numel()
        return cls(flat)

    def clear(self) -> None:
        """The next iteration: all zero, all LOCAL."""
        self.flat.zero_()
        self.ledger.clear()

    def set_aside(self, memory: Memory | None = None, beside: int = 0) -> Aside:
        """Copy the REDUCED spans (and nothing else) before gradients are accumulated into the bucket once more.

        ``with bucket.set_aside():`` puts them back at the end.  ``memory``: where the copies are kept; by default on
        the bucket's device as far as it has room.  ``beside``: bytes that other buckets have set aside there.
        """
        return Aside(self, memory or Memory(), beside)


def _shard(parameter: Any) -> torch.Tensor:
    """What of ``parameter`` is in this worker's memory."""
    return parameter.to_local() if _is_distributed(parameter) else parameter


def _laid_out_as(parameter: Any, shard: torch.Tensor) -> torch.Tensor:
    """The tensor of which ``shard`` is in this worker's memory as ``_shard(parameter)`` is of ``parameter``."""
    if not _is_distributed(parameter):
        return shard
    from torch.distributed.tensor import DTensor  # half a second, for those that have it loaded anyway

    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements,
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def _is_distributed(parameter: Any) -> bool:
    return hasattr(parameter, "device_mesh")


class Aside:
    """Finished sums of a bucket, kept while lost microbatches are run again into it."""

    def __init__(self, bucket: Bucket, memory: Memory, beside: int) -> None:
        self._bucket = bucket
        self._kept: list[tuple[Span, torch.Tensor]] = []
        self.device_bytes = 0
        """What of the copies is on the bucket's device."""
        for span in bucket.ledger.reduced:
            copy = memory.copy(bucket.flat[span.start : span.stop], beside + self.device_bytes)
            self._kept.append((span, copy))
            if copy.device == bucket.flat.device:
                self.device_bytes += copy.nbytes

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.put_back()

    @property
    def nbytes(self) -> int:
        """What the copies take."""
        return sum(values.nbytes for _, values in self._kept)

    def put_back(self) -> None:
        """Overwrite the REDUCED spans with the finished sums."""
        for span, values in self._kept:
            self._bucket.flat[span.start : span.stop].copy_(values)
