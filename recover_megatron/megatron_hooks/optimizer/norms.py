"""The norm of gradients whose sums lie at the holders of the units that they update, and the loss scales that go by it.

measure     of each held unit, over the replica's workers that have a part of it; needs no other replica
exchange    over a column, as far as it lives; again after a loss: the same bits come out, since units, not workers,
            are summed up, each once, and a shadow's sum is its owner's
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.instep.gradients import alive
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.optimizer.keeping import Keeping
from recover_megatron.megatron_hooks.optimizer.shadows import LayoutPieces
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragments


@dataclass(frozen=True)
class UnitSums:
    """The sums of one unit's gradients.  ``column``: the place of its column among those of ``Shards``."""

    column: int
    squares: float
    zeros: float


class UnitNorms:
    """The sums of what one worker holds, ``fragments``.  ``width``: units that it holds of a column, at most.

    ``zeros``: whether zeros are counted, too.
    """

    def __init__(
        self,
        fragments: Sequence[ShardFragments],
        pieces: LayoutPieces,
        keeping: Keeping,
        width: int,
        *,
        zeros: bool,
    ) -> None:
        self._fragments, self._pieces, self._keeping = fragments, pieces, keeping
        self._shards, self._width, self._zeros = pieces.shards, width, zeros
        self._device = pieces.buckets.parameters[0][1].device

    def measure(self) -> torch.Tensor:
        """[column, place in what I hold of it, (sum of squares, zeros)] over the replica's model-parallel ranks."""
        columns = self._shards.columns
        sums = torch.zeros(len(columns), self._width, 2, dtype=torch.float64, device=self._device)
        for at, column in enumerate(columns):
            for place, unit in enumerate(self._shards.held(column)):
                for fragments in self._fragments:
                    if unit in fragments.held and self._pieces.column(fragments) == column:
                        sums[at, place] += fragments.sums(unit, zeros=self._zeros)
        group = self._keeping.norm_group()
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        return sums.cpu()

    def exchange(self, sums: torch.Tensor, begun: bool) -> tuple[list[UnitSums], bool]:
        """(the sums of all units, whether anybody may hold gathered parameters), the same on all of this position.

        A row has for each held unit: the unit, whether this worker speaks for it, and its sums.
        """
        shards = self._shards
        row = [float(begun)]
        for at, column in enumerate(shards.columns):
            held = shards.held(column)
            for place in range(self._width):
                unit = held[place] if place < len(held) else -1
                speaks = unit >= 0 and shards.speaks_for(column, unit)
                row += [float(unit), float(speaks), *sums[at, place].tolist()]
        assignment = self._pieces.assignment
        column = alive(self._keeping.tells_norms, assignment.live)
        rows = assignment.epoch_groups.ring(column).exchange_doubles(row)
        found = [
            UnitSums(at // (4 * self._width), *its[at + 3 : at + 5])
            for its in rows
            for at in range(0, len(its) - 1, 4)
            if its[at + 2]
        ]
        return found, any(its[0] for its in rows)


class LossScales:
    """The loss scales (--fp16) of ``optimizers`` whose gradients are spread over workers, each of which has a part.

    Each of Megatron's optimizers, that of experts, too, has a scale of its own, which falls when its gradients
    overflow; then the step is skipped.  Stock Megatron asks all workers for that inside the step.  Here it follows from
    the sums of squares that all tell each other for the norm, so all skip a step, or none.  ``fragments``: what is held
    of each optimizer; ``columns``: the place of its column among all.
    """

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
                    replaced.enter_context(monkeypatch.replaced(one, _unscale_main_grads_and_check_for_nan=divide))
            yield


def _scaled(one: Any) -> bool:
    return getattr(one, "grad_scaler", None) is not None


def _overflowed(told: Sequence[UnitSums], column: int) -> bool:
    return not all(math.isfinite(its.squares) for its in told if its.column == column)


def _divide(one: Any, fragments: ShardFragments, *, found: bool) -> bool:
    fragments.divide(one.grad_scaler.inv_scale)
    return found
