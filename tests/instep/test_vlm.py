"""A vision-language model, trained by a script of its own through a patched Megatron, survives deaths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.drawn import some
from tests.instep.conftest import Runs
from tests.instep.runs import Case, Layout, Strike

pytestmark = pytest.mark.slow

SCRIPT = (str(Path(__file__).with_name("vlm.py")),)
SHARDED = "--use-distributed-optimizer --optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4"
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 2000"
TP2 = Layout("vlm-tp2-dp3", 3, tensor=2)
FROZEN = Layout("vlm-tp2-dp2-frozen-lm-text-too", 2, tensor=2, flags="--freeze-LM --text-only 3")
CASES = [
    Case(Layout("vlm-dp4-frozen-vit", 4, flags="--freeze-ViT"),
         (Strike(1, 0, 3, "backward", visit=2), Strike(2, 0, 5, "all-gather"))),
    Case(Layout("vlm-dp3-frozen-vit-overlap", 3, flags=f"--freeze-ViT {OVERLAP}"),
         (Strike(0, 0, 2, "reduce-scatter"), Strike(2, 0, 6, "optimizer"))),
    Case(Layout("vlm-dp3-text-too", 3, flags="--text-only 3 --calculate-per-token-loss"),
         (Strike(0, 0, 4, "agree"), Strike(1, 0, 6, "eval")), dropout=True),
    Case(Layout("vlm-dp3-frozen-lm-text-too", 3, flags="--freeze-LM --text-only 3"),
         (Strike(0, 0, 4, "checkpoint"), Strike(1, 0, 6, "forward", visit=2))),
    Case(Layout("vlm-sharded-dp3-frozen-vit", 3, flags=f"--freeze-ViT {SHARDED}"),
         (Strike(1, 0, 3, "update"), Strike(0, 0, 5, "backward"))),
    Case(Layout("vlm-pp2-dp3-frozen-vit", 3, pipeline=2, flags="--freeze-ViT"),
         (Strike(1, 1, 3, "forward", visit=2), Strike(2, 0, 5, "reduce-scatter"))),
    Case(Layout("vlm-pp2-dp2-frozen-lm-text-too", 2, pipeline=2, flags="--freeze-LM --text-only 3"),
         (Strike(1, 1, 3, "backward", visit=2),)),
    Case(TP2, (Strike(1, 1, 3, "forward", visit=2), Strike(2, 0, 5, "reduce-scatter"))),
    Case(TP2, (Strike(1, 1, 3, "optimizer"), Strike(2, 0, 3, "backward")), 30, restarts=1),
]  # fmt: skip


@pytest.mark.parametrize("case", some("vlm", CASES, 2), ids=str)
def test_images_and_text_train_as_without_deaths(runs: Runs, case: Case) -> None:
    runs.check(replace(case, script=SCRIPT))


def test_without_a_death_it_is_stock_megatrons(runs: Runs) -> None:
    """With microbatches among them of which Megatron runs no backward pass."""
    runs.check_stock(Case(FROZEN, script=SCRIPT))
