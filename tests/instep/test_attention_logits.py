"""The largest attention logits by which weights are clipped, or which are logged, are those of the whole batch."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.drawn import some
from tests.harness.forkserver import ForkServer
from tests.instep.conftest import Runs
from tests.instep.logged import differences
from tests.instep.runs import LATENT, LAYOUTS, NO_EVALUATION, PARAMETERS, Case, Layout, Result, Strike, check, distance
from tests.instep.test_log import tell

pytestmark = pytest.mark.slow

CLIP = "--bf16 --qk-clip --qk-clip-threshold 0.01"
"""A threshold that some heads exceed in every step of a short run, by some tens of percent."""
GROUPED = "--group-query-attention --num-query-groups 1"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
NEAR = 300.0
"""bf16: gradients of a microbatch are rounded to 16 bits."""
MUON = tuple("--optimizer muon --lr 0.02 --min-lr 0.01 --muon-num-ns-steps 1 --muon-fp32-matmul-prec high".split())
MAXIMA = 2e-3
"""How far the maxima may be, relative: by 16 bits.  Of another microbatch they are some percent."""
LATER = 1e-2
"""The same after ten iterations: weights that were clipped by others round to others."""
CASES = [
    Case(Layout("clip-dp3", 3, flags=CLIP), (Strike(1, 0, 3, "backward"), Strike(2, 0, 5, "all-gather"))),
    Case(Layout("clip-dp4", 4, flags=f"{CLIP} {GROUPED} {RECOMPUTED}"),
         (Strike(0, 0, 1, "optimizer"), Strike(3, 0, 4, "reduce-scatter"), Strike(1, 0, 4, "recovery", visit=2))),
    Case(Layout("clip-tp2-dp3", 3, tensor=2, flags=f"{CLIP} {LATENT}"),
         (Strike(1, 1, 3, "forward", visit=2), Strike(2, 0, 3, "backward")), 30, restarts=1),
    Case(Layout("clip-pp2-dp2", 2, pipeline=2, flags=CLIP), (Strike(1, 1, 3, "agree"),)),
    Case(Layout("clip-vpp-dp2", 2, pipeline=2,
                flags=f"{CLIP} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
         (Strike(0, 1, 3, "backward", visit=3),)),
    Case(Layout("clip-cp2-dp2", 2, context=2, flags=CLIP), (Strike(0, 1, 3, "reduce-scatter"),)),
    Case(Layout("clip-muon-dp3", 3, flags=f"{CLIP} {LATENT}"),
         (Strike(2, 0, 2, "all-gather"), Strike(0, 0, 4, "optimizer")),
         model=MUON, flags=("--use-distributed-optimizer",), evaluated=True),
]  # fmt: skip


@pytest.mark.parametrize("case", some("attention logits", CASES, 2), ids=str)
def test_weights_are_clipped_by_the_largest_logits_of_the_whole_batch(runs: Runs, case: Case) -> None:
    case = case.throughout("instruments.maxima")
    ours, theirs = maxima(runs.check(case, NEAR)), maxima(runs.reference(case))
    assert {iteration for iteration, *_ in theirs} == set(range(1, case.iterations + 1))
    assert ours.keys() == theirs.keys()
    near = {at: MAXIMA if at[0] <= 10 else LATER for at in ours}
    assert {at: (ours[at], theirs[at]) for at in ours if ours[at] != pytest.approx(theirs[at], rel=near[at])} == {}


@pytest.mark.parametrize("case", some("stock clipping", CASES, 1), ids=lambda case: case.layout.name)
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
        assert apart < NEAR * PARAMETERS
        assert distance(its, other) > max(1e-3, 10 * apart), "clipping is seen in the weights"


def test_the_largest_logit_of_all_is_logged(forkserver: ForkServer, tmp_path: Path) -> None:
    flags = ("--bf16", "--log-max-attention-logit", *NO_EVALUATION)
    case = Case(LAYOUTS[0], (Strike(1, 0, 3, "backward"), Strike(2, 0, 5, "reduce-scatter")), model=flags)
    undisturbed, expected = tell(forkserver, replace(case, strikes=()), tmp_path / "undisturbed")
    assert undisturbed.ended.ok, undisturbed.told()
    result, log = tell(forkserver, case, tmp_path / "broken")
    check(result, undisturbed, NEAR)
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
