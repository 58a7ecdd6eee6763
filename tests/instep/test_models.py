"""Other models than a GPT on whole contexts: split contexts, latent attention, T5, BERT, vision; all survive deaths.

Deaths at each phase of the first two alone are cells of ``test_equality.py``, as parts of the largest recipes they are
here; what is logged of them: ``test_layouts.py``.
T5, BERT and the vision-language model are trained by scripts of their own through a patched Megatron.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.drawn import SEED, some
from tests.harness.forkserver import ForkServer
from tests.instep import test_layouts
from tests.instep.altered import altered
from tests.instep.cells import BEFORE_THE_COMMIT, PHASES, SHARDED_PHASES, Cell, case_of, cells
from tests.instep.conftest import Runs
from tests.instep.runs import (
    CLIPPED,
    CONTEXT_LAYOUTS,
    DEEPSEEK,
    INTERLEAVED,
    LATENT,
    MODEL,
    NO_EVALUATION,
    OVERLAP,
    ROPE,
    SHARDED,
    Case,
    Layout,
    Result,
    Strike,
    check,
    check_sharded,
)
from tests.instep.test_layouts import AUXILIARY, EXPERTS, Recipe, cp, ep
from tests.megatron_hooks.tiny import NO_DROPOUT, OURS, losses

pytestmark = pytest.mark.slow

SPLIT = {
    "learned positions": "",
    "rope": ROPE,
    "grouped queries": f"{ROPE} --num-attention-heads 4 --group-query-attention --num-query-groups 2",
    "window": f"{ROPE} --window-size 3,0",
    "sink": f"{ROPE} --softmax-type learnable",
    "recomputation": f"{ROPE} --recompute-granularity selective --recompute-modules core_attn",
    "further tokens": f"{ROPE} --mtp-num-layers 1",
    "latent": LATENT,
    "yarn": f"{LATENT} --rope-type yarn --rotary-scaling-factor 4",
    "no mask from the loader": "--no-create-attention-mask-in-dataloader",
    "deepseek": DEEPSEEK.replace("--mtp-num-layers 1", ""),
    "documents": "--dataloader-inter-document-masking",
}
"""What goes with --context-parallel-size, and must not see it."""
NEAR = {"further tokens": 1e-3}
"""Megatron takes the mean of their losses over the ranks' means, and one of the ranks has a token less."""
SCRIPT = (*altered("instruments.unwarmed"), OURS)


@pytest.mark.parametrize("name", some("split", list(SPLIT), 1))
def test_a_split_context_changes_nothing_but_rounding(forkserver: ForkServer, tmp_path: Path, name: str) -> None:
    found = {}
    for size in (1, 2, 4):
        out = tmp_path / str(size)
        argv = [*MODEL, *Layout(name, 1, context=size, samples=4, flags=SPLIT[name]).argv, *NO_DROPOUT, *NO_EVALUATION]
        run = forkserver.run(
            size, [*SCRIPT, *argv, "--train-iters", "4"], out, losses=out / "losses.jsonl", timeout=240
        )
        assert run.ok, run.tail()
        found[size] = losses(out / "losses.jsonl")
    assert len(found[1]) == 4
    near = NEAR.get(name, 1e-6)
    for size in (2, 4):
        for split, whole in zip(found[size], found[1], strict=True):
            assert split["loss"] == pytest.approx(whole["loss"], rel=near)
            assert split["grad_norm"] == pytest.approx(whole["grad_norm"], rel=10 * near)


LLAMA = (
    f"{ROPE} --normalization RMSNorm --swiglu --ffn-hidden-size 32 --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-attention-heads 4 --group-query-attention --num-query-groups 2"
)
"""Llama 3."""
PACKED = {
    "llama": LLAMA, "sink": f"{LLAMA} --softmax-type learnable", "latent": LATENT,
    "recomputation, two samples": f"{LATENT} --recompute-granularity selective --recompute-modules core_attn "
                                  "--micro-batch-size 2",
}  # fmt: skip


@pytest.mark.parametrize("name", some("packed", list(PACKED), 1))
def test_documents_that_are_packed_see_what_a_mask_of_them_lets_them_see(
    forkserver: ForkServer, tmp_path: Path, indexed_data: str, name: str
) -> None:
    """The masked are computed by Megatron's own attention where it can: not where it is latent."""
    found = []
    ways = ("--dataloader-inter-document-masking", "--reset-attention-mask --reset-position-ids")
    for number, way in enumerate(ways):
        out = tmp_path / str(number)
        argv = [*MODEL, *Layout(name, 1, samples=4, flags=f"{PACKED[name]} {way}").argv, *NO_DROPOUT, *NO_EVALUATION]
        argv = [flag for flag in argv if flag != "--mock-data"]
        argv += ["--data-path", indexed_data, "--data-cache-path", str(out / "cache"), "--train-iters", "4"]
        run = forkserver.run(1, [OURS, *argv], out, losses=out / "losses.jsonl", timeout=240)
        assert run.ok, run.tail()
        found.append([(step["loss"], step["grad_norm"]) for step in losses(out / "losses.jsonl")])
    assert len(found[0]) == 4
    for packed, masked in zip(*found, strict=True):
        assert packed == pytest.approx(masked, rel=1e-6)


# ---- the largest recipes in small
ZERO = f"{' '.join(SHARDED)} {OVERLAP}"
QWEN = (
    f"{LLAMA} --qk-layernorm --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8 --moe-grouped-gemm "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2"
)
"""Qwen3 with experts."""
LLAMA_CP2 = Layout("llama-cp2-dp3", 3, context=2, flags=f"{LLAMA} {OVERLAP.split()[0]} --calculate-per-token-loss")
LLAMA_TP2 = Layout("llama-cp2-tp2-dp2", 2, context=2, tensor=2, flags=f"{LLAMA} --sequence-parallel --bf16 {ZERO}")
LLAMA_PP2 = Layout("llama-cp2-pp2-dp2", 2, context=2, pipeline=2, flags=f"{LLAMA} {ZERO}")
QWEN_EP2 = Layout("qwen3-ep2-dp3", 3, inner_ranks=2, flags=f"{QWEN} {ZERO}")
QWEN_CP2 = Layout("qwen3-cp2-ep2-dp3", 3, context=2, flags=QWEN)
"""Experts are spread over the two context ranks."""
DEEPSEEK_EP2 = Layout("deepseek-pp2-ep2-dp2", 2, pipeline=2, inner_ranks=2,
                      flags=f"{DEEPSEEK} --expert-model-parallel-size 2 {ZERO}")  # fmt: skip
DEEPSEEK_TP2 = Layout("deepseek-tp2-pp2-dp2", 2, tensor=2, pipeline=2, flags=f"{DEEPSEEK} --sequence-parallel")
DEEPSEEK_VPP = Layout("deepseek-vpp2-pp2-dp3", 3, pipeline=2, flags=f"{DEEPSEEK} {INTERLEAVED} "
                      "--moe-layer-freq [0]*1+[1]*3")  # fmt: skip
HIERARCHY = Layout("cp4-dp2", 2, context=4, flags="--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2")
"""Transformer Engine has groups of its own inside of the context's, which are in a replica, too."""
DEEPSEEK_CP2 = Layout("deepseek-cp2-dp3", 3, context=2, flags=DEEPSEEK)
LARGEST = [LLAMA_CP2, LLAMA_TP2, LLAMA_PP2, QWEN_EP2, QWEN_CP2, DEEPSEEK_EP2, DEEPSEEK_TP2, DEEPSEEK_VPP, DEEPSEEK_CP2]


def nearness(layout: Layout) -> float:
    return 300.0 if "--bf16" in layout.flags else 10.0 if "adam" in layout.flags else 1.0


def equal(runs: Runs, case: Case, replicas: int | None = None) -> Result:
    by = check_sharded if "--use-distributed-optimizer" in case.layout.flags else check
    return runs.check(case, nearness(case.layout), by, replicas)


def in_each_phase() -> list[Cell]:
    """For each of them and each phase one kill, and one hang: where and when is drawn.

    Shards of an optimizer have one shadow: two deaths at once are too many ("recovery").
    """
    source, found = random.Random(f"largest {SEED}"), list[Cell]()
    for layout in LARGEST:
        dropout = source.random() < 0.5  # all of a layout are compared with one failure-free run
        zero = "--use-distributed-optimizer" in layout.flags
        phases = [phase for phase in (*PHASES, *SHARDED_PHASES * zero) if not (zero and phase == "recovery")]
        every = cells([layout], phases, [dropout])
        of = {phase: [cell for cell in every if cell.phase == phase] for phase in phases}
        found += [source.choice(its) for its in of.values() if its]  # with two replicas there is no "recovery"
        found.append(replace(source.choice(of[source.choice(BEFORE_THE_COMMIT)]), kind="stop"))
    return found


@pytest.mark.parametrize("cell", some("largest", in_each_phase(), 2), ids=str)
def test_a_fault_at_any_phase_of_the_largest_recipes_changes_nothing_but_rounding(runs: Runs, cell: Cell) -> None:
    most = cell.layout.replicas if cell.phase == "all-gather" else 0
    equal(runs, case_of(cell, SEED, most, iterations=8))


@pytest.mark.parametrize("layout", some("largest of stock", LARGEST, 1), ids=lambda layout: layout.name)
def test_without_a_death_the_largest_recipes_are_stock_megatrons(runs: Runs, layout: Layout) -> None:
    """DEEPSEEK_EP2 has a stage without experts, whose gradients are clipped by the norm of those of the others, too."""
    runs.check_stock(Case(layout, model=CLIPPED), nearness(layout))


CP2_PP2 = replace(CONTEXT_LAYOUTS[2], name="cp2-pp2-dp3", replicas=3)
REGROUPED = [
    Case(CONTEXT_LAYOUTS[0], (Strike(0, 0, 3, "backward"), Strike(1, 1, 3, "forward"))),
    Case(replace(CONTEXT_LAYOUTS[1], name="cp2-tp2-dp3", replicas=3),
         (Strike(0, 1, 3, "backward"), Strike(2, 2, 5, "agree"))),
    Case(CP2_PP2, (Strike(0, 1, 3, "reduce-scatter"), Strike(1, 2, 3, "forward"))),
    Case(CONTEXT_LAYOUTS[3], (Strike(0, 0, 3, "agree"), Strike(1, 1, 4, "backward"))),
    Case(QWEN_CP2, (Strike(0, 1, 3, "forward"), Strike(2, 0, 3, "backward"))),
    Case(DEEPSEEK_VPP, (Strike(0, 0, 3, "backward", visit=2), Strike(1, 1, 4, "agree"))),
    Case(DEEPSEEK_CP2, (Strike(0, 1, 3, "backward"), Strike(1, 0, 4, "reduce-scatter"))),
]  # fmt: skip

LONG = 10
BUILT = [
    Case(CONTEXT_LAYOUTS[0], (Strike(1, 1, 3, "backward"), Strike(2, 1, 3, "forward")), LONG),
    Case(CONTEXT_LAYOUTS[0], (Strike(1, 0, 3, "backward"),), LONG, restarts=1),
    Case(CONTEXT_LAYOUTS[3], (Strike(1, 1, 3, "backward"),), LONG, restarts=1),
    Case(LLAMA_TP2, (Strike(1, 2, 3, "update"),), LONG, restarts=1),
    Case(LLAMA_PP2, (Strike(0, 3, 3, "norm"),), LONG, restarts=1),
    Case(QWEN_EP2, (Strike(2, 1, 3, "reduce-scatter"),), LONG, restarts=1),
    Case(HIERARCHY, (Strike(1, 2, 3, "backward"),), LONG, restarts=1),
    Case(QWEN_EP2, (Strike(1, 0, 3, "backward"), Strike(2, 0, 5, "update")), LONG),
    Case(DEEPSEEK_EP2, (Strike(1, 3, 3, "param-gather"),), LONG, restarts=1),
    Case(DEEPSEEK_TP2, (Strike(0, 1, 3, "agree"),), LONG, restarts=1),
    Case(DEEPSEEK_CP2, (Strike(1, 1, 3, "forward"),), LONG, restarts=1),
]
"""Somebody builds the model of a position: of a context rank, of a stage with the further tokens, of an expert rank."""


@pytest.mark.parametrize("case", some("contexts put together", [*REGROUPED, *BUILT], 1), ids=str)
def test_replicas_that_split_the_context_are_put_together_again(runs: Runs, case: Case) -> None:
    replicas = case.layout.replicas if case.restarts else 2
    case = replace(case, model=CLIPPED)
    equal(runs, case.patient(f"5-:{replicas}" if case.iterations == LONG else f"7-:{replicas}"), replicas)


LOGGED = [
    Recipe("context-masked", cp(3), "--eod-mask-loss", data=True),
    Recipe("context-masked-per-token-mtp", cp(3), f"{ROPE} --mtp-num-layers 1 --eod-mask-loss "
           "--calculate-per-token-loss", data=True),
    Recipe("context-masked-experts-by-sequence", cp(2), f"{EXPERTS} {AUXILIARY.replace('aux', 'seq_aux', 1)} "
           "--moe-per-layer-logging --eod-mask-loss", data=True),
    Recipe("qwen3", ep(3), f"{QWEN} {ZERO} {test_layouts.ADAM}", checkpoint="torch_dist"),
]  # fmt: skip
"""Beside those of ``test_layouts.py``: of the ranks of a context one has fewer tokens that count than the other."""


@pytest.mark.parametrize("recipe", some("logged of contexts", LOGGED, 1), ids=str)
def test_what_is_logged_of_parts_of_a_context_is_that_of_the_run_without_deaths(
    forkserver: ForkServer, tmp_path: Path, indexed_data: str, recipe: Recipe
) -> None:
    test_layouts.test_deaths_change_no_number_that_is_logged_and_no_tensor_that_is_saved(
        forkserver, tmp_path, indexed_data, recipe
    )


# ---- scripts of their own
T5 = "--decoder-seq-length 12"
T5_TP2 = Layout("t5-tp2-dp3", 3, tensor=2, flags=T5)
T5_CASES = [
    Case(Layout("t5-dp4", 4, flags=T5), (Strike(1, 0, 3, "backward", visit=2), Strike(2, 0, 5, "all-gather"))),
    Case(Layout("t5-dp3-overlap", 3, flags=f"{T5} --overlap-grad-reduce --ddp-bucket-size 2000"),
         (Strike(0, 0, 2, "reduce-scatter"), Strike(2, 0, 6, "optimizer"))),
    Case(Layout("t5-dp3-per-token", 3, flags=f"{T5} --calculate-per-token-loss"),
         (Strike(0, 0, 4, "agree"), Strike(1, 0, 6, "eval")), dropout=True),
    Case(Layout("t5-sharded-dp3", 3, flags=f"{T5} --use-distributed-optimizer --optimizer adam --lr 0.01 "
                "--min-lr 0.003 --adam-eps 1e-4"),
         (Strike(1, 0, 3, "update"), Strike(0, 0, 5, "backward"))),
    Case(T5_TP2, (Strike(1, 1, 3, "forward", visit=2), Strike(2, 0, 5, "reduce-scatter"))),
    Case(T5_TP2, (Strike(1, 1, 3, "optimizer"), Strike(2, 0, 3, "backward")), 30, restarts=1),
]  # fmt: skip


BERT_TP2 = Layout("bert-tp2-dp3", 3, tensor=2)
BERT_CASES = [
    Case(Layout("bert-dp4", 4), (Strike(1, 0, 3, "backward"), Strike(2, 0, 5, "all-gather"))),
    Case(Layout("bert-dp3-overlap", 3, samples=15, flags="--overlap-grad-reduce --ddp-bucket-size 2000"),
         (Strike(0, 0, 2, "reduce-scatter"), Strike(1, 0, 6, "eval")), dropout=True),
    Case(Layout("bert-pp2-dp3", 3, pipeline=2), (Strike(1, 1, 3, "forward", visit=2), Strike(2, 0, 5, "eval"))),
    Case(BERT_TP2, (Strike(1, 1, 3, "optimizer"), Strike(2, 0, 3, "backward")), 30, restarts=1),
]  # fmt: skip
"""A worker's losses are its own microbatches', not the ranks' mean; in an evaluation of which it has another share than
the others, too."""


VLM_SHARDED = "--use-distributed-optimizer --optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4"
VLM_OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 2000"
VLM_TP2 = Layout("vlm-tp2-dp3", 3, tensor=2)
FROZEN = Layout("vlm-tp2-dp2-frozen-lm-text-too", 2, tensor=2, flags="--freeze-LM --text-only 3")
VLM_CASES = [
    Case(Layout("vlm-dp4-frozen-vit", 4, flags="--freeze-ViT"),
         (Strike(1, 0, 3, "backward", visit=2), Strike(2, 0, 5, "all-gather"))),
    Case(Layout("vlm-dp3-frozen-vit-overlap", 3, flags=f"--freeze-ViT {VLM_OVERLAP}"),
         (Strike(0, 0, 2, "reduce-scatter"), Strike(2, 0, 6, "optimizer"))),
    Case(Layout("vlm-dp3-text-too", 3, flags="--text-only 3 --calculate-per-token-loss"),
         (Strike(0, 0, 4, "agree"), Strike(1, 0, 6, "eval")), dropout=True),
    Case(Layout("vlm-dp3-frozen-lm-text-too", 3, flags="--freeze-LM --text-only 3"),
         (Strike(0, 0, 4, "checkpoint"), Strike(1, 0, 6, "forward", visit=2))),
    Case(Layout("vlm-sharded-dp3-frozen-vit", 3, flags=f"--freeze-ViT {VLM_SHARDED}"),
         (Strike(1, 0, 3, "update"), Strike(0, 0, 5, "backward"))),
    Case(Layout("vlm-pp2-dp3-frozen-vit", 3, pipeline=2, flags="--freeze-ViT"),
         (Strike(1, 1, 3, "forward", visit=2), Strike(2, 0, 5, "reduce-scatter"))),
    Case(Layout("vlm-pp2-dp2-frozen-lm-text-too", 2, pipeline=2, flags="--freeze-LM --text-only 3"),
         (Strike(1, 1, 3, "backward", visit=2),)),
    Case(VLM_TP2, (Strike(1, 1, 3, "forward", visit=2), Strike(2, 0, 5, "reduce-scatter"))),
    Case(VLM_TP2, (Strike(1, 1, 3, "optimizer"), Strike(2, 0, 3, "backward")), 30, restarts=1),
]  # fmt: skip


def by_its_script(case: Case) -> Case:
    """By t5.py, bert.py or vlm.py, as the name of its layout begins."""
    name = case.layout.name.partition("-")[0]
    return replace(case, script=(str(Path(__file__).with_name(f"{name}.py")),))


@pytest.mark.parametrize(
    "case", [*some("t5", T5_CASES, 2), *some("bert", BERT_CASES, 2), *some("vlm", VLM_CASES, 2)], ids=str
)
def test_models_of_scripts_of_their_own_train_as_without_deaths(runs: Runs, case: Case) -> None:
    runs.check(by_its_script(case))


@pytest.mark.parametrize("layout", [T5_TP2, BERT_TP2, FROZEN], ids=lambda layout: layout.name)
def test_without_a_death_it_is_stock_megatrons(runs: Runs, layout: Layout) -> None:
    """In FROZEN with microbatches among them of which Megatron runs no backward pass."""
    runs.check_stock(by_its_script(Case(layout)))
