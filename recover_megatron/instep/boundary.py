"""The boundary before a step: where a plan has said that spares make new replicas, all meet there once more.

The plan of that epoch places them, and the step that follows is their first decision.  Where states are compared
(``verify_interval``) all meet there anyway, and the plan finds who differs from its column (`plan`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recover_megatron.instep.assignment import Assignment
from recover_megatron.instep.hooks import Hooks
from recover_megatron.instep.progress_reports import ProgressReports
from recover_megatron.instep.rendezvous import Rendezvous


@dataclass(eq=False)
class Boundary:
    """Of one worker; its main thread calls it.  ``verify_interval``: iterations between comparisons; 0: none."""

    _hooks: Hooks
    _progress: ProgressReports
    _assignment: Assignment
    _rendezvous: Rendezvous
    verify_interval: int
    _verified: int = field(default=0, init=False)
    """The iteration before which states were compared last."""

    def meet_if_wanted(self, prepare: Callable[[], Any]) -> None:
        """Meet the others once more if a plan has called for it; raises as ``Rendezvous.meet`` does.

        ``prepare`` is called before and must be made of sections: what must not wait until new mates are here.
        """
        mine = self._assignment
        while self._wanted():
            before = mine.decision
            prepare()
            if mine.decision is before:
                self._verified = self._hooks.iteration()
                self._rendezvous.before_step(self._next, self._hooks.digest())
        mine.shares.easing = mine.decision.at == self._next and bool(mine.decision.transfers)

    @property
    def _next(self) -> int:
        """The number of the step that follows."""
        return self._progress.at + 1

    def _wanted(self) -> bool:
        decision = self._assignment.decision
        if self._assignment.begun_by_others(self._next):
            return False  # there will be another boundary
        if decision.at == self._next and decision.version is not None:
            return False  # the epoch was made for this boundary
        if decision.regroup:
            return True
        return self.verifying and self._verified != self._hooks.iteration()

    @property
    def verifying(self) -> bool:
        """Whether states are compared before the step of this iteration."""
        return self.verify_interval > 0 and self._hooks.iteration() % self.verify_interval == 0

    @property
    def joining_next(self) -> bool:
        """Whether the step that follows is one that others have begun, or some begin without a state."""
        decision = self._assignment.decision
        return self._assignment.begun_by_others(self._next) or (decision.at == self._next and bool(decision.fresh))

    @property
    def in_section_of_others(self) -> bool:
        """Whether the epoch was made while others were in a section that comes before the next step."""
        decision = self._assignment.decision
        return decision.at == self._next and not decision.step and decision.version is None
