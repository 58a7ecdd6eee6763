"""Where finished sums are kept while lost microbatches are run again: on their device, or where it is full on the host.

A recovery comes at a moment that nobody has planned for: up to a whole gradient buffer is copied, and then the passes
of the re-run need as much memory as any other.  If the copies took it, all survivors would run out of it at the same
microbatch.  So a copy stays on a GPU only if the most that was ever allocated there and all copies fit together.
"""

from __future__ import annotations

import torch


class Memory:
    """Makes the copies.  ``copy`` is what is used; the rest says how, and is replaced in tests."""

    def copy(self, values: torch.Tensor, beside: int = 0) -> torch.Tensor:
        """A copy of ``values``, on their device or in host memory; ``beside``: bytes of other copies on the device."""
        if self.has_room(values, beside):
            try:
                return self.on_device(values)
            except torch.OutOfMemoryError:
                pass  # it is in pieces, or another process has taken it
        return self.on_host(values)

    def has_room(self, values: torch.Tensor, beside: int) -> bool:
        """Whether the device of ``values`` holds a copy beside all that an iteration needs, and the other copies."""
        if values.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(values.device)
        ours = free + torch.cuda.memory_reserved(values.device)
        return torch.cuda.max_memory_allocated(values.device) + beside + values.nbytes <= ours

    def on_device(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on their device.  Raises ``torch.OutOfMemoryError``."""
        return values.clone()

    def on_host(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in host memory: pinned, where the host gives that, since it goes back at the speed of the bus then."""
        try:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        except RuntimeError:  # no CUDA, or no more memory that may be pinned
            host = torch.empty(values.shape, dtype=values.dtype)
        return host.copy_(values)
