"""What can end a wait on the control plane other than its result."""

from __future__ import annotations

EXIT_SAME_FAULT = 1
"""Exit code of a run that an exception ended which every worker would raise."""
EXIT_NO_REPLICA = 10
"""Exit code of a run that has too few live workers left for one replica."""
EXIT_LOST_MAJORITY = 11
"""Exit code of a worker or a run that no coordinator may continue."""
EXIT_STATE_LOST = 12
"""Exit code of a run whose live workers do not hold the whole state between them."""
EXIT_FENCED = 13
"""Exit code of a worker that finds itself out of the run; the run itself goes on without it."""


class MembershipError(Exception):
    """Base of everything this package raises for a state of the run (never for a programming error)."""


class EpochRevoked(MembershipError):
    """The epoch in which the operation was started is over; ``join`` the next one with your status."""

    def __init__(self, epoch: int, reason: str = "") -> None:
        super().__init__(f"epoch {epoch} was revoked" + (f": {reason}" if reason else ""))
        self.epoch = epoch
        self.reason = reason


class Fenced(MembershipError):
    """This worker is out of the run for good: end the process (exit code ``EXIT_FENCED``), the others go on."""


class CoordinatorLost(MembershipError):
    """No coordinator may continue the run for this worker; ``code`` is the exit code to end with.

    ``by``: the worker whose word ended the run for all (``give_up``, ``report_exception``); None: it was no worker's.
    ``told``: whether a coordinator has said so; else none was reached, and the run may go on, or have ended well.
    """

    def __init__(
        self, message: str, code: int = EXIT_LOST_MAJORITY, by: int | None = None, *, told: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.by = by
        self.told = told


class SecretError(MembershipError):
    """The job's secret is missing, unreadable, too short, or readable by others; the message says what to do."""


class AuthenticationError(MembershipError):
    """The other side of a connection does not know the job's secret."""


class NoPlan(Exception):
    """Raised by a planner when the survivors cannot go on; the run stops with ``code`` and the message."""

    def __init__(self, message: str, code: int = EXIT_NO_REPLICA) -> None:
        super().__init__(message)
        self.code = code


class RunOver(Exception):
    """Raised within a coordinator: the run ends here, with exit code ``code``, and everybody is told why.

    ``by``: the worker whose word it is; None: it is the coordinator's own.
    """

    def __init__(self, code: int, reason: str, by: int | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.by = by
