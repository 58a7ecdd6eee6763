"""The candidates that joined a run after its launch: who leads keeps their list, and tells it to everybody.

    launcher that joins: candidate(address) ---> coordinator ---candidates(added...)---> all members, and who attaches

The candidates of the launch are known to all from the start; nodes are lost and replaced, so in a long run none of them
may be left.  Any process that members turn to may lead, since a candidate promises nothing and what binds is what the
members hold (``quorum``): the list decides where members look for a coordinator, never who may lead.  Members whose
lists differ for a moment look in different places first, and meet where there is a candidate at all.

Only this coordinator's list counts: members forget those of its predecessor.  It need not be kept, for every launcher
tells each new coordinator of its candidate.  A launcher that is not connected has none.
"""

from __future__ import annotations

from typing import Any

from recover_megatron.membership.events import Outbox
from recover_megatron.membership.records import MOST_ADDED
from recover_megatron.membership.roster import NodeAgentStatus, Roster

Address = tuple[str, int]


class AddedCandidates:
    """The list of one coordinator.

    ``lease`` and ``slack``: what candidates of this run share (``quorum.standing``), for the launchers; None: nothing.
    """

    def __init__(self, roster: Roster, out: Outbox, lease: str | None, slack: int | None, witnessed: bool) -> None:
        """``witnessed``: whether the run has a witness."""
        self._roster = roster
        self._out = out
        self._shared: dict[str, Any] = {} if lease is None else {"lease": lease, "slack": slack or 0}
        self._shared |= {"witnessed": True} if witnessed else {}
        self._told: dict[str, tuple[NodeAgentStatus, Address]] = {}
        """By the name of the node, in the order in which they came; only those of launchers that joined."""
        self._leads = False
        self._listed: list[Address] = []

    def has(self, node_agent: NodeAgentStatus, address: Address) -> None:
        """A launcher has a candidate."""
        self._told[node_agent.node] = node_agent, address
        self._tell_if_changed()

    def look(self) -> None:
        """Called now and then: leave out those whose launcher's session has ended, by whatever, its silence too."""
        gone = [node for node, (node_agent, _) in self._told.items() if node_agent.session is None]
        for node in gone:
            del self._told[node]
        self._tell_if_changed()

    def _tell_if_changed(self) -> None:
        if self._leads and self._listed != self._list:
            self._listed = self._list
            self._out.log("candidates", added=[f"{host}:{port}" for host, port in self._listed])
            for session in list(self._roster.sessions):
                self.greet(session)

    def lead(self) -> None:
        """This candidate leads from now on: everybody is told, launchers also what a candidate needs to know."""
        self._leads = True
        self._listed = self._list
        for session in list(self._roster.sessions):
            self.greet(session)

    def greet(self, session: int) -> None:
        """Tell who has just attached, and was not turned away, if this candidate leads."""
        peer = self._roster.sessions.get(session)
        if self._leads and peer is not None:
            more = self._shared if isinstance(peer, NodeAgentStatus) else {}
            self._out.send([session], {**self._message, **more})

    @property
    def _list(self) -> list[Address]:
        return [address for _, address in self._told.values()][:MOST_ADDED]

    @property
    def _message(self) -> dict[str, Any]:
        return {"type": "candidates", "added": [list(a) for a in self._listed], "world": self._roster.world}
