"""Gradients and counters of a step, in buckets that the workers sum."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from recover_megatron.collectives.ledger import Bucket
from recover_megatron.errors import Disagreement


class Gradients:
    """Memory of a model's gradients on one device: one bucket for each dtype of the parameters.

    A parameter is *covered* (part of a bucket) from the first step at whose start it is trainable (``requires_grad``).
    No memory is allocated for a parameter that is never trained.  The counters of a step are the loss, how often each
    microbatch was added, and how many microbatches gave each covered parameter a gradient.  They are at the end of the
    float64 bucket if there is one, else of the float32 bucket, else in a separate bucket.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], microbatches: int) -> None:
        """``parameters``: all parameters of the model, trainable or not, in the same order on all workers."""
        self._all, self._microbatches = list(parameters), microbatches
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._used: set[int] = set()
        """Indices, in the list of covered parameters, of the parameters with a gradient from the current microbatch."""
        self._uses: list[float] = []
        self._grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._held = -1
        """Counter of changes of the gradients' memory when ``hold`` was called; -1: no sums are held."""
        self._cover([at for at, parameter in enumerate(self._all) if parameter.requires_grad])

    def _cover(self, numbers: Sequence[int]) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter, _ in self._grads:
            parameter.grad = None
        self._held = -1
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
        """Register a hook that adds ``at`` to ``_used`` when a backward pass gives ``parameter`` a gradient."""
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # torch registers no hook on a frozen parameter
        handle = parameter.register_post_accumulate_grad_hook(lambda _: self._used.add(at))
        parameter.requires_grad_(trained)
        return handle

    @property
    def covered(self) -> str:
        """Covered parameters, as a hexadecimal number: bit n is 1 if parameter n of the model is covered."""
        return f"{sum(1 << at for at in self._covered):x}"

    def cover(self, covered: str) -> bool:
        """Cover the same parameters as another worker; return whether this has changed the buckets.

        ``covered``: the other worker's ``covered``.  Raises ValueError if this model does not have these parameters.
        """
        bits = int(covered, 16)
        numbers = [at for at in range(bits.bit_length()) if bits >> at & 1]
        if not numbers or numbers[-1] >= len(self._all):
            raise ValueError(f"the covered parameters {covered!r} do not fit a model with {len(self._all)} parameters")
        if self._covered == set(numbers):
            return False
        self._cover(numbers)
        return True

    def grow(self) -> bool:
        """Cover newly trainable parameters.  If there are any, zero all gradients and return True."""
        if not any(parameter.requires_grad for parameter in self._others):
            return False
        trained = {at for at, parameter in enumerate(self._all) if parameter.requires_grad}
        self._cover(sorted(self._covered | trained))
        return True

    @property
    def trained(self) -> list[bool]:
        """Flags of the model's parameters, in order: True if the parameter is trainable now."""
        return [parameter.requires_grad for parameter in self._all]

    def train(self, trained: Sequence[bool]) -> None:
        """Make each parameter trainable or frozen.  ``trained``: the property ``trained`` of another worker."""
        for parameter, flag in zip(self._all, trained, strict=True):
            parameter.requires_grad_(flag)

    def hold(self) -> None:
        """Keep finished sums of the coming step, which this worker has received before the step, at ``clear``."""
        if any(bucket.ledger.reduced for bucket in self.buckets):
            self._held = self.changes()[1]

    def clear(self) -> bool:
        """Prepare the next step: zero all buckets, mark them LOCAL, and let the parameters' ``grad`` refer to them.

        The ``grad`` of parameters that are not covered becomes None, so that no old ``grad`` is used.  After ``hold``
        the buckets stay as they are, unless the script has written to a ``grad`` since: then the result is False, and
        the caller must request a new epoch, in which this worker receives the sums again.
        """
        held, self._held = self._held, -1
        self._put_in()
        for parameter in self._others:
            parameter.grad = None
        self._used.clear()
        if held == self.changes()[1]:
            return True
        for bucket in self.buckets:
            bucket.clear()
        return held < 0

    def _put_in(self) -> None:
        for parameter, grad in self._grads:
            parameter.grad = grad

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Set the parameters' ``grad`` to None inside this context, in which a state is loaded.

        Some optimizers (torchtitan's, torch.distributed.checkpoint's wrapper) do not load if there are gradients.
        """
        for parameter, _ in self._grads:
            parameter.grad = None
        try:
            yield
        finally:
            self._put_in()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Save finished sums at the start of this context, and restore them at its end.

        Microbatches run inside this context, since they add their gradients to the memory of the sums.
        """
        with contextlib.ExitStack() as stack:
            beside = 0
            for bucket in self.buckets:
                saved = bucket.save_sums(beside=beside)
                beside += saved.device_bytes
                stack.enter_context(saved)
            yield

    def changes(self) -> tuple[int, int]:
        """Return two counters of in-place changes: of the covered parameters, and of the gradients' memory."""
        return sum(parameter._version for parameter, _ in self._grads), sum(flat._version for flat in self._memory)

    def count(self, j: int, loss: torch.Tensor) -> None:
        """Count microbatch ``j`` after its gradients were added, and add its part ``loss`` to the step's loss.

        Raises RuntimeError if a gradient is outside the buckets, where it would not be summed.
        """
        if any(parameter.grad is not None for parameter in self._others):
            raise RuntimeError(
                "a microbatch has given a gradient to a parameter that was frozen when the step began: unfreeze it in "
                "the loop's body, or before you create ElasticDataParallel; a microbatch may freeze it again"
            )
        if any(parameter.grad is not grad for parameter, grad in self._grads):
            raise RuntimeError(
                "the microbatch has replaced a parameter's grad by another tensor: remove zero_grad() (a step begins "
                "with zero gradients), and do not use sparse gradients"
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
        """Return the loss of the summed step; raise Disagreement unless the sum has each microbatch exactly once."""
        loss, *counts = self._counted.tolist()
        times, self._uses = counts[: self._microbatches], counts[self._microbatches :]
        if any(count != 1 for count in times):
            raise Disagreement(f"microbatches 0, 1, ... were summed {[int(count) for count in times]} times, not once")
        return float(loss)

    def leave_out_unused(self) -> None:
        """Set ``grad`` to None for parameters to which no microbatch, on any worker, has given a gradient.

        Optimizers skip these parameters (frozen layers, unused branches), as they do without this library.  Must be
        called after ``loss``.  ``clear`` sets ``grad`` again.
        """
        for (parameter, grad), used in zip(self._grads, self._uses, strict=True):
            if not used and grad is not None and not grad.any():  # a script may write grad without autograd
                parameter.grad = None
