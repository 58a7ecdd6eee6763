"""A run beside its reference: the same training without failures, iteration by iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recover_megatron.run_log.steps import StepRecord

TOLERANCE = 1e-2
"""A relative difference of a loss above it is none of rounding, in bf16 either."""


@dataclass(frozen=True)
class Difference:
    """One value of one iteration in both runs."""

    iteration: int
    run: float
    reference: float

    @property
    def relative(self) -> float:
        """|run - reference| / |reference|; 0 for equal ones (two NaNs are equal), infinite where only one is finite."""
        if self.run == self.reference or (math.isnan(self.run) and math.isnan(self.reference)):
            return 0.0
        difference = abs(self.run - self.reference)
        if not math.isfinite(difference) or self.reference == 0:
            return math.inf
        return difference / abs(self.reference)


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common and where they differ."""

    iterations: int
    """How many both have."""
    losses: list[Difference]
    """In the order of the iterations; those where either was skipped are left out."""
    grad_norms: list[Difference]
    unlike: list[str]
    """What no rounding explains, a sentence each: other samples, a step that only one of them skipped, other losses."""

    @property
    def worst_loss(self) -> Difference | None:
        """The largest relative difference; the first of equals."""
        return max(self.losses, key=lambda difference: difference.relative, default=None)

    @property
    def worst_grad_norm(self) -> Difference | None:
        """The same of the grad norms."""
        return max(self.grad_norms, key=lambda difference: difference.relative, default=None)


def unfit(run: Sequence[StepRecord], reference: Sequence[StepRecord]) -> str:
    """Why ``reference`` cannot be one of ``run``: it is another training; empty: it can be.

    Another batch shows in the samples and microbatches of iterations that both have, other data in a loss of the very
    first iterations that no rounding explains.
    """
    other = {step.iteration: step for step in reference}
    pairs = [(step, other[step.iteration]) for step in run if step.iteration in other]
    if not pairs:
        return "it has no iteration of this run"
    mine, theirs = pairs[0]
    batches = [sum(map(len, step.microbatches.values())) for step in (mine, theirs)]
    if batches[0] != batches[1]:
        return f"another batch: {batches[1]} microbatches in iteration {mine.iteration}, {batches[0]} in this run"
    if mine.consumed_samples != theirs.consumed_samples:
        return (
            f"another batch: {theirs.consumed_samples} samples were consumed by the end of iteration {mine.iteration}, "
            f"{mine.consumed_samples} in this run"
        )
    if mine.loss is not None and theirs.loss is not None:
        apart = Difference(mine.iteration, mine.loss, theirs.loss).relative
        if apart > TOLERANCE:
            return (
                f"other data, or another model or seed: the loss of iteration {mine.iteration} is {theirs.loss!r}, "
                f"{mine.loss!r} in this run"
            )
    return ""


def compare(run: Sequence[StepRecord], reference: Sequence[StepRecord]) -> Comparison:
    """Compare the iterations that both have."""
    other = {step.iteration: step for step in reference}
    pairs = [(step, other[step.iteration]) for step in run if step.iteration in other]
    unlike = []
    for mine, theirs in pairs:
        if mine.consumed_samples != theirs.consumed_samples:
            unlike.append(
                f"iteration {mine.iteration}: {mine.consumed_samples} samples were consumed by its end, "
                f"{theirs.consumed_samples} in the reference"
            )
        elif (mine.loss is None) != (theirs.loss is None):
            who = "this run" if mine.loss is None else "the reference"
            unlike.append(f"iteration {mine.iteration}: only {who} skipped the step")
    losses = _differences(pairs, lambda step: step.loss)
    if far := [difference for difference in losses if difference.relative > TOLERANCE]:
        unlike.append(
            f"the loss is more than {TOLERANCE:.0%} off the reference in {len(far)} iterations, first in iteration "
            f"{far[0].iteration}: {far[0].run!r}, {far[0].reference!r} in the reference"
        )
    return Comparison(len(pairs), losses, _differences(pairs, lambda step: step.grad_norm), unlike)


def _differences(
    pairs: Sequence[tuple[StepRecord, StepRecord]], value: Callable[[StepRecord], float | None]
) -> list[Difference]:
    found = []
    for mine, theirs in pairs:
        a, b = value(mine), value(theirs)
        if a is not None and b is not None:
            found.append(Difference(mine.iteration, a, b))
    return found
