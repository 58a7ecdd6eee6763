"""Functions that the leading worker calls for all between two steps; if it dies, the next leading worker does.

lead(f) on all      the leading worker calls f at once; the others keep it
a step finished     its sum needed that worker, which has completed f: all drop it
that worker died    the others join; the new leading worker calls the functions that it has kept
leave               all join, with ``leaving``, until `settled`: no worker leaves while another one needs it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from recover_megatron.elastic.epoch_start import Standing, Status
from recover_megatron.membership.records import CoordinatorLost, Fenced


class Leading:
    """Calls of ``lead`` since the last step, on this worker."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, Callable[[], Any]]] = []
        self.calls = 0
        """Number of calls of ``lead`` since the last step."""
        self.unsettled = False
        """True if workers may still need each other before this one leaves."""

    @property
    def todo(self) -> int:
        """Number of functions that this worker must call if it leads."""
        return len(self._kept)

    @property
    def names(self) -> str:
        """Names of these functions, for messages."""
        return ", ".join(name for name, _ in self._kept)

    def add(self, function: Callable[[], Any], name: str) -> None:
        """Keep ``function``, which one worker must call; ``name``: default is the function's name."""
        self._kept.append((name or getattr(function, "__name__", "lead"), function))
        self.calls, self.unsettled = self.calls + 1, True

    def call(self, begin: Callable[[str], None], failed: Callable[[str, Exception], None]) -> None:
        """Call the kept functions in order; each is kept until it returns.  Raises what a function raises."""
        while self._kept:
            name, function = self._kept[0]
            begin(name)
            try:
                function()
            except (CoordinatorLost, Fenced):  # this worker is no longer part of the run: not a fault of the function
                raise
            except Exception as error:
                failed(name, error)
                raise
            self._kept.pop(0)

    def forget(self) -> None:
        """Drop all functions after a finished step: they are done, and all workers have the state."""
        self._kept.clear()
        self.calls, self.unsettled = 0, False


def settled(statuses: Mapping[int, Status], at: Standing, completed: int) -> bool:
    """Return whether a worker that has finished its last step ``completed`` may leave; ``statuses``: of all workers.

    It may if the leading worker has completed that step and has no function left to call, and all have a state.
    """
    lead = statuses[at.holders[0]]
    return lead.completed >= completed and not lead.todo and all(status.holds for status in statuses.values())
