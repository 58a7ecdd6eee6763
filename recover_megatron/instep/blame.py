"""Whether this worker's mates may be to blame for what it met, and for how long that is believed.

An operation on a group that fails while a mate is being lost fails by that, whatever its words are.  One that fails in
words of a lost connection is taken for the end of a mate before that is known, and the worker waits for another
replica.  Where its mates live and the iteration fails in the same way again and again, nobody's end explains it: then
it is a fault of the work (two workers that do not agree on a shape), and is told as one.
"""

from __future__ import annotations

from recover_megatron.instep.faults import Orphaned, is_communication, is_in_a_group, is_of_device, is_own
from recover_megatron.instep.orphan import BLAME_SECONDS
from recover_megatron.instep.recovery import Recovery

UNEXPLAINED = 2
"""How often in one iteration a replica's communication may fail while all of its workers live."""


class Blame:
    """Judges the errors of one worker, and remembers how often they were unexplained in this iteration."""

    def __init__(self) -> None:
        self._iteration = 0
        self._unexplained = 0
        self._judged: tuple[BaseException | None, bool] = (None, False)

    def of_mates(self, error: BaseException, recovery: Recovery) -> bool:
        """Whether ``error`` is no fault of this worker and its work: its replica is broken, or seems to be.

        May wait for the news of a death, once for an error.  Raises as ``Session.wait_lost`` does.
        """
        if self._judged[0] is not error:
            self._judged = error, self._is_of_mates(error, recovery)
        return self._judged[1]

    def _is_of_mates(self, error: BaseException, recovery: Recovery) -> bool:
        if isinstance(error, Orphaned):
            return True
        if is_of_device(error):  # of an orphan, too: with this device it could only wait, and nobody would replace it
            return False
        if recovery.orphan.orphaned:
            return True
        if len(recovery.assignment.grid.replicas[0]) == 1:
            return False
        if is_communication(error):
            if self._iteration != recovery.hooks.iteration() or self._unexplained < UNEXPLAINED:
                return True
        elif is_own(error) or not is_in_a_group(error):
            return False
        # Not until an epoch is revoked: that may be for others' sake, and before the news of a mate's death.
        return recovery.session.wait_lost(recovery.assignment.mates, BLAME_SECONDS)

    def left(self, recovery: Recovery) -> None:
        """This worker has left the training because of such an error, and has waited for the news of a death."""
        iteration = recovery.hooks.iteration()
        if self._iteration != iteration:
            self._iteration, self._unexplained = iteration, 0
        if not recovery.assignment.lost_mates:
            self._unexplained += 1
