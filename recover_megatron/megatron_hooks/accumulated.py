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

    def watch(self, fsdp: Any, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Count for a chunk in Megatron-FSDP, whose own hooks of ``parameters`` have been registered before."""
        for param in parameters:
            if param.requires_grad and getattr(param, "allreduce", True):
                self._counts[fsdp] = 0
                param.register_post_accumulate_grad_hook(lambda _: self._add(fsdp))
                return

    def _add(self, chunk: Any) -> None:
        self._counts[chunk] += 1

    def counts(self, model: Sequence[Any]) -> list[int | None]:
        """By chunk; None for one without a trainable dense parameter, of which nothing can be counted."""
        return [self._counts.get(chunk) for chunk in model]

    def check(self, model: Sequence[Any], before: Sequence[int | None], microbatches: Sequence[int]) -> None:
        """Raise Disagreement unless exactly so many of its ``microbatches`` were added to each chunk since ``before``.

        By chunk; without those of which Megatron runs no backward pass, see ``has_gradient``.
        """
        counts = zip(before, self.counts(model), microbatches, strict=True)
        for number, (old, new, its) in enumerate(counts):
            if old is not None and new is not None and new - old != its:
                raise Disagreement(
                    f"chunk {number} added the gradients of {new - old} microbatches, not of its {its}: "
                    "stopping before this step is reported as good"
                )


def has_gradient(output: Any) -> bool:
    """Whether Megatron runs a backward pass from this output of a forward step (``schedules.backward_step``).

    It does not where nothing that is trained took part: a sample of text alone, in a model whose language model is
    frozen.
    """
    first = output[0] if isinstance(output, list) else output
    return bool(getattr(first, "requires_grad", True))
