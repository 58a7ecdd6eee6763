"""A model of an encoder and a decoder, trained by a script of its own through a patched Megatron, survives deaths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.drawn import some
from tests.instep.conftest import Runs
from tests.instep.runs import Case, Layout, Strike

pytestmark = pytest.mark.slow

SCRIPT = (str(Path(__file__).with_name("t5.py")),)
T5 = "--decoder-seq-length 12"
TP2 = Layout("t5-tp2-dp3", 3, tensor=2, flags=T5)
CASES = [
    Case(Layout("t5-dp4", 4, flags=T5), (Strike(1, 0, 3, "backward", visit=2), Strike(2, 0, 5, "all-gather"))),
    Case(Layout("t5-dp3-overlap", 3, flags=f"{T5} --overlap-grad-reduce --ddp-bucket-size 2000"),
         (Strike(0, 0, 2, "reduce-scatter"), Strike(2, 0, 6, "optimizer"))),
    Case(Layout("t5-dp3-per-token", 3, flags=f"{T5} --calculate-per-token-loss"),
         (Strike(0, 0, 4, "agree"), Strike(1, 0, 6, "eval")), dropout=True),
    Case(Layout("t5-sharded-dp3", 3, flags=f"{T5} --use-distributed-optimizer --optimizer adam --lr 0.01 "
                "--min-lr 0.003 --adam-eps 1e-4"),
         (Strike(1, 0, 3, "update"), Strike(0, 0, 5, "backward"))),
    Case(TP2, (Strike(1, 1, 3, "forward", visit=2), Strike(2, 0, 5, "reduce-scatter"))),
    Case(TP2, (Strike(1, 1, 3, "optimizer"), Strike(2, 0, 3, "backward")), 30, restarts=1),
]  # fmt: skip


@pytest.mark.parametrize("case", some("t5", CASES, 2), ids=str)
def test_an_encoder_and_a_decoder_train_as_without_deaths(runs: Runs, case: Case) -> None:
    runs.check(replace(case, script=SCRIPT))


def test_without_a_death_it_is_stock_megatrons(runs: Runs) -> None:
    runs.check_stock(Case(TP2, script=SCRIPT))
