"""What a witness outside of the launchers says: which nodes of the launch are off, so that nothing runs there.

A witness is whoever manages the nodes: SLURM's controller, Kubernetes' API server (``testimony``). It tells of ends
alone, and an end is final. What it says of a node that it does not reach is no news: it may be cut off, as this side
may be. Its word is used where the count of ``leadership`` and the lease give up: fewer than half are reached. They may
ask for the lease if *nobody else can be running*, by ``alone``:

* whoever is missing was started by a launcher of the launch (``JOINED_FROM``), and
* each node of the launch is off, or is *here*: its launcher is reached, and all that it runs are members, or gone.

Why no second side can be going on then. Let B be the side that uses the witness, A another one. A has left B out. Its
members are those of the last epoch that B knows, and newcomers. What runs on a node that is off has ended. What runs on
a node that is here is a member of B, as its launcher told, after the testimony (``Witness.opened``): so it follows A no
more. What is left are newcomers of launchers that joined, which may be anywhere, and of which B may never have heard.
So a side that has left out somebody who may be running takes such newcomers in only when the lease names this side,
without those that are left out (``Witness.lets_in``); and B needs the lease, which is refused to it then. A coordinator
that took over cannot know whom the one before has left out: a newcomer that was in an earlier epoch is in nothing that
its members present. So it takes such newcomers in only when the lease names its side.

A death that a witness knows is never counted as one that a launcher has seen: *gone* takes workers out of the count of
every side, and whoever tells of them there presents what the dead have followed. A witness presents nothing. Were it
believed so, of five workers a side of three could go on, lose two with their node, and go on with the last one, while
the others, told of the two, would be two of three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from recover_megatron.membership.events import AskForLease, AskWitness, Outbox, Statement
from recover_megatron.membership.records import JOINED_FROM, Formed, WorkerId, Workers
from recover_megatron.membership.roster import Fate, Roster

ASK_SECONDS = 2.0
"""From one question to the next one."""


def alone(
    members: Workers,
    missing: Workers,
    gone: Workers,
    nodes: frozenset[str],
    off: frozenset[str],
    here: Mapping[str, Iterable[WorkerId]],
) -> bool:
    """Whether nobody but ``members`` can be running: see above.

    ``nodes``: of the launch, by the names of their launchers. ``here``: what the launchers that are reached run. A
    node that is reached and said to be off makes the witness no witness.
    """
    return (
        bool(off)
        and nodes <= off | here.keys()
        and off.isdisjoint(here)
        and all(number < JOINED_FROM for number in missing)
        and all(members | gone >= frozenset(running) for running in here.values())
    )


class Witness:
    """What a coordinator was told by the witness, and what follows from that.

    ``nodes``: of the launch, by the names of their launchers; empty: it cannot be asked from here (by the candidate of
    a launcher that joined). None: there is no witness, and nothing here does anything.
    """

    def __init__(self, roster: Roster, out: Outbox, nodes: frozenset[str] | None) -> None:
        self.nodes = nodes
        self.off: frozenset[str] = frozenset()
        """The nodes that are off."""
        self.took_over = False
        """Whether another coordinator led before this one: it may have left out workers that nobody here knows."""
        self._roster = roster
        self._out = out
        self._then: frozenset[str] = frozenset()  # off when the rendezvous was opened
        self._asked_at: float | None = None
        self._needed_since: float | None = None
        self._reasons: set[str] = set()
        self._asked: dict[tuple[int, int], Workers] = {}  # claims by term and epoch -> whom they name
        self._granted = False  # the first of these, or a later one, is the lease's holder

    # -- what it says -------------------------------------------------------------------------------------------------

    def ask(self, now: float, needed: bool) -> None:
        """Called now and then: ask about the nodes that are not reached, where an answer is ``needed``."""
        if not needed or not self.nodes:
            self._needed_since = None
            return
        self._needed_since = now if self._needed_since is None else self._needed_since
        settled = now - self._needed_since >= self._roster.settings.heartbeat_interval
        nodes = self.nodes - self.off - self._reached
        if settled and nodes and (self._asked_at is None or now - self._asked_at >= ASK_SECONDS):
            self._asked_at = now
            self._out.do(AskWitness(nodes))

    def hear(self, testimony: Statement) -> frozenset[str]:
        """Take it in; the nodes that are known to be off by it, and were not before."""
        new = testimony.off & (self.nodes or frozenset()) - self.off
        self.off |= new
        if testimony.reason not in self._reasons and (new or not testimony.off) and testimony.reason:
            self._reasons.add(testimony.reason)
            self._out.log("testimony", off=sorted(new), reason=testimony.reason)
            text = {"type": "tell", "text": f"witness: {testimony.reason}"[:2000]}
            self._out.send(self._roster.node_agent_sessions, text)
        return new

    def waits(self, now: float) -> bool:
        """Whether those that may not go on wait for what it says: as long as members look for a coordinator."""
        since = self._needed_since
        return bool(self.nodes) and (since is None or now <= since + self._roster.settings.lost_timeout)

    def excuse(self, pause: float) -> None:
        """This process was kept from running for so long."""
        self._needed_since = None if self._needed_since is None else self._needed_since + pause

    # -- what follows -------------------------------------------------------------------------------------------------

    def opened(self) -> None:
        """A rendezvous is opened: its launchers acknowledge it after all that was heard of the witness by now."""
        self._then = self.off

    def leaves_alone(self, members: Workers, missing: Workers, epoch: int | None) -> bool:
        """Whether nobody but ``members`` can be running.

        ``epoch``: of the rendezvous that launchers must have acknowledged to be here; None: there is none yet.
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
        off = self.off if epoch is None else self._then
        return off.isdisjoint(self._reached) and alone(members, missing, self._roster.gone, self.nodes, off, here)

    @property
    def _reached(self) -> frozenset[str]:
        """The nodes whose launchers are."""
        return frozenset(name for name, agent in self._roster.node_agents.items() if agent.session is not None)

    # -- newcomers of launchers that joined ---------------------------------------------------------------------------

    def lets_in(self, number: WorkerId, formed: Formed) -> bool:
        """Whether a worker may come into the next epoch: always, but for newcomers of launchers that joined.

        These may not while somebody is (or may be, ``took_over``) left out who may be running, and would not know of
        them, unless that one could not get the lease. ``formed``: the last epoch; who was in it is no newcomer.
        """
        return self.nodes is None or number < JOINED_FROM or number in formed.members or self._is_recorded

    @property
    def _is_recorded(self) -> bool:
        """Whether nobody who is left out and may be running can get the lease."""
        left_out = self._roster.with_fate(Fate.OUT) | self._roster.with_fate(Fate.ASIDE)
        if not left_out and not self.took_over:
            return True
        return self._granted and left_out.isdisjoint(frozenset().union(*self._asked.values()))

    def has_to_record(self) -> bool:
        """Whether the epoch that was formed is to be named by the lease, without waiting, for what ``lets_in`` says."""
        return self.nodes is not None and not self._is_recorded

    def asks(self, claim: AskForLease) -> None:
        """The lease is asked for, by whatever claim: it may pass to these members."""
        self._asked[claim.term, claim.epoch] = claim.members

    def granted(self, claim: AskForLease) -> None:
        """A claim other than a renewal was granted: what was asked before it names nobody any more."""
        keys = list(self._asked)
        for key in keys[: keys.index((claim.term, claim.epoch))]:
            del self._asked[key]
        self._granted = True
