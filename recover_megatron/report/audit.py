"""The audit: in every iteration each microbatch was counted exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from recover_megatron.report.steps import Step

_NAMED = 8


def microbatches_per_iteration(steps: Sequence[Step]) -> int:
    """M, where nobody says it: one more than the highest id that was counted anywhere in the run."""
    return 1 + max((i for step in steps for ids in step.microbatches.values() for i in ids), default=-1)


def violations(steps: Sequence[Step], expected: int | None = None) -> list[str]:
    """What is wrong, a sentence each, in the order of the steps; empty: the invariant was kept.

    ``expected`` is M.  Without it M is taken from the steps themselves, so that an id missing from every iteration
    goes unnoticed only if it is the highest.  Checked too: no iteration is left out, and every iteration takes the
    same number of samples.
    """
    found: list[str] = []
    total = microbatches_per_iteration(steps) if expected is None else expected
    batch: int | None = None
    for previous, step in zip([None, *steps], steps, strict=False):
        found += [f"iteration {step.iteration}: {problem}" for problem in _id_problems(step, total)]
        if previous is None:
            continue
        ahead = step.iteration - previous.iteration
        if ahead > 1:
            missing = f"{previous.iteration + 1}" + (f" to {step.iteration - 1}" if ahead > 2 else "")
            found.append(f"iteration {missing}: no line in steps.jsonl")
        elif ahead == 1:
            taken = step.consumed_samples - previous.consumed_samples
            batch = taken if batch is None else batch
            if taken != batch or taken <= 0:
                found.append(f"iteration {step.iteration}: consumed {taken} samples, {batch} are a batch")
    return found


def _id_problems(step: Step, total: int) -> list[str]:
    if not step.microbatches:
        return ["no microbatches are recorded"]
    counted = Counter(i for ids in step.microbatches.values() for i in ids)
    problems = []
    if missing := [i for i in range(total) if i not in counted]:
        problems.append(f"microbatch {_list(missing)} of 0..{total - 1} not counted")
    if twice := sorted(i for i, times in counted.items() if times > 1):
        by = {replica for replica, ids in step.microbatches.items() if set(ids) & set(twice)}
        problems.append(f"microbatch {_list(twice)} counted more than once (replica {', '.join(sorted(by))})")
    if foreign := sorted(i for i in counted if not 0 <= i < total):
        problems.append(f"microbatch {_list(foreign)} counted, which is not one of 0..{total - 1}")
    return problems


def _list(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:_NAMED])) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")
