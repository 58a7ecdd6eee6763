"""The step's state machine alone, whose calls are records of having been called; and the audit in the sum's tail."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.errors import Disagreement
from recover_megatron.instep.faults import WrongGradients
from recover_megatron.instep.hooks import ProgressReports
from recover_megatron.instep.step import REGROUP_SECONDS, Step
from recover_megatron.instep.trainer import EXTRAS, Outcome, Tail
from recover_megatron.membership.records import EXIT_SAME_FAULT, CoordinatorLost, Fenced, MembershipError

NUMBER, TOTAL = 7, 4


class Parts:
    """Everything that a step needs, for a worker of replica 0 of two.

    ``revoked``: which of its sums (1: the first) are revoked. ``committed``: what the plan after it says is over.
    """

    def __init__(self, revoked: Collection[int] = (), committed: int = NUMBER - 1) -> None:
        self.calls: list[str] = []
        self._revoked, self._committed, self._sums = revoked, committed, 0
        self.gradients = self
        self.columns: list[Any] = []
        self.column: tuple[int, ...] = (0, 1)
        self.me, self.replica, self.inner_rank, self.live, self.mates = 0, 0, 0, frozenset({0, 1}), {0}
        self.epoch_groups = SimpleNamespace(over=False, open_rings=lambda rings: None, ring=lambda ring: None)
        self.tried: set[int] = set()
        self.decision = SimpleNamespace(rerun={0: [[2, 3]]})
        self.extras_of_all, self.seconds = torch.zeros(1), dict[int, float]()
        self.over = NUMBER - 1
        self.submitted = False

    def quiet(self, *args: object, **named: object) -> None:
        """What is of no interest here."""

    pending = mark = inject = check = finish_pass = stream = hold = fill = quiet

    # progress, assignment, orphan
    def begin(self) -> int:
        return NUMBER

    def share(self, total: int) -> list[list[int]]:
        return [list(range(total // 2))]

    def committed(self, number: int) -> bool:
        return self.over >= number

    def agree(self, number: int) -> None:
        self.calls.append(f"agree {number}")

    def end_run(self, what: str, error: Exception) -> None:
        self.calls.append(f"the run ends: {what}: {error}")

    # rendezvous
    def committed_before_the_end(self, number: int) -> bool:
        return False

    def meet(self, number: int, *, step: bool, total: int, ran: Sequence[int]) -> None:
        self.calls.append(f"meet holding {[*ran]}")
        self.over = self._committed

    # trainer
    def compute(self, ids: list[int], *, again: bool) -> None:
        self.calls.append(f"compute {ids}" + " again" * again)

    def extras(self) -> torch.Tensor:
        return torch.zeros(1)

    # gradients and the tail
    def pull(self, groups: object, live: object, tail: object) -> None:
        self.calls.append("pull")

    def save_sums(self) -> list[Any]:
        return []

    def reduce(self, groups: object, live: object, tail: object) -> None:
        self._sums += 1
        self.calls.append("sum")
        if self._sums in self._revoked:
            raise EpochRevoked("worker 1 died")

    def verify(self) -> dict[int, list[int]]:
        return {0: [0, 1], 1: [2, 3]}


def step(parts: Parts) -> Outcome:
    recovery: Any = SimpleNamespace(progress=parts, assignment=parts, orphan=parts, rendezvous=parts)
    tail: Any = SimpleNamespace(
        column=(0, 1), fill=parts.fill, verify=parts.verify, extras=parts.extras_of_all, seconds={}
    )
    trainer: Any = parts
    return Step(recovery, trainer, TOTAL, tail, 1.0).run()


def test_without_a_death_it_computes_sums_and_agrees() -> None:
    parts = Parts()
    outcome = step(parts)
    assert parts.calls == ["compute [0, 1]", "sum", "agree 7"]
    assert outcome.counted == {0: [0, 1], 1: [2, 3]}
    assert not outcome.reran
    assert not outcome.seconds


def test_after_a_death_the_lost_microbatches_alone_are_run_and_all_is_summed_and_agreed_again() -> None:
    parts = Parts(revoked={1})
    outcome = step(parts)
    assert parts.calls == [
        "compute [0, 1]", "sum", "meet holding [0, 1]", "pull", "compute [2, 3] again", "sum", "agree 7"
    ]  # fmt: skip
    assert outcome.reran == {0: [2, 3]}
    assert not outcome.by_plan
    assert set(outcome.seconds) == {"rendezvous", "regroup", "pull", "rerun", "reduce", "agree"}


class Wrong(Parts):
    """A worker that finds its gradients wrong: in the pass (``submitted``: when a part is summed), after it, or in the
    sum.  ``mates``: the workers of its replica."""

    def __init__(self, where: str, submitted: bool = False, mates: Collection[int] = (0,)) -> None:
        super().__init__()
        self._where, self.submitted, self.mates = where, submitted, set(mates)

    def compute(self, ids: list[int], *, again: bool) -> None:
        super().compute(ids, again=again)
        if self._where != "sum":
            raise {"pass": Disagreement, "after": WrongGradients}[self._where]("one is missing")

    def verify(self) -> dict[int, list[int]]:
        raise Disagreement("one is missing")


END = "the run ends: worker 0 has found wrong gradients: one is missing"


@pytest.mark.parametrize(
    ("parts", "calls"),
    [
        (Wrong("pass"), ["compute [0, 1]"]),
        (Wrong("pass", submitted=True), ["compute [0, 1]", END]),
        (Wrong("sum"), ["compute [0, 1]", "sum", END]),
        (Wrong("after"), ["compute [0, 1]"]),
        (Wrong("after", mates={0, 1}), ["compute [0, 1]", END]),
        (Wrong("pass", mates={0, 1}), ["compute [0, 1]"]),
    ],
    ids=[
        "in a pass of which nothing is summed",
        "in a pass of which a part is summed",
        "in the sum",
        "after a pass without mates",
        "after a pass whose mates may have submitted",
        "in a pass that mates cannot finish alone",
    ],
)
def test_gradients_that_are_found_wrong_end_the_run_once_others_may_hold_them(parts: Parts, calls: list[str]) -> None:
    with pytest.raises(Disagreement):
        step(parts)
    assert parts.calls == calls


class Out:
    """The session of a worker of iteration 5, and its framework: the run ends when the worker waits for that."""

    def __init__(self, error: MembershipError) -> None:
        self.said: list[tuple[object, ...]] = []
        self._error = error

    def iteration(self) -> int:
        return 5

    def give_up(self, *what: object) -> None:
        self.said.append(what)

    def mark(self, iteration: int, phase: str, microbatch: None, waiting: bool, allow: float) -> None:
        self.said.append((iteration, waiting))

    def wait_lost(self, workers: Collection[int], timeout: float) -> bool:
        assert timeout > 1e6
        self.said.append(("waited for the end",))
        raise self._error


@pytest.mark.parametrize("error", [CoordinatorLost("it ends", 1), Fenced("late")])
def test_who_ends_the_run_stays_until_that_was_heard(error: MembershipError) -> None:
    """Or the next coordinator would not hear it, where there is none now (tests/membership/test_real_processes.py)."""
    session: Any = Out(error)
    ProgressReports(session, session).end_run("worker 1 has found wrong gradients", Disagreement("NaN"))
    (code, reason), *then = session.said
    assert code == EXIT_SAME_FAULT
    assert reason.startswith("worker 1 has found wrong gradients in iteration 5, whose update no worker applies: NaN")
    assert then == [(5, True), ("waited for the end",)]


class Clocked(Parts):
    """Parts whose calls take time by a clock of their own, each another number of seconds."""

    def __init__(self) -> None:
        super().__init__(revoked={1})
        self.now = 0.0

    def meet(self, number: int, **where: Any) -> None:
        super().meet(number, **where)
        self.now += 1

    def pull(self, *args: object) -> None:  # type: ignore[override]
        self.now += 2

    def compute(self, ids: list[int], *, again: bool) -> None:
        self.now += 4 if again else 100

    def reduce(self, *args: Any) -> None:  # type: ignore[override]
        self.now += 8 if self._sums else 200  # the first one waits for the others, until it is revoked
        super().reduce(*args)

    def agree(self, number: int) -> None:
        self.now += 16


def test_what_a_worker_waited_before_it_heard_of_the_death_is_not_counted_as_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = Clocked()
    monkeypatch.setattr("recover_megatron.instep.step.time", SimpleNamespace(perf_counter=lambda: parts.now))
    took = {"rendezvous": 1, "regroup": 0, "pull": 2, "rerun": 4, "reduce": 8, "agree": 16}
    assert step(parts).seconds == took


class Marking(Parts):
    """Has, of each call, whether the last mark said that this worker waits for others."""

    def __init__(self) -> None:
        super().__init__(revoked={1})
        self.waits = False
        self.said: dict[str, bool] = {}
        self.allow, self.allowed = 0.0, dict[str, float]()
        self.epoch_groups.ring = lambda ring: self.say("ring")

    def mark(self, phase: str, *, waiting: bool = False, allow: float = 0.0) -> None:  # type: ignore[override]
        self.waits, self.allow = waiting, allow

    def meet(self, number: int, **where: Any) -> None:
        super().meet(number, **where)
        self.waits = False  # with a new plan the coordinator takes nobody for one that waits before it says so

    def pull(self, *args: object) -> None:  # type: ignore[override]
        self.say("pull")

    def compute(self, ids: list[int], *, again: bool) -> None:
        self.say("again" if again else "first")

    def say(self, what: str) -> None:
        self.said[what], self.allowed[what] = self.waits, self.allow


def test_a_worker_says_that_it_waits_while_it_opens_rings_and_pulls_and_not_while_it_computes() -> None:
    """Else nobody would find the worker that does not come there."""
    parts = Marking()
    step(parts)
    assert parts.said == {"first": False, "ring": True, "pull": True, "again": False}
    # All workers wait in these, with nothing to tell: without it a healthy recovery would count as stuck.
    assert parts.allowed == {"first": 0.0, "ring": REGROUP_SECONDS, "pull": REGROUP_SECONDS, "again": 0.0}


def test_what_the_plan_says_is_committed_is_not_made_again() -> None:
    parts = Parts(revoked={1}, committed=NUMBER)
    outcome = step(parts)
    assert parts.calls == ["compute [0, 1]", "sum", "meet holding [0, 1]"]
    assert outcome.by_plan
    assert not outcome.reran


def test_a_second_death_in_the_recovery_is_met_as_the_first_was() -> None:
    parts = Parts(revoked={1, 2})
    step(parts)
    met = ["meet holding [0, 1]", "pull", "compute [2, 3] again", "sum"]
    assert parts.calls[:6] == ["compute [0, 1]", "sum", *met]
    assert parts.calls[6] == "meet holding [0, 1, 2, 3]"
    assert parts.calls[-2:] == ["sum", "agree 7"]


# ---- the tail


def summed(fills: list[tuple[int, list[int]]], total: int, share: float = 1.0) -> Tail:
    """The tail after the sum over workers that filled it so: (replica, ids)."""
    tails = [Tail((0,), total, 8, torch.device("cpu")) for _ in fills]
    for tail, (replica, ids) in zip(tails, fills, strict=True):
        tail.fill(replica, ids, torch.tensor([1.0, 2.0], dtype=torch.float64), share)
    result = Tail((0,), total, 8, torch.device("cpu"))
    result.bucket.flat.copy_(torch.stack([tail.bucket.flat for tail in tails]).sum(dim=0))
    return result


def test_the_tail_tells_who_counted_what_from_the_sum() -> None:
    tail = summed([(0, [0, 2]), (3, [1, 3])], 4)
    assert tail.verify() == {0: [0, 2], 3: [1, 3]}
    assert tail.extras[:3].tolist() == [2.0, 4.0, 0.0]


def test_several_workers_of_a_replica_in_one_column_count_together_as_one() -> None:
    tail = summed([(1, [0, 1, 2])] * 3 + [(6, [3])] * 3, 4, share=1 / 3)
    assert tail.verify() == {1: [0, 1, 2], 6: [3]}


@pytest.mark.parametrize("second", [[1], [1, 2, 3], []], ids=["one is missing", "one is there twice", "a share"])
def test_a_sum_in_which_an_id_is_not_counted_once_is_refused(second: list[int]) -> None:
    with pytest.raises(Disagreement, match="not counted exactly once"):
        summed([(0, [0, 2]), (1, second)], 4).verify()


def test_filling_again_leaves_what_is_finished_alone() -> None:
    tail = Tail((0,), 4, 1, torch.device("cpu"))
    tail.fill(0, [0, 1], torch.zeros(1, dtype=torch.float64), 1.0)
    tail.bucket.flat[:4] = 1.0
    tail.bucket.ledger.mark(range(0, 4), 1)
    tail.fill(0, [3], torch.ones(1, dtype=torch.float64), 1.0, seconds=0.5)
    assert tail.bucket.flat[:10].tolist() == [1, 1, 1, 1, 0, 0, 0, 1, 0.5, 1]


def test_more_numbers_than_the_tail_has_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="room for"):
        Tail((0,), 4, 1, torch.device("cpu")).fill(0, [], torch.zeros(EXTRAS + 1, dtype=torch.float64), 1.0)
