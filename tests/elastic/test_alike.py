"""What keeps all workers alike: generators that are set alike, states that are compared, one that acts for all."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from examples import plain_pytorch as example
from recover_megatron.elastic import data_parallel
from recover_megatron.elastic.data_parallel import ElasticDataParallel
from recover_megatron.elastic.epoch_start import LatestState, Status
from recover_megatron.elastic.generators import Generators
from recover_megatron.elastic.leading import Leading, may_leave
from recover_megatron.elastic.run_state import State
from recover_megatron.elastic.verification import Verdict, compare
from recover_megatron.membership.records import CoordinatorLost, Fenced


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_workers_that_ran_other_microbatches_draw_the_same_afterwards_and_each_step_draws_anew() -> None:
    generators, seen = Generators(3, torch.device("cpu")), []
    for microbatches in ([0, 2], [1], []):
        for step in (1, 2):
            for j in microbatches:
                generators.for_microbatch(step, j)
                drawn()
            generators.for_update(step)
            seen.append((drawn(), drawn()))
            generators.after_lead(step, 1)
            seen.append((drawn(), drawn()))
    assert seen[0:4] == seen[4:8] == seen[8:12]
    assert len({number for pair in seen[0:4] for numbers in pair for number in numbers}) == 4 * 2 * 3


def test_a_microbatch_draws_the_same_whoever_runs_it_and_another_one_something_else() -> None:
    generators, other = Generators(3, torch.device("cpu")), Generators(4, torch.device("cpu"))
    seen = []
    for its, step, j in [(generators, 5, 1), (generators, 5, 2), (generators, 6, 1), (other, 5, 1), (generators, 5, 1)]:
        its.for_microbatch(step, j)
        seen.append(drawn())
    assert seen[0] == seen[4]
    assert len({number for numbers in seen[:4] for number in numbers}) == 4 * 3


def test_without_a_seed_the_generators_are_left_alone() -> None:
    generators = Generators(None, torch.device("cpu"))
    states = random.getstate(), torch.get_rng_state().tolist()
    generators.for_microbatch(1, 1)
    generators.for_update(1)
    assert (random.getstate(), torch.get_rng_state().tolist()) == states


def state(weight: float = 1.0, moment: float = 0.0) -> State:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, moment)
    return State({"model": model, "optimizer": optimizer})


def compared(*states: State) -> list[Verdict | None]:
    """What workers 10, 11, ... find, which exchange their numbers as over a ring."""
    rows: list[list[int]] = [[] for _ in states]
    barrier = threading.Barrier(len(states), timeout=60)

    def worker(rank: int) -> Verdict | None:
        def exchange(numbers: Sequence[int]) -> list[list[int]]:
            rows[rank] = list(numbers)
            barrier.wait()
            everyone = [list(row) for row in rows]
            barrier.wait()
            return everyone

        return compare(exchange, range(10, 10 + len(states)), states[rank].described())

    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(worker, range(len(states))))


def test_equal_states_are_equal() -> None:
    assert compared(state(), state(), state()) == [None] * 3


def test_the_tensors_are_named_and_the_worker_whose_state_is_not_that_of_most() -> None:
    names = "optimizer.state.0.momentum_buffer, optimizer.state.1.momentum_buffer"
    verdicts = compared(state(), state(moment=1.0), state())
    assert verdicts == [Verdict((11,), (10, 12), names)] * 3
    assert verdicts[0] is not None
    assert verdicts[0].text(50) == (
        f"the state of worker 11 after step 50 differs from that of workers 10, 12 ({names}): worker 11 fetches "
        "that state.  A checkpoint saved since the previous comparison may contain the wrong state"
    )


@pytest.mark.parametrize("states", [(1.0, 2.0), (1.0, 1.0, 2.0, 2.0), (1.0, 2.0, 3.0)], ids=["two", "halves", "three"])
def test_where_no_state_is_that_of_most_nobody_takes_over_anything(states: tuple[float, ...]) -> None:
    verdicts = compared(*map(state, states))
    assert verdicts == [Verdict(tuple(range(10, 10 + len(states))), (), "model.bias, model.weight")] * len(states)
    assert verdicts[0] is not None
    assert "restart from a checkpoint that is not newer than the previous comparison" in verdicts[0].text(50)


def test_states_with_other_tensors_and_numbers_are_compared_too() -> None:
    rest, lacks = state(), state()
    optimizer: Any = lacks._parts["optimizer"]
    del optimizer.state[optimizer.param_groups[0]["params"][1]]
    optimizer.param_groups[0]["lr"] = 0.2
    first, _, last = compared(rest, rest, lacks)
    assert first == Verdict((12,), (10, 11), "optimizer.param_groups.0.lr, optimizer.state.1.momentum_buffer")
    assert last == Verdict((12,), (10, 11), "optimizer.param_groups.0.lr, a tensor that this worker does not have")


def test_the_order_of_keys_and_the_form_of_a_sequence_do_not_count_but_types_and_shapes_do() -> None:
    class Part:
        def __init__(self, its: dict[str, Any]) -> None:
            self._its = its

        def state_dict(self) -> dict[str, Any]:
            return self._its

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def described(**its: Any) -> dict[str, str]:
        return State({"model": torch.nn.Module(), "data": Part(its)}).described()

    assert described() == {}, "a part without anything"
    one = described(a=1, b=[2.0, torch.zeros(2, 3)], c={"x": "y", "z": None})
    assert one == described(c={"z": None, "x": "y"}, b=(2.0, torch.zeros(2, 3)), a=1)
    for name, other in {
        "data.b.1": described(a=1, b=[2.0, torch.zeros(3, 2)], c={"x": "y", "z": None}),
        "data.b.0": described(a=1, b=[2.5, torch.zeros(2, 3)], c={"x": "y", "z": None}),
        "data.a": described(a=True, b=[2.0, torch.zeros(2, 3)], c={"x": "y", "z": None}),
        "data.c.x": described(a=1, b=[2.0, torch.zeros(2, 3)], c={"x": "z", "z": None}),
    }.items():
        assert [each for each in one if one[each] != other[each]] == [name]


def call(leading: Leading, log: list[str]) -> None:
    leading.call(lambda name: log.append(f"begin {name}"), lambda name, error: log.append(f"{name} failed: {error}"))


def test_what_one_worker_does_for_all_is_kept_until_it_is_done_or_a_step_is_finished() -> None:
    leading, log = Leading(), []

    def save() -> None:
        log.append("save")
        if log.count("save") == 1:
            raise OSError("full")

    assert not leading.unfinished
    leading.add(save, "")
    leading.add(lambda: log.append("evaluated"), "evaluation")
    assert (leading.todo, leading.names, leading.calls, leading.unfinished) == (2, "save, evaluation", 2, True)
    with pytest.raises(OSError, match="full"):
        call(leading, log)
    assert leading.todo == 2, "the next worker that leads has to do it, and so has this one if it goes on"
    call(leading, log)
    assert log == ["begin save", "save", "save failed: full", "begin save", "save", "begin evaluation", "evaluated"]
    assert (leading.todo, leading.unfinished) == (0, True), "others may not know yet"
    leading.add(save, "")
    leading.forget()
    assert (leading.todo, leading.calls, leading.unfinished) == (0, 0, False)


@pytest.mark.parametrize(("error", "code"), [(Fenced("late"), 13), (CoordinatorLost("over", 12), 12)])
def test_a_worker_that_learns_in_a_function_of_lead_that_it_was_put_out_ends_in_order_and_reports_no_fault(
    error: Exception, code: int
) -> None:
    it: Any = object.__new__(ElasticDataParallel)
    reported: list[Any] = []
    it._column, it._leading, it.completed = SimpleNamespace(me=0, members=[0, 1]), Leading(), 5
    it._session = SimpleNamespace(settings=SimpleNamespace(stall_timeout=1.0), mark=lambda *_, **__: None)
    it._session.wait_in_touch = lambda **_: (_ for _ in ()).throw(error)
    it._report = lambda *what: reported.append(what)
    with pytest.raises(SystemExit) as ended:
        it.lead(it.check)
    assert ended.value.code == code
    assert reported == []


@pytest.mark.parametrize(
    ("statuses", "may"),
    [
        ({1: Status(30, True), 2: Status(30, True, todo=1)}, True),
        ({1: Status(30, True, todo=1), 2: Status(30, True)}, False),
        ({1: Status(29, True), 2: Status(30, True, todo=1)}, False),
        ({1: Status(31, True), 2: Status(31, True)}, True),
        ({1: Status(30, True), 3: Status(0, False)}, False),
    ],
    ids=["done", "to be done again", "still in its loop", "trains on", "lacks the state"],
)
def test_nobody_leaves_before_what_one_does_for_all_is_done_and_all_have_the_state(
    statuses: dict[int, Status], may: bool
) -> None:
    assert may_leave(statuses, LatestState(30, (1, 2)), 30) == may


def test_a_worker_without_the_state_leaves_without_a_wait() -> None:
    """It could not be given the state in ``leave``, so all would wait for each other for ever."""
    it, left = object.__new__(ElasticDataParallel), []
    it._leading, it._holds = Leading(), False
    it._leading.add(lambda: None, "before the first step")
    it._column = SimpleNamespace(leave=lambda: left.append(True))  # type: ignore[assignment]
    it._join = lambda **_: pytest.fail("it has joined")  # type: ignore[method-assign]
    it.leave()
    assert left == [True]


@pytest.mark.parametrize("leaving", [True, False])
def test_a_worker_that_leaves_before_others_lets_them_go_on_without_it(leaving: bool) -> None:
    """They take no part in a sum with one that leaves, so nothing else would end the epoch in which they wait."""
    it, said = object.__new__(ElasticDataParallel), []
    it._leading, it._holds, it.completed = Leading(), True, 3
    it._leading.add(lambda: None, "save")
    it._leading.call(lambda _: None, lambda *_: None)
    it._statuses, it._latest_state = (
        {0: Status(3, True, leaving=True), 1: Status(3, True, leaving=leaving)},
        LatestState(3, (0, 1)),
    )
    it._column = SimpleNamespace(me=0, over=False, leave=lambda: said.append("left"))  # type: ignore[assignment]
    it._session = SimpleNamespace(ask=said.append)  # type: ignore[assignment]
    it._join = lambda **_: None  # type: ignore[method-assign]
    it.leave()
    assert said == [*["worker 0 leaves before the others"] * (not leaving), "left"]


def test_workers_draw_the_same_after_what_one_did_for_all_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_parallel, "some_differ", lambda *_: False)
    seen = []
    for me in (0, 1):
        it: Any = object.__new__(ElasticDataParallel)
        it._leading, it._holds, it._changed, it.completed = Leading(), True, True, 0
        it._generators = Generators(0, torch.device("cpu"))
        it._own, it._exchange = SimpleNamespace(given="", code=""), SimpleNamespace(address="")
        it._passes, it._gradients = SimpleNamespace(ran=[]), SimpleNamespace(covered="1")
        it._session = SimpleNamespace(mark=lambda *_, **__: None, settings=SimpleNamespace(stall_timeout=1.0))
        its = dict.fromkeys((0, 1), Status(0, True, covered="1").to_json())
        quiet = {"join": lambda _: None, "renew": lambda _: None}
        it._column = SimpleNamespace(me=me, members=[], statuses=its, begins_after=0, **quiet)
        it.lead(drawn)
        it._join()
        seen.append(drawn())
    assert seen[0] == seen[1]


def test_two_workers_that_save_never_write_into_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stood still, and goes on to write when another one has saved, would spoil that checkpoint."""
    renamed: list[str] = []
    monkeypatch.setattr(example, "run", lambda *_: [SimpleNamespace(step=50, loss=0.0)])
    monkeypatch.setattr(example, "os", SimpleNamespace(path=os.path, rename=lambda new, _: renamed.append(new)))
    for worker in (0, 1):
        elastic = SimpleNamespace(worker=worker, state_dict=dict, check=lambda: None, lead=lambda save: save())
        monkeypatch.setattr(example, "ElasticDataParallel", lambda *_, its=elastic, **__: its)
        example.main(50, str(tmp_path / "checkpoint.pt"))
    assert len(set(renamed)) == 2
    assert sorted(map(str, tmp_path.iterdir())) == sorted(renamed)
