"""A launcher's side as a state machine without I/O: what a node agent says and hears beside following."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recover_megatron.membership.events import Connected, MemberEffect, MemberEvent, Notify, Say
from recover_megatron.membership.follower import Follower
from recover_megatron.membership.records import Settings, WorkerId, Workers, from_runs, to_runs


class NodeAgentClient(Follower):
    """A launcher: speaks for the processes of its node, kills those that are put out."""

    def __init__(
        self, node: str, incarnation: str, candidates: int, settings: Settings, now: float, *, late: bool = False
    ) -> None:
        hello = {"type": "attach_node_agent", "node": node, "incarnation": incarnation}
        super().__init__(hello, candidates, settings, now, late=late)
        self.planned: Workers = frozenset()
        """The workers that were in any plan."""
        self._running: set[WorkerId] = set()
        self.condemned: Workers = frozenset()
        """The workers of this node or others that are to be killed, as far as this launcher was told."""
        self._ended: dict[WorkerId, str] = {}
        self._stopping = 0
        self._own: tuple[str, int] | None = None  # the candidate here, if it was added after the launch
        self._unanswered = 0  # beats

    def stopping(self, signal: int) -> list[MemberEffect]:
        """Report that somebody has told this launcher to end its workers; every coordinator from now on is told."""
        self._stopping = signal
        self._effects = []
        if self._connected:
            self._say({"type": "stopping", "signal": signal})
        return self._effects

    def hosts(self, address: tuple[str, int]) -> list[MemberEffect]:
        """Report a candidate that was started here after the launch; every coordinator from now on is told."""
        self._own = address
        self._effects = []
        if self._connected:
            self._say({"type": "candidate", "address": list(address)})
        return self._effects

    def ended(self, worker: WorkerId, how: str) -> list[MemberEffect]:
        """Report that a worker's process has ended; every coordinator attached to from now on is told."""
        self._ended[worker] = how
        self._running.discard(worker)
        self._effects = []
        if self._connected:
            self._say({"type": "ended", "worker": worker, "how": how})
        return self._effects

    @property
    def ended_here(self) -> Workers:
        """The workers whose end was reported."""
        return frozenset(self._ended)

    def spawned(self, worker: WorkerId, pid: int) -> list[MemberEffect]:
        """Report a worker's process: whoever leads knows then who can tell of its end."""
        self._running.add(worker)
        return [Say({"type": "spawned", "worker": worker, "pid": pid})] if self._connected else []

    def handle(self, event: MemberEvent, now: float) -> list[MemberEffect]:
        """As ``Follower.handle``; the deaths seen are told to each coordinator anew."""
        effects = super().handle(event, now)
        if isinstance(event, Connected):
            self._unanswered = 0
            self._say(self.beat)
            if self._own is not None:
                self._say({"type": "candidate", "address": list(self._own)})
            if self._stopping:
                self._say({"type": "stopping", "signal": self._stopping})
            for worker, how in self._ended.items():
                self._say({"type": "ended", "worker": worker, "how": how})
        return effects

    def _attach_message(self) -> dict[str, Any]:
        return {**super()._attach_message(), "running": to_runs(self._running)}

    @property
    def up_to_date(self) -> bool:
        """Whether a coordinator is reached, and all is heard that it said before it got the last beat."""
        return self._connected and self._unanswered <= 0

    def ask(self) -> list[MemberEffect]:
        """Have the coordinator answer; it is ``up_to_date`` again with the answer."""
        self._effects = []
        if self._connected:
            self._say(self.beat)
        return self._effects

    def _say(self, message: Mapping[str, Any]) -> None:
        self._unanswered += message["type"] == "beat"
        super()._say(message)

    def _on(self, message: Mapping[str, Any], now: float) -> None:
        self._unanswered -= message["type"] == "beat"
        if message["type"] == "kill":
            self.condemned |= {message["worker"], *from_runs(message.get("with", []))}
        super()._on(message, now)

    def overhear(self, message: Mapping[str, Any]) -> None:
        """Present to the next coordinator what the last one may count on (``Rendezvous._acknowledged``)."""
        if message["type"] == "revoke" and message["term"] >= self.presentation.term:
            self.presentation.term = message["term"]
            self._opened(message)

    def _planned(self, message: Mapping[str, Any]) -> None:
        self.planned |= self.presentation.formed.members

    def _revoked(self, message: Mapping[str, Any]) -> None:
        self._say({"type": "ack", "epoch": message["epoch"], "term": message["term"]})
        self._effects.append(Notify("opened", {"epoch": message["epoch"]}))
