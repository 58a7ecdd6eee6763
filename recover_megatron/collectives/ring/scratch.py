"""The memory in which partial sums and arriving segments lie: a few segments, reused."""

from __future__ import annotations

import torch


class Scratch:
    """A pool of equal buffers; grows to what a collective needs, counts its peak."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        """``pinned``: host memory that a GPU copies from and to without a detour."""
        self._device = device
        self._pinned = pinned
        self._size = 0
        self._free: list[torch.Tensor] = []
        self.bytes = 0
        """Bytes allocated now."""
        self.peak = 0
        """The most bytes ever allocated."""

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``numel`` elements with arbitrary content; ``give`` it back."""
        needed = numel * dtype.itemsize
        if needed > self._size:
            self._drop()
            self._size = needed
        if not self._free:
            self._free.append(torch.empty(self._size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned))
            self.bytes += self._size
            self.peak = max(self.peak, self.bytes)
        return self._free.pop()[:needed].view(dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Take back what ``take`` gave, when nothing reads or writes it any more."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._size:  # of before the buffers grew
            self.bytes -= storage.nbytes()
            return
        self._free.append(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))

    def _drop(self) -> None:
        self.bytes -= sum(buffer.nbytes for buffer in self._free)
        self._free.clear()
