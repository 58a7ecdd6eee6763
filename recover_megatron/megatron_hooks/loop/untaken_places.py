"""The policy of a worker that could not take the place it was given: offer itself again at once, later, or no more."""

from __future__ import annotations

from dataclasses import dataclass

from recover_megatron.instep.decision import Decision
from recover_megatron.membership.ending import alike
from recover_megatron.membership.records import EpochRevoked

MOST = 3
PAUSE_SECONDS = 10.0


@dataclass(eq=False)
class UntakenPlaces:
    """The places that one worker was given and could not take: whether it offers itself again.

        taken                                  nothing is held against it any more
        the epoch ended first                  it offers itself again: another's affair
        failed, in words that are new          again, at once
        failed in the same words               again, after ``PAUSE_SECONDS``: it may pass
        for the ``MOST``-th time in a row      it is put aside: it waits for the end of the run, and is offered no place

    Each try costs all an epoch, and nobody would notice, since the others train on.  Where nobody else has a place the
    run itself is at stake: it is tried on, until `edges` ends it.
    """

    _text: str = ""
    _times: int = 0

    @property
    def pause(self) -> float:
        """Seconds to wait before it offers itself again."""
        return PAUSE_SECONDS if self._times > 1 else 0.0

    @property
    def aside(self) -> bool:
        """Whether it does not do so any more."""
        return self._times >= MOST

    def failed(self, error: Exception, decision: Decision) -> str:
        """``error`` has kept it from the place that ``decision`` gave it; what to tell people."""
        others = set(decision.replicas) - set(decision.fresh)
        if not isinstance(error, EpochRevoked) and others:
            self._times = self._times + 1 if alike(str(error)) == self._text else 1
            self._text = alike(str(error))
        if self.aside:
            return f"it is put aside: {MOST} times in a row it could not take a place: {error}"
        return f"it could not take its place: {error}"

    def taken(self) -> None:
        self._times = 0
