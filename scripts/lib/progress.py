"""Console output of a training: a table with some of its iterations, and a text for each recovery."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from recover_megatron.run_log.events import Lines
from recover_megatron.run_log.steps import StepRecord

_BAR_WIDTH = 30


class Progress:
    """Table on the console: turns steps into the lines to print."""

    def __init__(self, iterations: int, reference: float, rows: int) -> None:
        """``reference``: loss that fills the bar, the unigram entropy of the text; ``rows``: about how many lines."""
        self._iterations = iterations
        self._reference = reference
        self._every = max(1, iterations // rows)
        self._since: list[StepRecord] = []

    def header(self) -> str:
        """Return the first line of the table."""
        return f"{'iteration':>11}  {'loss':>6}  {'ms/iter':>7}  {'left':>6}  | = unigram entropy {self._reference:.2f}"

    def lines(self, steps: Iterable[StepRecord]) -> Iterable[str]:
        """Yield the lines after ``steps``: the mean loss since the last line, and the remaining time."""
        for step in steps:
            self._since.append(step)
            if step.iteration % self._every == 0 or step.iteration in (1, self._iterations):
                yield self._line(step)
                self._since.clear()

    def _line(self, step: StepRecord) -> str:
        loss = fmean(math.nan if s.loss is None else s.loss for s in self._since)
        seconds = fmean(s.seconds for s in self._since)
        left = round(seconds * (self._iterations - step.iteration))
        return (
            f"{step.iteration:>6}/{self._iterations:<4}  {loss:6.3f}  {seconds * 1000:7.0f}  "
            f"{left // 60:>3}:{left % 60:02}  {self._bar(loss)}"
        )

    def _bar(self, loss: float) -> str:
        if not loss < 1e9:  # NaN too
            return "?"
        filled = min(round(loss / self._reference * _BAR_WIDTH), 2 * _BAR_WIDTH)
        bar = f"{'#' * filled:<{_BAR_WIDTH}}"
        return bar[:_BAR_WIDTH] + "|" + bar[_BAR_WIDTH:]


def recoveries(events: Lines) -> Iterator[str]:
    """Yield a line for each loss of workers, recovery and new replica since ``events`` was read last."""
    for event in events.new()[1]:
        if text := describe(event):
            yield f"    >>>  {text}"


def describe(event: Mapping[str, Any]) -> str | None:
    """Describe an event of a training worker; None if it is not shown."""
    if event["event"] == "plan" and event.get("lost_workers"):
        gone = _names("worker", event["lost_workers"])
        left = _names("replica", event["replicas"])
        spares = f"; without a place: {_names('worker', event['spares'])}" if event.get("spares") else ""
        return f"iteration {event['iteration']}: {gone} lost; epoch {event['epoch']} continues with {left}{spares}"
    if event["event"] == "plan" and event.get("fresh"):
        together = (f"replica {fresh} of workers {event['grid'][str(fresh)]}" for fresh in event["fresh"])
        return f"iteration {event['iteration']}: epoch {event['epoch']} adds {', '.join(together)}"
    if event["event"] == "recovery":
        reran = [f"{_names('microbatch', ids)} by replica {who}" for who, ids in event.get("reran", {}).items()]
        again = f"run again: {', '.join(reran)}; " if reran else ""
        times = ", ".join(f"{phase} {seconds * 1000:.0f} ms" for phase, seconds in event["seconds"].items())
        return f"iteration {event['iteration']}: {again}finished ({times})"
    return None


def _names(what: str, ids: Sequence[int]) -> str:
    plural = {"microbatch": "microbatches"}.get(what, what + "s")
    return f"{what if len(ids) == 1 else plural} {', '.join(map(str, ids))}"
