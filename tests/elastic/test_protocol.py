"""Who joins, waits, gives, acts for all, and leaves in an epoch of the library: one worker at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.collectives.ledger import Span
from recover_megatron.elastic import data_parallel
from recover_megatron.elastic.data_parallel import ElasticDataParallel
from recover_megatron.elastic.epoch_start import LatestState, Status
from recover_megatron.elastic.leading import Leading
from recover_megatron.elastic.restoring import NotRestored
from recover_megatron.elastic.verification import Verdict
from recover_megatron.membership.records import CoordinatorLost
from tests.elastic.test_state import Striking, stepping


class Worker:
    """A worker whose column, session and exchange write down what is asked of them, in ``said``."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, statuses: dict[int, Status], me: int = 0, begins_after: int = 3
    ) -> None:
        self.said: list[str] = []
        self.it: Any = object.__new__(ElasticDataParallel)
        mine = statuses[me]
        it = self.it
        it._leading, it._holds, it._changed, it.completed = Leading(), mine.holds, True, mine.completed
        it._sent, it._statuses, it._latest_state, it._verify_interval, it._allow = mine, {}, None, 2, 0.0
        it._own, it._state = SimpleNamespace(given="", code=""), SimpleNamespace(described=dict)
        it._generators = SimpleNamespace(after_lead=lambda *_: None)
        it._passes = SimpleNamespace(ran=[1])
        it._gradients = SimpleNamespace(
            covered="1", buckets=[], trained=[True], clear=self._says("cleared"), hold=self._says("held"), cover=repr,
        )  # fmt: skip
        it._exchange = SimpleNamespace(address="", put=self._says("put"))
        it._session = SimpleNamespace(
            mark=lambda *_, **__: None, settings=SimpleNamespace(stall_timeout=1.0), epoch=4, left=frozenset(),
            ask=self._says("asked"), give_up=lambda code, _: self.said.append(f"gave up {code}"),
            wait_revoked=self._says("waited"),
        )  # fmt: skip
        it._column = SimpleNamespace(
            me=me, members=sorted(statuses), column=sorted(statuses), over=False, begins_after=begins_after,
            statuses={worker: status.to_json() for worker, status in statuses.items()}, join=self._joins,
            group=lambda _: self.said.append("group") or "group", renew=self._says("renewed"), leave=self._says("left"),
        )  # fmt: skip
        it._fetch = lambda _: self.said.append("fetched") or setattr(it, "_holds", True) or True
        monkeypatch.setattr(data_parallel, "some_differ", lambda *_: False)

    def _says(self, word: str) -> Callable[..., None]:
        return lambda *_, **__: self.said.append(word)

    def _joins(self, told: Any) -> None:
        self.said.append("joined")
        self.told = Status.from_json(told)


DONE, AWAY = Status(3, True, covered="1"), Status(0, False, covered="1")
GOES = Status(3, True, covered="1", leaving=True)


@pytest.mark.parametrize(
    ("me", "statuses", "calls"),
    [
        (0, {0: DONE, 1: DONE}, True),
        (1, {0: DONE, 1: DONE}, False),
        (1, {0: AWAY, 1: DONE}, True),
        (0, {0: Status(2, True, covered="1"), 1: DONE}, False),
    ],
    ids=["the lowest", "another", "the lowest that has the state", "one that has to apply the step first"],
)
def test_after_a_death_the_lowest_that_has_the_state_does_what_is_left_to_do_and_tells_the_others(
    monkeypatch: pytest.MonkeyPatch, me: int, statuses: dict[int, Status], calls: bool
) -> None:
    worker = Worker(monkeypatch, statuses, me)
    worker.it._leading.add(lambda: worker.said.append("saved"), "save")
    worker.it._join()
    assert worker.said == (["joined", "saved", "renewed"] if calls else ["joined"])
    assert worker.told.todo == 1
    assert worker.it._leading.unfinished, "it does not leave before it knows that this is done"


def test_a_worker_that_takes_anothers_state_forgets_its_gradients_and_nobody_leaves_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(monkeypatch, {0: Status(9, True, covered="1"), 1: DONE}, me=1, begins_after=0)
    worker.it._join()
    assert worker.said == ["joined", "cleared"]
    assert (worker.it._holds, worker.it._passes.ran) == (False, [])
    giver = Worker(monkeypatch, {0: Status(9, True, covered="1"), 1: DONE}, begins_after=0)
    giver.it._join()
    assert giver.it._leading.unfinished


@pytest.mark.parametrize(
    ("me", "statuses", "said"),
    [
        (0, {0: DONE, 1: DONE}, ["group"]),
        (0, {0: DONE, 1: AWAY}, ["put", "group"]),
        (1, {0: DONE, 1: AWAY}, ["group", "fetched"]),
        (0, {0: DONE, 1: GOES}, ["waited"]),
        (1, {0: GOES, 1: AWAY}, ["fetched", "renewed"]),
    ],
    ids=["all have the state", "one lacks it", "the one that lacks it", "one leaves", "the giver leaves"],
)
def test_who_gives_the_state_who_takes_it_and_who_waits(
    monkeypatch: pytest.MonkeyPatch, me: int, statuses: dict[int, Status], said: list[str]
) -> None:
    """No group is opened with one that leaves: it takes no part in a sum.  Who has gone on since it joined says so."""
    worker = Worker(monkeypatch, statuses, me)
    worker.it._join()
    worker.said.clear()
    leaves = any(status.leaving for status in statuses.values())
    assert worker.it._enter() == (None if leaves else "group")
    assert worker.said == said


def test_at_the_launch_a_worker_that_has_the_state_has_joined_once_and_others_until_they_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = Worker(monkeypatch, {0: DONE, 1: AWAY})
    holder.it._column.members, holder.it._column.over = [], True
    joins = holder.it._column.join
    holder.it._column.join = lambda told: (joins(told), setattr(holder.it._column, "members", [0, 1]))
    assert holder.it.begin() == 3
    assert holder.said == ["joined"]
    taker = Worker(monkeypatch, {0: DONE, 1: AWAY}, me=1)
    taker.it._join()
    fetch, tries = taker.it._fetch, iter([EpochRevoked(4, "a death")])

    def fetched(at: LatestState) -> bool:
        for error in tries:
            raise error
        return bool(fetch(at))

    taker.it._fetch = fetched
    taker.it.begin()
    assert taker.it._holds
    assert taker.said[-1] == "held", "the sums of the others' step that were pulled on the way"


@pytest.mark.parametrize(
    ("verdict", "me", "agree", "said"),
    [
        (None, 0, True, []),
        (Verdict((1,), (0, 2), "w"), 0, False, ["waited"]),
        (Verdict((1,), (0, 2), "w"), 1, False, ["renewed"]),
    ],
    ids=["equal", "another differs", "this one differs"],
)
def test_a_worker_whose_state_differs_asks_for_that_of_the_others_which_wait(
    monkeypatch: pytest.MonkeyPatch, verdict: Verdict | None, me: int, agree: bool, said: list[str]
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(data_parallel, "compare", lambda *given: compared.append(given) or verdict)
    worker = Worker(monkeypatch, dict.fromkeys(range(3), DONE), me)
    worker.it.completed = 4
    assert worker.it._verified(SimpleNamespace(exchange="exchange")) == agree
    assert worker.said == said
    assert worker.it._holds == ("renewed" not in said)
    assert compared == [("exchange", [0, 1, 2], {})]
    for completed, interval in ((0, 2), (3, 2), (4, 0)):
        worker.it.completed, worker.it._verify_interval = completed, interval
        assert worker.it._verified(SimpleNamespace(exchange="exchange"))
    assert len(compared) == 1, "only after every second step, and never with 0"


@pytest.mark.parametrize(("agree", "sums"), [(True, ["sum", "agreed 4"]), (False, [])])
def test_nothing_is_summed_before_the_states_are_compared(
    monkeypatch: pytest.MonkeyPatch, agree: bool, sums: list[str]
) -> None:
    worker = Worker(monkeypatch, {0: DONE, 1: DONE})
    group = SimpleNamespace(all_reduce=lambda _: SimpleNamespace(wait=lambda: worker.said.append("sum")))
    worker.it._enter, worker.it._verified = lambda: group, lambda _: agree
    worker.it._latest_state, worker.it._statuses = LatestState(3, (0, 1)), {0: DONE, 1: DONE}
    worker.it.microbatches, worker.it._passes.run, worker.it._gradients.buckets = 4, lambda *_, **__: True, ["bucket"]
    worker.it._column.agree = lambda step: worker.said.append(f"agreed {step}")
    worker.it._finish(lambda *_: None)
    assert worker.said == sums


@pytest.mark.parametrize(("digest", "changed"), [("ab", False), ("", True)], ids=["at the launch", "later"])
def test_who_has_taken_a_state_is_as_those_who_gave_it(
    monkeypatch: pytest.MonkeyPatch, digest: str, changed: bool
) -> None:
    """A worker whose state no step has changed yet tells its digest: another one would take it for another state."""
    worker, trained = Worker(monkeypatch, {0: DONE, 1: AWAY}, me=1), []
    del worker.it._fetch
    worker.it._statuses = {0: Status(3, True, digest, address="host:1")}
    worker.it._session.check = None
    worker.it._exchange.fetch = lambda *_, **__: (3, [True, False])
    worker.it._gradients.away, worker.it._gradients.train = nullcontext, trained.append
    assert worker.it._fetch(LatestState(3, (0,)))
    assert (worker.it.completed, worker.it._holds, worker.it._changed) == (3, True, changed)
    assert trained == [[True, False]], "what is frozen there is frozen here"


def test_a_worker_of_the_launch_that_cannot_take_a_later_state_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, {0: DONE, 1: AWAY}, me=1)
    del worker.it._fetch
    worker.it._statuses, worker.it._session.check = {0: DONE}, None
    worker.it._gradients.away = nullcontext

    def fetch(*_: Any, **__: Any) -> None:
        raise NotRestored("lost")

    worker.it._exchange.fetch = fetch
    with pytest.raises(SystemExit, match="2"):
        worker.it._fetch(LatestState(3, (0,)))
    assert worker.said == []


def test_the_worker_that_leads_calls_what_one_does_for_all_and_the_others_keep_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for me, called in ((0, ["saved"]), (1, [])):
        worker = Worker(monkeypatch, {0: DONE, 1: DONE}, me)
        worker.it.lead(partial(worker.said.append, "saved"))
        assert worker.said == called
        assert worker.it._leading.todo == (not called)


def test_a_finished_step_forgets_what_was_asked_before_and_sets_the_generators_alike() -> None:
    drawn = []
    for more in (0, 3):
        striking = Striking()
        it = stepping(striking, [])
        it._leading.add(lambda: None, "save")
        it.step(lambda step, j, more=more, its=striking: (torch.rand(more), its.plain())[1])  # type: ignore[misc]
        assert (it._leading.todo, it._leading.unfinished) == (0, False)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]


def test_a_step_that_begins_with_more_parameters_that_are_trained_asks_for_another_epoch() -> None:
    striking, renewed = Striking(), []
    it = stepping(striking, [])
    it._gradients.grow = lambda: True  # type: ignore[method-assign]
    it._column.renew = renewed.append  # type: ignore[method-assign]
    it.step(lambda step, j: striking.plain())
    assert renewed == ["more parameters are trainable from step 1 on"]
    clear = it._gradients.clear
    it._gradients.grow = it._gradients.clear = lambda: clear() and False  # type: ignore[method-assign]
    it.step(lambda step, j: striking.plain())
    assert renewed[1:] == ["worker 1 has changed sums of this step that it had received"]


def test_a_worker_that_joins_in_the_middle_of_a_sum_makes_its_first_step_with_what_is_finished_of_it() -> None:
    """``begin``, which ``run`` calls first, opens the group, which pulls the finished sums, and fetches the state."""
    striking = Striking()
    it: Any = stepping(striking, [])
    it._holds, bucket = False, it._gradients.buckets[0]

    def enter() -> str:
        bucket.flat.fill_(1)  # the gradients, the loss, and that each microbatch was counted once
        bucket.ledger.mark(Span(0, bucket.flat.numel()), 3)
        it._holds = True
        return "group"

    it._enter, it._finish = enter, lambda microbatch: setattr(it._column, "committed", 1)  # nothing is left to sum
    it.begin()
    assert it.step(lambda step, j: striking.plain()).loss == 1
    assert striking.weight.tolist() == pytest.approx(3 * [0.9])


def test_where_no_state_is_that_of_most_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "compare", lambda *_: Verdict((0, 1), (), "w"))
    worker = Worker(monkeypatch, {0: DONE, 1: DONE})
    worker.it.completed = 4
    with pytest.raises(CoordinatorLost) as ended:
        worker.it._verified(SimpleNamespace(exchange=None))
    assert ended.value.code == 12
    assert worker.said == ["gave up 12"]


def test_a_worker_leaves_when_nothing_is_left_to_do_and_gives_its_state_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(monkeypatch, {0: GOES, 1: GOES})
    worker.it._leading.unfinished = True
    then = iter([{0: GOES, 1: AWAY}, {0: GOES, 1: GOES}])
    join = worker.it._column.join

    def joins(told: Any) -> None:
        join(told)
        worker.it._column.statuses = {its: status.to_json() for its, status in next(then).items()}

    worker.it._column.join = joins
    worker.it.leave()
    assert worker.said == ["joined", "put", "waited", "joined", "left"]
    assert worker.told.leaving
    worker.it.leave()
    assert worker.said[5:] == ["left"], "a second time changes nothing"
    quick = Worker(monkeypatch, {0: DONE, 1: DONE})
    quick.it.leave()
    assert quick.said == ["left"], "where one worker did nothing for all nobody waits"


def test_microbatches_are_run_until_the_epoch_is_over_each_with_its_own_random_numbers() -> None:
    striking, begun, drawn = Striking(), [], []
    it = stepping(striking, [])

    def microbatch(step: int, j: int) -> torch.Tensor:
        drawn.append(torch.rand(1).item())
        return striking.plain()

    for _ in range(2):
        it._gradients.clear()
        it._passes.ran = []
        over = iter([False, True])
        done = it._passes.run(
            microbatch, 1, [1, 0], over=lambda its=over: next(its), begin=begun.append, failed=pytest.fail
        )  # type: ignore
        assert not done
        assert (it._passes.ran, begun) == ([1], [1])
        assert it._passes.run(microbatch, 1, [0], over=lambda: False, begin=begun.append, failed=pytest.fail)  # type: ignore
        assert it._passes.ran == [1, 0]
        assert it._gradients.loss() == 3.0
        begun.clear()
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
