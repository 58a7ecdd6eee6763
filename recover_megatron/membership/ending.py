"""The end of a run: whether anybody is left who can go on, and how everybody is told why it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from signal import Signals
from typing import Any

from recover_megatron.membership.epochs import Epochs
from recover_megatron.membership.events import Close, CoordinatorEvent, Exit, Outbox, Received
from recover_megatron.membership.exception_reports import ExceptionReports
from recover_megatron.membership.records import EXIT_LOST_MAJORITY, EXIT_NO_REPLICA, Formed, RunOver, Workers, to_runs
from recover_megatron.membership.roster import Fate, Roster


class Ending:
    """What a coordinator does once its run is over: it tells all (``begin``), then those that come late (``handle``).

    The effect ``Exit`` follows when everybody has been told that is waited for, or at ``deadline``.
    """

    def __init__(self, roster: Roster, out: Outbox) -> None:
        self.deadline = math.inf
        self._roster = roster
        self._out = out
        self._farewell: dict[str, Any] = {}  # the stop message, once there is one
        self._untold: set[int | str] = set()  # workers and launchers still to get it

    def begin(
        self, over: RunOver, formed: Formed, absent: Workers, patience: float, observers: Iterable[int], now: float
    ) -> None:
        """Tell all members and ``observers`` (sessions).

        A worker's word holds for those, too, that have not come to the open rendezvous yet (``absent``): they are
        waited for, until ``patience`` as the rendezvous would have, and told. (Any other reason may be this
        coordinator's alone: let them try another.) Launchers that workers have named and that have not come yet, in a
        run shorter than their way here, are waited for, too: they need the exit code; and so are those that have just
        lost their connection, and may be on their way back. Not where another coordinator may go on.
        """
        roster, settings = self._roster, self._roster.settings
        code, reason = over.code, over.reason
        if code and (told := self._told_to_stop(formed)):
            code, reason = told
        workers = absent if over.by is not None else Workers()
        nodes: set[str] = set()
        if over.by is not None or code != EXIT_LOST_MAJORITY:
            nodes = {
                w.node_agent for w in roster.workers.values() if w.node_agent and w.node_agent not in roster.node_agents
            }
        until = [patience] * bool(workers) + [now + settings.heartbeat_timeout] * bool(nodes)
        if code != EXIT_LOST_MAJORITY and (lost := self._just_lost(now)):
            nodes |= lost
            until.append(now + 2 * settings.heartbeat_timeout)
        self._untold = {*workers, *nodes}
        self.deadline = max(until, default=math.inf)
        self._out.log("stop", code=code, reason=reason)
        self._farewell = {"type": "stop", "code": code, "reason": reason[:2000], "epoch": formed.epoch}
        if over.by is not None:
            self._farewell["by"] = over.by
        self._out.send([*sorted(roster.sessions), *observers], self._farewell)
        if not self._untold:
            self._out.do(Exit(code, reason))

    def handle(self, event: CoordinatorEvent, now: float) -> None:
        """Any event from now on: tell those who come late, if they are waited for."""
        waited = bool(self._untold)
        if isinstance(event, Received):
            message = event.message
            if message["type"] == "observe" or (waited and message["type"] in ("attach", "attach_node_agent")):
                self._out.send([event.session], self._farewell)
                self._out.do(Close(event.session))
                self._untold -= {message.get("worker"), message.get("node")}
            else:
                self._roster.refuse(event.session, "this coordinator has stopped")
        if waited and (not self._untold or now >= self.deadline):
            self._untold.clear()
            self.deadline = math.inf
            self._out.do(Exit(self._farewell["code"], self._farewell["reason"]))

    def _told_to_stop(self, formed: Formed) -> tuple[int, str] | None:
        """Code and reason of a run whose launchers, all that have workers in it, were told to end them."""
        roster = self._roster
        nodes = {roster.workers[number].node_agent for number in formed.members}
        if formed.epoch == 0:  # a worker that has not come has named no launcher, but that may have come
            nodes = (nodes - {""}) | roster.node_agents.keys()
        node_agents = [roster.node_agents[node] for node in sorted(nodes) if node in roster.node_agents]
        if not nodes or len(node_agents) < len(nodes) or not all(node_agent.stopping for node_agent in node_agents):
            return None
        number = node_agents[0].stopping
        names = ", ".join(node_agent.node for node_agent in node_agents)
        return 128 + number, f"ended by {Signals(number).name}, which the launcher on {names} received"

    def _just_lost(self, now: float) -> set[str]:
        """The launchers that are not reached, but were not long ago, and are not known to have ended."""
        since = now - self._roster.settings.lost_timeout
        node_agents = self._roster.node_agents.values()
        return {w.node for w in node_agents if w.session is None and not w.ended and w.heard > since}


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
