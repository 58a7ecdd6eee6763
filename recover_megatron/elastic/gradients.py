"""The gradients of a step in memory that the workers sum: buckets, and what a step counts beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from recover_megatron.collectives.ledger import Bucket
from recover_megatron.errors import Disagreement


class Gradients:
    """The memory of the gradients of a model, on one device, as buckets: one for each type of its parameters.

    A parameter is covered, which means that it has a part of a bucket, from the first step on that begins with it
    trained (``requires_grad``); those that are never trained cost no memory.  Behind the gradients in the bucket of the
    widest type (float32 or float64; else in a bucket of its own) is what a step counts: its loss, how often each
    microbatch was added, and how many microbatches gave each covered parameter a gradient.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], microbatches: int) -> None:
        """``parameters``: all of the model, trained or not, in the order that is the same on all workers."""
        self._all, self._microbatches = list(parameters), microbatches
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._used: set[int] = set()
        """Covered parameters, by number, that the present microbatch has given a gradient."""
        self._uses: list[float] = []
        self._grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._cover([at for at, parameter in enumerate(self._all) if parameter.requires_grad])

    def _cover(self, numbers: Sequence[int]) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter, _ in self._grads:
            parameter.grad = None
        self._covered = frozenset(numbers)
        self._others = [parameter for at, parameter in enumerate(self._all) if at not in self._covered]
        parameters = [self._all[at] for at in sorted(numbers)]
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        wide = torch.float64 if torch.float64 in by_type else torch.float32
        size = 1 + self._microbatches + len(parameters)
        extras = {dtype: size if dtype is wide else 0 for dtype in by_type}
        self.buckets = [Bucket.of_gradients(group, extra=extras[dtype]) for dtype, group in by_type.items()]
        self._grads = [(parameter, parameter.grad) for parameter in parameters]
        self._memory = [bucket.flat for bucket in self.buckets]
        if wide not in by_type:
            self.buckets.append(Bucket(torch.zeros(size, dtype=wide, device=parameters[0].device)))
        of_counts = self.buckets[list(by_type).index(wide) if wide in by_type else -1]
        self._counted = of_counts.flat[-size:]
        self._hooks = [self._hook(parameter, at) for at, parameter in enumerate(parameters)]

    def _hook(self, parameter: torch.Tensor, at: int) -> torch.utils.hooks.RemovableHandle:
        """Notice when a backward pass gives ``parameter`` a gradient."""
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # else torch takes no hook; a frozen parameter's is not called
        handle = parameter.register_post_accumulate_grad_hook(lambda _: self._used.add(at))
        parameter.requires_grad_(trained)
        return handle

    @property
    def covered(self) -> str:
        """The numbers of the covered parameters, as bits of a hexadecimal number."""
        return f"{sum(1 << at for at in self._covered):x}"

    def cover(self, covered: str) -> bool:
        """Cover what another worker covers (``covered``), and nothing else; whether that is a change.

        Raises ValueError where that is no parameter of this model.
        """
        bits = int(covered, 16)
        numbers = [at for at in range(bits.bit_length()) if bits >> at & 1]
        if not numbers or numbers[-1] >= len(self._all):
            raise ValueError(f"the covered parameters {covered!r} are not those of a model with {len(self._all)}")
        if self._covered == set(numbers):
            return False
        self._cover(numbers)
        return True

    def grow(self) -> bool:
        """Cover the parameters that are trained and were not; whether there are any.  All gradients are zero then."""
        if not any(parameter.requires_grad for parameter in self._others):
            return False
        trained = {at for at, parameter in enumerate(self._all) if parameter.requires_grad}
        self._cover(sorted(self._covered | trained))
        return True

    @property
    def trained(self) -> list[bool]:
        """The model's parameters, in order: True for those that are trained now."""
        return [parameter.requires_grad for parameter in self._all]

    def train(self, trained: Sequence[bool]) -> None:
        """Freeze and unfreeze the model's parameters as they are on another worker (``trained``)."""
        for parameter, its in zip(self._all, trained, strict=True):
            parameter.requires_grad_(its)

    def clear(self) -> None:
        """The next step: all zero, nothing summed; the parameters' ``grad`` is this memory, whatever it was since.

        Those that are not covered have none: the optimizer would step with what is left from before.
        """
        self._put_in()
        for parameter in self._others:
            parameter.grad = None
        self._used.clear()
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

        Raises RuntimeError where gradients are outside of the buckets, which nobody would sum.
        """
        if any(parameter.grad is not None for parameter in self._others):
            raise RuntimeError(
                "a microbatch has given a gradient to a parameter that was frozen when the step began: unfreeze it in "
                "the loop's body, or before ElasticDataParallel is made; a microbatch may freeze it again"
            )
        if any(parameter.grad is not grad for parameter, grad in self._grads):
            raise RuntimeError(
                "a parameter's grad is another tensor than before the microbatch: leave zero_grad() out (a step begins "
                "with gradients of zero), and sparse gradients"
            )
        counted = self._counted
        counted[0] += loss.detach().to(counted.dtype).reshape(())
        counted[1 + j] += 1
        uses = counted[1 + self._microbatches :]
        if len(self._used) == len(self._grads):
            uses += 1
        else:
            uses[sorted(self._used)] += 1
        self._used.clear()

    def loss(self) -> float:
        """Return the loss of the summed step.  Raises Disagreement unless each microbatch is in it exactly once."""
        loss, *counts = self._counted.tolist()
        times, self._uses = counts[: self._microbatches], counts[self._microbatches :]
        if any(count != 1 for count in times):
            raise Disagreement(f"the sum has the microbatches of the step {[int(count) for count in times]} times")
        return float(loss)

    def leave_out_unused(self) -> None:
        """Take the gradient of zero from the parameters that no microbatch of the step has used, on any worker.

        So optimizers leave these parameters alone, as in a loop of one process: frozen layers, branches not taken.
        After ``loss``; until ``clear``.
        """
        for (parameter, grad), used in zip(self._grads, self._uses, strict=True):
            if not used and grad is not None and not grad.any():  # the loop may have written it without autograd
                parameter.grad = None
