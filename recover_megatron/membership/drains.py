"""Nodes that somebody is about to switch off: what was asked of the run, what its members have answered, what is left.

    observer: drain(name) --no such node, or no training yet--> REFUSED
        |
        v         the next plan tells the members, one of which answers
      ASKED ----> MOVING --none of its workers lives, nor is in the last epoch--> DRAINED: it may be switched off
        |           |
        '-----------'--the members cannot do without it--> REFUSED, and forgotten: it may be asked again

Only members know what they hold, so they decide, all alike (``workload.domains``), and remember what they have
accepted: their statuses tell it, so the next coordinator knows it. What was only asked is lost with a coordinator; the
observer sees that, and asks again.

A worker's node is the name that its status tells, or its launcher's. No name is used twice in a run (who joins it has a
new one), so a node that was drained stays so: nobody of it is let in. A new coordinator that does not know of it yet
may let one in, which leaves with its first plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from recover_megatron.membership.epochs import Epochs
from recover_megatron.membership.events import Outbox
from recover_megatron.membership.records import Json, WorkerId, Workers, to_runs
from recover_megatron.membership.roster import Fate, Member, Roster

MOST = 64
"""So many refusals are remembered, and so many names of nodes are told in one."""
DRAINED = "is drained: it may be switched off"
"""After a node's name: why an epoch is opened when the last of its workers has left."""


class DrainState(Enum):
    """See the drawing above."""

    ASKED = "asked"
    MOVING = "moving"
    DRAINED = "drained"
    REFUSED = "refused"


class Drains:
    """What one coordinator knows of them."""

    def __init__(self, roster: Roster, epochs: Epochs, out: Outbox) -> None:
        self._roster = roster
        self._epochs = epochs
        self._out = out
        self._asked: list[str] = []
        self._accepted: set[str] = set()
        self._refused: dict[str, str] = {}  # by the name that was asked for

    # -- what is asked, and answered ----------------------------------------------------------------------------------

    def ask(self, name: str, *, begun: bool) -> None:
        """Somebody wants the node ``name`` drained, or all nodes of a host of that name; asking again changes nothing.

        ``begun``: this coordinator leads a run whose training has begun.
        """
        nodes = self._nodes_of(name)
        self._out.log("drain", node=name, nodes=nodes)
        if name not in nodes:  # of a host, told before: what becomes of its nodes is told now
            self._refused.pop(name, None)
        if not begun:
            self._refuse(name, "the training has not begun")
        elif not nodes:
            known = ", ".join(self._nodes[:MOST])
            self._refuse(name, f"the run has no node and no host of this name; its nodes: {known}")
        for node in nodes if begun else ():
            if node in self._asked or node in self._known_to_members:
                continue
            self._refused.pop(node, None)
            self._asked.append(node)
            self._roster.changes.append(f"node {node} is to be drained")

    def to_decide(self, members: Iterable[WorkerId]) -> tuple[str, ...]:
        """What ``members``, who have joined, have to decide in the epoch that is formed now, in the order asked.

        Asked again, too: what they had accepted, and none of them tells any more. They have refused it since, and the
        answer was not heard: it came while an epoch was being made, or its teller died.
        """
        statuses = {number: self._roster.workers[number].status for number in members}
        forgotten = self._accepted - draining_of({"statuses": statuses}) - {*self._asked}
        self._asked += sorted(node for node in forgotten if self._live(node))
        return tuple(self._asked)

    def answered(self, node: str, reason: str) -> None:
        """A member tells what the present epoch has decided of a node; ``reason``: why it is refused, else empty."""
        if node in self._asked:
            self._asked.remove(node)
        if reason:
            self.tell_launcher(node, stays=True)  # nothing, unless it was told otherwise
            self._accepted.discard(node)
            self._refuse(node, reason)
        elif node not in self._accepted:
            self._accepted.add(node)
            self._out.log("draining", node=node)
            self.tell_launcher(node)
            self._roster.changes.extend(self.news_of(node))  # its spares may have left before this was told

    def tell_launcher(self, node: str, **more: bool) -> None:
        """Have the launcher of a node that is being drained start no more workers; nothing for another one."""
        node_agent = self._roster.node_agents.get(node)
        if self.is_draining(node) and node_agent is not None and node_agent.session is not None:
            self._out.send([node_agent.session], {"type": "drain", **more})

    def _refuse(self, name: str, reason: str) -> None:
        self._out.log("drain_refused", node=name, reason=reason)
        self._refused.pop(name, None)
        self._refused[name] = reason
        while len(self._refused) > MOST:
            del self._refused[next(iter(self._refused))]

    # -- what is left -------------------------------------------------------------------------------------------------

    def is_draining(self, node: str) -> bool:
        """Whether a node is being drained, or was."""
        return node in self._known_to_members

    def why_left(self, worker: Member) -> str:
        """For people: why a worker leaves in order."""
        drained = worker.node in self._asked or self.is_draining(worker.node)
        return "its node was drained" if drained else "it had finished"

    def news_of(self, node: str) -> list[str]:
        """Why an epoch is to be opened: the last one still counts on workers of the node, of which none is left."""
        empty = self.is_draining(node) and not self._live(node)
        return [f"node {node} {DRAINED}"] if empty and self._workers_of(node) & self._epochs.formed.members else []

    def rows(self) -> list[Json]:
        """For observers: what became of all that was asked."""
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
        """The nodes that the members have agreed to do without, by their answer or by what they joined with.

        Not those that their last answer refuses: a death may change their mind.
        """
        return (self._accepted | draining_of(self._epochs.plan)) - self._refused.keys()

    @property
    def _nodes(self) -> list[str]:
        return sorted({worker.node for worker in self._roster.workers.values() if worker.node})

    def _nodes_of(self, name: str) -> list[str]:
        # The members may remember a node of which nobody was left when this coordinator came to lead.
        known = name in self._nodes or name in self._known_to_members
        on_the_host = {worker.node for worker in self._roster.workers.values() if worker.host == name}
        return [name] if known else sorted(on_the_host - {""})

    def _workers_of(self, node: str) -> Workers:
        return frozenset(number for number, worker in self._roster.workers.items() if worker.node == node)

    def _live(self, node: str) -> Workers:
        """With those aside: they come back, and leave then, or are put out."""
        return self._workers_of(node) & (self._roster.with_fate(Fate.LIVE) | self._roster.with_fate(Fate.ASIDE))


def draining_of(plan: Json) -> set[str]:
    """What the members of a plan have agreed to before, bounded; empty where its statuses tell nothing of it."""
    statuses = plan.get("statuses") if isinstance(plan, dict) else None
    found: set[str] = set()
    for status in statuses.values() if isinstance(statuses, dict) else ():
        told = status.get("draining") if isinstance(status, dict) else None
        if isinstance(told, Iterable) and not isinstance(told, (str, dict)):
            found |= {name for name in list(told)[:MOST] if isinstance(name, str) and len(name) <= 256}
    return found
