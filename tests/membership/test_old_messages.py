"""What is said of an epoch, a rendezvous or a coordinator that is over is not believed."""

from __future__ import annotations

from typing import Any

import pytest
from simulation import SETTINGS, World

from recover_megatron.membership.events import Connected, Heard, Received, Settle, State
from recover_megatron.membership.member import Member


class Said:
    """A coordinator whose first or second epoch is formed, and messages to it as they come, from all workers."""

    def __init__(self, epoch: int = 1) -> None:
        self._world = World(3, candidates=1, node_agents=False)
        self._world.run_fairly(2.0)
        self.coordinator = self._world.coordinators[0]
        self.is_in(State.STEADY, 1)
        if epoch == 2:
            self.say(type="complain", epoch=1, reason="a test")
            self.say(type="join", epoch=2, status=None, done=0)

    def is_in(self, state: State, epoch: int) -> None:
        assert (self.coordinator.state, self.coordinator.epochs.formed.epoch) == (state, epoch)

    def say(self, **message: Any) -> None:
        for connection in list(self._world.connections.values()):
            self.coordinator.handle(Received(connection.number, message), self._world.now)
        self.coordinator.handle(Settle(), self._world.now)


def test_no_plan_is_made_of_joins_of_a_rendezvous_that_is_over() -> None:
    said = Said()
    said.say(type="complain", epoch=1, reason="a test")
    said.say(type="join", epoch=1, status=None, done=0)
    said.is_in(State.RENDEZVOUS, 1)
    said.say(type="join", epoch=2, status=None, done=0)
    said.is_in(State.STEADY, 2)


@pytest.mark.parametrize("message", [{"type": "done", "iteration": 99}, {"type": "idle"}], ids=lambda m: m["type"])
def test_reports_of_an_epoch_that_is_over_decide_nothing(message: dict[str, Any]) -> None:
    said = Said(epoch=2)
    before = said.coordinator.epochs.committed
    said.say(**message, epoch=1)
    assert said.coordinator.epochs.committed == before
    workers = said.coordinator.roster.workers.values()
    assert {(worker.done, worker.idle_in == 2) for worker in workers} == {(0, False)}


def test_a_complaint_about_an_epoch_that_is_over_ends_no_other() -> None:
    said = Said(epoch=2)
    said.say(type="complain", epoch=1, reason="a test")
    said.is_in(State.STEADY, 2)


class Heeding:
    """A worker that has been told by the coordinator of term 7 that rendezvous 3 is open."""

    def __init__(self) -> None:
        hello = {"worker": 0, "incarnation": "0" * 32, "host": "here", "pid": 1}
        self.member = Member(hello, 1, SETTINGS, 0.0)
        self.member.handle(Connected(), 0.0)
        self.hear("revoke", epoch=3, term=7)

    def hear(self, kind: str, **message: Any) -> None:
        rest: dict[str, Any] = {"members": [[0, 2]], "committed": 4, "dead": [], "left": [], "reason": "a test"}
        self.member.handle(Heard({"type": kind, **rest, **message}), 0.0)


@pytest.mark.parametrize("other", [{"epoch": 2, "term": 7}, {"epoch": 3, "term": 6}], ids=["epoch", "term"])
def test_a_worker_takes_up_the_plan_of_the_rendezvous_that_is_open_and_no_other(other: dict[str, int]) -> None:
    heeding = Heeding()
    heeding.hear("plan", **other)
    assert heeding.member.plan is None
    assert heeding.member.revoked
    heeding.hear("plan", epoch=3, term=7)
    assert heeding.member.plan is not None
    assert not heeding.member.revoked


def test_a_worker_follows_no_coordinator_that_another_one_has_followed() -> None:
    heeding = Heeding()
    heeding.hear("revoke", epoch=4, term=6)
    heeding.hear("lead", term=6)
    heeding.hear("plan", epoch=3, term=7)
    assert heeding.member.plan is not None
    assert heeding.member.plan.epoch == 3
    assert heeding.member.presentation.term == 7


def test_a_worker_believes_the_commits_of_its_own_epoch_alone() -> None:
    heeding = Heeding()
    heeding.hear("plan", epoch=3, term=7)
    heeding.hear("commit", epoch=2, iteration=99)
    assert heeding.member.committed == 4
    heeding.hear("commit", epoch=3, iteration=5)
    assert heeding.member.committed == 5
