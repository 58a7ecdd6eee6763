"""Everything that looks at a run: observers get a view of it, and the view remembers what the state does not tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recover_megatron.membership.drains import Drains
from recover_megatron.membership.epochs import Epochs, Rendezvous
from recover_megatron.membership.events import Outbox, State
from recover_megatron.membership.lateness import Lateness
from recover_megatron.membership.leadership import Leadership
from recover_megatron.membership.roster import Roster
from recover_megatron.membership.view import History, Observers, view


@dataclass(eq=False)
class Observing:
    """Reads the parts of one coordinator.  It changes none of them; what an observer asks of ``Drains`` may."""

    _roster: Roster
    _leadership: Leadership
    _epochs: Epochs
    _rendezvous: Rendezvous
    _lateness: Lateness
    _drains: Drains
    _out: Outbox
    history: History = field(default_factory=History, init=False)
    """To be told every record of the event log."""

    def __post_init__(self) -> None:
        self.observers = Observers(self._out)

    def view(self, state: State, now: float) -> dict[str, Any]:
        """What an observer is shown. Changes nothing."""
        opened, stall, term = self._rendezvous.opened, self._lateness.stall, self._leadership.term
        seen = view(self._roster, self._epochs, opened, stall, self.history, state.value, term, now)
        return {**seen, "drains": drains} if (drains := self._drains.rows()) else seen

    def asked(self, session: int, message: Mapping[str, Any], state: State, now: float) -> None:
        """Show an observer the state, after it has asked for a node to be drained; see ``view`` for what it may ask."""
        if not self.observers.ask(session, now):
            self._roster.refuse(session, "an observer that asks too often")
            return
        if message["type"] == "drain" and state is not State.STANDBY and not self._is_taking_over:
            self._drains.ask(message["node"], begun=self._epochs.own)
        self._out.send([session], self.view(state, now))
        self.observers.make_room()

    @property
    def _is_taking_over(self) -> bool:
        """Whether this coordinator leads a run that has begun, and does not know yet what its members have decided."""
        return self._epochs.formed.epoch > 0 and not self._epochs.own
