"""Samples per second: of each iteration, and by how many replicas there were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from recover_megatron.run_log.audit import samples_per_microbatch
from recover_megatron.run_log.steps import StepRecord


def samples(steps: Sequence[StepRecord]) -> dict[int, int]:
    """Iteration -> the samples it consumed; of the first, and after a gap, counted from its microbatches."""
    size = samples_per_microbatch(steps)
    found = {}
    for before, step in pairwise([None, *steps]):
        assert step is not None
        if before is not None and step.iteration == before.iteration + 1:
            found[step.iteration] = step.consumed_samples - before.consumed_samples
        elif size is not None:
            found[step.iteration] = size * sum(len(ids) for ids in step.microbatches.values())
    return found


def rates(steps: Sequence[StepRecord]) -> list[tuple[int, float]]:
    """(iteration, samples per second of its compute time), for all iterations whose samples are known."""
    counts = samples(steps)
    return [(s.iteration, counts[s.iteration] / s.seconds) for s in steps if s.iteration in counts and s.seconds > 0]


@dataclass(frozen=True)
class Level:
    """The throughput with one number of replicas."""

    replicas: int
    iterations: int
    seconds: float
    """Of an iteration, median."""
    samples_per_second: float
    """Median."""


def levels(steps: Sequence[StepRecord]) -> list[Level]:
    """By the number of replicas, most first.

    An iteration in which the number changed is left out: its time is that of a recovery.  So is the first of all, which
    warms up, if there are others.
    """
    rate = dict(rates(steps))
    groups: dict[int, list[StepRecord]] = {}
    for before, step in pairwise([None, *steps]):
        assert step is not None
        changed = before is not None and (before.epoch, before.replicas) != (step.epoch, step.replicas)
        if step.iteration in rate and not changed and (before is not None or len(steps) == 1):
            groups.setdefault(step.replicas, []).append(step)
    return [
        Level(n, len(group), median(s.seconds for s in group), median(rate[s.iteration] for s in group))
        for n, group in sorted(groups.items(), reverse=True)
    ]
