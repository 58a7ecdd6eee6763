"""What Megatron users combine, flags of NVIDIA's configurations among it: a death changes nothing but rounding.

Nor the biases of routers, moved by what the whole batch has counted, nor the largest attention logits of all, by which
weights are clipped.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from tests.drawn import some
from tests.instep.conftest import Runs
from tests.instep.logged import differences
from tests.instep.runs import (
    INTERLEAVED,
    LATENT,
    LAYOUTS,
    NO_EVALUATION,
    PARAMETERS,
    ROPE,
    SAMPLES,
    Case,
    Layout,
    Result,
    Strike,
    check,
    check_audit,
    check_parameters,
    check_rows,
    check_steps,
    distance,
)
from tests.instep.test_log import tell_both
from tests.megatron_hooks.tiny import STOCK

pytestmark = pytest.mark.slow

DP4, OVERLAP, TP2 = LAYOUTS[0], LAYOUTS[1], LAYOUTS[2]
AVERAGE = "--ddp-average-in-collective"
EXPERTS = Layout("experts-dp3", 3, inner_ranks=2, flags="--num-experts 4 --expert-model-parallel-size 2 "
                 "--moe-router-topk 2 --disable-bias-linear")  # fmt: skip
INTERLEAVED_DP2 = Layout("interleaved-dp2", 2, pipeline=2, flags=INTERLEAVED)
"""Six microbatches of a rank: two groups of three."""
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
ADAM = ("--optimizer", "adam", "--lr", "0.01", "--min-lr", "0.003", "--adam-eps", "1e-4")
MTP = f"--mtp-num-layers 1 {ROPE}"
DEEPSEEK = (
    f"{MTP} --num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --disable-bias-linear "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2"
)
OFF = tuple(
    "--moe-token-dispatcher-type flex --cuda-graph-impl local "
    "--use-sharp --use-nccl-ub --log-straggler --log-max-attention-logit --error-injection-rate 1 "
    "--rerun-mode validate_results".split()
)
HALF = ("--fp16", "--accumulate-allreduce-grads-in-fp32", "--initial-loss-scale", "1048576", "--hysteresis", "1")
"""The first steps overflow and are skipped."""
DECREASED = "--global-batch-size 14 --decrease-batch-size-if-needed --eval-global-batch-size 12"
"""To 12: 14 is no multiple of the launch's 4 replicas, nor of the 3 or 2 that are left, or of those with a newcomer."""
CASES = [
    Case(DP4, (Strike(1, 0, 3, "optimizer"), Strike(2, 0, 5, "reduce-scatter")), model=tuple(DECREASED.split())),
    Case(TP2, (Strike(1, 1, 3, "optimizer"),), 30, restarts=1, model=tuple(DECREASED.split())),
    Case(EXPERTS, (Strike(1, 1, 3, "reduce-scatter"), Strike(0, 0, 5, "backward")), flags=OFF),
    Case(Layout("vpp-sharded-dp2", 2, pipeline=2, flags=INTERLEAVED),
         (Strike(0, 1, 4, "update"),), model=ADAM, flags=(*SHARDED, "--overlap-param-gather-with-optimizer-step")),
    Case(DP4, (Strike(1, 0, 3, "backward"), Strike(2, 0, 5, "reduce-scatter")), flags=(AVERAGE,)),
    Case(OVERLAP, (Strike(1, 0, 3, "all-gather"), Strike(0, 0, 5, "agree")), flags=(AVERAGE,)),
    Case(EXPERTS, (Strike(1, 1, 3, "reduce-scatter"), Strike(0, 0, 5, "backward")), flags=(AVERAGE,)),
    Case(INTERLEAVED_DP2, (Strike(1, 0, 3, "forward", visit=3),),
         flags=("--microbatch-group-size-per-virtual-pipeline-stage", "3")),
    Case(INTERLEAVED_DP2, (Strike(0, 1, 4, "reduce-scatter"),),
         flags=("--microbatch-group-size-per-virtual-pipeline-stage", "3", AVERAGE)),
    Case(Layout("mtp-dp3", 3, flags=MTP), (Strike(1, 0, 3, "norm"), Strike(0, 0, 5, "backward")),
         model=ADAM, flags=SHARDED),
    Case(Layout("mtp-pp2-dp3", 3, pipeline=2, flags=MTP), (Strike(2, 1, 3, "update"), Strike(0, 0, 5, "forward")),
         model=ADAM, flags=SHARDED),
    Case(Layout("mtp-vpp-dp2", 2, pipeline=2, flags=f"{MTP} {INTERLEAVED}"),
         (Strike(1, 1, 3, "backward"),), model=ADAM, flags=SHARDED[:1]),
    Case(Layout("deepseek-pp2-dp2", 2, pipeline=2, inner_ranks=2, flags=DEEPSEEK), (Strike(1, 2, 3, "norm"),),
         model=ADAM, flags=SHARDED),
]  # fmt: skip


@pytest.mark.parametrize("case", some("recipe flags", CASES, 2), ids=lambda case: f"{case}{case.flags}")
def test_a_flag_that_changes_how_gradients_are_summed_or_applied_changes_nothing_but_rounding(
    runs: Runs, case: Case
) -> None:
    runs.check(case)


def test_the_profiled_worker_stays_profiled_when_the_ranks_change_and_no_other_worker_is(runs: Runs) -> None:
    """Of ranks 0 and 1 one dies before the profile, and the one after them becomes rank 1, without a profiler."""
    profile = "--profile --use-pytorch-profiler --profile-ranks 0 1 --profile-step-start 5 --profile-step-end 7"
    board = str(runs.out / "board")
    runs.check(Case(DP4, (Strike(0, 0, 3, "backward"),), flags=(*profile.split(), "--tensorboard-dir", board)))
    assert [file.name for file in (runs.out / "torch_profile").iterdir()] == ["rank-0.json.gz"], (
        "worker 1's, renumbered"
    )


EXTERNAL_CASES = [
    Case(DP4, (Strike(1, 0, 3, "data"), Strike(2, 0, 5, "reduce-scatter")), evaluated=True),
    Case(Layout("pp2-dp3", 3, pipeline=2), (Strike(1, 1, 3, "forward"), Strike(0, 0, 5, "agree")), 30, restarts=1,
         model=("--num-workers", "1")),
]  # fmt: skip


@pytest.mark.parametrize("case", some("external", EXTERNAL_CASES, 1), ids=str)
def test_what_a_loader_of_the_users_own_gives_by_number_is_trained_as_megatrons_own(runs: Runs, case: Case) -> None:
    external = case.altered("instruments.own_loaders").with_flags("--dataloader-type", "external")
    check(runs(external), runs.reference(case))


def test_a_loader_that_gives_batches_one_after_the_other_alone_is_refused(runs: Runs) -> None:
    result = runs(Case(DP4).with_flags("--dataloader-type", "external"))
    assert set(result.ended.codes) == {2}, result.told()
    said = "--recover with --dataloader-type external needs a loader with a method microbatch(number): MockGPTDataset"
    assert said in result.said


INFILLING = tuple(
    "--fim-data --fim-rate 0.6 --fim-spm-rate 0.5 --fim-prefix-token 120 --fim-middle-token 121 --fim-suffix-token 122 "
    "--fim-pad-token 123 --fim-eod-token 126".split()
)
INFILLING_CASES = [
    Case(DP4, (Strike(1, 0, 3, "data"), Strike(2, 0, 5, "reduce-scatter")), model=(*INFILLING, "--num-workers", "2")),
    Case(TP2, (Strike(1, 0, 3, "backward"), Strike(0, 1, 5, "agree")), 30, restarts=1,
         model=(*INFILLING, "--fim-split-sample", "60", "--fim-fragment-rate", "0.7")),
]  # fmt: skip


@pytest.mark.parametrize("case", some("infilling", INFILLING_CASES, 1), ids=str)
def test_samples_for_infilling_are_those_of_the_run_without_deaths(runs: Runs, indexed_data: str, case: Case) -> None:
    case = case.throughout("instruments.infilling", indexed_data)
    runs.check(case)
    plain = replace(case, model=case.model[len(INFILLING) :])
    assert [step.loss for step in runs.reference(case).steps] != [step.loss for step in runs.reference(plain).steps]


GLITCH = 2 * SAMPLES + 5
"""A sample of iteration 3: microbatch 5, which worker 1 runs."""


def test_a_worker_that_alone_finds_an_unexpected_result_ends_and_its_microbatch_runs_elsewhere(runs: Runs) -> None:
    plain = Case(DP4, flags=("--rerun-mode", "validate_results"))
    case = plain.altered("faulty.poison", "glitch", GLITCH)
    result = runs(case)
    assert list(result.ended.codes) == [0, 1, 0, 0], result.told()
    assert "found NaN in local forward loss calculation" in result.log(1)
    assert "--rerun-mode validate_results: a worker that finds an unexpected result exits" in result.log(0)
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
    assert "--use-distributed-optimizer with muon, soap or lion is off" in result.log(0)


@pytest.mark.skipif(not find_spec("emerging_optimizers"), reason="needs the Python package emerging-optimizers")
def test_muon_without_a_death_is_stock_megatrons(runs: Runs) -> None:
    """Not with its layers spread: gloo gathers parts of one size alone."""
    runs.check_stock(Case(DP4, model=MUON), script=STOCK)


LAYER_WISE = (*MUON, "--bf16", "--use-distributed-optimizer", "--ckpt-format", "torch_dist")
DP2 = Layout("dp2", 2)


@pytest.mark.skipif(not find_spec("emerging_optimizers"), reason="needs the Python package emerging-optimizers")
def test_a_checkpoint_of_muon_whose_layers_were_spread_is_resumed_and_so_is_ours(runs: Runs) -> None:
    """Stock Megatron spreads them (gloo is taught to gather parts of different sizes); with --recover nobody does."""
    case = Case(DP2, model=LAYER_WISE).throughout("instruments.uneven_gathers")
    theirs, ours = runs.out / "theirs", runs.out / "ours"
    save, load = (["--save-interval", "4", "--save"], ["--ckpt-step", "4", "--exit-on-missing-checkpoint", "--load"])
    expected = runs.stock(case, *save, str(theirs)).recorded[4:]
    struck = replace(case, strikes=(Strike(1, 0, 6, "backward"),))
    resumed = runs(struck.with_flags(*load, str(theirs)), "resumed")
    check_rows(resumed.steps, expected, SIXTEEN_BITS, "of theirs")
    struck = replace(case, strikes=(Strike(0, 0, 2, "all-gather"),))
    assert runs(struck.with_flags(*save, str(ours)), "run").ended.codes == [-9, 0]
    stock = replace(runs, out=runs.out / "again").stock(case, *load, str(ours)).recorded
    check_rows(stock, expected, SIXTEEN_BITS, "of ours")


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
    result = runs.check(case, near=100)
    skipped = [step.iteration for step in result.steps if step.grad_norm is None]
    assert skipped == [step.iteration for step in runs.reference(case).steps if step.grad_norm is None] != []


@pytest.mark.parametrize("flags", [SHARDED, (SHARDED[0], "--recover-shadow-device", "cpu"), ()], ids=" ".join)
def test_all_leave_out_the_same_updates_of_a_norm_that_is_too_large(runs: Runs, flags: tuple[str, ...]) -> None:
    """Shadows, too, which are asked for when their owner is lost."""
    usual = runs.reference(Case(DP4, model=ADAM, flags=flags))
    limit = sorted(step.grad_norm or 0.0 for step in usual.steps)[len(usual.steps) // 2]
    strikes = (Strike(1, 0, 3, "optimizer"), Strike(2, 0, 6, "backward"))
    case = Case(DP4, strikes, model=ADAM, flags=flags).throughout("instruments.skip_above", limit)
    result = runs.check(case, near=10)
    left_out = [(step.grad_norm or 0.0) > limit for step in result.steps]
    assert any(left_out)
    assert not all(left_out)
    result_of_usual = [step.loss for step in usual.steps]
    assert [step.loss for step in result.steps] != pytest.approx(result_of_usual, rel=1e-4)


def test_float16_gradients_are_added_up_in_float32_without_being_asked_for(runs: Runs) -> None:
    fp16 = "--fp16 --initial-loss-scale 65536"
    case = Case(DP4, (Strike(1, 0, 3, "backward"), Strike(2, 0, 5, "reduce-scatter")), model=tuple(fp16.split()))
    result = runs(case)
    asked = replace(case, model=(*case.model, "--accumulate-allreduce-grads-in-fp32"))
    check(result, runs.reference(asked), near=100)
    assert "--fp16: gradients are accumulated in float32" in result.log(0)


# ---- forward passes beside backward passes
BESIDE = (
    "--bf16 --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
BESIDE_ADAM = tuple("--optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-2".split())
INTERLEAVED_EXPERTS = Layout("experts-vpp-dp3", 3, pipeline=2, inner_ranks=2, flags=f"{EXPERTS.flags} {INTERLEAVED}")
BESIDE_CASES = [
    Case(EXPERTS, (Strike(1, 1, 3, "backward", visit=2), Strike(0, 0, 5, "reduce-scatter")), flags=SHARDED[1:2]),
    Case(EXPERTS, (Strike(1, 1, 3, "norm"), Strike(2, 0, 5, "forward", visit=3)), model=BESIDE_ADAM, flags=SHARDED),
    Case(INTERLEAVED_EXPERTS, (Strike(0, 2, 3, "backward", visit=3),), model=BESIDE_ADAM, flags=SHARDED),
    Case(INTERLEAVED_EXPERTS, (Strike(1, 1, 3, "agree"),), flags=SHARDED[1:2]),
    Case(replace(EXPERTS, name="experts-dp4", replicas=4, samples=8), (Strike(1, 1, 3, "reduce-scatter"),)),
]  # fmt: skip
"""Of the last one a pass has one microbatch."""


def beside(case: Case) -> Case:
    return replace(case, model=(*BESIDE.split(), *case.model))


@pytest.mark.parametrize("case", some("beside", BESIDE_CASES, 1), ids=lambda case: f"{case}{case.flags}")
def test_gradients_of_weights_that_are_computed_late_are_counted_once(runs: Runs, case: Case) -> None:
    late = beside(case).throughout("instruments.late_weights")
    check_steps(runs.reference(late), runs.reference(beside(case)), SIXTEEN_BITS)
    runs.check(late, SIXTEEN_BITS)


def test_what_a_pass_that_was_given_up_has_kept_of_late_weights_is_dropped(runs: Runs) -> None:
    """Its mate dies in the middle of a layer's backward pass, and it takes a place again."""
    case = beside(Case(EXPERTS, (), 12, restarts=1, doomed=(3,)).altered("faulty.in_dispatch", 3, 4, 4))
    case = case.throughout("instruments.late_weights").patient("6-:3")
    result = runs.check(case, SIXTEEN_BITS, replicas=3)
    assert 2 in result.grid[1]


@pytest.mark.parametrize("layout", some("beside stock", [EXPERTS, INTERLEAVED_EXPERTS], 1), ids=str)
def test_forward_passes_beside_backward_passes_compute_what_they_compute_alone(runs: Runs, layout: Layout) -> None:
    # Tied, an embedding's two gradients are added up in 16 bits, or each to the buffer.
    case = beside(Case(layout, model=("--untie-embeddings-and-output-weights",)))
    alone = replace(case, model=tuple(flag for flag in case.model if flag != "--overlap-moe-expert-parallel-comm"))
    steps = [[(step.loss, step.grad_norm) for step in runs.reference(its).steps] for its in (case, alone)]
    assert steps[0] == steps[1]
    check_parameters(runs.reference(case), runs.reference(alone), 1e-9)
    check_rows(runs.reference(case).steps, runs.stock(case).recorded, SIXTEEN_BITS)


# ---- biases of routers
FOUR = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
BIAS = f"{FOUR} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02"
QUANTILES = f"{FOUR} --moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0"
OVER_TWO = "--expert-model-parallel-size 2"
SHARDED_ADAM = "--optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4 --use-distributed-optimizer"
ROUTER_CASES = [
    (Case(Layout("bias-dp3", 3, flags=BIAS), (Strike(1, 0, 3, "optimizer"), Strike(2, 0, 5, "backward"))), 1.0),
    (Case(Layout("bias-bf16-dp3", 3, flags=f"{BIAS} --bf16"), (Strike(1, 0, 3, "reduce-scatter"),)), 300.0),
    (Case(Layout("bias-sharded-dp3", 3, flags=f"{BIAS} {SHARDED_ADAM}"), (Strike(0, 0, 4, "agree"),)), 1.0),
    (Case(Layout("bias-pp2-dp2", 2, pipeline=2, flags=BIAS), (Strike(1, 1, 3, "forward", visit=2),)), 1.0),
    (Case(Layout("bias-tp2-dp2", 2, tensor=2, flags=f"{BIAS} --sequence-parallel"),
          (Strike(0, 1, 4, "all-gather"),)), 1.0),
    (Case(Layout("bias-ep2-dp3", 3, inner_ranks=2, flags=f"{BIAS} {OVER_TWO}"),
          (Strike(2, 1, 3, "optimizer"), Strike(1, 0, 5, "agree")), 30, restarts=1), 1.0),
    (Case(Layout("quantiles-dp3", 3, flags=QUANTILES), (Strike(1, 0, 3, "optimizer"), Strike(2, 0, 5, "data"))), 1.0),
]  # fmt: skip


ROUTER_ITERATIONS = 7
"""Odd: a bias that goes up and down is not where it began."""


@pytest.mark.parametrize(("case", "near"), some("routers", ROUTER_CASES, 2), ids=str)
def test_biases_of_routers_are_those_of_the_run_without_deaths(runs: Runs, case: Case, near: float) -> None:
    case = replace(case, iterations=max(ROUTER_ITERATIONS, case.iterations * bool(case.restarts)))
    check_biases(runs.check(case, near), runs.reference(case))


@pytest.mark.parametrize("layout", some("stock routers", [case.layout for case, _ in ROUTER_CASES], 1), ids=str)
def test_biases_of_routers_are_stock_megatrons(runs: Runs, layout: Layout) -> None:
    case = Case(layout, iterations=ROUTER_ITERATIONS)
    check_biases(runs.reference(case), runs.stock(case))


def check_biases(result: Result, expected: Result) -> None:
    """Assert that all who have a place at the end have the biases of the same position in ``expected``."""
    largest = 0.0
    for position, column in enumerate(zip(*result.grid.values(), strict=True)):
        its = expected.left[result.case.layout.grid.replicas[0][position]]["biases"]
        largest = max(largest, *(float(bias.abs().max()) for bias in its.values()))
        for worker in column:
            assert result.left[worker]["biases"].keys() == its.keys()
            for name, bias in result.left[worker]["biases"].items():
                assert torch.allclose(bias, its[name], atol=1e-5), (str(result.case), worker, name, bias, its[name])
    assert largest > 0.01


# ---- the largest attention logits
CLIP = "--bf16 --qk-clip --qk-clip-threshold 0.01"
"""A threshold that some heads exceed in every step of a short run, by some tens of percent."""
GROUPED = "--group-query-attention --num-query-groups 1"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SIXTEEN_BITS = 300.0
"""bf16: gradients of a microbatch are rounded to 16 bits."""
CLIP_MUON = tuple("--optimizer muon --lr 0.02 --min-lr 0.01 --muon-num-ns-steps 1 --muon-fp32-matmul-prec high".split())
MAXIMA = 2e-3
"""How far the maxima may be, relative: by 16 bits.  Of another microbatch they are some percent."""
LATER_MAXIMA = 1e-2
"""The same after ten iterations: weights that were clipped by others round to others."""
CLIP_CASES = [
    Case(Layout("clip-dp3", 3, flags=CLIP), (Strike(1, 0, 3, "backward"), Strike(2, 0, 5, "all-gather"))),
    Case(Layout("clip-dp4", 4, flags=f"{CLIP} {GROUPED} {RECOMPUTED}"),
         (Strike(0, 0, 1, "optimizer"), Strike(3, 0, 4, "reduce-scatter"), Strike(1, 0, 4, "recovery", visit=2))),
    Case(Layout("clip-tp2-dp3", 3, tensor=2, flags=f"{CLIP} {LATENT}"),
         (Strike(1, 1, 3, "forward", visit=2), Strike(2, 0, 3, "backward")), 30, restarts=1),
    Case(Layout("clip-pp2-dp2", 2, pipeline=2, flags=CLIP), (Strike(1, 1, 3, "agree"),)),
    Case(Layout("clip-vpp-dp2", 2, pipeline=2,
                flags=f"{CLIP} {INTERLEAVED}"),
         (Strike(0, 1, 3, "backward", visit=3),)),
    Case(Layout("clip-cp2-dp2", 2, context=2, flags=CLIP), (Strike(0, 1, 3, "reduce-scatter"),)),
    Case(Layout("clip-latent-cp2-dp3", 3, context=2, flags=f"{CLIP} {LATENT}"),
         (Strike(1, 1, 3, "forward", visit=2), Strike(2, 0, 5, "agree"))),
    Case(Layout("clip-muon-dp3", 3, flags=f"{CLIP} {LATENT}"),
         (Strike(2, 0, 2, "all-gather"), Strike(0, 0, 4, "optimizer")),
         model=CLIP_MUON, flags=("--use-distributed-optimizer",), evaluated=True),
]  # fmt: skip


@pytest.mark.parametrize("case", some("attention logits", CLIP_CASES, 2), ids=str)
def test_weights_are_clipped_by_the_largest_logits_of_the_whole_batch(runs: Runs, case: Case) -> None:
    case = case.throughout("instruments.maxima")
    ours, theirs = maxima(runs.check(case, SIXTEEN_BITS)), maxima(runs.reference(case))
    assert {iteration for iteration, *_ in theirs} == set(range(1, case.iterations + 1))
    assert ours.keys() == theirs.keys()
    near = {at: MAXIMA if at[0] <= 10 else LATER_MAXIMA for at in ours}
    assert {at: (ours[at], theirs[at]) for at in ours if ours[at] != pytest.approx(theirs[at], rel=near[at])} == {}


def test_the_largest_logits_of_planned_passes_are_those_of_the_batch(runs: Runs) -> None:
    layout = replace(EXPERTS, name="clip-beside-dp3", flags=f"{EXPERTS.flags} {BESIDE} {CLIP}")
    case = Case(layout, (Strike(1, 1, 3, "backward", visit=2), Strike(2, 0, 5, "all-gather")))
    test_weights_are_clipped_by_the_largest_logits_of_the_whole_batch(runs, case)
    alone = replace(case, layout=replace(layout, flags=layout.flags.replace("--overlap-moe-expert-parallel-comm", "")))
    planned, unplanned = (maxima(runs.reference(its.throughout("instruments.maxima"))) for its in (case, alone))
    assert planned == pytest.approx(unplanned, rel=LATER_MAXIMA)


@pytest.mark.parametrize("case", some("stock clipping", CLIP_CASES, 1), ids=lambda case: case.layout.name)
def test_weights_are_clipped_as_stock_megatron_does(runs: Runs, case: Case) -> None:
    # Stock Megatron counts an evaluation for the next step.
    case = Case(case.layout).throughout("instruments.maxima")
    stock, clipped = runs.stock(case), runs.reference(case)
    unclipped = runs.reference(
        replace(case, layout=replace(case.layout, flags=case.layout.flags.replace("--qk-clip ", "")))
    )
    for worker, left in stock.left.items():
        its, other = clipped.left[worker]["parameters"], unclipped.left[worker]["parameters"]
        apart = distance(its, left["parameters"])
        assert apart < SIXTEEN_BITS * PARAMETERS
        assert distance(its, other) > max(1e-3, 10 * apart), "clipping is seen in the weights"


def test_the_largest_logit_of_all_is_logged(runs: Runs) -> None:
    flags = ("--bf16", "--log-max-attention-logit", *NO_EVALUATION)
    case = Case(LAYOUTS[0], (Strike(1, 0, 3, "backward"), Strike(2, 0, 5, "reduce-scatter")), model=flags)
    _, log, expected = tell_both(runs, case, SIXTEEN_BITS)
    name = "max_attention_logit"
    assert len(expected.board[name]) == case.iterations
    assert all(expected.board[name].values())
    assert differences({name: log.board[name]}, {name: expected.board[name]}, MAXIMA) == []


Place = tuple[int, int, int, int, int]
"""Iteration, tensor rank, pipeline rank, layer of that worker, head of it."""


def maxima(result: Result) -> dict[Place, float]:
    """What the workers have printed; of those that stand in the same place, all must have printed the same."""
    found: dict[Place, float] = {}
    for log in result.out.glob("worker-*.log"):
        for line in re.findall(r"^maxima: (.*)$", log.read_text(errors="replace"), re.MULTILINE):
            iteration, (tensor, stage), layers = json.loads(line)
            for layer, heads in enumerate(layers):
                for head, largest in enumerate(heads):
                    at = (iteration, tensor, stage, layer, head)
                    assert found.setdefault(at, largest) == largest, (str(log), at)
    return found
