"""Where a worker is in the training, told to the coordinator: so who hangs is known, and where faults are injected.

Decisions are numbered by every worker in the same way (`sections`); the number counts steps, evaluations, checkpoints
and barriers of all together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from recover_megatron.instep.hooks import Hooks
from recover_megatron.membership.session import Session

FIRST_SECONDS = 600.0
"""What a worker's first decision may take beyond the hang timeout between two marks: kernels are compiled in it."""


class ProgressReports:
    """The decision that this worker works on, and what it does in it.  Written by the main thread."""

    def __init__(self, session: Session, hooks: Hooks) -> None:
        self._session = session
        self._hooks = hooks
        self.at = 0
        """The number of the decision under way, or of the last one; 0: there was none."""
        self.microbatch: int | None = None
        """The one that this worker has begun last."""
        self.tried: set[int] = set()
        """Those of the step under way that its replica has begun, as far as it knows, until the step is committed."""
        self.phase = ""
        """What it was doing when it last said so."""
        self._warm = False
        """Whether this worker has done all that is done for the first time only."""
        self._allow = 0.0

    def begin(self) -> int:
        """The number of the next decision, which begins."""
        self.at += 1
        self.tried.clear()
        return self.at

    def agree(self, number: int) -> None:
        """Report the decision done and wait for all; raises as ``Session.agree`` does."""
        self.inject("agree")
        self.mark("agree", waiting=True)
        self._session.agree(number)
        self._warm = True

    def begin_anew(self) -> None:
        """Until the next decision is done this worker may take as long as in its first one.

        A worker that joined the run late compiles its kernels then, and those of its replica wait for it within theirs.
        """
        self._warm = False

    def mark(self, phase: str, *, microbatch: int | None = None, waiting: bool = False, allow: float = 0.0) -> None:
        """Report progress: see ``Session.mark``.  ``allow``: seconds beyond the hang timeout until the next mark."""
        self.microbatch, self.phase, self._allow = microbatch, phase, allow
        if microbatch is not None:
            self.tried.add(microbatch)
        self._session.mark(self._hooks.iteration(), phase, microbatch, waiting, self.allowed)

    @property
    def allowed(self) -> float:
        """The seconds beyond the hang timeout that what this worker does now may take until its next mark."""
        return self._allow + (0.0 if self._warm else FIRST_SECONDS)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark as waiting for others, within a phase: a hang is then blamed on whom this worker waits for."""
        phase, microbatch, allow = self.phase, self.microbatch, self._allow
        self.mark(what, microbatch=microbatch, waiting=True)
        try:
            yield
        finally:
            self.mark(phase, microbatch=microbatch, allow=allow)

    @contextmanager
    def storage(self, phase: str) -> Iterator[None]:
        """Mark as waiting for storage, in ``phase``: the stall timeout is allowed on top of the hang timeout."""
        before, microbatch, allow = self.phase, self.microbatch, self._allow
        self.mark(phase, microbatch=microbatch, allow=self._session.settings.stall_timeout)
        self.inject(phase)
        yield
        self.mark(before, microbatch=microbatch, allow=allow)

    def inject(self, phase: str, iteration: int | None = None) -> None:
        """Inject a fault if one is due in this phase of ``iteration``; None: of that under way."""
        self._hooks.inject(phase, iteration)
