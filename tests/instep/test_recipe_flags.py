"""Flags of NVIDIA's configurations: a run whose workers die equals one without deaths, and mostly without the flag."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from tests.drawn import some
from tests.instep.conftest import Runs
from tests.instep.runs import (
    LAYOUTS,
    SAMPLES,
    Case,
    Layout,
    Strike,
    check,
    check_audit,
    check_parameters,
    check_steps,
)
from tests.megatron_hooks.tiny import STOCK

pytestmark = pytest.mark.slow

DP4, OVERLAP, TP2 = LAYOUTS[0], LAYOUTS[1], LAYOUTS[2]
AVERAGE = "--ddp-average-in-collective"
EXPERTS = Layout("experts-dp3", 3, inner_ranks=2, flags="--num-experts 4 --expert-model-parallel-size 2 "
                 "--moe-router-topk 2 --disable-bias-linear")  # fmt: skip
INTERLEAVED = Layout("interleaved-dp2", 2, pipeline=2, flags="--num-layers 4 --num-layers-per-virtual-pipeline-stage 1")
"""Six microbatches of a rank: two groups of three."""
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
ADAM = ("--optimizer", "adam", "--lr", "0.01", "--min-lr", "0.003", "--adam-eps", "1e-4")
MTP = "--mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion"
DEEPSEEK = (
    f"{MTP} --num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --disable-bias-linear "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2"
)
OFF = tuple(
    "--moe-token-dispatcher-type flex --cuda-graph-impl local --overlap-moe-expert-parallel-comm --delay-wgrad-compute "
    "--use-sharp --use-nccl-ub --log-straggler --log-max-attention-logit --error-injection-rate 1 "
    "--rerun-mode validate_results".split()
)
EIGHT_BITS = ("--fp8-param-gather", "--fp4-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag")
HALF = ("--fp16", "--accumulate-allreduce-grads-in-fp32", "--initial-loss-scale", "1048576", "--hysteresis", "1")
"""The first steps overflow and are skipped."""
DECREASED = "--global-batch-size 14 --decrease-batch-size-if-needed --eval-global-batch-size 12"
"""To 12: 14 is no multiple of the launch's 4 replicas, nor of the 3 or 2 that are left, or of those with a newcomer."""
CASES = [
    Case(DP4, (Strike(1, 0, 3, "optimizer"), Strike(2, 0, 5, "reduce-scatter")), model=tuple(DECREASED.split())),
    Case(TP2, (Strike(1, 1, 3, "optimizer"),), 30, restarts=1, model=tuple(DECREASED.split())),
    Case(EXPERTS, (Strike(1, 1, 3, "reduce-scatter"), Strike(0, 0, 5, "backward")), flags=OFF),
    Case(Layout("vpp-sharded-dp2", 2, pipeline=2, flags="--num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
         (Strike(0, 1, 4, "update"),), model=ADAM, flags=(*SHARDED, "--overlap-param-gather-with-optimizer-step")),
    Case(DP4, (Strike(1, 0, 3, "backward"), Strike(2, 0, 5, "reduce-scatter")), flags=(AVERAGE,)),
    Case(OVERLAP, (Strike(1, 0, 3, "all-gather"), Strike(0, 0, 5, "agree")), flags=(AVERAGE,)),
    Case(EXPERTS, (Strike(1, 1, 3, "reduce-scatter"), Strike(0, 0, 5, "backward")), flags=(AVERAGE,)),
    Case(INTERLEAVED, (Strike(1, 0, 3, "forward", visit=3),),
         flags=("--microbatch-group-size-per-virtual-pipeline-stage", "3")),
    Case(INTERLEAVED, (Strike(0, 1, 4, "reduce-scatter"),),
         flags=("--microbatch-group-size-per-virtual-pipeline-stage", "3", AVERAGE)),
    Case(Layout("mtp-dp3", 3, flags=MTP), (Strike(1, 0, 3, "norm"), Strike(0, 0, 5, "backward")),
         model=ADAM, flags=SHARDED),
    Case(Layout("mtp-pp2-dp3", 3, pipeline=2, flags=MTP), (Strike(2, 1, 3, "update"), Strike(0, 0, 5, "forward")),
         model=ADAM, flags=SHARDED),
    Case(Layout("mtp-vpp-dp2", 2, pipeline=2, flags=f"{MTP} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
         (Strike(1, 1, 3, "backward"),), model=ADAM, flags=SHARDED[:1]),
    Case(Layout("deepseek-pp2-dp2", 2, pipeline=2, inner_ranks=2, flags=DEEPSEEK), (Strike(1, 2, 3, "norm"),),
         model=ADAM, flags=SHARDED),
]  # fmt: skip


@pytest.mark.parametrize("case", some("recipe flags", CASES, 2), ids=lambda case: f"{case}{case.flags}")
def test_a_flag_that_changes_how_gradients_are_summed_or_applied_changes_nothing_but_rounding(
    runs: Runs, case: Case
) -> None:
    runs.check(case)


GLITCH = 2 * SAMPLES + 5
"""A sample of iteration 3: microbatch 5, which worker 1 runs."""


def test_a_worker_that_alone_finds_an_unexpected_result_ends_and_its_microbatch_runs_elsewhere(runs: Runs) -> None:
    plain = Case(DP4, flags=("--rerun-mode", "validate_results"))
    case = plain.altered("faulty.poison", "glitch", GLITCH)
    result = runs(case)
    assert list(result.ended.codes) == [0, 1, 0, 0], result.told()
    assert "found NaN in local forward loss calculation" in result.log(1)
    assert "--rerun-mode validate_results: a worker that finds an unexpected result ends" in result.log(0)
    check_audit(result, case.iterations)
    check_steps(result, runs.reference(plain))
    check_parameters(result, runs.reference(plain))
    assert result.replicas == [4, 4, *[3] * 6]


MUON = tuple(
    "--optimizer muon --lr 0.02 --min-lr 0.01 --adam-eps 1e-4 --muon-num-ns-steps 1 "
    "--muon-fp32-matmul-prec high".split()
)
"""One step: each makes small singular values, which are mostly rounding here, three times as large."""
MUON_CASES = [
    Case(DP4, (Strike(1, 0, 3, "optimizer"), Strike(2, 0, 5, "backward")), model=MUON, flags=SHARDED),
    Case(DP4, (Strike(0, 0, 4, "reduce-scatter"), Strike(3, 0, 6, "agree")), flags=("--use-distributed-optimizer",),
         model=(*MUON, "--bf16")),
    Case(TP2, (Strike(1, 1, 3, "optimizer"), Strike(2, 0, 3, "forward")), 30, restarts=1, model=MUON, flags=SHARDED),
    Case(EXPERTS, (Strike(2, 1, 3, "optimizer"), Strike(1, 0, 5, "backward")), 30, restarts=1, model=MUON,
         flags=SHARDED[:1]),
    Case(Layout("muon-pp2-dp3", 3, pipeline=2), (Strike(0, 1, 3, "all-gather"), Strike(1, 0, 5, "data")), model=MUON,
         flags=("--use-distributed-optimizer", "--no-use-layer-wise-param-layout")),
]  # fmt: skip


@pytest.mark.skipif(not find_spec("emerging_optimizers"), reason="needs the Python package emerging-optimizers")
@pytest.mark.parametrize("case", some("muon", MUON_CASES, 1), ids=lambda case: f"{case}{case.model}")
def test_muon_whose_layers_would_be_spread_is_survived_with_all_state_in_every_worker(runs: Runs, case: Case) -> None:
    result = runs.check(case, 300.0 if "--bf16" in case.model else 10.0)
    assert "--use-distributed-optimizer with muon and its kin is off" in result.log(0)


@pytest.mark.skipif(not find_spec("emerging_optimizers"), reason="needs the Python package emerging-optimizers")
def test_muon_without_a_death_is_stock_megatrons(runs: Runs) -> None:
    """Not with its layers spread: gloo gathers parts of one size alone."""
    runs.check_stock(Case(DP4, model=MUON), script=STOCK)


HALF_CASES = [
    Case(DP4, (Strike(1, 0, 2, "norm"), Strike(2, 0, 6, "update")), model=(*ADAM, *HALF), flags=SHARDED),
    Case(DP4, (Strike(3, 0, 1, "update"), Strike(0, 0, 5, "param-gather")), model=(*ADAM, *HALF),
         flags=(SHARDED[0], "--recover-shadow-device", "cpu")),
    Case(TP2, (Strike(1, 1, 3, "norm"),), 30, restarts=1, model=(*ADAM, *HALF),
         flags=(SHARDED[0], "--log-num-zeros-in-grad")),
    Case(EXPERTS, (Strike(2, 1, 3, "update"), Strike(1, 0, 5, "reduce-scatter")), model=(*ADAM, *HALF),
         flags=SHARDED[:1]),
    Case(Layout("fp16-pp2-dp3", 3, pipeline=2), (Strike(2, 1, 2, "update"), Strike(0, 0, 5, "forward")),
         model=(*ADAM, *HALF), flags=SHARDED),
]  # fmt: skip


@pytest.mark.parametrize("case", some("fp16 shards", HALF_CASES, 1), ids=lambda case: f"{case}{case.flags}")
def test_all_skip_the_same_steps_of_a_loss_scale_whose_gradients_are_spread(runs: Runs, case: Case) -> None:
    result, expected = runs(case), runs.reference(case)
    skipped = [step.iteration for step in result.steps if step.grad_norm is None]
    assert skipped == [step.iteration for step in expected.steps if step.grad_norm is None] != []
    check(result, expected, near=100)


def test_float16_gradients_are_added_up_in_float32_without_being_asked_for(runs: Runs) -> None:
    fp16 = "--fp16 --initial-loss-scale 65536"
    case = Case(DP4, (Strike(1, 0, 3, "backward"), Strike(2, 0, 5, "reduce-scatter")), model=tuple(fp16.split()))
    result = runs(case)
    asked = replace(case, model=(*case.model, "--accumulate-allreduce-grads-in-fp32"))
    check(result, runs.reference(asked), near=100)
    assert "--fp16: gradients are added up in float32" in result.log(0)
