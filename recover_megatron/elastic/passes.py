"""Forward and backward passes of microbatches, with checks that a microbatch changes only the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recover_megatron.elastic.checks import check_backward
from recover_megatron.elastic.generators import Generators
from recover_megatron.elastic.gradients import Gradients
from recover_megatron.elastic.run_state import State
from recover_megatron.elastic.steps import Microbatch
from recover_megatron.out_of_turn import tell_readers


class Passes:
    """Runs the microbatches of this worker and counts them."""

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
        """Numbers of the microbatches of the current step whose gradients this worker has added."""
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
        """Run the microbatches ``share`` and add their gradients; stop and return False when ``over()`` is True.

        ``begin(j)`` is called before microbatch j.  ``failed(j, error)`` is called if microbatch j raises an error,
        before this method raises it.
        """
        tell_readers(self._loader_lost)  # ``gradient`` does this, too, but is not called if ``share`` is empty
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
        """Add the gradient of microbatch ``j``; return its part of the step's loss.

        Raises TypeError if the loss is no scalar tensor.  Raises RuntimeError if the microbatch changed parameters or
        buffers, or changed gradients outside ``backward=``, or if ``backward=`` is wrong (``check_backward``).
        """
        before, untrained = self._gradients.changes(), self._state.untrained()
        self._reads = True
        try:
            result = microbatch(step, j)
        finally:
            self._reads = False
            tell_readers(self._loader_lost)
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            what = f"a tensor of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else f"{result!r:.100}"
            raise TypeError(f"microbatch({step}, {j}) returned {what}: it must return its loss, a scalar tensor")
        loss, forward = result / self._microbatches, self._gradients.changes()
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
                f"microbatch({step}, {j}) has changed parameters: remove the optimizer's step(), the library calls it"
            )
        if changed := self._state.changed(untrained):
            raise RuntimeError(
                f"microbatch({step}, {j}) has changed the model's {', '.join(changed[:5])}, on this worker only: a "
                "model whose state changes in its forward pass is not supported; call .eval() on a norm with running "
                "statistics (BatchNorm), again after each model.train(), or use GroupNorm or LayerNorm"
            )
        if before[1] != forward[1] and forward[1] != after[1]:
            raise RuntimeError(
                f"microbatch({step}, {j}) has changed gradients outside backward=: remove zero_grad() and backward()"
            )
        return loss

    def _loader_lost(self, error: RuntimeError) -> None:
        """Raise ``error``, about the death of a DataLoader process, if a microbatch is running; else ignore it."""
        if self._reads:
            raise error
