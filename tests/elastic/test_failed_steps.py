"""An exception out of a step, after which this worker may have half of an update, or of a sum; and a DataLoader's
process that dies, which is told where a microbatch reads and nowhere else."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data._utils import signal_handling

from recover_megatron import ElasticDataParallel
from recover_megatron.membership.records import CoordinatorLost, Fenced
from tests.elastic.test_state import Striking, stepping
from tests.harness.loaders import groups, kill, strike_in_update
from tests.harness.waiting import DEADLINE

WORDS: dict[str, Callable[[Any], Any]] = {
    "step": lambda it: it.step(lambda step, j: torch.ones(())),
    "begin": lambda it: it.begin(),
    "lead": lambda it: it.lead(lambda: it.said.append("saved")),
    "check": lambda it: it.check(),
    "leave": lambda it: it.leave(),
    "state_dict": lambda it: it.state_dict(),
}


class Two(Striking):
    """Two parameters, each in a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD(groups(self.weight, self.bias), lr=0.1)

    def plain(self) -> torch.Tensor:
        return super().plain() + self.bias.sum()


def worker(model: Striking) -> Any:
    """A worker that leads, and notes in ``said`` what it does for the others, or asks of them."""
    it: Any = stepping(model, [])
    it._known, it.said = set(map(id, model.parameters())), []
    it._column.leave = lambda: it.said.append("left")
    it._exchange.put = lambda *_: it.said.append("put")
    it._session.wait_in_touch = lambda **_: None
    return it


def fail(it: Any, error: BaseException, *, updating: bool) -> None:
    """Make a step out of which ``error`` comes: in the middle of its update, or of its sum; the script catches it."""

    def update() -> None:
        with torch.no_grad():
            it._state._parts["model"].weight.add_(1)
        raise error

    def finish(_: Any) -> None:
        raise error

    it._optimizer = SimpleNamespace(step=update, param_groups=[])
    it._finish = it._finish if updating else finish
    with pytest.raises(type(error)):
        it.step(lambda step, j: it._state._parts["model"].plain())


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("error", [RuntimeError("a loader"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_after_an_error_in_the_update_a_worker_ends_and_gives_its_state_to_nobody(
    word: str, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    it = worker(Two())
    fail(it, error, updating=True)
    with pytest.raises(SystemExit) as ended:
        WORDS[word](it)
    assert ended.value.code == (3 if isinstance(error, SystemExit) else 1)
    assert it.said == []
    assert it.completed == 0
    said = capsys.readouterr().err
    assert f"worker 1 exits, and the other workers continue without it: the script called {word}() after" in said
    assert f" step 1 raised {type(error).__name__}, and parameters and optimizer may be half updated" in said
    assert "Let the error end the process: --max-restarts starts another worker" in said
    assert "in update\n" in said, "where it was raised is shown"


@pytest.mark.parametrize("word", [word for word in WORDS if word != "state_dict"])
def test_after_an_error_in_the_sum_a_worker_ends_too_since_the_others_may_be_summing_its_gradients(word: str) -> None:
    it = worker(Two())
    fail(it, RuntimeError("a loader"), updating=False)
    with pytest.raises(SystemExit, match="1"):
        WORDS[word](it)
    assert it.said == []


def test_a_state_that_no_update_has_begun_to_change_may_be_saved() -> None:
    it = worker(Two())
    fail(it, KeyboardInterrupt(), updating=False)
    assert it.state_dict()["completed"] == 0


@pytest.mark.parametrize("error", [Fenced("too late"), CoordinatorLost("over", 0)], ids=repr)
def test_an_end_of_the_run_is_told_as_before_however_often_a_worker_asks(error: Exception) -> None:
    it = worker(Two())
    for _ in range(2):
        fail(it, error, updating=False)


@pytest.mark.parametrize(("updating", "phase"), [(False, "step"), (True, "update")])
def test_the_coordinator_is_told_of_an_error_that_the_script_catches(updating: bool, phase: str) -> None:
    it, told = worker(Two()), []
    it._session.report_exception = lambda *what, **how: told.append((what[2], how["phase"]))
    fail(it, OSError("full"), updating=updating)
    assert told == [("OSError: full", phase)]


def test_the_coordinator_is_not_told_of_ctrl_c_as_of_an_error_which_ends_the_run_where_all_workers_have_it() -> None:
    it, told = worker(Two()), []
    it._session.report_exception = lambda *what, **how: told.append(what)
    fail(it, KeyboardInterrupt(), updating=False)
    assert told == []


class Numbers(torch.utils.data.IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        yield from map(float, range(1, 100))


class Reading:
    """A worker whose microbatches read from a DataLoader with a process of its own."""

    def __init__(self) -> None:
        self.model = Two()
        self.it: ElasticDataParallel = worker(self.model)
        self.batches: Any = None

    def open(self) -> None:
        self.batches = iter(torch.utils.data.DataLoader(Numbers(), batch_size=1, num_workers=1, prefetch_factor=1))
        (self.process,) = self.batches._workers

    def microbatch(self, step: int, j: int) -> torch.Tensor:
        if self.batches is None:
            self.open()
        return self.model.plain() * float(next(self.batches))

    def close(self) -> None:
        self.batches._shutdown_workers()


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    """Its loader is the first one of this process, for all that torch knows."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    its = Reading()
    yield its
    its.close()
    signal.signal(signal.SIGCHLD, before)


def test_a_loaders_process_that_is_killed_in_the_update_is_told_by_the_next_microbatch_that_reads(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike_in_update(monkeypatch, lambda: reading.process)
    reading.it.step(reading.microbatch)
    assert reading.it.completed == 1
    assert torch.equal(reading.model.weight, reading.model.bias), "all parameters have the step"
    reading.batches._timeout = 0.05
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"):
        reading.it.step(reading.microbatch)
    assert reading.it.completed == 1


def test_a_loaders_process_is_told_by_no_sum_of_a_step_in_which_this_worker_has_no_microbatch(reading: Reading) -> None:
    reading.open()
    reading.it._passes.run(
        reading.microbatch, 1, [], over=lambda: False, begin=lambda j: None, failed=lambda j, error: None
    )
    kill(reading.process)


def test_a_loaders_process_that_is_killed_while_a_microbatch_reads_is_told_at_once(reading: Reading) -> None:
    def microbatch(step: int, j: int) -> torch.Tensor:
        if step == 2:
            kill(reading.process)
        return reading.microbatch(step, j)

    reading.it.step(microbatch)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal: Killed"):
        reading.it.step(microbatch)


def test_a_loader_that_the_first_microbatch_made_raises_nothing_when_that_is_over(reading: Reading) -> None:
    reading.it._passes.gradient(reading.microbatch, 1, 0)
    kill(reading.process)


def test_a_worker_that_reads_may_go_on_in_a_thread_of_its_own(reading: Reading) -> None:
    reading.it.step(reading.microbatch)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(reading.it.step, reading.microbatch).result(DEADLINE).step == 2


def test_an_error_of_the_programs_own_handler_of_sigchld_comes_out_where_it_was_raised(reading: Reading) -> None:
    def of_the_program(*_: Any) -> None:
        raise RuntimeError("a process of the program has died")

    before = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, of_the_program)
    try:
        reading.it.step(reading.microbatch)
        with pytest.raises(RuntimeError, match="a process of the program"):
            signal.raise_signal(signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_handler_of_a_signal_gets_no_state_in_the_middle_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    it, saved = worker(Two()), []
    module = importlib.import_module("torch.optim.sgd")
    update = module.sgd

    def sgd(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        signal.raise_signal(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, lambda *_: saved.append(it.state_dict()))
    try:
        signal.raise_signal(signal.SIGUSR2)
        monkeypatch.setattr(module, "sgd", sgd)
        with pytest.raises(RuntimeError, match="during the update of step 1"):
            it.step(lambda step, j: it._state._parts["model"].plain())
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(saved) == 1, "before the step"


@pytest.mark.parametrize("error", [RuntimeError("a loader"), Fenced("too late")], ids=repr)
def test_after_a_failed_step_nobody_gets_the_state_any_more(error: Exception) -> None:
    """The script that has caught the error may change it, and a worker that comes may be fetching it."""
    it = worker(Two())
    it._exchange.withdraw = lambda: it.said.append("withdrawn")
    fail(it, error, updating=False)
    assert it.said == ["withdrawn"]
