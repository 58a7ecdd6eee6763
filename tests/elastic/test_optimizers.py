"""A newcomer trains on with the bits of the others, whatever optimizer they have; a newcomer that does not restore the
state that was sent is refused before it trains."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron import ElasticDataParallel
from recover_megatron.collectives.state.trees import flatten, new_memory, unflatten
from recover_megatron.elastic import data_parallel
from recover_megatron.elastic.epoch_start import LatestState, Status
from recover_megatron.elastic.restoring import NotRestored, contents, difference
from recover_megatron.elastic.run_state import Exchange, State, Stateful

Parameters = list[torch.nn.Parameter]

NOT_TRAINED = {
    "LBFGS": "its step wants a closure",
    "SparseAdam": "its gradients must be sparse",
    "OrthogonalizedOptimizer": "the base of others, with no way of its own to make a matrix orthogonal",
}
FLOAT32_ALONE = {
    "AdaptiveMuon",
    "MOP",
    "Muon",
    "MuonHyperball",
    "PolarGrad",
    "PSGDPro",
    "Scion",
    "SinkhornMuon",
    "Spel",
}
"""The optimizers of emerging_optimizers that refuse parameters of bfloat16."""
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "foreach": {"foreach": True, "maximize": True, "amsgrad": True, "centered": True, "nesterov": True},
    "fused": {"fused": True, "amsgrad": True, "lr": torch.tensor(0.02)},
}


def optimizers_in(names: dict[str, Any]) -> dict[str, Any]:
    """The optimizers among the names of a module."""
    classes = {name: its for name, its in names.items() if inspect.isclass(its) and its is not torch.optim.Optimizer}
    return {name: its for name, its in sorted(classes.items()) if issubclass(its, torch.optim.Optimizer)}


def of_torch() -> Iterable[Any]:
    for name, cls in optimizers_in(vars(torch.optim)).items():
        for flag, flags in FLAGS.items():
            if name not in NOT_TRAINED and (flag == "plain" or flag in inspect.signature(cls).parameters):
                yield pytest.param(cls, flags, id=f"{name}-{flag}")


def of_emerging_optimizers() -> dict[str, Any]:
    package = importlib.import_module("emerging_optimizers")
    found = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return {name: its for module in found for name, its in optimizers_in(vars(importlib.import_module(module))).items()}


def made(cls: Any, flags: dict[str, Any], parameters: Parameters) -> torch.optim.Optimizer:
    """An optimizer with state, and with those of the flags that it knows."""
    given = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01, **flags}
    known = {name: value for name, value in given.items() if name in inspect.signature(cls).parameters}
    optimizer = cls(parameters, **known)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def new(*dtypes: torch.dtype) -> Parameters:
    return [torch.nn.Parameter(torch.full((4, 4), 0.25, dtype=dtype)) for dtype in dtypes]


def state_of(parameters: Parameters, optimizer: Any, **more: Stateful) -> State:
    return State({"model": torch.nn.ParameterList(parameters), "optimizer": optimizer, **more})


def sent(state: State) -> Any:
    """The tree that a newcomer gets."""
    text, tensors = flatten(state.tree())
    tree, mine = unflatten(text, new_memory)
    for own, its in zip(mine, tensors, strict=True):
        own.copy_(its)
    return tree


def train(parameters: Parameters, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        torch.manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter).normal_()
        optimizer.step()


def differences(make: Callable[[Parameters], torch.optim.Optimizer], *dtypes: torch.dtype) -> list[str]:
    """Train one by 3 steps, give its state to another, train both by 20: what differs before those and after."""
    giver, taker = new(*dtypes), new(*dtypes)
    one, other = make(giver), make(taker)
    states = state_of(giver, one), state_of(taker, other)
    train(giver, one, range(3))
    tree = sent(states[0])
    arrived = contents(tree)
    with torch.no_grad():
        states[1].load(tree)
    found = [difference(arrived, contents(states[1].tree()))]
    train(giver, one, range(3, 23))
    train(taker, other, range(3, 23))
    trained = contents(states[0].tree())
    assert difference(trained, arrived), "both have trained"
    return [*found, difference(trained, contents(states[1].tree()))]


@pytest.mark.parametrize(("cls", "flags"), list(of_torch()))
def test_a_newcomer_trains_on_with_the_same_bits(cls: Any, flags: dict[str, Any]) -> None:
    assert differences(lambda mine: made(cls, flags, mine), torch.float32, torch.bfloat16) == ["", ""]


@pytest.mark.skipif(not find_spec("emerging_optimizers"), reason="needs the Python package emerging-optimizers")
def test_a_newcomer_trains_on_with_the_same_bits_with_emerging_optimizers() -> None:
    found = {}
    with torch.compiler.set_stance(
        "force_eager"
    ):  # to compile them takes a minute, and each time may give other kernels
        for name, cls in of_emerging_optimizers().items():
            if name not in NOT_TRAINED:
                dtypes = (torch.float32,) if name in FLOAT32_ALONE else (torch.float32, torch.bfloat16)
                found[name] = differences(lambda mine, cls=cls: made(cls, {}, mine), *dtypes)
    assert len(found) >= 15
    assert found == {name: ["", ""] for name in found}


class WideMoments(torch.optim.Optimizer):
    """Keeps of each parameter more than tensors of its type: moments of 32 bits, a counter, lists and texts."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.02})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                its = self.state[parameter]
                if not its:
                    its |= {"kind": "wide", "seen": torch.tensor(1000), "none": None, "rate": 0.1}
                    its["moments"] = {
                        "first": torch.zeros_like(parameter, dtype=torch.float32),
                        "more": [0, [1.5, "x"]],
                    }
                    its["sums"] = [torch.zeros(3, dtype=torch.float64), torch.tensor([True, False])]
                assert its["kind"] == "wide"
                its["seen"] += 1
                its["sums"][0] += 1 / 3
                first = its["moments"]["first"].lerp_(parameter.grad.float(), its["rate"])
                parameter.data.sub_(group["lr"] * first / its["seen"].log())


def test_a_state_of_other_types_than_the_parameters_arrives_as_it_was() -> None:
    assert differences(WideMoments, torch.bfloat16) == ["", ""]


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [its["moments"]["first"] for its in optimizer.state.values()]


class Wrapped(torch.optim.Optimizer):
    """An optimizer by its type alone, as accelerate's."""

    def __init__(self, parameters: Parameters) -> None:
        self.optimizer = WideMoments(parameters)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


class Several:
    """One optimizer for each parameter, as torchtitan's; with itself among its attributes."""

    def __init__(self, parameters: Parameters) -> None:
        self.optimizers = [WideMoments([parameter]) for parameter in parameters]
        self.names = {"first": self.optimizers[0], "self": self}

    def state_dict(self) -> dict[str, Any]:
        return {str(at): its.state_dict() for at, its in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for at, its in enumerate(self.optimizers):
            its.load_state_dict(state_dict[str(at)])


@pytest.mark.parametrize("cls", [Wrapped, Several])
def test_an_optimizer_within_another_object_loads_the_types_that_were_sent(cls: Any) -> None:
    states = []
    for steps in (range(3), range(0)):
        parameters = new(torch.bfloat16, torch.bfloat16)
        whole = cls(parameters)
        states.append(state_of(parameters, whole))
        inner = [whole.optimizer] if cls is Wrapped else whole.optimizers
        for step in steps:
            for each in inner:
                train(parameters, each, [step])
    tree = sent(states[0])
    arrived = contents(tree)
    states[1].load(tree)
    assert difference(arrived, contents(states[1].tree())) == ""


def test_hooks_that_change_a_state_before_and_after_it_is_loaded_still_do() -> None:
    """The state is sent in other units; after it has arrived it is rounded."""
    giver, taker = new(torch.bfloat16), new(torch.bfloat16)
    one, other = WideMoments(giver), WideMoments(taker)

    def times(factor: float, state: Any) -> Any:
        changed = {
            at: {**its, "moments": {"first": its["moments"]["first"] * factor}} for at, its in state["state"].items()
        }
        return {**state, "state": changed}

    one.register_state_dict_post_hook(lambda _, state: times(2, state))
    other.register_load_state_dict_pre_hook(lambda _, state: times(0.5, state))
    train(giver, one, range(3))
    tree = sent(state_of(giver, one))
    state_of(taker, other).load(tree)
    assert torch.equal(moments(other)[0], moments(one)[0])
    other.register_load_state_dict_post_hook(lambda its: moments(its)[0].round_())
    state_of(taker, other).load(tree)
    assert torch.equal(moments(other)[0], moments(one)[0].round())


def test_moments_have_the_order_in_memory_of_their_parameter() -> None:
    """A fused optimizer goes through the memory of both side by side."""

    def channels_last(mine: Parameters) -> torch.optim.Optimizer:
        mine[0].data = torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last)
        return torch.optim.Adam(mine, fused=True)

    assert differences(channels_last, torch.float32) == ["", ""]


def test_a_learning_rate_that_is_a_tensor_stays_on_its_device() -> None:
    parameters = new(torch.float32)
    optimizer = torch.optim.SGD(parameters, lr=torch.tensor(0.5))
    state = state_of(parameters, optimizer)
    tree = sent(state)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    state.load(tree)
    assert optimizer.param_groups[0]["lr"].is_meta


def without_a_run(parameters: Parameters, optimizer: torch.optim.Optimizer) -> ElasticDataParallel:
    it = object.__new__(ElasticDataParallel)
    it._state, it.completed = state_of(parameters, optimizer), 3
    it._column, it._gradients = SimpleNamespace(members=[], me=5, begins_after=0), SimpleNamespace(away=nullcontext)  # type: ignore[assignment]
    return it


@pytest.mark.parametrize("cls", [WideMoments, torch.optim.Adam])
def test_a_checkpoint_that_was_loaded_stays_as_it_is(cls: Any) -> None:
    parameters = new(torch.bfloat16)
    optimizer = cls(parameters)
    train(parameters, optimizer, range(3))
    it = without_a_run(parameters, optimizer)
    checkpoint = {"completed": 3, "state": sent(it._state)}
    kept = contents(checkpoint)
    ends = []
    for _ in range(2):
        it.load_state_dict(checkpoint)
        assert difference(kept, contents(it.state_dict())) == ""
        train(parameters, optimizer, range(3, 6))
        ends.append(contents(it.state_dict()))
    assert difference(kept, contents(checkpoint)) == ""
    assert difference(*ends) == ""


def test_a_checkpoint_in_other_types_than_the_model_is_cast() -> None:
    giver, taker = new(torch.float32), new(torch.bfloat16)
    one, other = torch.optim.AdamW(giver), torch.optim.AdamW(taker)
    train(giver, one, range(3))
    state_of(taker, other).load(sent(state_of(giver, one)))
    assert other.state[taker[0]]["exp_avg"].dtype == torch.bfloat16
    train(taker, other, range(3, 4))


LOST = "load_state_dict() has lost data.at"


class Part:
    """A part of a state; it restores all of it, but for what ``loads`` does."""

    def __init__(self, values: dict[str, Any], loads: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.values, self._loads = values, loads

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = self._loads(state_dict)


VALUES = {"at": (1, 2), "rate": 0.5, "one": torch.ones(2), "other": {"nan": float("nan"), "sum": torch.ones(2)}}


def halved(state: dict[str, Any]) -> dict[str, Any]:
    state["one"].mul_(0.5)  # in the memory of the state that was sent
    return state


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        (lambda state: dict(state, at=(1, 2), rate=0.5), ""),
        (lambda state: {"rate": state["rate"], **state}, ""),
        (lambda state: dict(state, at=[2, 2]), "data.at: [1, 2] became [2, 2]"),
        (lambda state: dict(state, rate=1), "data.rate: 0.5 became 1"),
        (lambda state: dict(state, rate=b"1"), 'data.rate: 0.5 became "a bytes"'),
        (lambda state: dict(state, one=state["one"] * 2), "data.one: other bits of torch.float32 [2]"),
        (halved, "data.one: other bits of torch.float32 [2]"),
        (lambda state: dict(state, one=state["one"].double()), "data.one: torch.float32 [2] became torch.float64 [2]"),
        (lambda state: dict(state, one=None), "data.one: torch.float32 [2] became null"),
        (lambda state: dict(state, other={"nan": 0.0, "sum": torch.ones(2)}), "data.other.nan: NaN became 0.0"),
        (
            lambda state: {"at": state["at"]},
            "data: a dictionary of 4 became a dictionary of 1; data.rate: 0.5 became nothing; data.one: torch.float32 "
            "[2] became nothing; data.other: a dictionary of 2 became nothing; and 2 more",
        ),
        (lambda state: dict(reversed(state.items())), "its tensors have another order"),
    ],
    ids=[
        "all is restored",
        "in another order",
        "a list",
        "a type",
        "not to be sent",
        "bits",
        "bits in place",
        "a tensor's type",
        "no tensor",
        "in a dictionary",
        "forgotten",
        "the tensors' order",
    ],
)
def test_a_part_that_does_not_restore_its_state_is_named_before_the_newcomer_trains(
    loads: Callable[[dict[str, Any]], dict[str, Any]], said: str
) -> None:
    """The state goes from one worker to another by their stores, as in a run."""
    parameters = new(torch.bfloat16)
    optimizer = WideMoments(parameters)
    train(parameters, optimizer, range(1))
    taker = new(torch.bfloat16)
    giver = state_of(parameters, optimizer, data=Part(VALUES, dict))
    states = giver, state_of(taker, WideMoments(taker), data=Part({}, loads))
    one, other = (Exchange("127.0.0.1", b"x" * 32) for _ in states)
    one.put(4, 7, [True, False], giver)
    with pytest.raises(NotRestored) if said else nullcontext() as refused:
        fetched = other.fetch(4, {0: one.address}, states[1], stay=lambda: None, progress=lambda: None)
        assert fetched == (7, [True, False])
    if refused is None:
        assert difference(contents(states[0].tree()), contents(states[1].tree())) == ""
    else:
        assert str(refused.value).endswith(f": {said}")


def test_a_worker_whose_state_cannot_be_sent_any_more_tells_those_that_come_and_trains_on() -> None:
    parameters = new(torch.float32)
    data = Part({"best": 1.0}, dict)
    state = state_of(parameters, torch.optim.SGD(parameters), data=data)
    one, other = (Exchange("127.0.0.1", b"x" * 32) for _ in range(2))
    data.values["best"] = b"from a later step"
    one.put(4, 7, [True, True], state)
    with pytest.raises(NotRestored, match="cannot send their state: a bytes cannot be sent"):
        other.fetch(4, {0: one.address}, state, stay=lambda: None, progress=lambda: None)


@pytest.mark.parametrize("newcomer", [True, False])
def test_a_newcomer_that_does_not_restore_the_state_ends_with_2_and_at_the_launch_the_run_does(
    newcomer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    gave_up: list[tuple[int, str]] = []
    monkeypatch.setattr(data_parallel, "log", SimpleNamespace(info=lines.append))
    monkeypatch.setattr(data_parallel, "is_newcomer", lambda: newcomer)
    parameters = new(torch.float32)
    it = without_a_run(parameters, torch.optim.SGD(parameters))
    it._holds, it._allow, it._statuses = False, 0.0, {0: Status(address="host:1")}
    it._session = SimpleNamespace(  # type: ignore[assignment]
        epoch=4, check=None, mark=lambda *_: None, give_up=lambda *why: gave_up.append(why), wait_revoked=lambda: True
    )

    def fetch(*_: Any, **__: Any) -> int:
        raise NotRestored(LOST)

    it._exchange = SimpleNamespace(fetch=fetch)  # type: ignore[assignment]
    with pytest.raises(SystemExit, match="2") if newcomer else nullcontext():
        assert not it._fetch(LatestState(7, (0,)))
    assert not it._holds
    assert lines == [f"worker 5 exits, and the run continues without it: {LOST}"] * newcomer
    assert gave_up == [(2, f"worker 5: {LOST}")] * (not newcomer)
