"""The audit of a whole run: every microbatch of every iteration was counted exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from recover_megatron.report.steps import Step, audit_problem


def microbatches_per_iteration(steps: Sequence[Step]) -> int:
    """M as the steps themselves show it: one more than the highest id that was counted in any of them."""
    return 1 + max((j for step in steps for ids in step.microbatches.values() for j in ids), default=-1)


def violations(steps: Sequence[Step], expected: int | None = None) -> list[str]:
    """What is wrong, a sentence each, in the order of the iterations; empty: the invariant was kept.

    ``expected`` is M.  Without it M is taken from the steps, so that the loss of the highest ids goes unnoticed if they
    are missing from every iteration.  Checked besides the ids: no iteration is left out, and each consumed as many
    samples as the others.  (So a run that changes its batch size by design cannot be judged by this.)
    """
    total = microbatches_per_iteration(steps) if expected is None else expected
    return [*_counts(steps, total), *_sequence(steps)]


def _counts(steps: Sequence[Step], total: int) -> Iterator[str]:
    for step in steps:
        counted = {j for ids in step.microbatches.values() for j in ids}
        if problem := audit_problem(step):
            yield problem
        elif missing := sorted(set(range(total)) - counted):
            yield f"iteration {step.iteration}: microbatches {missing} were not counted"
        elif foreign := sorted(counted - set(range(total))):
            yield f"iteration {step.iteration}: microbatches {foreign} were counted, the last one is {total - 1}"


def _sequence(steps: Sequence[Step]) -> Iterator[str]:
    batch: int | None = None
    for before, step in pairwise(steps):
        if step.iteration != before.iteration + 1:
            yield f"iteration {step.iteration} follows iteration {before.iteration} in steps.jsonl"
            continue
        consumed = step.consumed_samples - before.consumed_samples
        batch = consumed if batch is None else batch
        if consumed != batch:
            yield f"iteration {step.iteration}: {consumed} samples were consumed, in those before {batch}"
