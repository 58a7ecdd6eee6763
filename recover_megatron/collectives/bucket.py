"""A gradient bucket with its ledger, and what a caller may do with parts of it between two epochs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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

    def set_aside(self) -> Aside:
        """Copy the REDUCED spans (and nothing else) before gradients are accumulated into the bucket once more."""
        return Aside(self)

    def element_bytes(self, spans: Sequence[Span]) -> list[tuple[int, int]]:
        """Byte ranges of ``spans`` within the bucket."""
        size = self.flat.element_size()
        return [(span.start * size, span.stop * size) for span in spans]


class Aside:
    """Finished sums of a bucket, kept while lost microbatches are run again into it."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._kept = [(span, bucket.flat[span.start : span.stop].clone()) for span in bucket.ledger.reduced]

    @property
    def nbytes(self) -> int:
        """What the copies take."""
        return sum(values.nbytes for _, values in self._kept)

    def put_back(self) -> None:
        """Overwrite the REDUCED spans with the finished sums."""
        for span, values in self._kept:
            self._bucket.flat[span.start : span.stop].copy_(values)
