"""Policy of a worker that failed to take its assigned place: ask for a place again at once, ask again later, or retire.

``MOST``: number of failures in a row after which the worker retires, if their messages are the same.  Numbers and names
that differ between workers do not matter (``alike``).
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
    """Counter of one worker's failures to take a place, which decides whether the worker asks for a place again.

        the worker took the place              set the number of failures to 0
        the epoch ended first                  ask again; this does not count as a failure
        a failure with a new message           ask again at once
        a failure with the same message        ask again after ``PAUSE_SECONDS``, because the cause may pass
        the same message ``MOST`` times        retire: wait for the end of the run, and ask no more

    Attempts are limited because each attempt costs all workers an epoch, and the user may not notice the failures while
    the other workers train.  If no other worker has a place, the run needs this worker: its failures are not counted,
    and it asks until `edges` ends the run.
    """

    _text: str = ""
    _times: int = 0

    @property
    def pause(self) -> float:
        """Seconds to wait before the worker asks for a place again."""
        return PAUSE_SECONDS if self._times > 1 else 0.0

    @property
    def retired(self) -> bool:
        """True if the worker is retired: it asks for no further place."""
        return self._times >= MOST

    def failed(self, error: Exception, decision: Decision) -> str:
        """Record that the worker did not take its place in ``decision``, because of ``error``; return a message."""
        others = set(decision.replicas) - set(decision.fresh)
        if not isinstance(error, EpochRevoked) and others:
            self._times = self._times + 1 if alike(str(error)) == self._text else 1
            self._text = alike(str(error))
        if self.retired:
            return f"it is retired, because it failed {MOST} times in a row to take a place: {error}"
        return f"it could not take its place: {error}"

    def taken(self) -> None:
        self._times = 0
