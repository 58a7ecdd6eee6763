"""A spare's manners, with a session that is played: it asks for no epoch while fresh replicas get their state."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.instep.decision import Decision, JoinStatus
from recover_megatron.instep.spare import Over, Spare
from recover_megatron.membership.errors import CoordinatorLost, EpochRevoked
from tests.harness.waiting import DEADLINE

FRESH = Decision(5, {0: (0, 1), 1: (2, 3)}, (4,), at=7, fresh=(1,), version=6, transfers={2: 0, 3: 1})


class Session:
    """Epoch 5 is there; what the spare does is noted in ``said``."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.left = frozenset[int]()
        self.idled, self.waited, self.asked = threading.Event(), threading.Event(), threading.Event()
        self.settled = threading.Event()
        self.over = False

    def idle(self) -> None:
        self.idled.set()

    def leave(self) -> None:
        self.said.append("leave")

    def wait_revoked(self, timeout: float | None = None) -> bool:
        assert self.asked.wait(DEADLINE)
        raise CoordinatorLost("the end of the test", 0)

    def wait_committed(self, iteration: int, epoch: int) -> None:
        self.said.append(f"wait for {iteration} in {epoch}")
        self.waited.set()
        assert self.settled.wait(DEADLINE)
        if self.over:
            raise EpochRevoked(epoch)

    def ask(self, reason: str) -> None:
        self.said.append("ask")
        self.asked.set()


@pytest.mark.parametrize("revoked", [False, True])
def test_news_are_told_when_the_first_step_of_the_fresh_replicas_is_over(revoked: bool) -> None:
    session = Session()
    session.over = revoked
    planner: Any = SimpleNamespace(
        timeline=(0, 0),
        node="a",
        meet=lambda status, reason: (FRESH, None),
        give_up_unless_enough=lambda decision: None,
        has_all_replicas=lambda decision: False,
    )
    played: Any = session
    spare = Spare(planner, played, 4, JoinStatus(None, position=0))
    spare.start()
    assert session.idled.wait(DEADLINE)
    outcomes: list[Any] = []
    main = threading.Thread(target=lambda: outcomes.append(spare.arrive(version=6)))
    main.start()
    assert session.waited.wait(DEADLINE)
    assert session.said == ["wait for 7 in 5"], "not asked yet: it would end the epoch in which states are given"
    session.settled.set()
    main.join(DEADLINE)
    assert session.said == ["wait for 7 in 5", "ask"]
    assert outcomes == [Over(0, "the end of the test")]


def test_who_is_ready_while_all_places_are_taken_asks_for_no_epoch() -> None:
    session = Session()
    planner: Any = SimpleNamespace(
        timeline=(0, 0),
        node="a",
        meet=lambda status, reason: (FRESH, None),
        give_up_unless_enough=lambda decision: None,
        has_all_replicas=lambda decision: True,
    )
    played: Any = session
    spare = Spare(planner, played, 4, JoinStatus(None, position=0))
    spare.start()
    assert session.idled.wait(DEADLINE)
    session.asked.set()  # the run ends
    assert spare.arrive(version=None) == Over(0, "the end of the test")
    assert session.said == []


@pytest.mark.parametrize("finished", [False, True])
def test_no_whole_replica_is_the_end_of_the_run_only_where_somebody_had_finished(finished: bool) -> None:
    """Not where others have left since their node was drained: new replicas may come of it, or a checkpoint."""
    session = Session()
    session.left = frozenset({2, 3})
    session.asked.set()  # the run ends
    planner: Any = SimpleNamespace(
        timeline=(0, 0),
        node="a",
        finished=finished,
        meet=lambda status, reason: (Decision(6, {}, (0, 4), at=8), None),
        give_up_unless_enough=lambda decision: None,
        has_all_replicas=lambda decision: False,
    )
    played: Any = session
    spare = Spare(planner, played, 4, JoinStatus(None, position=0))
    spare.start()
    assert spare.arrive(version=None) == Over(0, "the training is over" if finished else "the end of the test")
    assert session.idled.is_set() is not finished
