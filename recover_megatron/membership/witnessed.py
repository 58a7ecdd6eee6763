"""What a coordinator does by the word of a witness (``witness``): when it asks, and what a testimony changes."""

from __future__ import annotations

from recover_megatron.membership.epochs import Epochs, Rendezvous
from recover_megatron.membership.events import Statement
from recover_megatron.membership.lateness import Lateness
from recover_megatron.membership.leadership import Leadership
from recover_megatron.membership.roster import Fate, Roster
from recover_megatron.membership.states import State


class Witnessed:
    """Of one coordinator. It calls for a new epoch in ``Roster.changes``."""

    def __init__(
        self, roster: Roster, leadership: Leadership, epochs: Epochs, rendezvous: Rendezvous, lateness: Lateness
    ) -> None:
        self._roster = roster
        self._leadership = leadership
        self._epochs = epochs
        self._rendezvous = rendezvous
        self._lateness = lateness
        self._witness = leadership.witness

    def look(self, state: State, now: float) -> None:
        """Called now and then, in any state: ask, where the answer matters."""
        stalled = state in (State.RENDEZVOUS, State.STEADY) and self._lateness.stall.since is not None
        too_few = state is State.RENDEZVOUS and self._rendezvous.too_few
        nobody_leads = state is State.STANDBY and self._leadership.lacks_members
        self._witness.ask(now, needed=stalled or too_few or nobody_leads)
        waiting = self._roster.newcomers - self._rendezvous.members
        if state is State.STEADY and any(self._witness.lets_in(number, self._epochs.formed) for number in waiting):
            self._roster.changes.append("newcomers that have waited may come in")

    def hear(self, testimony: Statement, state: State, now: float) -> None:
        """The witness has spoken: nobody waits any more for those that it says are lost.

        What it says holds for the next rendezvous: the launchers acknowledge that after this.
        """
        off = self._witness.hear(testimony)
        if not off or state not in (State.RENDEZVOUS, State.STEADY):
            return
        timeout = self._roster.settings.heartbeat_timeout
        for worker in list(self._roster.workers.values()):
            silent = worker.session is None or self._roster.silence(worker, now) > timeout
            if worker.node_agent in off and worker.fate is Fate.LIVE and silent:
                self._roster.exclude(worker, testimony.reason, now)
        if state is State.RENDEZVOUS:
            self._roster.changes.append(testimony.reason)
