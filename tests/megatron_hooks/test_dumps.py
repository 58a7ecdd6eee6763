"""Dumps of layers and parameters by Megatron's own classes, where workers are lost and come; nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.core.transformer.moe import router_trace
from megatron.core.transformer.moe.router_trace import RouterTracer, load_hidden_states_for_record
from megatron.training import activation_logging, dgrad_logging

from recover_megatron.megatron_hooks.checkpoint import training_state as state
from recover_megatron.megatron_hooks.checkpoint.training_state import TrainingState
from recover_megatron.megatron_hooks.logging import dumps
from recover_megatron.megatron_hooks.loop import evaluation
from recover_megatron.megatron_hooks.loop.evaluation import Evaluation
from recover_megatron.megatron_hooks.loop.training_parts import TrainingParts

Make = Callable[..., RouterTracer]


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Make a tracer as train() does, of the rank 0, in a worker whose slot is 1, after ``made`` iterations."""
    monkeypatch.setattr(RouterTracer, "__init__", RouterTracer.__init__)
    run = SimpleNamespace(made=0)
    dumps.install(lambda: (1, run.made))

    def make(made: int, most: int = 100) -> RouterTracer:
        run.made = made
        return RouterTracer(str(tmp_path), most, 0 if made else 1, training_mode=True, capture_hidden_states=True)

    return make


def seen(tracer: RouterTracer, iteration: int, value: float) -> None:
    """An iteration of one router and one token, whose hidden state is ``value``."""
    router = SimpleNamespace(layer_number=1, topk=1)
    tracer._record(router, (torch.full((1, 4), value),), (torch.ones(1, 2), torch.tensor([[True, False]])))
    tracer.advance_step(iteration)


def traced(folder: Path) -> list[tuple[int, float]]:
    """The iteration of each whole line in the trace of slot 1, with the hidden state to which the line points."""
    found = []
    for line in (folder / "router_trace_rank1.jsonl").read_text().splitlines():
        if line.endswith("}"):
            record = json.loads(line)
            found.append((record["step"], float(load_hidden_states_for_record(record, str(folder))[0, 0])))
    return found


def test_a_worker_that_takes_a_place_adds_to_what_the_lost_one_has_traced(tracer: Make, tmp_path: Path) -> None:
    lost = tracer(0)
    seen(lost, 6, 3.0)
    lost.flush()
    (tmp_path / "router_trace_rank0.jsonl").write_text("of a worker that lives\n")
    with (tmp_path / "router_trace_rank1.jsonl").open("a") as file:
        file.write('{"step": 7, "ra')  # it was killed
    newcomer = tracer(8)
    seen(newcomer, 8, 5.0)
    newcomer.flush()
    assert traced(tmp_path) == [(6, 3.0), (8, 5.0)]
    assert (tmp_path / "router_trace_rank0.jsonl").read_text() == "of a worker that lives\n"


def test_a_run_that_begins_empties_the_traces_of_another_one(tracer: Make, tmp_path: Path) -> None:
    before = tracer(0)
    seen(before, 6, 3.0)
    before.flush()
    seen(again := tracer(0), 0, 5.0)
    again.flush()
    assert traced(tmp_path) == [(0, 5.0)]


def test_a_worker_that_comes_traces_no_more_iterations_than_the_run_is_to(tracer: Make, tmp_path: Path) -> None:
    newcomer = tracer(8, most=9)
    for iteration in (8, 9):
        if not newcomer._stopped:
            seen(newcomer, iteration, 1.0)
    newcomer.flush()
    assert [iteration for iteration, _ in traced(tmp_path)] == [8]
    assert tracer(9, most=9)._stopped


def leave_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tidy up like an orphan that has left train_step."""
    for name in ("get_model_config", "get_rerun_state_machine", "get_timers"):
        monkeypatch.setattr(state, name, lambda *_: SimpleNamespace(_timers={}))
    optimizer = SimpleNamespace()
    totals = SimpleNamespace(pause=lambda: None)
    orphan = SimpleNamespace(_model=[SimpleNamespace(bucket_groups=[], expert_parallel_bucket_groups=[])],
                             _optimizer=optimizer, _optimizers=[optimizer], totals=totals)  # fmt: skip
    TrainingState.tidy(cast(Any, orphan))


def test_an_orphan_dumps_gradients_and_activations_of_a_later_step_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved: list[Any] = []
    for module in (dgrad_logging, activation_logging):
        monkeypatch.setattr(module, "_LOGGER", None)
        monkeypatch.setattr(module, "LINEAR_TYPES", (torch.nn.Linear,))
        monkeypatch.setattr(module, "save_grads", lambda _, found, *__: saved.append(json.dumps([*found])))
    layer = torch.nn.Linear(2, 2)

    def step(name: str) -> None:
        monkeypatch.setattr(dgrad_logging, "unwrap_model", lambda _: torch.nn.ModuleDict({name: layer}))
        dgrad_logging.enable_dgrad_logging([layer], str(tmp_path))  # type: ignore[arg-type]
        activation_logging.enable_activation_logging([layer], str(tmp_path))
        layer(torch.ones(1, 2)).sum().backward()

    step("lost")
    leave_step(monkeypatch)
    assert not layer._forward_hooks
    assert not layer._backward_hooks
    step("later")
    assert dgrad_logging._LOGGER is not None
    (captured,) = dgrad_logging._LOGGER._dgrads_state_dict.values()
    assert {name.partition("/")[0] for name in captured} == {"later"}
    dgrad_logging.disable_dgrad_logging()
    activation_logging.disable_activation_logging()


def test_an_orphan_traces_nothing_of_the_step_that_it_has_left_and_no_router_twice(
    monkeypatch: pytest.MonkeyPatch, tracer: Make, tmp_path: Path
) -> None:
    left = tracer(0)
    monkeypatch.setattr(router_trace, "_MOE_ROUTER_TRACER", left)
    layer = torch.nn.Linear(2, 2)
    left._hook_handles.append(layer.register_forward_hook(lambda *_: None))
    seen(left, 6, 3.0)
    left._record(SimpleNamespace(layer_number=1, topk=1), (torch.ones(1, 4),), (torch.ones(1), torch.ones(1, 1)))
    leave_step(monkeypatch)
    assert router_trace.get_moe_router_tracer() is None
    assert not layer._forward_hooks
    left.flush()  # as at the end of the process
    assert traced(tmp_path) == [(6, 3.0)]


class OnTheirWay:
    """A distributed optimizer whose parameters have not all come."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def complete(self) -> None:
        with torch.no_grad():
            self._model.weight.fill_(2.0)  # type: ignore[operator, union-attr]

    def primaries(self) -> list[Any]:
        return []

    def saving(self, *, moments: bool) -> Any:
        return nullcontext()

    def step(self, original: Callable[[], Any]) -> Any:
        return original()


@pytest.fixture
def model() -> torch.nn.Linear:
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


@pytest.mark.parametrize(("bf16", "type", "norm"), [(False, torch.float32, 4.0), (True, torch.float32, 4.0),
                                                    (True, torch.bfloat16, 2.0)])  # fmt: skip
def test_the_norm_is_that_of_all_parameters_of_the_model_where_main_parameters_are_not_added_up(
    monkeypatch: pytest.MonkeyPatch, model: torch.nn.Linear, bf16: bool, type: torch.dtype, norm: float
) -> None:
    monkeypatch.setattr(evaluation, "get_args", lambda: SimpleNamespace(bf16=bf16))
    sharded = OnTheirWay(model.to(type))
    wrapper = Evaluation(cast(Any, None), lambda: cast(Any, sharded), lambda: None)._norm
    assert wrapper(lambda model: float(model[0].weight.norm()))([model]) == norm


@pytest.mark.parametrize(("iteration", "written"), [(3, 2.0), (2, 1.0)])
def test_parameters_have_all_come_in_an_iteration_in_which_they_are_written(
    monkeypatch: pytest.MonkeyPatch, model: torch.nn.Linear, iteration: int, written: float
) -> None:
    monkeypatch.setattr(dumps, "get_args", lambda: SimpleNamespace(save_params_interval=2, curr_iteration=iteration))
    sharded, nothing = OnTheirWay(model), lambda *_: None
    parts = SimpleNamespace(sharded=sharded, complete=sharded.complete,
                            places=SimpleNamespace(withdraw=nothing), memory=SimpleNamespace(before_update=nothing),
                            scales=SimpleNamespace(move=nothing), state=SimpleNamespace(stepped=nothing))  # fmt: skip
    optimizer = SimpleNamespace(step=lambda: (True,))
    guard = SimpleNamespace(begin=nothing, end=nothing)
    TrainingParts.count_updates(cast(Any, parts), optimizer, cast(Any, guard))
    optimizer.step()
    assert float(model.weight[0, 0]) == written
