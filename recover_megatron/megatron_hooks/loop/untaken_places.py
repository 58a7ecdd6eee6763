"""Policy of a worker that failed to take its assigned place: offer itself again at once, offer itself later, or retire.

``MOST``: number of equal failures in a row after which the worker retires.
"""

from __future__ import annotations

from dataclasses import dataclass

from recover_megatron.instep.decision import Decision
from recover_megatron.membership.ending import alike
from recover_megatron.membership.records import EpochRevoked

MOST = 3
PAUSE_SECONDS = 10.0


@dataclass(eq=False)
class UntakenPlaces:
    """Count of one worker's failures to take a place; decides whether the worker offers itself again.

        it took the place                      its failures are forgotten
        the epoch ended first                  it offers itself again, and no failure is counted
        it failed with a new message           it offers itself again at once
        it failed with the same message        it offers itself again after ``PAUSE_SECONDS``: the cause may pass
        so ``MOST`` times in a row             it is retired: it waits for the end of the run, and is offered no place

    Attempts are limited because each costs all workers an epoch, which no user notices while the other workers train.
    If no other worker has a place, the run depends on this worker, so it tries until `edges` ends the run.
    """

    _text: str = ""
    _times: int = 0

    @property
    def pause(self) -> float:
        """Seconds to wait before the next offer."""
        return PAUSE_SECONDS if self._times > 1 else 0.0

    @property
    def retired(self) -> bool:
        """True if the worker is retired: it makes no further offer."""
        return self._times >= MOST

    def failed(self, error: Exception, decision: Decision) -> str:
        """Record that the worker did not take its place in ``decision``, because of ``error``; return a message."""
        others = set(decision.replicas) - set(decision.fresh)
        if not isinstance(error, EpochRevoked) and others:
            self._times = self._times + 1 if alike(str(error)) == self._text else 1
            self._text = alike(str(error))
        if self.retired:
            return f"it is retired after {MOST} failures in a row to take a place: {error}"
        return f"it could not take its place: {error}"

    def taken(self) -> None:
        self._times = 0
