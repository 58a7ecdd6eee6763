"""The files of a run's log folder, read into one record; and a run beside its reference, iteration by iteration.

A reference is the same training without failures.
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

# Megatron prints it; no file has it in a better form.
_EVALUATION = re.compile(
    rb"validation loss at iteration (\d+)(?: on (\w+) set)? \| lm loss value: ([0-9.E+-]+|nan|inf)", re.IGNORECASE
)


class NotARun(Exception):
    """The folder holds no run that could be reported on, in words for the user."""


@dataclass(frozen=True)
class RecordedRun:
    """What is known of a run."""

    folder: Path
    steps: list[StepRecord]
    """In the order of their iterations; lines that a crash has cut or spoiled are not among them."""
    corpus: dict[str, Any] | None
    """corpus.json of scripts/prepare_corpus.py."""
    workers: list[dict[str, Any]]
    """workers.json of recover-run: an object for each worker; empty: there is none."""
    settings: dict[str, Any]
    """run.json of scripts/quickstart.sh; empty for other runs."""
    evaluations: dict[str, dict[int, float]]
    """Split (validation, test) -> iteration -> loss."""
    events: tuple[list[Event], list[Event], list[Event]] = ([], [], [])
    """The workers', the coordinators', the chaos; each in the order of time."""
    spoiled: list[str] = field(default_factory=list)
    """Lines, as file:line, and files that cannot be read and were left out."""
    after_spoiled: dict[str, int] = field(default_factory=dict)
    """Spoiled line of steps.jsonl -> the last iteration before it."""

    @property
    def rollbacks(self) -> list[Event]:
        """The events of those that were carried out, in their order: ``to``, ``lost``, ``tier``."""
        return [event for event in self.events[0] if event["event"] == "rolled back"]

    def audit(self, microbatches: int | None = None) -> list[str]:
        """A sentence for each thing that is wrong or not shown; ``microbatches``: of each iteration, if it is known."""
        found = violations(self.steps, microbatches or self.settings.get("microbatches"))
        begun, ended = last_launch(self.events[0])
        if not self.steps:
            if begun <= ended:
                return [not_shown(begun, ended)]
            return [not_shown(1, None)] if self.after_spoiled else found
        first, last = self.steps[0], self.steps[-1]
        has_events = (self.folder / EVENTS_FILE).exists()  # else steps.jsonl alone was copied
        if has_events and (missing := lost_before(first, self.events[0])):
            found.insert(0, not_shown(first.iteration - missing, first.iteration - 1))
        elif first.iteration > 1 and 0 in self.after_spoiled.values():  # those of a launch before
            found.insert(0, not_shown(1, first.iteration - 1))
        if (next_one := max(last.iteration + 1, begun)) <= ended:
            found.append(not_shown(next_one, ended))
        elif last.iteration in self.after_spoiled.values():
            found.append(not_shown(last.iteration + 1, None))
        return found

    @property
    def microbatches(self) -> int:
        """Of an iteration; of a run without settings as its steps show it."""
        return self.settings.get("microbatches") or microbatches_per_iteration(self.steps)

    @property
    def unigram_entropy(self) -> float | None:
        """Nats per token of the validation text, knowing only how frequent each byte is in the training text."""
        return None if self.corpus is None else float(self.corpus["unigram_entropy_nats"]["valid_under_train"])


def last_launch(workers: Sequence[Event]) -> tuple[int, int]:
    """First and last iteration of the last launch, by its ``start`` and ``end``; the last is 0 where no end is told."""
    begun, ended = 1, 0
    for event in workers:
        if event["event"] == "start":
            begun, ended = int(event.get("iteration", 1)), 0
        elif event["event"] == "end":
            ended = int(event.get("iteration", 0))
    return begun, ended


def lost_before(first: StepRecord, workers: Sequence[Event]) -> int:
    """Number of iterations made before ``first``, the first line left of steps.jsonl (log rotation).

    They were made by its launch, or by an earlier one, whose lines a launch that goes on after them keeps.  Where no
    event tells of a start it was at iteration 1, for all that is known.
    """
    starts = [event for event in workers if event["event"] == "start"]
    expected = first.iteration - first.skipped
    begun = [start for start, made in _made(workers) if start <= made < expected]
    if not any(event.get("iteration") == expected for event in starts):  # whatever their hosts' clocks say
        starts = [event for event in starts if event["time"] <= (first.time or math.inf)] or starts[:1]
        begun.append(int(starts[-1].get("iteration", 1)) if starts else 1)
    return expected - min([expected, *begun])


def _made(workers: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """For each ``checkpoint`` and ``end`` the first iteration of its launch, and the last one that was made by then."""
    begun = None
    for event in workers:
        if event["event"] == "start":
            begun = int(event.get("iteration", 1))
        elif event["event"] in ("checkpoint", "end") and begun is not None:
            yield begun, int(event["saved"] if "saved" in event else event.get("iteration", 0))


def read_run(folder: Path, corpus: Path | None = None) -> RecordedRun:
    """Read what is there.  ``corpus`` is the corpus.json to compare with (default: the one in ``folder``, if any).

    Raises NotARun if there is no steps.jsonl, or no corpus at a path that was given.
    """
    if not folder.is_dir():
        raise NotARun(f"{folder}: no such folder")
    after_spoiled: dict[str, int] = {}
    try:
        steps = list(read_steps(folder / STEPS_FILE, after_spoiled))
    except FileNotFoundError:
        raise NotARun(
            f"{folder} has no {STEPS_FILE}: no iteration has been committed there, or the run did not have --recover"
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
    """The content of the file; None: there is no file, or one that is ``spoiled``, which gets its name."""
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
"""A relative difference of a loss above it is never one of rounding, however long that has grown."""
TOLERANCE = 1e-4
"""The same right after a change of the replicas, unless the losses differed before."""
SOON = 10
"""For so many iterations, the one with the change included."""
ROUGH = 10
"""So many times more is allowed after the first of them in 16 bits or fewer."""


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
    pairs = _pairs(run, reference)
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
        if apart > GROWN:
            return (
                f"other data, or another model or seed: the loss of iteration {mine.iteration} is {theirs.loss!r}, "
                f"{mine.loss!r} in this run"
            )
    return ""


def compare(
    run: Sequence[StepRecord], reference: Sequence[StepRecord], tolerance: float = TOLERANCE, *, rough: bool = False
) -> Comparison:
    """``tolerance``: of the relative difference of the loss, right after a change of the replicas.

    ``rough``: the model computes in 16 bits or fewer.
    """
    pairs = _pairs(run, reference)
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
    """The largest relative difference of the loss that rounding explains, by iteration.

    Right after a change of the replicas, in either run, it is ten times what it was before, at least ``tolerance``, and
    ``later`` times that after the first iteration, whose parameters are still the same.
    """
    limits: dict[int, float] = {}
    recent: deque[float] = deque(maxlen=SOON)
    epochs: tuple[int, int] | None = None
    left, before = 0, 0.0
    for mine, theirs in pairs:
        if epochs not in (None, now := (mine.epoch, theirs.epoch)):
            left, before = SOON, max(recent)
        epochs = now
        least = tolerance if left == SOON else tolerance * later
        limits[mine.iteration] = max(least, min(GROWN, 10 * before) if left > 0 else GROWN)
        left -= 1
        recent.append(off.get(mine.iteration, 0.0))
    return limits


def _pairs(run: Sequence[StepRecord], reference: Sequence[StepRecord]) -> list[tuple[StepRecord, StepRecord]]:
    other = {step.iteration: step for step in reference}
    return [(step, other[step.iteration]) for step in run if step.iteration in other]


def _differences(
    pairs: Sequence[tuple[StepRecord, StepRecord]], value: Callable[[StepRecord], float | None]
) -> list[Difference]:
    found = []
    for mine, theirs in pairs:
        a, b = value(mine), value(theirs)
        if a is not None and b is not None:
            found.append(Difference(mine.iteration, a, b))
    return found
