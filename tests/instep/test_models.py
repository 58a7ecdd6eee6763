"""Other models than a GPT on whole contexts: split contexts, latent attention, T5, BERT, vision; all survive deaths.

Deaths at each phase of the first two are cells of ``test_equality.py``; what is logged of them: ``test_layouts.py``.
T5, BERT and the vision-language model are trained by scripts of their own through a patched Megatron.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.drawn import some
from tests.harness.forkserver import ForkServer
from tests.instep.altered import altered
from tests.instep.conftest import Runs
from tests.instep.runs import (
    CLIPPED,
    CONTEXT_LAYOUTS,
    DEEPSEEK,
    LATENT,
    MODEL,
    NO_EVALUATION,
    ROPE,
    Case,
    Layout,
    Strike,
)
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


CP2_PP2 = replace(CONTEXT_LAYOUTS[2], name="cp2-pp2-dp3", replicas=3)
REGROUPED = [
    Case(CONTEXT_LAYOUTS[0], (Strike(0, 0, 3, "backward"), Strike(1, 1, 3, "forward"))),
    Case(replace(CONTEXT_LAYOUTS[1], name="cp2-tp2-dp3", replicas=3),
         (Strike(0, 1, 3, "backward"), Strike(2, 2, 5, "agree"))),
    Case(CP2_PP2, (Strike(0, 1, 3, "reduce-scatter"), Strike(1, 2, 3, "forward"))),
    Case(CONTEXT_LAYOUTS[3], (Strike(0, 0, 3, "agree"), Strike(1, 1, 4, "backward"))),
]  # fmt: skip

LONG = 10
BUILT = [
    Case(CONTEXT_LAYOUTS[0], (Strike(1, 1, 3, "backward"), Strike(2, 1, 3, "forward")), LONG),
    Case(CONTEXT_LAYOUTS[0], (Strike(1, 0, 3, "backward"),), LONG, restarts=1),
    Case(CONTEXT_LAYOUTS[3], (Strike(1, 1, 3, "backward"),), LONG, restarts=1),
]
"""Somebody builds the model of a position: of a context rank, of a stage with the further tokens."""


@pytest.mark.parametrize("case", some("contexts put together", [*REGROUPED, *BUILT], 1), ids=str)
def test_replicas_that_split_the_context_are_put_together_again(runs: Runs, case: Case) -> None:
    replicas = 3 if case.restarts else 2
    case = replace(case, model=CLIPPED)
    runs.check(case.patient(f"5-:{replicas}" if case.iterations == LONG else f"7-:{replicas}"), replicas=replicas)


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
