"""Biases of routers, moved once a step by what the whole batch has counted, are those of the run without deaths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.drawn import some
from tests.instep.conftest import Runs
from tests.instep.runs import Case, Layout, Result, Strike

pytestmark = pytest.mark.slow

EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
BIAS = (
    f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02"
)
QUANTILES = f"{EXPERTS} --moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0"
SPREAD = "--expert-model-parallel-size 2"
ADAM = "--optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4 --use-distributed-optimizer"
CASES = [
    (Case(Layout("bias-dp3", 3, flags=BIAS), (Strike(1, 0, 3, "optimizer"), Strike(2, 0, 5, "backward"))), 1.0),
    (Case(Layout("bias-bf16-dp3", 3, flags=f"{BIAS} --bf16"), (Strike(1, 0, 3, "reduce-scatter"),)), 300.0),
    (Case(Layout("bias-sharded-dp3", 3, flags=f"{BIAS} {ADAM}"), (Strike(0, 0, 4, "agree"),)), 1.0),
    (Case(Layout("bias-pp2-dp2", 2, pipeline=2, flags=BIAS), (Strike(1, 1, 3, "forward", visit=2),)), 1.0),
    (Case(Layout("bias-tp2-dp2", 2, tensor=2, flags=f"{BIAS} --sequence-parallel"),
          (Strike(0, 1, 4, "all-gather"),)), 1.0),
    (Case(Layout("bias-ep2-dp3", 3, inner_ranks=2, flags=f"{BIAS} {SPREAD}"),
          (Strike(2, 1, 3, "optimizer"), Strike(1, 0, 5, "agree")), 30, restarts=1), 1.0),
    (Case(Layout("quantiles-dp3", 3, flags=QUANTILES), (Strike(1, 0, 3, "optimizer"), Strike(2, 0, 5, "data"))), 1.0),
]  # fmt: skip


ITERATIONS = 7
"""Odd: a bias that goes up and down is not where it began."""


@pytest.mark.parametrize(("case", "near"), some("routers", CASES, 2), ids=str)
def test_biases_of_routers_are_those_of_the_run_without_deaths(runs: Runs, case: Case, near: float) -> None:
    case = replace(case, iterations=max(ITERATIONS, case.iterations * bool(case.restarts)))
    check_biases(runs.check(case, near), runs.reference(case))


@pytest.mark.parametrize("layout", some("stock routers", [case.layout for case, _ in CASES], 1), ids=str)
def test_biases_of_routers_are_stock_megatrons(runs: Runs, layout: Layout) -> None:
    case = Case(layout, iterations=ITERATIONS)
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
