"""The memory of a model's gradients as buckets, and beside it what a step counts: its loss, and its microbatches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from recover_megatron.collectives.bucket import Bucket
from recover_megatron.instep.errors import Disagreement


class Gradients:
    """Those of ``parameters``, all on one device: a bucket for each of their types, and one for what is counted."""

    def __init__(self, parameters: Sequence[torch.Tensor], microbatches: int) -> None:
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        buckets = [Bucket.of_gradients(group) for group in by_type.values()]
        self._grads = [(parameter, parameter.grad) for parameter in parameters]
        wide = torch.float64 if torch.float64 in by_type else torch.float32
        self._counted = Bucket(torch.zeros(1 + microbatches, dtype=wide, device=parameters[0].device))
        self.buckets = [*buckets, self._counted]

    def clear(self) -> None:
        """The next step: all zero, nothing summed; the parameters' ``grad`` is this memory, whatever it was since."""
        for parameter, grad in self._grads:
            parameter.grad = grad
        for bucket in self.buckets:
            bucket.clear()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """While microbatches are added: what is summed already stays as it is."""
        with contextlib.ExitStack() as stack:
            beside = 0
            for bucket in self.buckets:
                aside = bucket.set_aside(beside=beside)
                beside += aside.device_bytes
                stack.enter_context(aside)
            yield

    def count(self, j: int, loss: torch.Tensor) -> None:
        """Microbatch ``j`` has been added, with this part of the step's loss.

        Raises RuntimeError where its gradients are elsewhere: somebody has replaced ``grad``.
        """
        if any(parameter.grad is not grad for parameter, grad in self._grads):
            raise RuntimeError(
                "a parameter's grad is another tensor than before the microbatch: leave zero_grad() out (a step begins "
                "with gradients of zero), and sparse gradients"
            )
        counted = self._counted.flat
        counted[0] += loss.detach().to(counted.dtype)
        counted[1 + j] += 1

    def loss(self) -> float:
        """Of the step that was summed.  Raises Disagreement unless each microbatch is in it exactly once."""
        loss, *times = self._counted.flat.tolist()
        if any(count != 1 for count in times):
            raise Disagreement(f"the sum has the microbatches of the step {[int(count) for count in times]} times")
        return float(loss)
