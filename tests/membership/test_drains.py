"""A node that is to be switched off, at the coordinator: who is asked, what is told, when it may be."""

from __future__ import annotations

from typing import Any

import pytest
from script import Script, play, table
from simulation import World, over_the_wire

from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.drains import MOST, draining_of
from recover_megatron.membership.events import Closed, Received, Send, Settle, State
from recover_megatron.membership.messages import to_member
from recover_megatron.membership.messages.to_coordinator import Drain, DrainAnswer, ToCoordinator
from recover_megatron.membership.records import from_runs
from recover_megatron.membership.wire import TO_COORDINATOR, TO_MEMBER

OBSERVER = 10**6


class Drains(Script):
    """What is said of nodes that are to be switched off, by an observer and for the members of the first worker."""

    def _hear(self, message: ToCoordinator, session: int) -> list[Send]:
        """What the coordinator sends for a message."""
        coordinator = self.it.coordinators[0]
        effects = coordinator.handle(Received(session, over_the_wire(message, TO_COORDINATOR)), self.it.now)
        effects += coordinator.handle(Settle(), self.it.now)
        sent = [effect for effect in effects if isinstance(effect, Send)]
        for effect in sent:
            for to in effect.sessions:
                if to in self.it.connections:
                    self.it.connections[to].down.append(over_the_wire(effect.message, TO_MEMBER))
        return sent

    def ask(self, node: str, *answer: str) -> None:
        """An observer asks for it, by a name of the node's (``_`` for a blank), and is told of these states."""
        self.it.now += 1.0  # an observer that asks too often is refused
        sent = self._hear(Drain(node.replace("_", " ")), OBSERVER)
        (view,) = [effect.message for effect in sent if OBSERVER in effect.sessions]
        told = over_the_wire(view, TO_MEMBER).drains
        assert [f"{row['node'].replace(' ', '_')}:{row['state']}" for row in told] == list(answer)

    def answer(self, node: str, *reason: str) -> None:
        """The members do without the node, or why not."""
        self.answer_for(str(self.it.coordinators[0].epochs.formed.epoch), node, *reason)

    def answer_for(self, epoch: str, node: str, *reason: str) -> None:
        session = self.it.coordinators[0].roster.workers[0].session
        assert session is not None
        message = DrainAnswer(int(epoch), node, " ".join(reason))
        self._told = [send for send in self._hear(message, session) if isinstance(send.message, to_member.Drain)]

    def launcher_told(self, *told: str) -> None:
        """By the last answer: ``NODE`` that it is drained, ``stays:NODE`` that it is not."""
        agents = {agent.session: name for name, agent in self.it.coordinators[0].roster.node_agents.items()}
        assert [f"{'stays:' * send.message.stays}{agents[send.sessions[0]]}" for send in self._told] == [*told]
        assert all(len(send.sessions) == 1 for send in self._told)

    def leave(self, *workers: str) -> None:
        """They have no part, say so, and leave."""
        for worker in workers:
            member = self.it.worker(int(worker))
            self.it._member_effects(f"w{worker}", [*member.idle(), *member.leave()])

    def on_the_host(self, *workers: str) -> None:
        for worker in workers:
            self.it.coordinators[0].roster.workers[int(worker)].host = "the host"

    def accepted(self, node: str, *workers: str) -> None:
        """What the members' statuses say at the next rendezvous."""
        self.it.accepted = {int(worker): frozenset({node} - {"none"}) for worker in workers}

    def rendezvous(self, worker: str) -> None:
        """It asks for one."""
        self.it._member_effects(f"w{worker}", self.it.worker(int(worker)).ask("a failure"))

    def in_the_plan(self, *draining: str) -> None:
        """That the members were told of in their last plan, and have accepted."""
        plan = self.it.coordinators[0].epochs.plan
        self.it.coordinators[0].epochs.plan = {**plan, "statuses": {"0": {"draining": list(draining)}}}

    def _rows(self) -> list[dict[str, Any]]:
        return self.it.coordinators[0].view(self.it.now).drains

    def rows(self, *rows: str) -> None:
        assert [f"{row['node']}:{row['state']}" for row in self._rows()] == list(rows)

    def says(self, key: str, *words: str) -> None:
        """Of the only row; ``_`` for a blank in a name."""
        (row,) = self._rows()
        assert " ".join(words).replace("_", " ") in (row[key] if key == "reason" else ", ".join(row[key]))

    def moves(self, *workers: str) -> None:
        (row,) = self._rows()
        assert from_runs(row["workers"]) == set(map(int, workers))

    def asked_for(self, *nodes: str) -> None:
        """In the last plan."""
        assert self.it.coordinators[0].epochs.plan.get("drain", []) == list(nodes)

    def refuses(self, newcomer: str, *reason: str) -> None:
        assert " ".join(reason) in str(self.it.worker(int(newcomer)).out)

    def observer_goes(self) -> None:
        self.it.coordinators[0].handle(Closed(OBSERVER, True, "it has seen enough"), self.it.now)


@table("""
a node is drained when its workers have left and an epoch does without them, and a leaver keeps nobody waiting
    world 4 runs=4; ask node1 node1:asked; moves 2 3; run 2 -> epochs 2; asked_for node1
    answer node1 -> launcher_told node1; rows node1:moving; leave 2; run 2 -> rows node1:moving; epochs 2
    more_commits 4
    leave 3; busy 0 1; run 2 -> in_rendezvous; rows node1:moving
    wake; run 2 -> rows node1:drained; epochs 3; members 0 1; asked_for; more_commits 4
a worker that leaves before its plan is told of is waited for no longer
    world 4 runs=4; ask node1 node1:asked; run 2; leave 2 3; run 2 -> rows node1:asked; epochs 2
    answer node1; run 2 -> rows node1:drained; epochs 3
asked twice it is one order and one epoch
    world 4 runs=4; ask node1 node1:asked; ask node1 node1:asked; run 2; answer node1; ask node1 node1:moving; run 2
    -> rows node1:moving; epochs 2
what the members refuse is told and may be asked again
    world 4 runs=4; ask node1 node1:asked; run 2; answer node1 nothing would be left -> rows node1:refused
    says reason nothing would be left; ask node1 node1:asked
what was accepted may be refused after a death and asked again
    world 4 runs=4; ask node1 node1:asked; run 2; answer node1; in_the_plan node1; answer node1 somebody else has died
    -> rows node1:refused; ask node1 node1:asked
who asks by the name of a host is answered by it
    world 4 runs=4; on_the_host 2 3; ask the_host node1:asked; says names node1, the_host; run 2
    answer node1 -> rows node1:moving; says names node1, the_host
also when it is refused
    world 4 runs=4; on_the_host 2 3; ask the_host node1:asked; run 2
    answer node1 nothing would be left -> rows node1:refused; says names node1, the_host
an answer for an epoch that is over does not count
    world 4 runs=4; ask node1 node1:asked; answer_for 1 node1 of an earlier epoch -> rows node1:asked
a node that nobody knows is refused with those that there are, and costs the run nothing
    world 4 runs=4; ask nowhere nowhere:refused; says reason its nodes: node0, node1; run 2 -> epochs 1
a newcomer of a drained node is not let in and one of another node is
    world 4 runs=4; ask node1 node1:asked; run 2; answer node1; newcomers 1 0; run 4 -> members 0 1 2 3 5
    refuses 4 node1 is being drained
a death of those who stay is no end of the run in order, though others have left whose node is drained
    world 4 runs=4; ask node1 node1:asked; run 2; answer node1; observer_goes; leave 2 3; kill 0 1; run 3
    -> stops 10 no live worker is left
also where they say that they are idle while an epoch is being made
    world 4 runs=4; ask node1 node1:asked; run 2; answer node1; observer_goes; busy 0 1 2 3; rendezvous 0; run 1
    -> in_rendezvous; leave 2 3; kill 0 1; run 3 -> stops 10 no live worker is left
a refusal that nobody has heard, told while an epoch was being made, is asked for again
    world 4 runs=4; ask node1 node1:asked; run 2; answer node1; accepted node1 0; rendezvous 1; run 2 -> asked_for
    accepted none 0; rendezvous 1; run 2 -> asked_for node1; answer node1 nothing would be left -> rows node1:refused
the next coordinator answers for a node that all had left before it came
    world 4 runs=4; accepted node7 0 1 2 3; rendezvous 1; run 2; ask node7 node7:drained
the launcher of a node that stays after all is told so, else it would start nobody there; who was told nothing is not
    world 4 runs=4; ask node1 node1:asked; run 2; answer node1 -> launcher_told node1
    answer node1 somebody else has died -> launcher_told stays:node1; answer node1 the same -> launcher_told
    ask node0 node0:asked node1:refused; run 2; answer node0 nothing would be left -> launcher_told
""")
def test_a_node_that_is_to_be_switched_off(script: str) -> None:
    play(script, kind=Drains)


def test_a_refusal_by_the_name_of_a_host_is_forgotten_when_it_is_asked_again() -> None:
    """Else who asks is told that its drained host is refused."""
    asked = "ask the_host the_host:refused; on_the_host 2 3; ask the_host node1:asked; run 2; answer node1"
    play(f"world 4 runs=4; {asked}; ask the_host node1:moving", kind=Drains)


def test_before_the_training_begins_it_is_refused_and_a_standby_forgets_it() -> None:
    world = World(2)
    coordinator = world.coordinators[0]
    view = coordinator.handle(Received(OBSERVER, Drain("node1")), 0.0)
    assert [e.message.state for e in view if isinstance(e, Send)] == ["standby"]
    assert not coordinator.view(0.0).drains


def test_the_next_coordinator_knows_it_from_what_the_members_tell() -> None:
    plan = {"statuses": {"0": {"draining": ["node1"]}, "1": {"draining": ["node1", "node2"]}, "2": {}}}
    assert draining_of(plan) == {"node1", "node2"}
    coordinator = Coordinator(2, World(2)._settings, salt=1)
    coordinator.epochs.plan = plan
    assert coordinator.drains.is_draining("node2")


@pytest.mark.parametrize("told", [None, 3, "node1", {"node1": 1}, [1, None, "x" * 300], ["n"] * (MOST + 9)])
def test_nonsense_in_a_status_is_left_out(told: object) -> None:
    assert draining_of({"statuses": {"0": {"draining": told}, "1": told}}) <= {"n"}
    assert draining_of({"statuses": told}) == draining_of(told) == set()


@pytest.mark.parametrize("when", [State.GATHERING, State.RENDEZVOUS])
def test_a_coordinator_that_has_just_taken_over_refuses_nothing(when: State) -> None:
    """It does not know the run's nodes yet, and what its members have accepted; who asks asks again."""
    world = World(4)
    world.run_fairly(4.0)
    world.accepted = dict.fromkeys((0, 1), frozenset({"node1"}))
    world.kill_coordinator(0)
    if when is State.GATHERING:
        world.frozen.add("w0")  # the next coordinator waits for it
    else:
        world.busy.add(0)  # and its rendezvous for the worker's join
    coordinator = world.coordinators[1]
    for _ in range(80):
        if coordinator.state is not when:
            world.run_fairly(0.25, step=0.25)
    assert coordinator.state is when
    coordinator.handle(Received(OBSERVER, over_the_wire(Drain("node1"), TO_COORDINATOR)), world.now)
    coordinator.handle(Closed(OBSERVER, True, "it has seen enough"), world.now)
    assert not coordinator.view(world.now).drains
    world.frozen.clear()
    world.busy.clear()
    world.run_fairly(4.0)
    assert coordinator.state is State.STEADY
    assert [(row["node"], row["state"]) for row in coordinator.view(world.now).drains] == [("node1", "moving")]
