"""Sections: decisions other than a training step, run again from the start by whoever is left when a worker is lost.

What needs workers of all replicas is part of a *decision*: a training step (`step`), an evaluation, a checkpoint, a
barrier of all.  (What some of them do together between two decisions: `exchange`.)  Every worker passes the same
decisions in the same order and numbers them; a decision is over when all have reported it done (``agree``), and whoever
is told otherwise meets the others and, but for a step, starts it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recover_megatron.collectives.errors import EpochRevoked
from recover_megatron.instep.assignment import Assignment
from recover_megatron.instep.hooks import Hooks
from recover_megatron.instep.orphan import Orphan
from recover_megatron.instep.progress_reports import ProgressReports
from recover_megatron.instep.rendezvous import Rendezvous
from recover_megatron.instep.staging import Kept


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Sections:
    """Of one worker; its main thread calls it."""

    _hooks: Hooks
    _progress: ProgressReports
    _assignment: Assignment
    _orphan: Orphan
    _rendezvous: Rendezvous
    kind: str = field(default="", init=False)
    """What the last section was, or is."""
    kept: Kept = field(default_factory=Kept, init=False)
    """What operations of the present section wrote over."""

    def run(
        self, kind: str, run: Callable[[], Any], *, reset: Callable[[], None] = _nothing, together: bool = False
    ) -> Any:
        """Run something that needs all workers to its end; what ``run`` returned.

        ``run`` must either raise ``EpochRevoked`` or have no effect that a second run would double; ``reset`` undoes
        the rest, but for what operations over replicas wrote over their input: that is ``kept``.

        ``together``: in ``run`` the workers of a replica wait for each other, and ``run`` does not raise
        ``EpochRevoked``. So they begin it together, whichever of them knows already that the epoch is over.

        Raises as ``Rendezvous.meet`` does, and what ``run`` raises.
        """
        number = self._progress.begin()
        result = None
        self.kind = kind
        self.kept.forget()
        while True:
            try:
                if together:
                    self._orphan.leave_if_broken()
                else:
                    self._orphan.check()
                result = run()
                # Not left to ``agree``: the session may not have heard yet of what an operation of ``run`` has met (and
                # gone on after: ``Mode.DEFERRED``), and what is reported done counts in later epochs, too.
                self._orphan.check()
                if self._assignment.decision.at == number:
                    # The epoch was made in the middle of this section.  What is reported stays so: a column that had
                    # reported it could see it committed, by what others report now, while one of its members runs it
                    # again and needs the rest.  So nobody reports before all have run it again, and if it is committed
                    # what this run has returned counts, though this worker may not come to report it.
                    with self._progress.waiting(kind):
                        self._assignment.epoch_groups.any(False, tuple(sorted(self._assignment.live)))
                self._progress.agree(number)
                self.kept.forget()
                return result
            except EpochRevoked:
                if self._rendezvous.committed_before_the_end(number):
                    return result
                self._rendezvous.in_section(number)
                if self._assignment.committed(number):  # only when all had reported it done, this worker too
                    return result
                self.kept.restore()
                reset()
                self._hooks.log("again", what=kind)
