"""A run whose replicas differ in speed, simulated: how its quotas move, and what that costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from recover_megatron.workload import Balance, quotas

Speeds = Callable[[int], Mapping[int, float]]
"""Iteration -> replica -> its seconds per microbatch, without noise."""


@dataclass
class Run:
    """What happened."""

    quotas: list[dict[int, int]] = field(default_factory=list)
    """Of each iteration."""
    ratios: list[float] = field(default_factory=list)
    """The time of each iteration over the least that whole microbatches allow, by the true speeds."""

    @property
    def changes(self) -> int:
        """How often the quotas changed."""
        return sum(before != after for before, after in zip(self.quotas, self.quotas[1:], strict=False))


def constant(*seconds: float) -> Speeds:
    """Replicas that are as fast in every iteration."""
    return lambda _: dict(enumerate(seconds))


def simulate(speeds: Speeds, total: int, iterations: int, *, noise: float, outliers: float = 0.02, seed: int) -> Run:
    """A run of ``total`` microbatches an iteration.

    ``noise``: of a measurement, log-normal, relative; ``outliers``: the part of them that is three times too long.
    """
    draw, balance, run = random.Random(seed), Balance(), Run()
    now = quotas(total, list(speeds(0)))
    for iteration in range(iterations):
        true = speeds(iteration)
        best = quotas(total, list(true), speeds={replica: 1 / seconds for replica, seconds in true.items()})
        run.quotas.append(now)
        run.ratios.append(_time(now, true) / _time(best, true))
        late = {replica: 3.0 if draw.random() < outliers else 1.0 for replica in true}
        balance.measured({r: seconds * draw.lognormvariate(0, noise) * late[r] for r, seconds in true.items()})
        now = balance.counts(now, total)
    return run


def _time(counts: Mapping[int, int], seconds: Mapping[int, float]) -> float:
    return max(counts[replica] * seconds[replica] for replica in counts)
