"""The audit of a whole run: every microbatch of every iteration was counted exactly once.

How many microbatches an iteration has follows from the samples it consumed, so a batch size that changes by design
(ramp-up, a step schedule) is judged like a constant one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from recover_megatron.run_log.steps import StepRecord, audit_problem


def microbatches_per_iteration(steps: Sequence[StepRecord]) -> int:
    """The largest M as the steps themselves show it: one more than the highest id that was counted in any of them."""
    return 1 + max((j for step in steps for ids in step.microbatches.values() for j in ids), default=-1)


def samples_per_microbatch(steps: Sequence[StepRecord]) -> int | None:
    """The micro batch size as most of the steps show it; None where none of them can (a single line, a bad run)."""
    sizes: Counter[int] = Counter()
    for before, step in pairwise(steps):
        consumed = step.consumed_samples - before.consumed_samples
        counted = sum(len(ids) for ids in step.microbatches.values())
        if step.iteration == before.iteration + 1 and counted and consumed % counted == 0:
            sizes[consumed // counted] += 1
    return sizes.most_common(1)[0][0] if sizes else None


def violations(steps: Sequence[StepRecord], expected: int | None = None) -> list[str]:
    """What is wrong, a sentence each, in the order of the iterations; empty: the invariant was kept.

    ``expected`` is M where it is known and constant.  Without it M is taken from the samples an iteration consumed;
    for the first line, which has nothing before it, from its own ids.  Checked besides: no iteration is left out.
    """
    return [*_first(steps[:1], expected), *_others(steps, expected)]


def _first(first: Sequence[StepRecord], expected: int | None) -> Iterator[str]:
    for step in first:
        yield from _counts(step, microbatches_per_iteration([step]) if expected is None else expected)


def _others(steps: Sequence[StepRecord], expected: int | None) -> Iterator[str]:
    size = samples_per_microbatch(steps)
    for before, step in pairwise(steps):
        consumed = step.consumed_samples - before.consumed_samples
        if consumed % (1 + step.skipped) == 0:  # those that were left out have consumed as many samples each
            consumed //= 1 + step.skipped
        total = microbatches_per_iteration([step]) if expected is None else expected
        if step.iteration != before.iteration + 1 + step.skipped:
            yield f"iteration {step.iteration} follows iteration {before.iteration} in steps.jsonl"
        elif size is None:
            # No line fits its own samples: ids are missing everywhere.
            yield f"iteration {step.iteration}: {consumed} samples cannot be those of the microbatches counted"
        elif consumed % size:
            yield f"iteration {step.iteration}: {consumed} samples are no whole number of microbatches of {size}"
        elif expected is None:
            total = consumed // size
        elif consumed != total * size:
            yield f"iteration {step.iteration}: {consumed} samples were consumed, not {total} microbatches of {size}"
        yield from _counts(step, total)


def _counts(step: StepRecord, total: int) -> Iterator[str]:
    """What is wrong with the ids of a step that has ``total`` microbatches."""
    counted = {j for ids in step.microbatches.values() for j in ids}
    if problem := audit_problem(step):
        yield problem
    elif missing := sorted(set(range(total)) - counted):
        yield f"iteration {step.iteration}: microbatches {missing} were not counted"
    elif foreign := sorted(counted - set(range(total))):
        yield f"iteration {step.iteration}: microbatches {foreign} were counted, the last one is {total - 1}"
