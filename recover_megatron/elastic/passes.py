"""The forward and backward passes of a worker's microbatches, each checked to have added its gradient and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recover_megatron.elastic.checks import check_backward
from recover_megatron.elastic.generators import Generators
from recover_megatron.elastic.gradients import Gradients
from recover_megatron.elastic.state import State
from recover_megatron.elastic.steps import Microbatch
from recover_megatron.out_of_turn import tell_readers


class Passes:
    """Runs microbatches on this worker."""

    def __init__(
        self,
        gradients: Gradients,
        state: State,
        generators: Generators,
        backward: Callable[[torch.Tensor], Any],
        microbatches: int,
    ) -> None:
        """``backward``: called with each loss, divided by ``microbatches``."""
        self._gradients, self._state, self._generators = gradients, state, generators
        self._backward, self._microbatches = backward, microbatches
        self.ran: list[int] = []
        """The microbatches of the present step whose gradients this worker has added."""
        self._reads = False

    def run(
        self,
        microbatch: Microbatch,
        step: int,
        share: Sequence[int],
        *,
        over: Callable[[], bool],
        begin: Callable[[int], None],
        failed: Callable[[int, Exception], None],
    ) -> bool:
        """Add the gradients of these microbatches; False: the epoch is ``over``, and some are left.

        ``begin``: told the number of each before it.  ``failed``: told of an exception, which is then raised.
        """
        tell_readers(self._loader_lost)  # here, too: this worker may have no microbatch of the step
        with self._gradients.kept():
            for j in share:
                if over():
                    return False
                begin(j)
                self._generators.for_microbatch(step, j)
                try:
                    self._gradients.count(j, self.gradient(microbatch, step, j))
                except Exception as error:
                    failed(j, error)
                    raise
                self.ran.append(j)
        return True

    def gradient(self, microbatch: Microbatch, step: int, j: int) -> torch.Tensor:
        """Add that of one microbatch; its part of the step's loss.  Raises where it did not add that alone."""
        before, untrained = self._gradients.changes(), self._state.untrained()
        self._reads = True
        try:
            told = microbatch(step, j)
        finally:
            self._reads = False
            tell_readers(self._loader_lost)
        if not isinstance(told, torch.Tensor) or told.numel() != 1:
            what = f"a tensor of shape {list(told.shape)}" if isinstance(told, torch.Tensor) else f"{told!r:.100}"
            raise TypeError(f"microbatch({step}, {j}) returned {what}: it must return its loss, a tensor of one number")
        loss, forward = told / self._microbatches, self._gradients.changes()
        arrived: list[torch.Tensor] = []
        hooked = loss.requires_grad and self._backward is not torch.Tensor.backward
        if hooked:
            loss.register_hook(arrived.append)
        self._backward(loss)
        if hooked:
            check_backward(arrived, f"microbatch({step}, {j})", value=not self.ran)
        after = self._gradients.changes()
        if before[0] != after[0]:
            raise RuntimeError(
                f"microbatch({step}, {j}) has changed parameters: leave the optimizer's step() to the library"
            )
        if changed := self._state.changed(untrained):
            raise RuntimeError(
                f"microbatch({step}, {j}) has changed the model's {', '.join(changed[:5])}, on this worker alone: a "
                "model whose state changes in its forward pass is not trained so; call .eval() on a norm with running "
                "statistics (BatchNorm), again after each model.train(), or take GroupNorm or LayerNorm"
            )
        if before[1] != forward[1] and forward[1] != after[1]:
            raise RuntimeError(
                f"microbatch({step}, {j}) has changed gradients beside backward: leave zero_grad() and backward() out"
            )
        return loss

    def _loader_lost(self, error: RuntimeError) -> None:
        """A process of a DataLoader has died: an error of the microbatch, and of no sum, update or checkpoint."""
        if self._reads:
            raise error
