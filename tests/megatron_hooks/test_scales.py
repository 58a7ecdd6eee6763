"""Delayed scaling in one process, on a double of Transformer Engine: what counts for a scale, and when it changes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron.errors import Disagreement, UserError
from recover_megatron.megatron_hooks.gradients import maxima
from recover_megatron.megatron_hooks.gradients.maxima import FORGOTTEN, Scales
from tests.doubles import transformer_engine as double

RECIPE = double.DelayedScaling(amax_history_len=2)
ARGS = SimpleNamespace(fp8="hybrid", fp8_recipe="delayed")
MOST = 448.0
TOTAL = 3


class Group:
    def size(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[double.FP8GlobalStateManager]]:
    """Nothing of it stays in this process."""
    manager = double.FP8GlobalStateManager
    for name in ("reduce_and_update_fp8_tensors", "reduce_tensor_across_group_op_max"):
        monkeypatch.setattr(manager, name, getattr(manager, name))
    alone = SimpleNamespace(get_tensor_and_context_parallel_group=Group, get_expert_model_parallel_world_size=lambda: 1)
    monkeypatch.setattr(maxima, "parallel_state", alone)
    monkeypatch.setattr(maxima.fp8_utils, "get_fp8_context", lambda config: double.autocast(RECIPE, None))
    # So an operation over workers would end the test: there is no process group.
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    before = {name: its for name, its in sys.modules.items() if name.startswith("transformer_engine")}
    double.install()
    maxima._engine.cache_clear()
    yield manager
    maxima._engine.cache_clear()
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    sys.modules.update(before)


class Model(torch.nn.Module):
    """Of one layer, whose weight is one number: its product is its input."""

    def __init__(self, attention: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(fp8_dot_product_attention=attention, fp8_multi_head_attention=False)
        self.layer = double.Linear()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, value: float) -> torch.Tensor:
        with double.autocast(RECIPE, None):
            x, weight = self.layer(torch.full((1,), value, requires_grad=True), self.weight)
        return x * weight

    @property
    def scale(self) -> float:
        return float(self.layer.fp8_meta["scaling_fwd"].scale[0])


def test_a_nan_of_any_worker_stays_in_the_maxima_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's and gloo's maximum loses a NaN where another worker has a number."""

    def other_has_minus_one(whole: torch.Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        others = torch.zeros_like(whole)
        others[0] = -1.0
        whole.copy_(torch.fmax(whole, others))

    monkeypatch.setattr(torch.distributed, "all_reduce", other_has_minus_one)
    monkeypatch.setattr(maxima.parallel_state, "get_context_parallel_rank", lambda: 0, raising=False)
    its = maxima._Maxima()
    its._width, pair = 3, SimpleNamespace(size=lambda: 2)
    its.begin(TOTAL)
    for j, mine in ((0, [torch.nan, 2.0, -torch.inf]), (2, [-2.0, torch.inf, 0.5])):
        its._row(j, -torch.inf, torch.zeros(1))[:] = torch.tensor(mine)
    its._over([pair, Group(), pair], [0, 2])
    assert str(its.read().view(TOTAL, 3).tolist()) == str([[torch.nan, 2.0, -1.0], [0.0] * 3, [-1.0, torch.inf, 0.5]])


def run(scales: Scales, model: Model, j: int, value: float) -> None:
    """Microbatch ``j``, forward and backward, in which the layer meets ``value`` and the gradient ``value / 8``."""
    with scales.microbatch(0, j):
        output = model(value)
    scales.watch(0, j, output)
    output.backward(torch.full((1,), value / 8))


def step(scales: Scales, *workers: torch.Tensor) -> None:
    """The step is committed and the update is made; what ``workers`` have read is summed."""
    scales.write(torch.stack(workers).sum(dim=0))
    scales.move()


def test_a_scale_changes_with_the_update_by_the_largest_value_of_the_whole_batch() -> None:
    model = Model()
    scales = Scales(ARGS, [model])
    scales.begin(TOTAL)
    for j, value in enumerate([2.0, 4.0]):
        run(scales, model, j, value)
        assert model.scale == 1, "within a step none changes"
    scales.ran([0, 1])
    other = torch.zeros(TOTAL, scales.size // TOTAL, dtype=torch.float64)
    other[2, 0], other[2, 3] = 8.0, 16.0
    scales.write(scales.read() + other.flatten())
    assert model.scale == 1, "nor when it is committed: an orphan may not make the update"
    scales.move()
    backward = model.layer.fp8_meta["scaling_bwd"]
    assert (model.scale, float(backward.scale[0])) == (MOST / 8, 57344 / 16)
    assert model.layer.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist() == [0, 8]
    assert list(scales.tensors())[1].tolist() == [[8, 1, 0]], "the weight's, too"


def test_an_evaluation_and_a_pass_that_was_given_up_count_for_nothing(
    engine: type[double.FP8GlobalStateManager],
) -> None:
    model = Model()
    scales = Scales(ARGS, [model])
    scales.begin(TOTAL)
    run(scales, model, 0, 64.0)
    left = deque(["a scale of the pass that was given up"])
    engine.fp8_tensors_recompute_buffer.append(left)
    with torch.no_grad():
        model(128.0)
    scales.begin(TOTAL)
    assert not left, "a layer that is computed again would take it"
    run(scales, model, 1, 2.0)
    scales.ran([1])
    with torch.no_grad():
        model(256.0)
    step(scales, scales.read())
    assert model.scale == MOST / 2


def test_parts_of_a_sum_that_are_final_and_others_that_are_summed_again_give_the_same() -> None:
    """Worker 1 is lost when one half of the sum is final: worker 0 has run its microbatch again in the other half."""
    model = Model()
    scales = Scales(ARGS, [model])
    scales.begin(2)
    run(scales, model, 1, 8.0)
    scales.ran([1])
    lost = scales.read()
    scales.begin(2)
    run(scales, model, 0, 2.0)
    scales.ran([0])
    first = scales.read() + lost
    run(scales, model, 1, 8.0)
    scales.ran([1])
    half = len(first) // 2
    for parts in ((first[:half], scales.read()[half:]), (scales.read()[:half], first[half:])):
        scales.write(torch.cat(parts))
        assert scales._found is not None
        assert float(scales._found[0]) == 8


def test_a_state_has_scales_and_histories_and_going_back_forgets_them() -> None:
    model, fresh = Model(), Model()
    scales = Scales(ARGS, [model])
    scales.begin(TOTAL)
    run(scales, model, 0, 2.0)
    scales.ran([0])
    step(scales, scales.read())
    newcomer = Scales(ARGS, [fresh])
    assert fresh.scale == 1, "it has scales before its first forward pass"
    for own, its in zip(newcomer.tensors(whole=True), scales.tensors(whole=True), strict=True):
        own.copy_(its)
    assert fresh.scale == MOST / 2
    newcomer.reset()
    assert fresh.scale == 1
    assert [float(its.sum()) for its in newcomer.tensors()] == [3, 0, 2, 0]


def test_a_backward_pass_that_was_not_seen_ends_the_step() -> None:
    model = Model()
    scales = Scales(ARGS, [model])
    scales.begin(TOTAL)
    with scales.microbatch(0, 1):
        scales.watch(0, 1, model(2.0))
    with pytest.raises(Disagreement, match=r"no backward pass ran for \(chunk, microbatch\) \[\(0, 1\)\]"):
        scales.ran([1])


def test_what_a_model_keeps_of_a_pass_before_the_training_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
    model(2.0)
    model.layer.fp8_meta[FORGOTTEN] = 3
    scales = Scales(ARGS, [model])
    assert FORGOTTEN not in model.layer.fp8_meta
    scales.begin(TOTAL)
    run(scales, model, 0, 4.0)
    scales.ran([0])
    step(scales, scales.read())
    assert model.scale == MOST / 4


def test_another_transformer_engine_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(fp8_meta: Any, fp8_weights: Any) -> None:
        """As in 1.x."""

    monkeypatch.setattr(double.FP8GlobalStateManager, "add_fp8_tensors_to_global_buffer", other)
    monkeypatch.setattr(double.TransformerEngineBaseModule, "init_fp8_metadata", lambda self, gemms: None)
    with pytest.raises(UserError) as refused:
        Scales(ARGS, [Model()])
    assert "init_fp8_metadata takes (self, gemms), expected (self, num_gemms, ...)" in str(refused.value)
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="unknown Transformer Engine"):
        Scales(ARGS, [Model()])


@pytest.mark.parametrize(("attention", "why"), [(False, "not support the FP8 module .*Other"), (True, "in 16 bits")])
def test_what_would_have_histories_that_nobody_sends_is_refused(attention: bool, why: str) -> None:
    class Other(double.TransformerEngineBaseModule):
        pass

    model = Model(attention)
    model.other = Other()
    with pytest.raises(UserError, match=why):
        Scales(ARGS, [model])
