"""The progress of a training, for a person who watches: a table with a line now and then."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean

from recover_megatron.run_log.steps import StepRecord

_ROWS = 25
_BAR_WIDTH = 30


class Progress:
    """Turns steps into the lines to print."""

    def __init__(self, iterations: int, reference: float, rows: int = _ROWS) -> None:
        """``reference`` is the loss that fills the bar: the unigram entropy of the text; ``rows``: about so many."""
        self._iterations = iterations
        self._reference = reference
        self._every = max(1, iterations // rows)
        self._since: list[StepRecord] = []

    def header(self) -> str:
        """The first line of the table."""
        return f"{'iteration':>11}  {'loss':>6}  {'ms/iter':>7}  {'left':>6}  | = unigram entropy {self._reference:.2f}"

    def lines(self, steps: Iterable[StepRecord]) -> Iterable[str]:
        """The lines that are due after ``steps``: the mean loss since the last line, and the time that is left."""
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
        bar = "#" * filled
        return (
            bar + " " * (_BAR_WIDTH - filled) + "|"
            if filled < _BAR_WIDTH
            else bar[:_BAR_WIDTH] + "|" + bar[_BAR_WIDTH:]
        )
