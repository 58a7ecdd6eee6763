"""What the files of a log folder tell of a run's training: read on from where they were read last.

    steps.jsonl      --.
    events.jsonl     --+--> History: the pace, losses, checkpoints, recoveries, goodput
    events-<n>.jsonl --'    (of the last launch into the folder)
    workers.json     -----> ``worker_processes``

Nothing here waits for a run, and a line that is being written is read when it is whole.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recover_megatron.run_log.events import COORDINATOR_FILES, EVENTS_FILE
from recover_megatron.run_log.steps import STEPS_FILE
from recover_megatron.run_log.tail import Lines

RECENT = 20
"""Iterations over which the pace is taken."""
Record = Mapping[str, Any]


@dataclass(frozen=True)
class RecentStep:
    """A committed iteration, without its microbatches."""

    iteration: int
    loss: float | None
    grad_norm: float | None
    consumed_samples: int
    replicas: int
    seconds: float


@dataclass(frozen=True)
class Training:
    """How the training gets on; what is not known is None."""

    iteration: int
    """The last that was committed."""
    train_iters: int | None
    loss: float | None
    seconds_per_iteration: float | None
    """Mean of the last ``RECENT``, recoveries included."""
    samples_per_second: float | None
    tflops_per_gpu: float | None
    """By Megatron's own formula, over the workers of the launch."""
    eta_seconds: float | None
    goodput: float | None
    """Share of the launch's worker time since the training began that went into committed iterations, 0 to 1."""
    checkpoint: int | None
    """The iteration of the last one of this launch."""
    checkpoint_folder: str | None
    checkpoint_age: float | None
    recoveries: int
    microbatches_rerun: int


class History:
    """Of the last launch into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps, self._events = Lines(folder / STEPS_FILE), Lines(folder / EVENTS_FILE)
        self._coordinators: dict[Path, Lines] = {}
        self.start: Record | None = None
        """The event of the training's beginning."""
        self._forget_steps()
        self._forget_events()
        self.news: list[Record] = []
        """Events since ``read`` was called last, of workers and coordinators."""
        self.last_time = 0.0
        """Of the newest event, in unix seconds: when a run that has ended did."""

        self._steps_written = 0.0  # when steps.jsonl was, in unix seconds

    def _forget_steps(self) -> None:
        self.recent: deque[RecentStep] = deque(maxlen=RECENT + 1)
        self.iterations = 0
        self._worked: list[tuple[int, float]] = []  # by step of this launch: (replicas, seconds)

    def _forget_events(self) -> None:
        self.recoveries = 0
        self.rerun = 0
        self.phases: list[tuple[str, float]] = []
        """(phase, seconds) of every recovery."""
        self._recovering = 0.0
        self.last_plan: Record | None = None
        self._saved: Record | None = None

    def read(self) -> None:
        """Take in what has been written since the last call."""
        self.news = []
        for event in self._events.new()[1]:
            self._take_event(event)
        anew, steps = self._steps.new(upto=b', "microbatches"')
        if anew:
            self._forget_steps()
        with suppress(OSError):
            self._steps_written = (self._folder / STEPS_FILE).stat().st_mtime
        for step in steps:
            self._take_step(step)
        for path in self._folder.glob(COORDINATOR_FILES):
            for event in self._coordinators.setdefault(path, Lines(path)).new()[1]:
                self._note(event)

    def _take_event(self, event: Record) -> None:
        self._note(event)
        match event.get("event"):
            case "start":
                self.start = event
                self._forget_events()
                self._worked = []
            case "plan":
                self.last_plan = event
                self.recoveries += bool(event.get("lost_replicas"))
            case "recovery":
                self.rerun += sum(map(len, event.get("reran", {}).values()))
                for phase, seconds in event.get("seconds", {}).items():
                    self.phases.append((phase, seconds))
                    self._recovering += seconds
            case "checkpoint":
                self._saved = event

    def _take_step(self, step: Record) -> None:
        try:
            known = {name: step[name] for name in RecentStep.__dataclass_fields__}
        except KeyError:
            return
        self.recent.append(RecentStep(**known))
        self.iterations += 1
        if self.start is None or known["iteration"] >= self.start.get("iteration", 0):
            self._worked.append((known["replicas"], known["seconds"]))

    def _note(self, event: Record) -> None:
        self.news.append(event)
        self.last_time = max(self.last_time, _number(event.get("time")) or 0.0)

    def training(self, now: float, end: float | None = None) -> Training | None:
        """How the training gets on; None: no iteration is known.

        ``now`` in unix seconds, from which ages count; ``end``: until when it went on, if not until now.
        """
        if not self.recent:
            return None
        start, last = self.start or {}, self.recent[-1]
        if last.iteration >= start.get("iteration", 0) and self._steps_written < start.get("time", 0.0):
            return None  # an earlier launch has made it; this one makes its first, and begins the file anew then
        pace = self._pace()
        rate = self._samples() / sum(pace) if pace and sum(pace) > 0 else None
        mean = sum(pace) / len(pace) if pace else None
        iters, world, flops = (_number(start.get(name)) for name in ("train_iters", "world", "flops_per_sample"))
        saved = self._saved or {}
        return Training(
            iteration=last.iteration,
            train_iters=int(iters) if iters else None,
            loss=last.loss,
            seconds_per_iteration=mean,
            samples_per_second=rate,
            tflops_per_gpu=rate * flops / world / 1e12 if rate and flops and world else None,
            eta_seconds=max(0.0, iters - last.iteration) * mean if iters and mean else None,
            goodput=self.goodput(now if end is None else end),
            checkpoint=saved.get("saved"),
            checkpoint_folder=saved.get("folder"),
            checkpoint_age=max(0.0, now - saved["time"]) if "time" in saved else None,
            recoveries=self.recoveries,
            microbatches_rerun=self.rerun,
        )

    def goodput(self, now: float) -> float | None:
        """See ``Training``; a recovery's seconds are not counted as work."""
        if self.start is None or now <= self.start["time"] or not self.start.get("replicas"):
            return None
        of = len(self.start["replicas"])
        work = sum(min(1.0, replicas / of) * seconds for replicas, seconds in self._worked) - self._recovering
        return min(1.0, max(0.0, work / (now - self.start["time"])))

    def _pace(self) -> Sequence[float]:
        return [step.seconds for step in list(self.recent)[1:]]

    def _samples(self) -> int:
        return self.recent[-1].consumed_samples - self.recent[0].consumed_samples


def worker_processes(folder: Path) -> dict[int, dict[str, Any]]:
    """Of workers.json, by worker id; empty where there is none."""
    try:
        entries = json.loads((folder / "workers.json").read_bytes())
        return {int(entry["worker_id"]): entry for entry in entries}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
