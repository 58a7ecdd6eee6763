"""What Megatron's log has added up since its last row: it goes with the state of a worker, as the parameters do.

train() keeps it in a variable of its own, which is empty when train() is entered.  A worker that comes into the run, or
comes back, in the middle of an interval gets what its column has added up, so its row is that of the whole interval.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import get_timers

INTERVAL = "interval-time"
"""Megatron's timer of the time since the last row."""
CUMULATIVE = ("cumulative_correct_values", "cumulative_total_values")
"""What Megatron's log of multi-token prediction counts from the start of the run."""


class LogTotals:
    """What one worker's log has added up since its last row, and over which seconds."""

    def __init__(self) -> None:
        self._totals: dict[str, Any] = {}
        self._seconds = 0.0
        """Of the interval, those that its timer does not know of."""

    def take_up(self, totals: dict[str, Any]) -> None:
        """``totals``: train()'s variable, before an iteration is added to it."""
        if totals is not self._totals:
            totals.update(self._totals)
            self._totals = totals
            get_timers()(INTERVAL)._elapsed += self._seconds
            self._seconds = 0.0

    def pause(self) -> None:
        """The timers are about to be reset: train() was left."""
        self._seconds += _seconds()

    def tree(self) -> dict[str, Any]:
        """To be sent; see ``instep.transfer``.  Copies: they are added to while they are sent."""
        return {
            "totals": _copies(self._totals),
            "seconds": self._seconds + _seconds(),
            "cumulative": _copies({k: v for k, v in MTPLossLoggingHelper.tracker.items() if k in CUMULATIVE}),
        }

    def load(self, tree: dict[str, Any]) -> None:
        """Become what ``tree`` says, from the next iteration of train() on."""
        self._totals, self._seconds = _on_device(tree["totals"]), tree["seconds"] - _seconds()
        for name in CUMULATIVE:  # those of a state before the first count are none
            MTPLossLoggingHelper.tracker.pop(name, None)
        MTPLossLoggingHelper.tracker.update(_on_device(tree["cumulative"]))


def _seconds() -> float:
    timer = get_timers()._timers.get(INTERVAL)
    return 0.0 if timer is None else float(timer.elapsed(reset=False))


def _copies(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _on_device(values: dict[str, Any]) -> dict[str, Any]:
    # Clones: what has arrived is a part of the memory of the whole state.
    return {key: value.clone().cuda() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
