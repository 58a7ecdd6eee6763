"""Drains: requests that all workers leave a node before it is switched off, and the members' answers.

    observer: drain(name) --no such node, or no training yet--> REFUSED
        |
        v         the next plan sends the request to the members; one of them answers
      ASKED ----> MOVING --no worker of the node is live or in the last epoch--> DRAINED: may be switched off
        |           |
        '-----------'--the members need the node--> REFUSED and forgotten: it may be requested again

Only members know which state they hold, so the members decide, all in the same way (``workload.domains``), and remember
the accepted drains. Their statuses list these drains, so the next coordinator knows them. A request that the
members have not answered is lost if the coordinator is lost. The observer notices that, and repeats the request.

A worker's node is the name in its status, or its launcher's name. No name is used twice in a run (a launcher that joins
has a new one), so a drained node stays drained: none of its workers is admitted again. A new coordinator that does not
know of the drain yet may admit a worker of the node; that worker leaves with its first plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from recover_megatron.membership.epochs import Epochs
from recover_megatron.membership.events import Outbox
from recover_megatron.membership.messages import fields, to_member
from recover_megatron.membership.records import Json, WorkerId, Workers, to_runs
from recover_megatron.membership.roster import Fate, Member, Roster

MOST = 64
"""Maximum number of refusals that are remembered, and of node names in the text of a refusal."""
DRAINED = "is drained: it may be switched off"
"""Text that follows a node's name in the reason for an epoch, when the node's last worker has left."""


class DrainState(Enum):
    """State of a drain; the module's docstring shows the transitions."""

    ASKED = "asked"
    MOVING = "moving"
    DRAINED = "drained"
    REFUSED = "refused"


class Drains:
    """All drains that one coordinator knows."""

    def __init__(self, roster: Roster, epochs: Epochs, out: Outbox) -> None:
        self._roster = roster
        self._epochs = epochs
        self._out = out
        self._asked: list[str] = []
        self._accepted: set[str] = set()
        self._refused: dict[str, str] = {}  # requested name -> reason

    # -- requests and answers -----------------------------------------------------------------------------------------

    def ask(self, name: str, *, begun: bool) -> None:
        """Record an observer's request to drain the node ``name``, or all nodes of the host ``name``. Idempotent.

        ``begun``: True if this coordinator leads a run whose training has begun; otherwise the request is refused.
        """
        nodes = self._nodes_of(name)
        self._out.log("drain", node=name, nodes=nodes)
        if name not in nodes:  # ``name`` is a host: the states of its nodes replace an earlier refusal for the host
            self._refused.pop(name, None)
        if not begun:
            self._refuse(name, "the training has not begun")
        elif not nodes:
            known = ", ".join(self._nodes[:MOST])
            self._refuse(name, f"the run has no node or host of this name; its nodes: {known}")
        for node in nodes if begun else ():
            if node in self._asked or node in self._known_to_members:
                continue
            self._refused.pop(node, None)
            self._asked.append(node)
            self._roster.changes.append(f"node {node} must be drained")

    def to_decide(self, members: Iterable[WorkerId]) -> tuple[str, ...]:
        """Return the nodes, in order of request, whose drain the joined ``members`` must decide in the new epoch.

        An accepted drain that no member's status lists any more is also decided again. In that case the members have
        refused it later, but their answer was lost, because an epoch was being formed or the answering worker died.
        """
        if not self._accepted:
            return tuple(self._asked)
        statuses = {number: self._roster.workers[number].status for number in members}
        forgotten = self._accepted - draining_of({"statuses": statuses}) - {*self._asked}
        self._asked += sorted(node for node in forgotten if self._live(node))
        return tuple(self._asked)

    def answered(self, node: str, reason: str) -> None:
        """Record a member's answer about a drain; ``reason``: why the drain is refused; empty if it is accepted."""
        if node in self._asked:
            self._asked.remove(node)
        if reason:
            self.tell_launcher(node, stays=True)  # does nothing if the node is not being drained
            self._accepted.discard(node)
            self._refuse(node, reason)
        elif node not in self._accepted:
            self._accepted.add(node)
            self._out.log("draining", node=node)
            self.tell_launcher(node)
            self._roster.changes.extend(self.news_of(node))  # the node's spares may have left before this answer

    def tell_launcher(self, node: str, stays: bool = False) -> None:
        """If ``node`` is being drained, notify its launcher, so that the launcher starts no more workers.

        ``stays``: True if the drain is refused after all.
        """
        node_agent = self._roster.node_agents.get(node)
        if self.is_draining(node) and node_agent is not None and node_agent.session is not None:
            self._out.send([node_agent.session], to_member.Drain(stays))

    def _refuse(self, name: str, reason: str) -> None:
        self._out.log("drain_refused", node=name, reason=reason)
        self._refused.pop(name, None)
        self._refused[name] = reason
        while len(self._refused) > MOST:
            del self._refused[next(iter(self._refused))]

    # -- progress -----------------------------------------------------------------------------------------------------

    def is_draining(self, node: str) -> bool:
        """Return whether a node is being drained or has been drained."""
        return node in self._known_to_members

    def why_left(self, worker: Member) -> str:
        """Return why a worker left normally, for the log."""
        drained = worker.node in self._asked or self.is_draining(worker.node)
        return "its node was drained" if drained else "it had finished"

    def news_of(self, node: str) -> list[str]:
        """Return a reason for a new epoch if a drained node is empty now, but was in the last epoch; else no reason."""
        empty = self.is_draining(node) and not self._live(node)
        return [f"node {node} {DRAINED}"] if empty and self._workers_of(node) & self._epochs.formed.members else []

    def rows(self) -> fields.Rows:
        """Return one row for each requested drain: node, state, and live or set-aside workers, for observers."""
        shown = sorted({*self._asked, *self._known_to_members})
        rows: list[dict[str, Json]] = [
            {"node": node, "state": self._state(node).value, "workers": to_runs(self._live(node))} for node in shown
        ]
        refused: list[dict[str, Json]] = [
            {"node": name, "state": DrainState.REFUSED.value, "workers": [], "reason": reason}
            for name, reason in self._refused.items()
        ]
        hosts = {host: self._nodes_of(host) for host in {worker.host for worker in self._roster.workers.values()}}
        every = [*rows[:MOST], *refused]
        for row in every:
            row["names"] = [row["node"], *sorted(host for host, nodes in hosts.items() if row["node"] in nodes)]
        return every

    def _state(self, node: str) -> DrainState:
        if node in self._asked:
            return DrainState.ASKED
        counted_on = self._workers_of(node) & self._epochs.formed.members if self._epochs.own else frozenset({-1})
        return DrainState.MOVING if self._live(node) or counted_on else DrainState.DRAINED

    @property
    def _known_to_members(self) -> set[str]:
        """Nodes whose drain the members have accepted, in an answer or in the statuses with which they joined.

        A node is left out if a later answer refuses its drain, since a death may change the members' decision.
        """
        return (self._accepted | draining_of(self._epochs.plan)) - self._refused.keys()

    @property
    def _nodes(self) -> list[str]:
        return sorted({worker.node for worker in self._roster.workers.values() if worker.node})

    def _nodes_of(self, name: str) -> list[str]:
        # A member's status may list a node that had no worker left when this coordinator began to lead.
        known = name in self._nodes or name in self._known_to_members
        on_the_host = {worker.node for worker in self._roster.workers.values() if worker.host == name}
        return [name] if known else sorted(on_the_host - {""})

    def _workers_of(self, node: str) -> Workers:
        return frozenset(number for number, worker in self._roster.workers.items() if worker.node == node)

    def _live(self, node: str) -> Workers:
        """Return the node's live and set-aside workers. A set-aside worker comes back and leaves, or is evicted."""
        return self._workers_of(node) & (self._roster.with_fate(Fate.LIVE) | self._roster.with_fate(Fate.ASIDE))


def draining_of(plan: Json) -> set[str]:
    """Return the nodes whose drain the members had accepted, according to the statuses in a plan."""
    statuses = plan.get("statuses") if isinstance(plan, dict) else None
    found: set[str] = set()
    for status in statuses.values() if isinstance(statuses, dict) else ():
        names = status.get("draining") if isinstance(status, dict) else None
        if isinstance(names, Iterable) and not isinstance(names, (str, dict)):
            found |= {name for name in list(names)[:MOST] if isinstance(name, str) and len(name) <= 256}
    return found
