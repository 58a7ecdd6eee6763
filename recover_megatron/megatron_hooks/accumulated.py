"""How many microbatches entered the gradient, counted where it happens: the hook that adds one to the buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.distributed import DistributedDataParallel

from recover_megatron.instep.errors import Disagreement
from recover_megatron.megatron_hooks import monkeypatch


class Accumulated:
    """Counts per model chunk, since the start of the run."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def install(self) -> None:
        """Wrap the seam; must come before the model is built."""
        monkeypatch.wrap(DistributedDataParallel, "_make_backward_post_hook", ("self", "param"), self._counting)

    def _counting(self, make: Callable[..., Any]) -> Callable[..., Any]:
        counts = self._counts

        def _make_backward_post_hook(ddp: Any, param: torch.nn.Parameter) -> Callable[..., None]:
            add_to_buffer = make(ddp, param)
            # The first dense parameter of a chunk gets a gradient from every microbatch (an expert's may get none).
            if ddp in counts or not getattr(param, "allreduce", True):
                return add_to_buffer
            counts[ddp] = 0

            def count(*unused: Any) -> None:
                add_to_buffer(*unused)
                counts[ddp] += 1

            return count

        return _make_backward_post_hook

    def counts(self, model: Sequence[Any]) -> list[int | None]:
        """By chunk; None for one without a trainable dense parameter, of which nothing can be counted."""
        return [self._counts.get(chunk) for chunk in model]

    def check(self, model: Sequence[Any], before: Sequence[int | None], microbatches: int) -> None:
        """Raise Disagreement unless exactly ``microbatches`` were added to every chunk since ``before``."""
        for number, (old, new) in enumerate(zip(before, self.counts(model), strict=True)):
            if old is not None and new is not None and new - old != microbatches:
                raise Disagreement(
                    f"chunk {number} added the gradients of {new - old} microbatches, not of its {microbatches}: "
                    "stopping before this step is reported as good"
                )
