"""Hybrid models: Mamba, gated delta nets, attention, MLPs and experts, killed and compared with the run without.

Trained by hybrid.py, a script of their own, through a patched Megatron.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.drawn import some
from tests.instep.conftest import Runs
from tests.instep.runs import ADAM, CLIPPED, LATENT, OVERLAP, SHARDED, Case, Layout, Strike, check_rows

SCRIPT = (str(Path(__file__).with_name("hybrid.py")),)
HYBRID = (
    "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --mamba-state-dim 8 --mamba-head-dim 8 "
    "--mamba-num-groups 2 --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type none --hybrid-layer-pattern"
)
"""What Nemotron-H has, in small; a pattern comes next."""
PLAIN = f"{HYBRID} M-M*"
STAGES = f"{HYBRID} M-|M*"
DELTA = (
    f"{HYBRID} G-M* --swiglu --ffn-hidden-size 32 --linear-key-head-dim 4 --linear-value-head-dim 4 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4"
)
LATENT_TOO = f"{HYBRID.replace('none', 'rope')} M+-M {LATENT}"
NEMOTRON_3 = (
    f"{HYBRID} ME*E/*E --mtp-num-layers 1 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
    "--moe-grouped-gemm --moe-shared-expert-intermediate-size 16 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall --squared-relu"
)
SPREAD = f"{NEMOTRON_3} --expert-model-parallel-size 2"
TP2, PP2 = (
    Layout("tp2-dp3", 3, tensor=2, flags=f"{PLAIN} --sequence-parallel"),
    Layout("pp2-dp3", 3, 1, 2, flags=STAGES),
)
CP2, EP2 = Layout("cp2-dp3", 3, context=2, flags=PLAIN), Layout("ep2-dp3", 3, inner_ranks=2, flags=SPREAD)
N3_PP2 = Layout("nemotron-3-pp2-dp3", 3, 1, 2, flags=NEMOTRON_3.replace("ME*E", "ME|*E"))
SHARDS = " ".join((*SHARDED, OVERLAP))


def dp(name: str, replicas: int, flags: str) -> Layout:
    return Layout(f"{name}-dp{replicas}", replicas, flags=flags)


CASES = [
    Case(dp("mamba", 4, PLAIN), (Strike(1, 0, 3, "backward", visit=2), Strike(2, 0, 5, "all-gather"))),
    Case(dp("mamba-overlap", 3, f"{PLAIN} --overlap-grad-reduce --ddp-bucket-size 2000"),
         (Strike(0, 0, 2, "reduce-scatter"), Strike(2, 0, 6, "optimizer")), dropout=True),
    Case(dp("mamba-hang", 3, PLAIN), (Strike(1, 0, 3, "forward", "stop"),)),
    Case(dp("mamba-packed", 3, f"{PLAIN} --dataloader-inter-document-masking"), (Strike(1, 0, 3, "backward"),)),
    Case(dp("mamba-by-parts", 3, f"{PLAIN} --disable-mamba-mem-eff-path"), (Strike(0, 0, 4, "agree"),)),
    Case(dp("recomputed", 3, f"{NEMOTRON_3} --recompute-granularity selective --recompute-modules moe_act layernorm"),
         (Strike(1, 0, 3, "backward"),), dropout=True),
    Case(dp("latent", 3, LATENT_TOO), (Strike(1, 0, 3, "backward"),)),
    Case(dp("mamba-sharded", 4, f"{PLAIN} {SHARDS}"),
         (Strike(1, 0, 3, "update"), Strike(0, 0, 6, "checkpoint"))),
    Case(TP2, (Strike(1, 1, 3, "forward", visit=2), Strike(2, 0, 6, "eval"))),
    Case(PP2, (Strike(1, 1, 3, "agree"), Strike(2, 0, 5, "reduce-scatter"))),
    Case(Layout("interleaved-pp2-dp3", 3, 1, 2, flags=f"{HYBRID} M|-|M|*", samples=24), (Strike(1, 0, 3, "backward"),)),
    Case(CP2, (Strike(0, 1, 3, "backward"), Strike(1, 0, 5, "optimizer"))),
    Case(EP2, (Strike(0, 1, 3, "backward", visit=2), Strike(2, 0, 5, "all-gather"))),
    Case(replace(EP2, name="ep2-sharded-dp3", flags=f"{SPREAD} {SHARDS}"),
         (Strike(1, 0, 3, "reduce-scatter"),)),
    Case(N3_PP2, (Strike(0, 1, 4, "forward"),)),
    Case(dp("delta", 3, DELTA), (Strike(0, 0, 3, "backward"), Strike(1, 0, 5, "eval"))),
    Case(Layout("delta-tp2-dp2", 2, tensor=2, flags=f"{DELTA} --sequence-parallel"), (Strike(1, 0, 3, "checkpoint"),)),
    Case(Layout("delta-cp2-dp2", 2, context=2, flags=DELTA), (Strike(0, 1, 3, "reduce-scatter"),)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", some("hybrid", CASES, 2), ids=str)
def test_hybrid_models_train_as_without_deaths(runs: Runs, case: Case) -> None:
    runs.check(replace(case, script=SCRIPT))


@pytest.mark.slow
def test_in_16_bits_they_do_too(runs: Runs) -> None:
    case = Case(
        dp("mamba-bf16", 3, f"{PLAIN} {SHARDS} --bf16 --mamba-training-ssm-states-dtype fp32"),
        (Strike(1, 0, 3, "update"),),
    )
    runs.check(replace(case, script=SCRIPT), near=300)


LONG = 10
BUILT = [
    Case(TP2, (Strike(0, 1, 3, "backward"), Strike(2, 0, 3, "forward"))),
    Case(PP2, (Strike(1, 1, 3, "backward"),), LONG, restarts=1),
    Case(EP2, (Strike(1, 0, 3, "optimizer"),), LONG, restarts=1),
    Case(replace(CP2, name="cp2-sharded-dp3", flags=f"{DELTA} {SHARDS}"),
         (Strike(2, 1, 3, "forward"),), LONG, restarts=1),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", some("hybrid put together", BUILT, 1), ids=str)
def test_who_builds_a_hybrid_model_anew_has_all_of_its_state(runs: Runs, case: Case) -> None:
    replicas = 3 if case.restarts else 2
    case = replace(case, script=SCRIPT, model=CLIPPED)
    runs.check(case.patient(f"5-:{replicas}" if case.restarts else f"7-:{replicas}"), replicas=replicas)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [dp("mamba", 4, PLAIN), EP2], ids=lambda layout: layout.name)
def test_without_a_death_it_is_stock_megatrons(runs: Runs, layout: Layout) -> None:
    runs.check_stock(Case(layout, script=SCRIPT))


WHOLE = {"mamba": PLAIN, "latent": LATENT_TOO, "delta": DELTA, "nemotron-3": NEMOTRON_3}
RESUMED = [
    ("mamba", replace(TP2, replicas=2)),
    ("mamba", replace(PP2, replicas=2)),
    ("mamba", replace(CP2, replicas=2)),
    ("delta", Layout("delta-tp2", 2, tensor=2, flags=f"{DELTA} --sequence-parallel")),
    ("delta", Layout("delta-cp2", 2, context=2, flags=DELTA)),
    ("latent", Layout("latent-tp2", 2, tensor=2, flags=f"{LATENT_TOO} --sequence-parallel")),
    ("nemotron-3", replace(N3_PP2, replicas=2)),
]
"""Spread experts do not go on from those of one worker: Megatron refuses, whose optimizers are two then, not one."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), some("hybrid resumed", RESUMED, 2), ids=lambda its: str(its))
def test_split_over_workers_it_goes_on_from_one_workers_checkpoint_as_that_does(
    runs: Runs, name: str, layout: Layout
) -> None:
    """And a death changes nothing."""
    saved, adam = str(runs.out / "saved"), (*ADAM, "--no-load-rng", "--make-vocab-size-divisible-by", "2")
    whole = Case(
        Layout(name, 1, flags=WHOLE[name]), script=SCRIPT, model=(*adam, "--save", saved, "--save-interval", "4")
    )
    alone = runs.stock(whole).recorded
    case = Case(layout, (Strike(1, 1, 6, "backward"),), script=SCRIPT, model=adam)
    resumed = runs(case.with_flags("--load", saved, "--ckpt-step", "4", "--exit-on-missing-checkpoint"))
    assert [step.iteration for step in resumed.steps] == [5, 6, 7, 8], resumed.told()
    assert resumed.replicas == [2, 2, 1, 1] or resumed.replicas == [2, 1, 1, 1], resumed.told()
    check_rows(resumed.steps, alone[4:], near=10, told=resumed.told())
