"""Functions that one worker calls for all between two steps, and the next worker that leads if the first one dies.

lead(f) on all      the worker that leads calls f at once; the others keep it
a step finished     its sum needed that worker, which has been through f: all forget it
that worker died    the others join; the one that leads now calls what it has kept
leave               all join, with ``leaving``, until `settled`: nobody takes anything along that another one needs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from recover_megatron.elastic.standing import Standing, Status
from recover_megatron.membership.records import CoordinatorLost, Fenced


class Leading:
    """The calls of ``lead`` since the last step, on this worker."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, Callable[[], Any]]] = []
        self.calls = 0
        """The number of calls of ``lead`` since the last step."""
        self.unsettled = False
        """Whether another worker may still need something of this one, or this one of another, before it leaves."""

    @property
    def todo(self) -> int:
        """The number of functions that this worker would have to call if it led."""
        return len(self._kept)

    @property
    def names(self) -> str:
        """Their names, for people."""
        return ", ".join(name for name, _ in self._kept)

    def add(self, function: Callable[[], Any], name: str) -> None:
        """Keep ``function``, which some worker is to call; ``name``: default is the function's."""
        self._kept.append((name or getattr(function, "__name__", "lead"), function))
        self.calls, self.unsettled = self.calls + 1, True

    def call(self, begin: Callable[[str], None], failed: Callable[[str, Exception], None]) -> None:
        """Call what is kept, in order; each is kept until it returns.  Raises what it raises."""
        while self._kept:
            name, function = self._kept[0]
            begin(name)
            try:
                function()
            except (CoordinatorLost, Fenced):  # this worker has no part in the run any more: no fault of the function
                raise
            except Exception as error:
                failed(name, error)
                raise
            self._kept.pop(0)

    def forget(self) -> None:
        """A step is finished: all that was asked for before is done, and all workers have the state."""
        self._kept.clear()
        self.calls, self.unsettled = 0, False


def settled(statuses: Mapping[int, Status], at: Standing, completed: int) -> bool:
    """Whether a worker that has completed ``completed`` steps, its last, may leave: ``statuses`` are all workers'.

    The worker that leads has been through the loop after that step and has nothing left to do, and all have a state.
    """
    lead = statuses[at.holders[0]]
    return lead.completed >= completed and not lead.todo and all(status.holds for status in statuses.values())
