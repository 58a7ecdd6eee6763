"""A ``backward=`` that scales is refused, norms with running statistics are taken in eval mode alone, and nothing of a
model's state that is not trained changes in a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from recover_megatron.elastic.checks import check
from recover_megatron.elastic.run_state import State
from recover_megatron.errors import UserError
from tests.elastic.test_state import elastic
from tests.examples.doubles.accelerate import Accelerator

Backward = Callable[[torch.Tensor], Any]


def added(backward: Backward, ran: tuple[int, ...] = (), loss: torch.dtype = torch.float32) -> list[float]:
    """The gradient of one of two microbatches, which is 3 for each of two weights in the sum of both."""
    weight = torch.nn.Linear(2, 1, bias=False)
    it = elastic(weight, torch.optim.SGD(weight.parameters()))
    it._passes._backward, it._passes.ran = backward, list(ran)
    it._passes.gradient(lambda step, j: weight(torch.full((2,), 3.0)).to(loss).sum(), 1, len(ran))
    assert weight.weight.grad is not None
    return weight.weight.grad.flatten().tolist()


def without_gradients(loss: torch.Tensor) -> None:
    with torch.no_grad():
        loss.backward()


@pytest.mark.parametrize(
    "backward",
    [
        torch.Tensor.backward,
        lambda loss: loss.backward(retain_graph=True),
        without_gradients,
        torch.compile(lambda loss: loss.backward(), backend="eager"),
        lambda loss: torch.autograd.backward([loss]),
        lambda loss: (loss * 61 / 61).backward(),
        Accelerator(cpu=True).backward,
    ],
    ids=["torch's", "keeps the graph", "no_grad", "compiled", "autograd", "there and back", "accelerate's"],
)
def test_a_backward_that_adds_the_gradient_once_is_taken(backward: Backward) -> None:
    assert added(backward) == pytest.approx([1.5, 1.5])


def test_a_backward_that_rounds_as_a_loss_of_16_bits_does_is_taken() -> None:
    assert added(lambda loss: (loss * 61 / 61).backward(), loss=torch.bfloat16) == pytest.approx([1.5, 1.5], rel=0.01)


def divides_in_place(loss: torch.Tensor) -> None:
    loss /= 8
    loss.backward()


ACCUMULATES = r"scales the gradient by 0.125, .* Accelerator\(gradient_accumulation_steps=1\)"


@pytest.mark.parametrize(
    ("backward", "error"),
    [
        (Accelerator(cpu=True, gradient_accumulation_steps=8).backward, ACCUMULATES),
        (divides_in_place, ACCUMULATES),
        (lambda loss: loss.backward(torch.tensor(0.125)), ACCUMULATES),
        (lambda loss: (loss * 65536.0).backward(), "scales the gradient by 65536, .* fp16 is not supported"),
        (lambda loss: (loss * torch.nan).backward(), "scales the gradient by nan"),
        (lambda loss: (loss.backward(retain_graph=True), loss.backward()), "ran 2 backward passes from the loss"),
        (lambda loss: None, r"ran no backward pass .* return loss.detach\(\)"),
    ],
    ids=["accelerate accumulates", "in place", "a gradient of its own", "a GradScaler", "nan", "twice", "never"],
)
def test_a_backward_that_adds_another_gradient_is_refused(backward: Backward, error: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^microbatch\(1, 0\): backward= {error}"):
        added(backward)


def test_the_later_microbatches_of_a_step_do_not_wait_for_the_device_to_tell_the_factor() -> None:
    assert added(lambda loss: (loss * 2).backward(), ran=(1,)) == [3.0, 3.0]
    with pytest.raises(RuntimeError, match="ran no backward pass"):
        added(lambda loss: None, ran=(1,))


class Norms(torch.nn.Module):
    """Layers that have running statistics, and one that only could."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = torch.nn.BatchNorm1d(3)
        self.sync = torch.nn.SyncBatchNorm(3)
        self.instance = torch.nn.InstanceNorm1d(3, track_running_stats=True)
        self.without = torch.nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch(self.without(x))


def refused(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.delenv("RECOVER_COORDINATOR", raising=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError) as error:
        check(model, optimizer, list(model.parameters()), 1, {}, again=False)
    first, *others = error.value.reasons
    assert "no coordinator" in first
    return others


def test_norms_with_running_statistics_are_refused_in_train_mode_and_taken_in_eval_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Norms()
    (reason,) = refused(model, monkeypatch)
    assert reason.startswith("batch, sync, instance: running statistics change")
    assert "GroupNorm" in reason
    assert ".eval()" in reason
    assert refused(model.eval(), monkeypatch) == []


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batchnorm_trains_in_eval_mode_and_is_named_when_it_counts_again(momentum: float | None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3, momentum=momentum))
    it = elastic(model, torch.optim.SGD(model.parameters()))
    x = torch.randn(4, 2)
    model[1].eval()
    it._passes.gradient(lambda step, j: model(x).square().mean(), 1, 0)
    assert model[1].weight.grad.abs().sum() > 0
    assert model[1].running_mean.tolist() == [0, 0, 0]
    model.train()
    with pytest.raises(RuntimeError, match=r"has changed the model's 1\.num_batches_tracked, .*call \.eval\(\) on"):
        it._passes.gradient(lambda step, j: model(x).square().mean(), 1, 1)


@pytest.fixture
def two_ranks() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_fully_shard_has_been_given_is_refused_over_a_mesh_of_one_process_too(
    ranks: int, two_ranks: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=False))
    fully_shard(model[0], mesh=two_ranks if ranks == 2 else DeviceMesh("cpu", [0]))
    (reason,) = refused(model, monkeypatch)
    assert reason.startswith("0.weight, 0.bias: distributed tensors (DTensor)")
    assert "Remove fully_shard()" in reason


class OfTheProgram(DistributedDataParallel):
    pass


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, FullyShardedDataParallel, OfTheProgram])
def test_a_wrapper_that_communicates_in_each_pass_is_refused_unless_it_is_alone(
    wrapper: Any, two_ranks: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, both = dist.new_group([0]), two_ranks.get_group()
    how = {} if wrapper is not FullyShardedDataParallel else {"device_id": torch.device("cpu")}
    (reason,) = refused(torch.nn.Sequential(wrapper(torch.nn.Linear(2, 2), process_group=both, **how)), monkeypatch)
    assert reason.startswith(f"the model is wrapped in {wrapper.__name__} over several processes")
    assert refused(wrapper(torch.nn.Linear(2, 2), process_group=alone, **how), monkeypatch) == []


def test_a_module_that_has_the_name_of_a_wrapper_and_no_process_group_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(type("DistributedDataParallel", (torch.nn.Linear,), {})(2, 2), monkeypatch) == []


def test_a_distributed_tensor_is_refused_wherever_it_is(two_ranks: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    whole = DTensor.from_local(torch.ones(2), two_ranks, [Replicate()])
    state = State({"model": model, "mean": SimpleNamespace(state_dict=lambda: {"of": [whole]})})  # type: ignore[dict-item]
    with pytest.raises(UserError, match="state of 'mean': a DTensor cannot be sent as part of a state"):
        state.digest()
    model.register_buffer("mean", whole)
    model.register_parameter("frozen", torch.nn.Parameter(whole, requires_grad=False))
    (reason,) = refused(model, monkeypatch)
    assert reason.startswith("frozen, mean: distributed")


class Teacher(torch.nn.Module):
    """A model with state that its forward pass changes, by the name of the way."""

    def __init__(self) -> None:
        super().__init__()
        self.student = torch.nn.Parameter(torch.ones(2))
        self.average = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("there", None)

    def in_place(self) -> None:
        with torch.no_grad():
            self.average.lerp_(self.student, 0.1)

    def replaced(self) -> None:
        self.seen = self.seen + 1

    def nothing(self) -> None: ...


@pytest.mark.parametrize(("way", "changed"), [("in_place", "average"), ("replaced", "seen"), ("nothing", "")])
def test_state_that_is_not_trained_must_not_change_in_a_microbatch(way: str, changed: str) -> None:
    model = Teacher()
    it = elastic(model, torch.optim.SGD([model.student]))

    def microbatch(step: int, j: int) -> torch.Tensor:
        getattr(model, way)()
        return (model.student * model.average).sum()

    model.replaced()  # between two steps, on all workers alike
    if not changed:
        it._passes.gradient(microbatch, 1, 0)
        return
    with pytest.raises(RuntimeError, match=f"has changed the model's {changed}, on this worker only"):
        it._passes.gradient(microbatch, 1, 0)
