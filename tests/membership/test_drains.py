"""A node that is to be switched off, at the coordinator: who is asked, what is told, when it may be."""

from __future__ import annotations

from typing import Any

import pytest
from simulation import World, over_the_wire

from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.drains import MOST, draining_of
from recover_megatron.membership.events import Closed, Received, Send, Settle
from recover_megatron.membership.states import State
from recover_megatron.membership.wire import TO_COORDINATOR, TO_MEMBER

OBSERVER = 10**6


def steady(workers: int = 4) -> World:
    world = World(workers)
    world.run_fairly(4.0)
    assert world.coordinators[0].state is State.STEADY
    return world


def hear(world: World, message: dict[str, Any], session: int = OBSERVER) -> list[Any]:
    """What the coordinator does about a message."""
    coordinator = world.coordinators[0]
    effects = coordinator.handle(Received(session, over_the_wire(message, TO_COORDINATOR)), world.now)
    effects += coordinator.handle(Settle(), world.now)
    for effect in effects:
        if isinstance(effect, Send):
            for to in effect.sessions:
                if to in world.connections:
                    world.connections[to].down.append(over_the_wire(dict(effect.message), TO_MEMBER))
    return effects


def ask(world: World, node: str) -> list[dict[str, Any]]:
    world.now += 1.0  # an observer that asks too often is refused
    (view,) = [
        e.message
        for e in hear(world, {"type": "drain", "node": node})
        if isinstance(e, Send) and OBSERVER in e.sessions
    ]
    return over_the_wire(view, TO_MEMBER)["drains"]


def rows(world: World) -> list[tuple[str, str]]:
    return [(row["node"], row["state"]) for row in world.coordinators[0].view(world.now).get("drains", [])]


def answer(world: World, node: str, reason: str = "") -> list[Any]:
    coordinator = world.coordinators[0]
    session, epoch = coordinator.roster.workers[0].session, coordinator.epochs.formed.epoch
    assert session is not None
    return hear(world, {"type": "drain_answer", "epoch": epoch, "node": node, "reason": reason}, session)


def leave(world: World, number: int) -> None:
    member = world.worker(number)
    world._member_effects(f"w{number}", [*member.idle(), *member.leave()])


def test_a_node_is_drained_when_its_workers_have_left_and_an_epoch_does_without_them() -> None:
    world = steady()
    assert [(row["node"], row["state"], row["workers"]) for row in ask(world, "node1")] == [
        ("node1", "asked", [[2, 3]])
    ]
    world.run_fairly(2.0)
    coordinator = world.coordinators[0]
    assert (coordinator.epochs.formed.epoch, coordinator.epochs.plan["drain"]) == (2, ["node1"])
    told = [e for e in answer(world, "node1") if isinstance(e, Send) and e.message["type"] == "drain"]
    assert [e.sessions for e in told] == [(coordinator.roster.node_agents["node1"].session,)]
    assert rows(world) == [("node1", "moving")]
    leave(world, 2)
    world.run_fairly(2.0)
    committed = coordinator.epochs.committed
    assert (rows(world), coordinator.epochs.formed.epoch) == ([("node1", "moving")], 2)
    assert committed > 0  # who has no part, and leaves, keeps nobody waiting
    leave(world, 3)
    world.busy = {0, 1}  # they are in the middle of something: the epoch without the others is not formed yet
    world.run_fairly(2.0)
    assert coordinator.state is State.RENDEZVOUS
    assert rows(world) == [("node1", "moving")], "a majority that a new coordinator needs counts on them"
    world.busy.clear()
    world.run_fairly(2.0)
    assert (rows(world), coordinator.epochs.formed.epoch) == ([("node1", "drained")], 3)
    assert coordinator.epochs.formed.members == {0, 1}
    assert "drain" not in coordinator.epochs.plan
    assert coordinator.epochs.committed > committed


def test_a_worker_that_leaves_before_its_plan_is_told_of_is_waited_for_no_longer() -> None:
    world = steady()
    ask(world, "node1")
    world.run_fairly(2.0)
    leave(world, 2)
    leave(world, 3)
    world.run_fairly(2.0)
    assert (rows(world), world.coordinators[0].epochs.formed.epoch) == ([("node1", "asked")], 2)
    answer(world, "node1")
    world.run_fairly(2.0)
    assert (rows(world), world.coordinators[0].epochs.formed.epoch) == ([("node1", "drained")], 3)


def test_asked_twice_it_is_one_order_and_one_epoch() -> None:
    world = steady()
    ask(world, "node1")
    ask(world, "node1")
    world.run_fairly(2.0)
    answer(world, "node1")
    ask(world, "node1")
    world.run_fairly(2.0)
    assert (rows(world), world.coordinators[0].epochs.formed.epoch) == ([("node1", "moving")], 2)


def test_what_the_members_refuse_is_told_and_may_be_asked_again() -> None:
    world = steady()
    ask(world, "node1")
    world.run_fairly(2.0)
    answer(world, "node1", "nothing would be left")
    (row,) = world.coordinators[0].view(world.now)["drains"]
    assert (row["state"], row["reason"]) == ("refused", "nothing would be left")
    assert [row["state"] for row in ask(world, "node1")] == ["asked"]


def test_what_was_accepted_may_be_refused_after_a_death_and_asked_again() -> None:
    world = steady()
    ask(world, "node1")
    world.run_fairly(2.0)
    answer(world, "node1")
    coordinator = world.coordinators[0]
    coordinator.epochs.plan = {**coordinator.epochs.plan, "statuses": {"0": {"draining": ["node1"]}}}
    answer(world, "node1", "somebody else has died")
    assert rows(world) == [("node1", "refused")]
    assert [(row["node"], row["state"]) for row in ask(world, "node1")] == [("node1", "asked")]


@pytest.mark.parametrize("reason", ["", "nothing would be left"])
def test_who_asks_by_the_name_of_a_host_is_answered_by_it(reason: str) -> None:
    world = steady()
    for number in (2, 3):
        world.coordinators[0].roster.workers[number].host = "the host"
    (row,) = ask(world, "the host")
    assert (row["node"], row["names"]) == ("node1", ["node1", "the host"])
    world.run_fairly(2.0)
    answer(world, "node1", reason)
    (row,) = world.coordinators[0].view(world.now)["drains"]
    assert (row["state"], row["names"]) == ("refused" if reason else "moving", ["node1", "the host"])


def test_an_answer_for_an_epoch_that_is_over_does_not_count() -> None:
    world = steady()
    ask(world, "node1")
    session = world.coordinators[0].roster.workers[0].session
    assert session is not None
    hear(world, {"type": "drain_answer", "epoch": 1, "node": "node1", "reason": "of an earlier epoch"}, session)
    assert rows(world) == [("node1", "asked")]


def test_a_node_that_nobody_knows_is_refused_with_those_that_there_are() -> None:
    world = steady()
    (row,) = ask(world, "nowhere")
    assert row["state"] == "refused"
    assert "its nodes: node0, node1" in row["reason"]
    world.run_fairly(2.0)
    assert world.coordinators[0].epochs.formed.epoch == 1  # it costs the run nothing


def test_before_the_training_begins_it_is_refused_and_a_standby_forgets_it() -> None:
    world = World(2)
    coordinator = world.coordinators[0]
    view = coordinator.handle(Received(OBSERVER, {"type": "drain", "node": "node1"}), 0.0)
    assert [e.message["state"] for e in view if isinstance(e, Send)] == ["standby"]
    assert "drains" not in coordinator.view(0.0)


def test_a_newcomer_of_a_drained_node_is_not_let_in_and_one_of_another_node_is() -> None:
    world = steady()
    ask(world, "node1")
    world.run_fairly(2.0)
    answer(world, "node1")
    world.add_newcomer(1)
    world.add_newcomer(0)
    world.run_fairly(4.0)
    coordinator = world.coordinators[0]
    assert 5 in coordinator.epochs.formed.members
    assert 4 not in coordinator.epochs.formed.members
    assert world.worker(4).out is not None
    assert "node1 is being drained" in str(world.worker(4).out)


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


@pytest.mark.parametrize("unheard", [False, True])
def test_a_death_of_those_who_stay_is_no_end_of_the_run_in_order(unheard: bool) -> None:
    """Who left since its node is drained had not finished; also where ``idle`` comes while an epoch is being made."""
    world = steady()
    ask(world, "node1")
    world.run_fairly(2.0)
    answer(world, "node1")
    world.coordinators[0].handle(Closed(OBSERVER, True, "it has seen enough"), world.now)
    if unheard:
        world.busy = {0, 1, 2, 3}
        world._member_effects("w0", world.worker(0).ask("a failure"))
        world.run_fairly(1.0)
        assert world.coordinators[0].state is State.RENDEZVOUS
    leave(world, 2)
    leave(world, 3)
    for number in (0, 1):
        world.kill_worker(number)
    world.run_fairly(3.0)
    (stop,) = [record for record in world.log if record["event"] == "stop"]
    assert (stop["code"], stop["reason"][:22]) == (10, "no live worker is left")


def test_a_refusal_that_nobody_has_heard_is_asked_for_again() -> None:
    """It was told while an epoch was being made; who waits for the node would wait for ever."""
    world = steady()
    ask(world, "node1")
    world.run_fairly(2.0)
    answer(world, "node1")
    asked = []
    for accepted in ({"node1"}, set()):
        world.accepted = {0: frozenset(accepted)}
        world._member_effects("w1", world.worker(1).ask("a failure"))
        world.run_fairly(2.0)
        asked.append(world.coordinators[0].epochs.plan.get("drain"))
    assert asked == [None, ["node1"]]
    answer(world, "node1", "nothing would be left")
    assert rows(world) == [("node1", "refused")]


def test_a_refusal_by_the_name_of_a_host_is_forgotten_when_it_is_asked_again() -> None:
    """Else who asks is told that its drained host is refused."""
    world = steady()
    assert [(row["node"], row["state"]) for row in ask(world, "the host")] == [("the host", "refused")]
    for number in (2, 3):
        world.coordinators[0].roster.workers[number].host = "the host"
    assert [(row["node"], row["state"]) for row in ask(world, "the host")] == [("node1", "asked")]
    world.run_fairly(2.0)
    answer(world, "node1")
    assert [(row["node"], row["state"]) for row in ask(world, "the host")] == [("node1", "moving")]


@pytest.mark.parametrize("when", [State.GATHERING, State.RENDEZVOUS])
def test_a_coordinator_that_has_just_taken_over_refuses_nothing(when: State) -> None:
    """It does not know the run's nodes yet, and what its members have accepted; who asks asks again."""
    world = steady()
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
    coordinator.handle(Received(OBSERVER, over_the_wire({"type": "drain", "node": "node1"}, TO_COORDINATOR)), world.now)
    coordinator.handle(Closed(OBSERVER, True, "it has seen enough"), world.now)
    assert "drains" not in coordinator.view(world.now)
    world.frozen.clear()
    world.busy.clear()
    world.run_fairly(4.0)
    assert coordinator.state is State.STEADY
    assert [(row["node"], row["state"]) for row in coordinator.view(world.now)["drains"]] == [("node1", "moving")]


def test_the_next_coordinator_answers_for_a_node_that_all_had_left_before_it_came() -> None:
    world = steady()
    coordinator = world.coordinators[0]
    world.accepted = dict.fromkeys(range(4), frozenset({"node7"}))
    world._member_effects("w1", world.worker(1).ask("a failure"))
    world.run_fairly(2.0)
    assert "node7" not in {worker.node for worker in coordinator.roster.workers.values()}
    assert [(row["node"], row["state"]) for row in ask(world, "node7")] == [("node7", "drained")]
    assert coordinator.drains.is_draining("node7")


def test_the_launcher_of_a_node_that_stays_after_all_is_told_so() -> None:
    """Else it would start nobody any more in place of a worker that dies there."""
    world = steady()
    ask(world, "node1")
    world.run_fairly(2.0)

    def told(effects: list[Any]) -> list[dict[str, Any]]:
        return [e.message for e in effects if isinstance(e, Send) and e.message["type"] == "drain"]

    assert told(answer(world, "node1")) == [{"type": "drain"}]
    assert told(answer(world, "node1", "somebody else has died")) == [{"type": "drain", "stays": True}]
    assert told(answer(world, "node1", "somebody else has died")) == []
    ask(world, "node0")
    world.run_fairly(2.0)
    assert told(answer(world, "node0", "nothing would be left")) == []  # it was told nothing before
