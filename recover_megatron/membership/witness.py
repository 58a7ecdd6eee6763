"""Witness outside of the launchers: it reports which nodes of the launch are off. No process runs on such a node.

A witness is the manager of the nodes: SLURM's controller, Kubernetes' API server (``testimony``). It only reports nodes
as off, which is final. If the witness does not reach a node, that proves nothing, because the witness may be cut off.
Silent workers on a node that is off are evicted (``lateness``). The right to continue depends on the statements only if
so few workers are reached that ``leadership`` does not let them ask for the lease. With the witness they may ask for it
if *no other worker can be running*. ``alone`` checks that:

* every missing worker was started by a launcher of the launch (``JOINED_FROM``), and
* each node of the launch is off, or is *here*: its launcher is reached, and all its workers are members, or gone.

Why no second side can continue then. Let B be the side that uses the witness, and A another side that has left B out.
The members of A are members of the last epoch that B knows, and newcomers. Processes on a node that is off have ended.
Processes on a node that is here are members of B, as its launcher reported after the testimony (``Witness.opened``), so
they do not follow A any more. That leaves newcomers whose launchers joined after the launch: they may run anywhere,
unknown to B. So a side that has left out a worker that may be running admits such newcomers only when the lease names
this side without the left-out workers (``Witness.lets_in``). Then B, which needs the lease, does not get it. A
coordinator that took over cannot know which workers the previous coordinator has left out, because its members may not
know a newcomer of an earlier epoch. So it, too, admits such newcomers only when the lease names its side.

A death that a witness reports does not make a worker *gone* (``leadership``), unlike a death that a launcher has seen.
Gone workers do not count on any side. A launcher that reports a death also presents the rendezvous that it knows; a
witness presents nothing. If workers on nodes reported off counted as gone, two sides could continue. Example: three of
five workers continue without the other two. Then two of the three are lost with a node, and the third continues. If the
lost workers counted as gone for the other two, these would be a majority (two of three), and would continue as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from recover_megatron.membership.events import AskForLease, AskWitness, Outbox, Statement
from recover_megatron.membership.messages import to_member
from recover_megatron.membership.records import JOINED_FROM, Formed, WorkerId, Workers
from recover_megatron.membership.roster import Fate, Roster

ASK_SECONDS = 2.0
"""Minimum seconds between two requests to the witness."""


def alone(
    members: Workers,
    missing: Workers,
    gone: Workers,
    nodes: frozenset[str],
    off: frozenset[str],
    here: Mapping[str, Iterable[WorkerId]],
) -> bool:
    """Return whether no worker except ``members`` can be running, by the rule in the module's docstring.

    ``nodes``: names of the launchers of the launch. ``off``: launchers whose nodes are reported off. ``here``: reached
    launcher -> workers that it runs. If a reached node is reported off, the witness is wrong, and the result is False.
    """
    return (
        bool(off)
        and nodes <= off | here.keys()
        and off.isdisjoint(here)
        and all(number < JOINED_FROM for number in missing)
        and all(members | gone >= frozenset(running) for running in here.values())
    )


class Witness:
    """Statements that one coordinator has received from the witness, and their consequences.

    ``nodes``: names of the launchers of the launch. Empty: this candidate cannot ask the witness, because its launcher
    joined after the launch. None: the run has no witness, and all methods do nothing.
    """

    def __init__(self, roster: Roster, out: Outbox, nodes: frozenset[str] | None) -> None:
        self.nodes = nodes
        self.off: frozenset[str] = frozenset()
        """Nodes that the witness has reported off."""
        self.took_over = False
        """True if another coordinator led before this one. It may have left out workers that this one does not know."""
        self._roster = roster
        self._out = out
        self._off_at_opening: frozenset[str] = frozenset()  # nodes known to be off when the open rendezvous was opened
        self._asked_at: float | None = None
        self._needed_since: float | None = None
        self._reasons: set[str] = set()
        self._asked: dict[tuple[int, int], Workers] = {}  # term and epoch of a claim -> its members
        self._granted = False  # True if a claim in ``_asked`` holds the lease

    # -- questions and statements -------------------------------------------------------------------------------------

    def ask(self, now: float, needed: bool) -> None:
        """Ask about all unreached nodes if ``needed`` has been True for a heartbeat interval. Called at every tick."""
        if not needed or not self.nodes:
            self._needed_since = None
            return
        self._needed_since = now if self._needed_since is None else self._needed_since
        waited = now - self._needed_since >= self._roster.settings.heartbeat_interval
        nodes = self.nodes - self.off - self._reached
        if waited and nodes and (self._asked_at is None or now - self._asked_at >= ASK_SECONDS):
            self._asked_at = now
            self._out.do(AskWitness(nodes))

    def hear(self, testimony: Statement) -> frozenset[str]:
        """Record a statement. Return the nodes that are newly known to be off."""
        new = testimony.off & (self.nodes or frozenset()) - self.off
        self.off |= new
        if testimony.reason not in self._reasons and (new or not testimony.off) and testimony.reason:
            self._reasons.add(testimony.reason)
            self._out.log("testimony", off=sorted(new), reason=testimony.reason)
            text = f"witness: {testimony.reason}"[:2000]
            self._out.send(self._roster.node_agent_sessions, to_member.Tell(text))
        return new

    def waits(self, now: float) -> bool:
        """Return whether a side with too few members must wait for the witness (at most ``lost_timeout``)."""
        since = self._needed_since
        return bool(self.nodes) and (since is None or now <= since + self._roster.settings.lost_timeout)

    def excuse(self, pause: float) -> None:
        """Shift the deadline of the wait for the witness by a pause of this process, in seconds."""
        self._needed_since = None if self._needed_since is None else self._needed_since + pause

    # -- consequences -------------------------------------------------------------------------------------------------

    def opened(self) -> None:
        """Record that a rendezvous opens. Launchers acknowledge it after all statements received so far."""
        self._off_at_opening = self.off

    def leaves_alone(self, members: Workers, missing: Workers, epoch: int | None) -> bool:
        """Return whether no worker except ``members`` can be running.

        ``epoch``: rendezvous that a launcher must have acknowledged to count as reached; None: none is required.
        """
        if not self.nodes:
            return False
        here = {
            name: node_agent.running
            for name, node_agent in self._roster.node_agents.items()
            if name in self.nodes
            and node_agent.session is not None
            and not node_agent.silent
            and (epoch is None or node_agent.acknowledged == epoch)
        }
        off = self.off if epoch is None else self._off_at_opening
        return off.isdisjoint(self._reached) and alone(members, missing, self._roster.gone, self.nodes, off, here)

    @property
    def _reached(self) -> frozenset[str]:
        """Nodes whose launchers are reached."""
        return frozenset(name for name, agent in self._roster.node_agents.items() if agent.session is not None)

    # -- newcomers of launchers that joined ---------------------------------------------------------------------------

    def lets_in(self, number: WorkerId, formed: Formed) -> bool:
        """Return whether a worker may be in the next epoch. False for some newcomers on nodes that joined the run.

        A side of left-out workers that gets the lease does not count newcomers that it does not know. So such a
        newcomer must wait while a left-out worker may be running and could get the lease. After a takeover this
        coordinator assumes that there are such workers. ``formed``: the last epoch; its members are no newcomers.
        """
        return self.nodes is None or number < JOINED_FROM or number in formed.members or self._is_recorded

    @property
    def _is_recorded(self) -> bool:
        """True if no left-out worker that may be running can get the lease."""
        left_out = self._roster.with_fate(Fate.OUT) | self._roster.with_fate(Fate.ASIDE)
        if not left_out and not self.took_over:
            return True
        return self._granted and left_out.isdisjoint(frozenset().union(*self._asked.values()))

    def has_to_record(self) -> bool:
        """Return whether the lease must name the formed epoch, so that ``lets_in`` may admit newcomers."""
        return self.nodes is not None and not self._is_recorded

    def asks(self, claim: AskForLease) -> None:
        """Record a claim that may get the lease."""
        self._asked[claim.term, claim.epoch] = claim.members

    def granted(self, claim: AskForLease) -> None:
        """Record that a claim, which is no renewal, got the lease. Earlier claims do not hold the lease any more."""
        keys = list(self._asked)
        for key in keys[: keys.index((claim.term, claim.epoch))]:
            del self._asked[key]
        self._granted = True
