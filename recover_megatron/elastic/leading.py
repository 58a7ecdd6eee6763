"""Functions that the leading worker calls for all workers between two steps.

The leading worker is the worker with the lowest id among the holders of the run's state.

all call lead(f)    the leading worker calls f at once; the other workers keep f
a step is finished  the step's sum needed the leading worker, so f has returned: all workers drop f
the leader dies     the others join a new epoch; the new leading worker calls the functions that it has kept
leave()             a worker joins with ``leaving`` set, and leaves when no other worker needs it (`may_leave`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from recover_megatron.elastic.epoch_start import LatestState, Status
from recover_megatron.membership.records import CoordinatorLost, Fenced


class Leading:
    """Functions passed to ``lead`` since the last step, each kept until it has certainly returned."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, Callable[[], Any]]] = []
        self.calls = 0
        """Number of calls of ``lead`` since the last step."""
        self.unfinished = False
        """True if this worker must not leave yet, since another worker may need its state or its kept functions."""

    @property
    def todo(self) -> int:
        """Number of kept functions, which this worker must call if it leads."""
        return len(self._kept)

    @property
    def names(self) -> str:
        """Names of the kept functions, for messages."""
        return ", ".join(name for name, _ in self._kept)

    def add(self, function: Callable[[], Any], name: str) -> None:
        """Keep ``function`` until it has surely returned.  ``name``: for messages; "" for the function's own name."""
        self._kept.append((name or getattr(function, "__name__", "lead"), function))
        self.calls, self.unfinished = self.calls + 1, True

    def call(self, begin: Callable[[str], None], failed: Callable[[str, Exception], None]) -> None:
        """Call the kept functions in order, and drop each function that has returned.  Raises a function's errors.

        ``begin(name)`` is called before each function, and ``failed(name, error)`` if a function raises an error.
        """
        while self._kept:
            name, function = self._kept[0]
            begin(name)
            try:
                function()
            except (CoordinatorLost, Fenced):  # not an error of the function: this worker is no longer part of the run
                raise
            except Exception as error:
                failed(name, error)
                raise
            self._kept.pop(0)

    def forget(self) -> None:
        """Drop all functions.  Called after a finished step: they have returned, and all workers have the state."""
        self._kept.clear()
        self.calls, self.unfinished = 0, False


def may_leave(statuses: Mapping[int, Status], at: LatestState, completed: int) -> bool:
    """Return whether a worker whose last step is ``completed`` may leave.  ``statuses``: worker id -> status.

    The worker may leave if all workers have a state, and if the leading worker has completed the same step and has no
    function left to call.
    """
    lead = statuses[at.holders[0]]
    return lead.completed >= completed and not lead.todo and all(status.holds for status in statuses.values())
