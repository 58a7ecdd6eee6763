"""Loss scales (--fp16) of optimizers whose gradients are spread over workers, each of which has a part.

Each of Megatron's optimizers, that of experts, too, has a scale of its own, which falls when its gradients overflow;
then the step is skipped.  Stock Megatron asks all workers for that inside the step.  Here it follows from the sums of
squares that all tell each other for the norm, so all skip a step, or none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.optimizer.norms import UnitSums
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragments


class LossScales:
    """Of ``optimizers``.  ``fragments``: what is held of each; ``columns``: the place of its column among all."""

    def __init__(self, optimizers: Sequence[Any], fragments: Sequence[ShardFragments], columns: Sequence[int]) -> None:
        self._every = list(zip(optimizers, fragments, columns, strict=True))

    def now(self) -> list[float]:
        """By which factor the gradients of each are too large: 1 without a loss scale."""
        return [float(one.grad_scaler.scale) if _scaled(one) else 1.0 for one, _, _ in self._every]

    def norm(self, told: Sequence[UnitSums]) -> float:
        """Of the gradients divided by their scales.  An exactly rounded sum: it does not depend on who told what."""
        scales = {column: scale for (_, _, column), scale in zip(self._every, self.now(), strict=True)}
        return math.sqrt(math.fsum(its.squares / scales.get(its.column, 1.0) ** 2 for its in told))

    def skips(self, told: Sequence[UnitSums]) -> bool:
        """Whether the step is to be skipped."""
        return any(_scaled(one) and _overflowed(told, column) for one, _, column in self._every)

    @contextmanager
    def dividing(self, told: Sequence[UnitSums]) -> Iterator[None]:
        """While Megatron's step divides the gradients by their scales, and asks whether they overflowed."""
        with ExitStack() as replaced:
            for one, fragments, column in self._every:
                if _scaled(one):
                    divide = functools.partial(_divide, one, fragments, found=_overflowed(told, column))
                    replaced.enter_context(monkeypatch.replaced(one, "_unscale_main_grads_and_check_for_nan", divide))
            yield


def _scaled(one: Any) -> bool:
    return getattr(one, "grad_scaler", None) is not None


def _overflowed(told: Sequence[UnitSums], column: int) -> bool:
    return not all(math.isfinite(its.squares) for its in told if its.column == column)


def _divide(one: Any, fragments: ShardFragments, *, found: bool) -> bool:
    fragments.divide(one.grad_scaler.inv_scale)
    return found
