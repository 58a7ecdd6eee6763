"""What can end a worker's part in the training other than the end of the training."""

from __future__ import annotations

from recover_megatron.membership.errors import EXIT_NO_REPLICA, EXIT_STATE_LOST

EXIT_REFUSED = 2
"""That of a worker whose flags are wrong, or not those of the run; nobody is started in its place."""


class InStepError(Exception):
    """Base of what this package raises for a state of the run."""


class Orphaned(InStepError):
    """This worker's replica is broken: another of its workers is gone.  The worker leaves the training and waits."""


class NoReplica(InStepError):
    """No complete replica is left, or fewer than the user wants: the run ends with exit code 10."""

    code = EXIT_NO_REPLICA


class Disagreement(InStepError):
    """Workers tell of what no order of events explains, or a sum is not what was agreed: nothing is committed."""


class StateLost(InStepError):
    """Workers enough for a replica live, but nobody holds the state of one of its positions: exit code 12."""

    code = EXIT_STATE_LOST


class RunOver(InStepError):
    """The run is over for this worker, which has no place: ``code`` is the exit code, the text says why."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Drained(RunOver):
    """This worker's node is drained: it has left the run in order, which goes on without it."""

    def __init__(self, node: str) -> None:
        super().__init__(0, f"node {node} is drained")


class OtherFlags(RunOver):
    """This worker was started with other flags than the run: exit code 2.  The run goes on without it."""

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_REFUSED, reason)


class OtherPosition(InStepError):
    """This worker is wanted in another position: it builds the model of ``position``, and comes back."""

    def __init__(self, position: int) -> None:
        super().__init__(f"position {position} is wanted of this worker")
        self.position = position


class CheckpointFailed(InStepError):
    """A checkpoint cannot be written.  ``own``: by this worker; others can."""

    def __init__(self, message: str, *, own: bool) -> None:
        super().__init__(message)
        self.own = own


class UnknownOperation(InStepError):
    """An operation over replicas inside a step, of which the recovery does not know what it is for: exit code 1."""
