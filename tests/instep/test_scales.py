"""Delayed FP8 scaling: scales are those of the run without deaths, on all workers, whoever died or came.

Transformer Engine is a double (``instruments.delayed_scaling``); all else is real.  Numbers are in float64, in which
the difference that is left by the order of additions moves no value to another one of 8 bits.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tests.drawn import some
from tests.instep import hsdp
from tests.instep.conftest import Runs
from tests.instep.runs import ADAM, CLIPPED, Case, Layout, Result, Strike

pytestmark = pytest.mark.slow

LENGTH = 3
DELAYED = f"--fp8-amax-history-len {LENGTH} --fp8-amax-compute-algo max"
RECENT = "--fp8-amax-compute-algo most_recent"
SHARDED = (*ADAM, "--use-distributed-optimizer")
DP3 = Layout("delayed-dp3", 3, flags=DELAYED)
EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --disable-bias-linear"
TP2 = Layout("delayed-tp2-dp3", 3, tensor=2, flags=DELAYED)
LONG = 10
EIGHT_BITS = 1000.0
"""Where a value that is rounded to 8 bits may fall to the other side."""
CASES = [
    Case(DP3, (Strike(1, 0, 3, "backward", visit=2), Strike(2, 0, 5, "agree"))),
    Case(Layout("delayed-dp4", 4, flags=f"{DELAYED} --overlap-grad-reduce --ddp-bucket-size 2000"),
         (Strike(0, 0, 1, "reduce-scatter"), Strike(3, 0, 4, "forward", visit=2), Strike(1, 0, 6, "optimizer"))),
    Case(Layout("recent-dp3", 3, flags=RECENT), (Strike(1, 0, 3, "eval"), Strike(2, 0, 5, "optimizer", visit=2))),
    Case(Layout("delayed-pp2-dp2", 2, pipeline=2, flags=DELAYED), (Strike(1, 1, 3, "backward", visit=2),)),
    Case(Layout("delayed-vpp-dp2", 2, pipeline=2,
                flags=f"{DELAYED} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
         (Strike(0, 1, 3, "backward", visit=3),)),
    Case(Layout("delayed-cp2-dp2", 2, context=2, flags=DELAYED), (Strike(0, 1, 3, "all-gather"),)),
    Case(TP2, (Strike(1, 1, 3, "forward", visit=2), Strike(2, 0, 5, "optimizer"))),
    Case(Layout("delayed-ep2-dp3", 3, inner_ranks=2, flags=f"{DELAYED} {EXPERTS}"),
         (Strike(2, 1, 3, "reduce-scatter", visit=2), Strike(1, 0, 5, "backward"))),
]  # fmt: skip


def delayed(case: Case) -> Case:
    return case.throughout("instruments.delayed_scaling").throughout("instruments.double")


@pytest.mark.parametrize("case", some("scales", CASES, 2), ids=str)
def test_scales_are_those_of_the_run_without_deaths(runs: Runs, case: Case) -> None:
    case = delayed(case)
    check_scales(runs.check(case), runs.reference(case))


@pytest.mark.parametrize("newcomers", [0, 1])
def test_who_takes_a_place_has_the_scales_of_those_who_were_there(runs: Runs, newcomers: int) -> None:
    """Two broken replicas make a whole one; somebody who has seen no microbatch comes."""
    strikes = (Strike(1, 1, 3, "backward"), Strike(2, 0, 3, "optimizer", visit=1))
    case = delayed(Case(TP2, strikes[: 2 - newcomers], LONG, restarts=newcomers, model=CLIPPED))
    result = runs.check(case.patient(f"6-:{2 + newcomers}"), replicas=2 + newcomers)
    check_scales(result, runs.reference(case))


IN_32_BITS = [
    Case(DP3, (Strike(1, 0, 3, "update"), Strike(0, 0, 5, "agree")), model=SHARDED),
    Case(replace(hsdp.TWO, name="delayed-hsdp", flags=f"{hsdp.TWO.flags} {DELAYED}"), (Strike(1, 1, 3, "backward"),)),
    Case(replace(TP2, name="delayed-bf16-tp2-dp3", flags=f"{DELAYED} --bf16 --overlap-grad-reduce --log-interval 7"),
         (Strike(1, 1, 3, "backward"),), LONG, restarts=1, model=(*SHARDED, *CLIPPED)),
]  # fmt: skip


@pytest.mark.parametrize("case", some("scales in 32 bits", IN_32_BITS, 1), ids=str)
def test_scales_are_near_where_the_optimizer_has_32_bits(runs: Runs, case: Case) -> None:
    """So some values are rounded to other ones of 8 bits."""
    case = case.throughout("instruments.delayed_scaling")
    case = case.patient("6-:3") if case.restarts else case
    check_scales(runs.check(case, EIGHT_BITS), runs.reference(case), near=0.02)


def test_with_one_microbatch_of_each_replica_the_scales_are_stocks(runs: Runs) -> None:
    """Then Transformer Engine alone changes scales once a step, too."""
    case = delayed(Case(replace(TP2, samples=3)))
    runs.check_stock(case)
    check_scales(Result(case, runs.reference(case).ended, runs.out / "stock"), runs.reference(case))


def test_a_run_from_a_checkpoint_goes_on_with_its_scales(runs: Runs) -> None:
    saving = ("--save", str(runs.out / "saved"), "--save-interval", "4")
    schedule = (*CLIPPED, "--lr-decay-iters", "40", "--ckpt-format", "torch", "--use-checkpoint-opt_param-scheduler")
    first = runs(delayed(Case(TP2, (), 4, model=schedule)).with_flags(*saving), "1")
    assert first.ended.ok, first.told()
    whole = delayed(Case(TP2, (Strike(1, 1, 6, "backward"),), model=schedule))
    resumed = runs(replace(whole, model=(*schedule, "--load", str(runs.out / "saved"))), "2")
    ours, theirs = scales(resumed), scales(runs.reference(whole))
    assert {iteration for iteration, _ in ours} == {5, 6, 7, 8}, resumed.told()
    assert {at: ours[at] for at in ours if ours[at] != pytest.approx(theirs[at], rel=1e-6)} == {}


def test_a_run_that_goes_back_takes_up_the_scales_of_its_checkpoint(runs: Runs) -> None:
    both = (Strike(0, 1, 6, "backward"), Strike(1, 1, 6, "forward"))
    case = delayed(Case(replace(TP2, name="delayed-tp2-dp2", replicas=2), both, LONG, flags=("--ckpt-format", "torch")))
    case = replace(case, model=CLIPPED).with_flags("--save", str(runs.out / "checkpoints"), "--save-interval", "2")
    result = runs.check(case)
    assert "rolled back to iteration 4" in result.said, result.told()
    check_scales(result, runs.reference(case))


def check_scales(result: Result, expected: Result, near: float = 1e-6) -> None:
    """Assert that all workers had the scales and histories of the same stage in ``expected``, after each iteration."""
    ours, theirs = scales(result), scales(expected)
    assert {iteration for iteration, _ in theirs} == set(range(1, result.case.iterations + 1))
    assert ours.keys() == theirs.keys()
    for at, its in theirs.items():
        assert ours[at] == pytest.approx(its, rel=near), at
    ones = [value for value in theirs[1, 0] if value == 1]
    assert len(ones) < len(theirs[1, 0]) / 2, "they have changed"


Stage = tuple[int, int]
"""Iteration, pipeline rank."""


def scales(result: Result) -> dict[Stage, list[float]]:
    """What the workers have printed, scales and histories; of those of a stage, all must have printed the same."""
    found: dict[Stage, list[float]] = {}
    for log in result.out.glob("worker-*.log"):
        for line in re.findall(r"^scales: (.*)$", log.read_text(errors="replace"), re.MULTILINE):
            iteration, (_, stage), states = json.loads(line)
            flat = [value for scale, rows in states for value in [*scale, *(each for row in rows for each in row)]]
            assert found.setdefault((iteration, stage), flat) == flat, (str(log), iteration)
    return found
