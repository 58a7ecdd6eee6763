"""Whether anybody is left who can go on, and for whom the run waits where all others are lost."""

from __future__ import annotations

from recover_megatron.membership.epochs import Epochs
from recover_megatron.membership.errors import EXIT_NO_REPLICA, RunOver
from recover_megatron.membership.events import Outbox
from recover_megatron.membership.exception_reports import ExceptionReports
from recover_megatron.membership.records import Workers, to_runs
from recover_megatron.membership.roster import Fate, Roster


class Survivors:
    """Those who hold the run's state, asked before a rendezvous is opened. Changes nothing but what is sent."""

    def __init__(self, roster: Roster, epochs: Epochs, exceptions: ExceptionReports, out: Outbox) -> None:
        self._roster = roster
        self._epochs = epochs
        self._exceptions = exceptions
        self._out = out

    def check(self, members: Workers, counted_on: Workers) -> None:
        """Raise RunOver where nobody of ``members``, the live of ``counted_on``, and no heir can go on."""
        roster, epochs = self._roster, self._epochs
        heirs = roster.heirs | (roster.returning if epochs.own else frozenset())
        if not members & epochs.formed.members and not heirs:  # newcomers alone have nothing to go on from
            if (counted_on - roster.idle(epochs.formed)) & roster.with_fate(Fate.LEFT):
                raise RunOver(0, "all workers have left")
            left = f"no live worker is left{self._exceptions.last_of(epochs.formed.members)}"
            if members - roster.newcomers | roster.with_fate(Fate.ASIDE):
                left = "all are lost who know what was committed last, the coordinator too; who lives was aside"
            raise RunOver(EXIT_NO_REPLICA, left)
        if epochs.finished:
            raise RunOver(0, "all workers that had a part in the work have left")

    def heirs(self, members: Workers) -> Workers:
        """The aside: they have to ask for a place before the next epoch, beside ``members`` of the last one.

        Where nobody lives who had a part in that epoch, all that is left of the run's state is what they hold. They
        may go on as any others may: if the rest is gone for certain. No rendezvous counts on one that has not asked:
        it would take it that it was never left out.
        """
        known = self._epochs.own or members & self._epochs.formed.members  # what was committed
        alone = known and not members & self._epochs.working
        return self._roster.with_fate(Fate.ASIDE) if alone else frozenset()

    def wait_for_heirs(self) -> None:
        """Nobody is there to open a rendezvous for, until one asks."""
        heirs = self._roster.heirs
        names = ", ".join(self._roster.workers[number].name for number in sorted(heirs)[:4])
        text = f"all others are lost: the run waits for {names}{' and others' * (len(heirs) > 4)}, set aside before"
        self._out.log("waits", workers=to_runs(heirs), reason=text)
        self._out.send(self._roster.node_agent_sessions, {"type": "tell", "text": text[:2000]})
