"""The gradients of a step in memory that the workers sum: buckets, and what a step counts beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from recover_megatron.collectives.ledger import Bucket
from recover_megatron.instep.faults import Disagreement


class Gradients:
    """The memory of the gradients of ``parameters``, all on one device, as buckets: one for each of their types.

    One more, "counted", has what a step counts: its loss, and how often each of its microbatches was added.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], microbatches: int) -> None:
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        buckets = [Bucket.of_gradients(group) for group in by_type.values()]
        self._grads = [(parameter, parameter.grad) for parameter in parameters]
        self._memory = [bucket.flat for bucket in buckets]
        wide = torch.float64 if torch.float64 in by_type else torch.float32
        self._counted = Bucket(torch.zeros(1 + microbatches, dtype=wide, device=parameters[0].device))
        self.buckets = [*buckets, self._counted]

    def clear(self) -> None:
        """The next step: all zero, nothing summed; the parameters' ``grad`` is this memory, whatever it was since."""
        self._put_in()
        for bucket in self.buckets:
            bucket.clear()

    def _put_in(self) -> None:
        for parameter, grad in self._grads:
            parameter.grad = grad

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Meanwhile the parameters have no gradient, as before a training: there are optimizers (torchtitan's, and what
        torch.distributed.checkpoint makes of one) that load nothing into parameters which have one.
        """
        for parameter, _ in self._grads:
            parameter.grad = None
        try:
            yield
        finally:
            self._put_in()

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

    def changes(self) -> tuple[int, int]:
        """Two numbers: one is another after each change of a parameter, one after each of a gradient, in place."""
        return sum(parameter._version for parameter, _ in self._grads), sum(flat._version for flat in self._memory)

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
        counted[0] += loss.detach().to(counted.dtype).reshape(())
        counted[1 + j] += 1

    def loss(self) -> float:
        """Of the step that was summed.  Raises Disagreement unless each microbatch is in it exactly once."""
        loss, *times = self._counted.flat.tolist()
        if any(count != 1 for count in times):
            raise Disagreement(f"the sum has the microbatches of the step {[int(count) for count in times]} times")
        return float(loss)
