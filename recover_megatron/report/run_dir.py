"""Reader of a run's log folder; comparison of a run with a reference, iteration by iteration.

A reference is a run of the same training without failures.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recover_megatron.run_log.events import EVENTS_FILE, Event, read_run_events
from recover_megatron.run_log.steps import (
    STEPS_FILE,
    StepRecord,
    microbatches_per_iteration,
    not_shown,
    read_steps,
    violations,
)

# Megatron only prints the validation loss, so it is read from the output.
_EVALUATION = re.compile(
    rb"validation loss at iteration (\d+)(?: on (\w+) set)? \| lm loss value: ([0-9.E+-]+|nan|inf)", re.IGNORECASE
)


class NotARun(Exception):
    """Error: a folder contains no run to report on.  The message is for the user."""


@dataclass(frozen=True)
class RecordedRun:
    """Contents of a run's log folder."""

    folder: Path
    steps: list[StepRecord]
    """Steps in the order of their iterations, without lines that a crash has cut or damaged."""
    corpus: dict[str, Any] | None
    """Content of corpus.json, which scripts/prepare_corpus.py writes; None if the file is missing or damaged."""
    workers: list[dict[str, Any]]
    """Content of recover-run's workers.json, an object for each worker; empty if the file is missing or damaged."""
    settings: dict[str, Any]
    """Content of run.json, which scripts/quickstart.sh writes; empty for other runs."""
    evaluations: dict[str, dict[int, float]]
    """Split (validation, test) -> iteration -> loss."""
    events: tuple[list[Event], list[Event], list[Event]] = ([], [], [])
    """Events of the workers, of the coordinators, and of fault injection, each in the order of time."""
    spoiled: list[str] = field(default_factory=list)
    """Damaged lines (as "file:line") and damaged files, which were skipped."""
    after_spoiled: dict[str, int] = field(default_factory=dict)
    """Damaged line of steps.jsonl, as "file:line" -> number of the last iteration before the line, 0 if none."""

    @property
    def rollbacks(self) -> list[Event]:
        """Return the events of all rollbacks in the order of time, with the fields ``to``, ``lost`` and ``tier``."""
        return [event for event in self.events[0] if event["event"] == "rolled back"]

    def audit(self, microbatches: int | None = None) -> list[str]:
        """Check that each iteration counted each microbatch exactly once; return a sentence for each error.

        Missing iterations are also errors.  ``microbatches``: number per iteration, None if unknown.
        """
        found = violations(self.steps, microbatches or self.settings.get("microbatches"))
        begun, ended = last_launch(self.events[0])
        if not self.steps:
            if begun <= ended:
                return [not_shown(begun, ended)]
            return [not_shown(1, None)] if self.after_spoiled else found
        first, last = self.steps[0], self.steps[-1]
        has_events = (self.folder / EVENTS_FILE).exists()  # False if only steps.jsonl was copied into the folder
        if has_events and (missing := lost_before(first, self.events[0])):
            found.insert(0, not_shown(first.iteration - missing, first.iteration - 1))
        elif first.iteration > 1 and 0 in self.after_spoiled.values():  # damaged lines at the start of the file
            found.insert(0, not_shown(1, first.iteration - 1))
        if (next_one := max(last.iteration + 1, begun)) <= ended:
            found.append(not_shown(next_one, ended))
        elif last.iteration in self.after_spoiled.values():
            found.append(not_shown(last.iteration + 1, None))
        return found

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches per iteration, from the settings or, if these lack it, from the steps."""
        return self.settings.get("microbatches") or microbatches_per_iteration(self.steps)

    @property
    def unigram_entropy(self) -> float | None:
        """Return the validation loss, in nats per token, of a model that knows only the corpus's byte frequencies."""
        return None if self.corpus is None else float(self.corpus["unigram_entropy_nats"]["valid_under_train"])


def last_launch(workers: Sequence[Event]) -> tuple[int, int]:
    """Return the first and last iteration of the last launch; the last iteration is 0 if there is no event ``end``."""
    begun, ended = 1, 0
    for event in workers:
        if event["event"] == "start":
            begun, ended = int(event.get("iteration", 1)), 0
        elif event["event"] == "end":
            ended = int(event.get("iteration", 0))
    return begun, ended


def lost_before(first: StepRecord, workers: Sequence[Event]) -> int:
    """Return how many iterations are missing in steps.jsonl before its first line ``first``, due to log rotation.

    The missing lines may be of an earlier launch, since a resumed launch keeps the lines of earlier launches.  Without
    a ``start`` event, the launch is assumed to have started at iteration 1.
    """
    starts = [event for event in workers if event["event"] == "start"]
    expected = first.iteration - first.skipped
    begun = [start for start, made in _iterations_made(workers) if start <= made < expected]
    # Iterations are compared before times, because the hosts' clocks may differ.
    if not any(event.get("iteration") == expected for event in starts):
        starts = [event for event in starts if event["time"] <= (first.time or math.inf)] or starts[:1]
        begun.append(int(starts[-1].get("iteration", 1)) if starts else 1)
    return expected - min([expected, *begun])


def _iterations_made(workers: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """Yield (first iteration of the launch, iteration of the checkpoint or end) for each ``checkpoint`` and ``end``."""
    begun = None
    for event in workers:
        if event["event"] == "start":
            begun = int(event.get("iteration", 1))
        elif event["event"] in ("checkpoint", "end") and begun is not None:
            yield begun, int(event["saved"] if "saved" in event else event.get("iteration", 0))


def read_run(folder: Path, corpus: Path | None = None) -> RecordedRun:
    """Read the log folder of a run.  ``corpus``: path of corpus.json; None: the file in ``folder``, if it exists.

    Raises NotARun if there is no steps.jsonl, or no valid file at ``corpus``.
    """
    if not folder.is_dir():
        raise NotARun(f"{folder}: no such folder")
    after_spoiled: dict[str, int] = {}
    try:
        steps = list(read_steps(folder / STEPS_FILE, after_spoiled))
    except FileNotFoundError:
        raise NotARun(
            f"{folder} has no {STEPS_FILE}: no iteration was committed, or the run did not use --recover"
        ) from None
    spoiled: list[str] = []
    if corpus is not None and _json(corpus, dict, spoiled) is None:
        raise NotARun(f"{corpus}: {'not a JSON object' if spoiled else 'no such file'}")
    spoiled += after_spoiled
    events = read_run_events(folder, spoiled)
    return RecordedRun(
        folder=folder,
        steps=steps,
        corpus=_json(corpus or folder / "corpus.json", dict, spoiled),
        workers=_json(folder / "workers.json", list, spoiled) or [],
        settings=_json(folder / "run.json", dict, spoiled) or {},
        evaluations=_evaluations(folder),
        events=events,
        spoiled=spoiled,
        after_spoiled=after_spoiled,
    )


def _json[Content: (list[Any], dict[str, Any])](path: Path, kind: type[Content], spoiled: list[str]) -> Content | None:
    """Return a JSON file's content; None if it is missing or damaged.  Add a damaged file's name to ``spoiled``."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    if isinstance(content, kind):
        return content
    spoiled.append(path.name)
    return None


def _evaluations(folder: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for log in sorted(folder.glob("*.log")):
        with log.open("rb") as lines:
            for line in lines:
                if match := _EVALUATION.search(line):
                    split = (match[2] or b"validation").decode()
                    found.setdefault(split, {})[int(match[1])] = float(match[3])
    return found


GROWN = 1e-2
"""Largest relative difference of the loss from the reference that accumulated rounding can explain."""
TOLERANCE = 1e-4
"""Like ``GROWN``, but for the ``SOON`` iterations after a change of the replicas, if the losses were equal before."""
SOON = 10
"""Number of iterations for which ``TOLERANCE`` applies, including the iteration with the change."""
ROUGH = 10
"""Factor for ``TOLERANCE`` after the first of the ``SOON`` iterations, if the model computes in 16 bits or fewer."""


@dataclass(frozen=True)
class Difference:
    """Values of a quantity, such as the loss, in one iteration of the run and of the reference."""

    iteration: int
    run: float
    reference: float

    @property
    def relative(self) -> float:
        """Return |run - reference| / |reference|; 0 for equal values (or two NaNs), infinite if only one is finite."""
        if self.run == self.reference or (math.isnan(self.run) and math.isnan(self.reference)):
            return 0.0
        difference = abs(self.run - self.reference)
        if not math.isfinite(difference) or self.reference == 0:
            return math.inf
        return difference / abs(self.reference)


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison of two runs over their common iterations."""

    iterations: int
    """Number of common iterations."""
    losses: list[Difference]
    """Differences of the loss by iteration, without iterations that one of the runs skipped."""
    grad_norms: list[Difference]
    unlike: list[str]
    """Sentences about differences that rounding cannot explain: in samples, losses, or skipped steps."""

    @property
    def worst_loss(self) -> Difference | None:
        """Return the largest relative difference of the loss; None if no iteration has a loss in both runs."""
        return max(self.losses, key=lambda difference: difference.relative, default=None)

    @property
    def worst_grad_norm(self) -> Difference | None:
        """Return the largest relative difference of the grad norm; None if no iteration has a norm in both runs."""
        return max(self.grad_norms, key=lambda difference: difference.relative, default=None)


def unfit(run: Sequence[StepRecord], reference: Sequence[StepRecord]) -> str:
    """Return why ``reference`` is not a run of the same training as ``run``; empty if it may be one.

    Compares the first iteration that both runs have.  A different batch size changes the number of samples or
    microbatches; different data, model or seed change the loss by more than rounding.
    """
    pairs = _pairs(run, reference)
    if not pairs:
        return "it has no iteration in common with this run"
    own, ref = pairs[0]
    batches = [sum(map(len, step.microbatches.values())) for step in (own, ref)]
    if batches[0] != batches[1]:
        return f"another batch size: {batches[1]} microbatches in iteration {own.iteration}, {batches[0]} in this run"
    if own.consumed_samples != ref.consumed_samples:
        return (
            f"another batch size: {ref.consumed_samples} samples consumed by the end of iteration {own.iteration}, "
            f"{own.consumed_samples} in this run"
        )
    if own.loss is not None and ref.loss is not None:
        apart = Difference(own.iteration, own.loss, ref.loss).relative
        if apart > GROWN:
            return (
                f"other data, or another model or seed: the loss of iteration {own.iteration} is {ref.loss!r}, "
                f"{own.loss!r} in this run"
            )
    return ""


def compare(
    run: Sequence[StepRecord], reference: Sequence[StepRecord], tolerance: float = TOLERANCE, *, rough: bool = False
) -> Comparison:
    """Compare two runs over their common iterations.

    ``tolerance``: allowed relative difference of the loss soon after a change of the replicas (see ``TOLERANCE``).
    ``rough``: True if the model computes in 16 bits or fewer.
    """
    pairs = _pairs(run, reference)
    unlike = []
    for own, ref in pairs:
        if own.consumed_samples != ref.consumed_samples:
            unlike.append(
                f"iteration {own.iteration}: {own.consumed_samples} samples were consumed by its end, "
                f"{ref.consumed_samples} in the reference"
            )
        elif (own.loss is None) != (ref.loss is None):
            skipper = "this run" if own.loss is None else "the reference"
            unlike.append(f"iteration {own.iteration}: only {skipper} skipped the step")
    losses = _differences(pairs, lambda step: step.loss)
    off = {difference.iteration: difference.relative for difference in losses}
    limits = _limits(pairs, off, tolerance, ROUGH if rough else 1)
    if far := [difference for difference in losses if difference.relative > limits[difference.iteration]]:
        first, others = far[0], f", and in {len(far) - 1} later iterations" if len(far) > 1 else ""
        unlike.append(
            f"the loss differs from the reference by more than rounding in iteration {first.iteration}{others}: "
            f"{first.run!r}, {first.reference!r} in the reference, a relative difference of {first.relative:.1e} "
            f"(limit {limits[first.iteration]:.1e})"
        )
    return Comparison(len(pairs), losses, _differences(pairs, lambda step: step.grad_norm), unlike)


def _limits(
    pairs: Sequence[tuple[StepRecord, StepRecord]], off: Mapping[int, float], tolerance: float, later: int
) -> dict[int, float]:
    """Return iteration -> largest relative difference of the loss that rounding explains.

    ``off``: iteration -> difference of the loss.  The limit is ``GROWN``, except in the ``SOON`` iterations after a
    change of the epoch in one of the runs.  In these iterations, the limit is ten times the largest recent difference
    before the change, at most ``GROWN``, but at least ``tolerance`` in the first, whose parameters are still the same,
    and at least ``later`` times ``tolerance`` in the others.
    """
    limits: dict[int, float] = {}
    recent: deque[float] = deque(maxlen=SOON)
    epochs: tuple[int, int] | None = None
    left, before = 0, 0.0
    for own, ref in pairs:
        if epochs not in (None, now := (own.epoch, ref.epoch)):
            left, before = SOON, max(recent)
        epochs = now
        least = tolerance if left == SOON else tolerance * later
        limits[own.iteration] = max(least, min(GROWN, 10 * before) if left > 0 else GROWN)
        left -= 1
        recent.append(off.get(own.iteration, 0.0))
    return limits


def _pairs(run: Sequence[StepRecord], reference: Sequence[StepRecord]) -> list[tuple[StepRecord, StepRecord]]:
    other = {step.iteration: step for step in reference}
    return [(step, other[step.iteration]) for step in run if step.iteration in other]


def _differences(
    pairs: Sequence[tuple[StepRecord, StepRecord]], value: Callable[[StepRecord], float | None]
) -> list[Difference]:
    found = []
    for own, ref in pairs:
        a, b = value(own), value(ref)
        if a is not None and b is not None:
            found.append(Difference(own.iteration, a, b))
    return found
