"""Progress marks of a worker: what it does, so that who hangs is known, and where faults are injected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from recover_megatron.instep.hooks import Hooks
from recover_megatron.membership.session import Session

FIRST_SECONDS = 600.0
"""What a worker's first decision may take beyond the hang timeout between two marks: kernels are compiled in it."""


class Marks:
    """See the module's text."""

    def __init__(self, session: Session, hooks: Hooks) -> None:
        self.session = session
        self.hooks = hooks
        self.microbatch: int | None = None
        """The one that this worker has begun last."""
        self.tried: set[int] = set()
        """Those of the step under way that its replica has begun, as far as it knows, until the step is committed."""
        self.phase = ""
        """What it was doing when it last said so."""
        self.warm = False
        """Whether this worker has done all that is done for the first time only."""
        self._allow = 0.0

    def mark(self, phase: str, *, microbatch: int | None = None, waiting: bool = False, allow: float = 0.0) -> None:
        """Report progress: see ``Session.mark``."""
        self.microbatch, self.phase, self._allow = microbatch, phase, allow
        if microbatch is not None:
            self.tried.add(microbatch)
        if not self.warm:
            allow += FIRST_SECONDS
        self.session.mark(self.hooks.iteration(), phase, microbatch, waiting, allow)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Wait for others in the middle of a phase: so who hangs meanwhile is known by the wait."""
        phase, microbatch, allow = self.phase, self.microbatch, self._allow
        self.mark(what, microbatch=microbatch, waiting=True)
        try:
            yield
        finally:
            self.mark(phase, microbatch=microbatch, allow=allow)

    @contextmanager
    def storage(self, phase: str) -> Iterator[None]:
        """Wait for storage, in ``phase``: that is no computation, and what others wait for may take longer there."""
        before, microbatch, allow = self.phase, self.microbatch, self._allow
        self.mark(phase, microbatch=microbatch, allow=self.session.settings.stall_timeout)
        self.strike(phase)
        yield
        self.mark(before, microbatch=microbatch, allow=allow)

    def strike(self, phase: str, iteration: int | None = None) -> None:
        """Fault injection; ``iteration`` None: that under way."""
        self.hooks.strike(phase, iteration)
