"""What can end a worker's part in the training other than the end of the training."""

from __future__ import annotations


class InStepError(Exception):
    """Base of what this package raises for a state of the run."""


class Orphaned(InStepError):
    """This worker's replica is broken: another of its workers is gone.  The worker leaves the training and waits."""


class NoReplica(InStepError):
    """No complete replica is left, or fewer than the user wants: the run ends with exit code 10."""


class Disagreement(InStepError):
    """Workers tell of what no order of events explains, or a sum is not what was agreed: nothing is committed."""
