"""The gradients' memory: counted, and told when somebody has taken it; what cannot be trained is refused at once, and
what a microbatch must not do when it has done it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron import ElasticDataParallel
from recover_megatron.collectives.comparison import OwnDescription
from recover_megatron.collectives.ledger import Span
from recover_megatron.elastic import checks
from recover_megatron.elastic.checks import some_differ
from recover_megatron.elastic.epoch_start import LatestState, Status, latest_state, shares
from recover_megatron.elastic.generators import Generators
from recover_megatron.elastic.gradients import Gradients
from recover_megatron.elastic.leading import Leading
from recover_megatron.elastic.passes import Passes
from recover_megatron.elastic.run_state import State
from recover_megatron.errors import Disagreement, UserError
from recover_megatron.network.peer_store import PeerStoreServer
from tests.harness.processes import python


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1).to(torch.bfloat16))


def test_each_type_has_a_bucket_and_the_loss_is_in_a_wide_one() -> None:
    narrow = Gradients(list(model().bfloat16().parameters()), 5)
    assert [(bucket.flat.dtype, bucket.flat.numel()) for bucket in narrow.buckets] == [
        (torch.bfloat16, 16 + 5), (torch.float32, 1 + 5 + 4)
    ]  # fmt: skip
    gradients = Gradients(list(model().parameters()), 5)
    assert [(bucket.flat.dtype, bucket.flat.numel()) for bucket in gradients.buckets] == [
        (torch.float32, 16 + 1 + 5 + 4), (torch.bfloat16, 5)
    ]  # fmt: skip


def test_a_microbatch_that_is_counted_twice_or_not_at_all_is_no_step() -> None:
    gradients = Gradients([torch.nn.Parameter(torch.zeros(2))], 2)
    gradients.count(0, torch.tensor(1.5))
    with pytest.raises(Disagreement, match=r"\[1, 0\] times"):
        gradients.loss()
    gradients.count(1, torch.tensor(1.0))
    assert gradients.loss() == 2.5
    gradients.count(1, torch.tensor(1.0))
    with pytest.raises(Disagreement, match=r"\[1, 2\] times"):
        gradients.loss()


def test_a_gradient_that_was_taken_away_is_told_and_is_back_in_the_next_step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    gradients = Gradients([parameter], 1)
    parameter.grad = None
    parameter.sum().backward()
    with pytest.raises(RuntimeError, match="zero_grad"):
        gradients.count(0, torch.tensor(1.0))
    gradients.clear()
    parameter.sum().backward()
    gradients.count(0, torch.tensor(1.0))
    assert gradients.buckets[0].flat.tolist() == [1, 1, 1, 1, 1]


def test_what_is_summed_stays_in_all_buckets() -> None:
    gradients = Gradients(list(model().parameters()), 3)
    for bucket in gradients.buckets:
        bucket.flat.fill_(1)
        bucket.ledger.mark(Span(0, 2), 1)
    with gradients.kept():
        for bucket in gradients.buckets:
            bucket.flat += 1
    assert [bucket.flat[:3].tolist() for bucket in gradients.buckets] == [[1, 1, 2]] * 2


def test_states_are_equal_where_their_digests_are() -> None:
    one, other = model(), model()
    digests = [
        State({"model": each, "optimizer": torch.optim.AdamW(each.parameters())}).digest() for each in (one, other)
    ]
    assert digests[0] == digests[1]
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    assert State({"model": other, "optimizer": torch.optim.AdamW(other.parameters())}).digest() != digests[0]


def test_a_state_that_arrives_goes_into_the_models_own_memory() -> None:
    here = model()
    state = State({"model": here, "optimizer": torch.optim.SGD(here.parameters(), momentum=0.9)})
    weight = here[0].weight
    place = state.place()
    assert place(("state", "model", "0.weight"), [4, 3], torch.float32).data_ptr() == weight.data_ptr()
    assert place(("state", "model", "0.weight"), [4, 4], torch.float32).data_ptr() != weight.data_ptr()
    assert place(("state", "optimizer", "0.weight"), [4, 3], torch.float32).data_ptr() != weight.data_ptr()
    with pytest.raises(ValueError, match="has the parts"):
        state.load({"model": {}})


class LoadsIntoNoGradient:
    """As torchtitan's optimizers, and those whose state torch.distributed.checkpoint sets."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"moment": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if all(parameter.grad is None for parameter in self._parameters):
            self.loaded = state_dict


def test_while_a_state_is_loaded_no_parameter_has_a_gradient_and_afterwards_its_own() -> None:
    here = model()
    gradients, optimizer = Gradients(list(here.parameters()), 1), LoadsIntoNoGradient(here)
    state = State({"model": here, "optimizer": optimizer})
    mine = [parameter.grad for parameter in here.parameters()]
    with gradients.away():
        state.load(state.tree())
    assert optimizer.loaded == {"moment": 3}
    assert all(parameter.grad is grad for parameter, grad in zip(here.parameters(), mine, strict=True))


def test_a_part_that_cannot_be_sent_is_named() -> None:
    class Bytes:
        def state_dict(self) -> dict[str, Any]:
            return {"position": b"12"}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    state = State({"model": model(), "data": Bytes(), "more": Bytes()})
    with pytest.raises(UserError, match="state of 'data': a bytes cannot be sent") as refused:
        state.digest()
    assert len(refused.value.reasons) == 2


def elastic(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> ElasticDataParallel:
    """One without a run, that can add gradients."""
    it = object.__new__(ElasticDataParallel)
    it.microbatches, it._leading, it._generators = 2, Leading(), Generators(0, torch.device("cpu"))
    it._gradients, it._state = Gradients(list(model.parameters()), 2), State({"model": model, "optimizer": optimizer})
    it._passes = Passes(it._gradients, it._state, it._generators, torch.Tensor.backward, 2)
    return it


class Striking(torch.nn.Module):
    """Whose forward pass does what its name says, beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        with torch.inference_mode():
            self.register_buffer("table", torch.zeros(1))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def plain(self) -> torch.Tensor:
        self.cache += 1  # nobody's but this worker's: it is in no state
        return self.weight.sum()

    def one_number(self) -> torch.Tensor:
        return self.weight.sum(0, keepdim=True)

    def nothing(self) -> None: ...

    def several(self) -> torch.Tensor:
        return self.weight * 2

    def steps(self) -> torch.Tensor:
        loss = self.weight.sum() * 1
        self.optimizer.step()
        return loss

    def counts(self) -> torch.Tensor:
        self.seen += 1
        return self.weight.sum()

    def zeroes(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        return self.weight.sum()

    def goes_back(self) -> torch.Tensor:
        loss = self.weight.sum()
        loss.backward(retain_graph=True)
        return loss


@pytest.mark.parametrize("name", ["plain", "one_number"])
def test_a_microbatch_gives_its_part_of_the_loss_and_of_the_gradient(name: str) -> None:
    striking = Striking()
    it = elastic(striking, striking.optimizer)
    for j in range(2):
        it._gradients.count(j, it._passes.gradient(lambda step, j: getattr(striking, name)(), 1, j))
    assert it._gradients.loss() == 3.0
    assert striking.weight.grad is not None
    assert striking.weight.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nothing", "returned None: it must return its loss"),
        ("several", r"returned a tensor of shape \[3\]: it must return its loss"),
        ("steps", r"has changed parameters: remove the optimizer's step\(\)"),
        ("counts", "has changed the model's seen, on this worker only"),
        ("zeroes", r"has changed gradients outside backward=: remove zero_grad\(\)"),
        ("goes_back", r"has changed gradients outside backward=: .* and backward\(\)"),
    ],
)
def test_what_a_microbatch_must_not_do_is_told(name: str, error: str) -> None:
    striking = Striking()
    it = elastic(striking, striking.optimizer)
    with pytest.raises((TypeError, RuntimeError), match=rf"microbatch\(1, 0\) {error}"):
        it._passes.gradient(lambda step, j: getattr(striking, name)(), 1, 0)


def test_a_microbatch_may_go_back_by_itself_where_nobody_else_does() -> None:
    striking = Striking()
    it = elastic(striking, striking.optimizer)
    it._passes._backward = lambda loss: None
    it._passes.gradient(lambda step, j: striking.goes_back().detach(), 1, 0)


def test_the_coordinator_is_told_of_an_exception_that_ends_the_worker_wherever_it_was_raised() -> None:
    it, told, shown = elastic(Striking(), Striking().optimizer), [], []
    it.completed = 3
    it._column = SimpleNamespace(me=1)  # type: ignore[assignment]
    it._session = SimpleNamespace(report_exception=lambda *what, **how: told.append((what, how)))  # type: ignore[assignment]
    it._uncaught = lambda *what: shown.append(what)
    full = OSError("No space left on device")
    it._ended_by(OSError, full, None)
    it._ended_by(KeyboardInterrupt, KeyboardInterrupt(), None)
    (((step, j, error, _, worker), how),) = told
    assert (step, j, error, worker) == (4, None, "OSError: No space left on device", 1)
    assert how == {"phase": "between steps", "tried": []}
    assert len(shown) == 2, "it is printed as always"


def stepping(striking: Striking, told: list[Any]) -> ElasticDataParallel:
    """One that makes whole steps with itself alone; ``told``: what the coordinator is told of losses and errors."""
    it = elastic(striking, striking.optimizer)
    it._optimizer, it._known, it._before_update = striking.optimizer, {id(striking.weight)}, lambda: None
    it.completed, it._holds, it._changed, it._summed = 0, True, False, frozenset({1})
    it._column = column = SimpleNamespace(me=1, members=[1], over=False, committed=0)  # type: ignore[assignment]
    it._exchange = SimpleNamespace(withdraw=lambda: None)  # type: ignore[assignment]
    it._session = SimpleNamespace(  # type: ignore[assignment]
        epoch=1, settings=SimpleNamespace(stall_timeout=1.0), mark=lambda *_, **__: None,
        show_loss=lambda *what: told.append(what), report_exception=lambda *what, **_: told.append(what[2]),
    )  # fmt: skip

    def finish(microbatch: Callable[[int, int], torch.Tensor]) -> None:
        for j in range(2):
            it._gradients.count(j, it._passes.gradient(microbatch, it.completed + 1, j))
        column.committed += 1

    it._finish = finish  # type: ignore[method-assign]
    return it


def test_the_coordinator_is_told_the_loss_of_each_finished_step() -> None:
    striking, told = Striking(), []
    it = stepping(striking, told)
    losses = [it.step(lambda step, j: striking.plain() * step).loss for _ in range(2)]
    assert told == list(enumerate(losses, 1))
    assert losses[0] == 3.0


def test_an_optimizer_whose_state_cannot_be_sent_is_found_when_it_has_one_and_not_by_a_death() -> None:
    striking, told = Striking(), []
    it = stepping(striking, told)
    update = striking.optimizer.step
    striking.optimizer.step = lambda: (update(), striking.optimizer.state[striking.weight].update(kind=b"1"))  # type: ignore
    with pytest.raises(UserError, match="state of 'optimizer': a bytes cannot be sent"):
        it.step(lambda step, j: striking.plain())
    assert len(told) == 1
    assert "a bytes cannot be sent" in told[0]


def status(completed: int = 0, holds: bool = True, digest: str = "", ran: tuple[int, ...] = ()) -> Status:
    return Status(completed, holds, digest, ran, "host:1")


def test_a_status_comes_through_the_wire() -> None:
    one = status(7, True, "ab", (0, 3))
    assert Status.from_json(one.to_json()) == one


def test_a_status_of_another_version_is_read_as_far_as_it_goes() -> None:
    assert Status.from_json({**status(7).to_json(), "since": 3}) == status(7)
    assert Status.from_json({"ran": [2]}) == Status(ran=(2,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"microbatches": 32}, "microbatches 32 (the run: 16)"),
        ({"seed": None}, "seed None (the run: 0)"),
        ({"state": {"scheduler": None}}, "state scheduler (the run: without a value)"),
        ({"model": torch.nn.Linear(3, 1)}, "parameter weight torch.float32 [1, 3] (the run: torch.float32 [1, 2])"),
        ({"model": torch.nn.Linear(2, 1).bfloat16()}, "parameter bias torch.bfloat16 [1] (the run: torch.float32 [1])"),
        ({"model": torch.nn.Linear(2, 1, bias=False)}, "parameter bias is missing (the run: torch.float32 [1])"),
        ({"code": {"train.py": "9"}}, "the content of train.py differs"),
    ],
)
def test_a_newcomer_that_differs_ends_with_2_and_the_others_do_not_begin_with_it(
    change: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of the run, and the newcomer, each with what both have joined with."""
    plain = {"model": torch.nn.Linear(2, 1), "microbatches": 16, "seed": 0, "state": {}, "code": {"train.py": "1"}}
    differ, joined, gave_up, lines = {}, {}, [], []
    session: Any = SimpleNamespace(give_up=lambda *what: gave_up.append(what))
    monkeypatch.setattr("recover_megatron.elastic.checks.log", SimpleNamespace(info=lines.append))
    for me, given in ((0, plain), (3, {**plain, **change})):
        store = PeerStoreServer("127.0.0.1", b"x" * 32)
        settings = Status.settings(given["model"], given["microbatches"], given["seed"], 100, given["state"])
        own = OwnDescription(settings, given["code"], store, b"x" * 32, called="settings")
        joined[me] = Status(5, me == 0, "", (), store.address, own.given, own.code).to_json()
        differ[me] = partial(some_differ, own, me, me == 0, joined, session)
    # The digest of a program may differ for good reasons: of that the newcomer alone finds out.
    assert differ[0]() == ("code" not in change)
    with pytest.raises(SystemExit) as ended:
        differ[3]()
    assert ended.value.code == 2
    assert "worker 3 exits, and the run continues without it" in lines[0]
    assert said in lines[0]
    assert gave_up == []
    del joined[3]
    assert not differ[0]()


def test_a_module_is_described_as_it_was_when_it_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the model is built, minutes later perhaps, somebody may edit the shared files."""
    monkeypatch.setattr(checks, "_AT_IMPORT", {"net.py": "as it was imported"})
    monkeypatch.setattr(checks.program, "describe", lambda: {"net.py": "edited since", "late.py": "1"})
    assert checks.loaded_program() == {"net.py": "as it was imported", "late.py": "1"}


@pytest.mark.parametrize(
    ("statuses", "committed", "wanted"),
    [
        ({0: status(digest="a"), 1: status(digest="a")}, 0, LatestState(0, (0, 1))),
        ({0: status(digest="a"), 1: status(digest="b"), 2: status(digest="a")}, 0, LatestState(0, (0, 2))),
        ({1: status(digest="b"), 2: status(digest="a")}, 0, LatestState(0, (1,))),
        ({0: status(digest="a"), 1: status(500, digest="c"), 2: status(500, digest="d")}, 0, LatestState(500, (1,))),
        ({0: status(7), 1: status(7), 4: status(holds=False)}, 7, LatestState(7, (0, 1))),
        ({0: status(6), 1: status(7), 4: status(holds=False)}, 7, LatestState(7, (0, 1))),
        ({0: status(0, digest="a"), 1: status(1)}, 1, LatestState(1, (0, 1))),
        ({4: status(holds=False), 5: status(holds=False)}, 7, None),
    ],
    ids=["equal", "one differs", "the lowest leads", "who has completed most", "a newcomer", "one has to apply it",
         "the first step", "nobody"],
)  # fmt: skip
def test_who_holds_the_state(statuses: dict[int, Status], committed: int, wanted: LatestState | None) -> None:
    assert latest_state(statuses, committed) == wanted


def test_what_nobody_had_is_shared_out_and_nothing_else() -> None:
    statuses = {0: status(7, ran=(0, 3)), 2: status(7, ran=(2,)), 4: status(holds=False)}
    at = LatestState(7, (0, 2))
    assert shares(statuses, at, [0, 2, 4], 8, 6) == {0: [1], 2: [4, 5]}, "who had less runs more; a newcomer nothing"


def test_what_was_run_of_an_older_step_does_not_count() -> None:
    statuses = {0: status(6, ran=(0, 1, 2)), 1: status(7, ran=())}
    assert shares(statuses, LatestState(7, (0, 1)), [0, 1], 8, 4) == {0: [0, 2], 1: [1, 3]}


@pytest.mark.parametrize("step", [9, 20])
def test_later_steps_of_the_epoch_are_everybodys(step: int) -> None:
    statuses = {0: status(7, ran=(0, 3)), 2: status(7), 4: status(holds=False)}
    dealt = shares(statuses, LatestState(7, (0, 2)), [0, 2, 4], step, 7)
    assert sorted(chain(*dealt.values())) == list(range(7))
    assert {len(ids) for ids in dealt.values()} == {2, 3}


def test_all_reasons_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECOVER_COORDINATOR", raising=False)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UserError) as refused:
        ElasticDataParallel(model, optimizer, microbatches=0, state={"model": optimizer})
    reasons = refused.value.reasons
    assert [reason.split(":")[0] for reason in reasons] == [
        "this process has no coordinator", "microbatches is 0", "1", "state"
    ]  # fmt: skip


Optimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


@pytest.mark.parametrize(
    ("optimizer", "device", "dtype", "reason"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "cpu", torch.float32, "LBFGS needs a closure"),
        (
            lambda model: torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(2))]),
            "cpu", torch.float32, "the optimizer has 1 parameter(s) that are not in the model",
        ),
        (lambda model: torch.optim.SGD(model.parameters()), "meta", torch.float32, "parameters are on the meta device"),
        (lambda model: torch.optim.SGD(model.parameters()), "cpu", torch.complex64, "torch.complex64 parameters are"),
    ],
    ids=["a closure", "another's parameters", "no memory", "complex"],
)  # fmt: skip
def test_a_worker_refuses_what_it_cannot_train_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    optimizer: Optimizer,
    device: str,
    dtype: torch.dtype,
    reason: str,
) -> None:
    monkeypatch.setenv("RECOVER_COORDINATOR", "127.0.0.1:1")
    model = torch.nn.Linear(2, 2, device=device, dtype=dtype)
    with pytest.raises(SystemExit, match="2"):
        ElasticDataParallel(model, optimizer(model), microbatches=1)
    assert f"error: {reason}" in capsys.readouterr().err


def test_a_process_group_in_which_no_later_worker_can_take_part_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RECOVER_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("RECOVER_REPLACED", "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    module = torch.nn.Linear(2, 2)
    with pytest.raises(SystemExit, match="2"):
        ElasticDataParallel(module, torch.optim.SGD(module.parameters()), microbatches=1)
    assert "error: torch's process group has 2 workers" in capsys.readouterr().err
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    checks.check(module, torch.optim.SGD(module.parameters()), [*module.parameters()], 1, {}, again=False)


def test_the_package_has_three_names_and_imports_torch_for_them_alone() -> None:
    code = (
        "import sys, recover_megatron as r; assert r.__version__ and not hasattr(r, 'walk'); "
        "assert 'torch' not in sys.modules; print(r.ElasticDataParallel, r.StepResult, r.run)"
    )
    said = python("-c", code).stdout
    assert "recover_megatron.elastic.data_parallel.ElasticDataParallel" in said
    assert "function run" in said
