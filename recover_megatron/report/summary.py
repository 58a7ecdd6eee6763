"""Summary of a run in a dozen lines of text; throughput by iteration and by number of replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from recover_megatron.report import goodput
from recover_megatron.report.goodput import Account
from recover_megatron.report.run_dir import RecordedRun
from recover_megatron.run_log.steps import NOT_SHOWN, StepRecord, samples_per_microbatch

_LAST = 10
"""Number of last iterations over which the summary averages the noisy training loss."""

_CHANGES = 8
"""Largest number of changes of the replicas, and of damaged lines, that the summary lists."""


def summary(run: RecordedRun, violations: Sequence[str], spent: Sequence[Account] = ()) -> str:
    """Return the summary of ``run``.  ``violations``: from ``RecordedRun.audit``; ``spent``: from ``accounts``."""
    steps = run.steps
    rows: list[tuple[str, str]] = [("run", str(run.folder))]
    if run.spoiled:
        rows.append(("left out", left_out(run.spoiled)))
    if not steps:
        rows.append(("iterations", "; ".join(violations) or f"none committed: {run.folder / 'steps.jsonl'} is empty"))
        return _table(rows)
    rows.append(("iterations", _iterations(run, steps)))
    rows.append(("time", _time(steps)))
    if spent:
        rows.append(("goodput", " ".join(goodput.in_short(spent[-1]))))
    rows.append(("replicas", _replicas(steps)))
    if run.rollbacks:
        rows.append(("rolled back", _rollbacks(run.rollbacks)))
    if run.workers:
        rows.append(("workers", _workers(run.workers)))
    rows += _losses(run, steps)
    rows.append(("microbatches", _audit(run, violations)))
    if "exit_code" in run.settings:
        rows.append(("exit code", str(run.settings["exit_code"])))
    return _table(rows)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<16}{text}" for name, text in rows)


def _iterations(run: RecordedRun, steps: Sequence[StepRecord]) -> str:
    text = f"{len(steps)} ({steps[0].iteration} to {steps[-1].iteration})"
    text += f"; {steps[-1].consumed_samples:,} samples"
    if sequence := run.settings.get("seq_length"):
        text += f" = {steps[-1].consumed_samples * int(sequence):,} tokens"
    return text


def _time(steps: Sequence[StepRecord]) -> str:
    seconds = [step.seconds for step in steps]
    return f"{median(seconds):.3f} s per iteration (median), {sum(seconds):.0f} s in all iterations"


def _replicas(steps: Sequence[StepRecord]) -> str:
    changes = [step for before, step in pairwise(steps) if step.replicas != before.replicas]
    parts = [f"{step.replicas} from iteration {step.iteration}" for step in changes]
    if len(parts) > _CHANGES:
        parts[_CHANGES // 2 : -_CHANGES // 2] = [f"... ({len(parts) - _CHANGES} more changes)"]
    text = ", ".join([str(steps[0].replicas), *parts])
    epochs = len({step.epoch for step in steps})
    return text + (f" ({epochs} epochs)" if epochs > 1 else "")


def _rollbacks(rollbacks: Sequence[dict[str, Any]]) -> str:
    """Describe the rollbacks, and the number of iterations that they discarded and that were run again.

    The other rows of the summary count only the last run of an iteration.
    """
    lost = sum(rollback["lost"] for rollback in rollbacks)
    to = ", ".join(f"to {back['to']} from {back['tier']} ({repeated(back)})" for back in rollbacks)
    kept = "; their first runs are in steps.jsonl.1, ..." if lost else ""  # no old file exists if no iteration was lost
    return f"{to}; {lost} iteration{'s' * (lost != 1)} lost{kept}"


def repeated(rollback: Mapping[str, Any]) -> str:
    """Describe which iterations are run again because of a rollback."""
    first, last = rollback["to"] + 1, rollback["to"] + rollback["lost"]
    if last < first:
        return "no iteration run again"
    return f"iteration {first} run again" if first == last else f"iterations {first} to {last} run again"


def _workers(workers: Sequence[dict[str, Any]]) -> str:
    """Count the workers by their final states, and list the workers that did not finish."""
    states: dict[str, list[str]] = {}
    for worker in workers:
        states.setdefault(str(worker.get("state")), []).append(str(worker.get("worker_id")))
    parts = [
        f"{len(ids)} {state}" + ("" if state == "finished" else f" (worker {', '.join(ids)})")
        for state, ids in states.items()
    ]
    return f"{len(workers)}: {', '.join(parts)}"


def _losses(run: RecordedRun, steps: Sequence[StepRecord]) -> list[tuple[str, str]]:
    rows = []
    if losses := [step.loss for step in steps if step.loss is not None]:  # None: the optimizer skipped the step
        last = losses[-_LAST:]
        rows.append(("first loss", _nats(losses[0])))
        rows.append(("training loss", f"{_nats(fmean(last))}, mean of the last {len(last)} iterations"))
    for split, points in sorted(run.evaluations.items(), reverse=True):
        iteration = max(points)
        rows.append((f"{split} loss", f"{_nats(points[iteration])}, after iteration {iteration}"))
    entropy = run.unigram_entropy
    if entropy is not None:
        rows.append(("unigram entropy", f"{_nats(entropy)}: the loss from byte frequencies alone"))
    return rows


def _nats(value: float) -> str:
    return f"{value:.4f} nats ({value / math.log(2):.3f} bits) per token"


def _audit(run: RecordedRun, violations: Sequence[str]) -> str:
    if not violations:
        return f"in every iteration each of 0..{run.microbatches - 1} was counted exactly once"
    wrong = failed(violations)
    return f"NOT {'each counted exactly once' if wrong else 'proven completely'}: {in_short(wrong or violations)}"


def failed(violations: Sequence[str]) -> list[str]:
    """Return the sentences of an audit that report a wrong count, without those about missing iterations."""
    return [text for text in violations if NOT_SHOWN not in text]


def left_out(spoiled: Sequence[str]) -> str:
    """Return a text with the number of damaged lines and files, and the first of them."""
    which = ", ".join(spoiled[:_CHANGES]) + (", ..." if len(spoiled) > _CHANGES else "")
    return f"{len(spoiled)} damaged line{'s' * (len(spoiled) != 1)} (NUL bytes, half a line, or two mixed): {which}"


def in_short(violations: Sequence[str]) -> str:
    return violations[0] + (f" (and {len(violations) - 1} more)" if len(violations) > 1 else "")


def rates(steps: Sequence[StepRecord]) -> list[tuple[int, float]]:
    """Return (iteration, samples per second) for each iteration whose number of samples is known.

    The number of samples is the increase of ``consumed_samples``.  For the first iteration, and for an iteration after
    a gap, it is computed from the number of microbatches.
    """
    usual = samples_per_microbatch(steps)
    found = []
    for before, step in pairwise([None, *steps]):
        assert step is not None
        size = step.micro_batch_size or usual
        if before is not None and step.iteration == before.iteration + 1:
            samples: int | None = step.consumed_samples - before.consumed_samples
        else:
            samples = None if size is None else size * sum(len(ids) for ids in step.microbatches.values())
        if samples is not None and step.seconds > 0:
            found.append((step.iteration, samples / step.seconds))
    return found


@dataclass(frozen=True)
class Level:
    """Throughput of the iterations that ran with a certain number of replicas."""

    replicas: int
    iterations: int
    seconds: float
    """Median time of an iteration, in seconds."""
    samples_per_second: float
    """Median of the samples per second."""


def levels(steps: Sequence[StepRecord]) -> list[Level]:
    """Return the throughput for each number of replicas, the largest number first.

    Iterations in which the epoch or the number of replicas changed are left out, because their time includes a
    recovery.  The first iteration is left out as a warm-up, unless it is the only one.
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
