"""A run that grows beyond the replicas of its launch, and shrinks again: what is trained stays the same.

What is compared is what test_equality.py compares; see ``runs``.  Newcomers have the ids that follow the launch's; who
dies is in the case's flags (``grown``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recover_megatron.run_log.steps import audit_problem, read_steps
from recover_megatron.status.__main__ import DrainExit
from tests.drawn import some
from tests.harness.forkserver import ForkServer
from tests.instep.conftest import Reference, Runs
from tests.instep.layouts import ADAM, INTERLEAVED, ROPE, SPREAD
from tests.instep.runs import NO_EVALUATION, SLOW_TO_SEE_A_HANG, Case, Layout, Result, check, check_evaluations
from tests.instep.test_drain import said
from tests.instep.units import check_sharded
from tests.megatron_hooks.tiny import MOCK, NO_DROPOUT, OURS, SCHEDULE, losses
from tests.megatron_hooks.tiny import MODEL as TINY

pytestmark = pytest.mark.slow

DP2 = Layout("dp2", 2)
TP2 = Layout("tp2-dp2", 2, tensor=2)
PP2 = Layout("pp2-dp2", 2, pipeline=2)
MODEL = (*NO_EVALUATION, "--clip-grad", "0.2")
SHARDED = (*MODEL, *ADAM.split(), "--use-distributed-optimizer")
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"


def grown(
    layout: Layout,
    newcomers: int,
    when: str,
    deaths: str = "",
    most: int = 6,
    iterations: int = 22,
    model: tuple[str, ...] = MODEL,
) -> Case:
    """A run of at most ``most`` replicas, to which ``newcomers`` workers come.

    ``when``: which iterations wait for how many replicas (``patient``).  ``deaths``: what is injected.  A worker that
    may die in several iterations (``at``) has done so before the last of them is made: a newcomer comes when it can.
    """
    flags = ("--recover-max-replicas", str(most))
    struck: dict[int, list[int]] = {}
    for fault in filter(None, deaths.split(",")):
        worker, iteration = fault.split(":")[0].split("@")
        struck.setdefault(int(worker), []).append(int(iteration))
    flags += ("--recover-inject", deaths) if deaths else ()
    case = Case(layout, (), iterations, flags=flags, spares=newcomers, model=model, doomed=tuple(struck))
    if late := [worker for worker, its in struck.items() if len(its) > 1]:
        case = case.until_struck(max(struck[late[0]]), *late)
    return case.patient(when)


def equal(runs: Runs, case: Case) -> Result:
    return runs.check(case, by=check_sharded if "--use-distributed-optimizer" in case.model else check)


@pytest.mark.parametrize("layout", some("joining", [DP2, TP2, PP2], 1), ids=lambda layout: layout.name)
def test_workers_that_join_a_whole_run_make_a_replica_more(runs: Runs, layout: Layout) -> None:
    case = grown(layout, layout.positions, "3-:3")
    result = equal(runs, case)
    assert result.replicas[0] == 2, result.replicas
    assert result.replicas[-1] == 3, result.replicas


def at(worker: int, phase: str, first: int = 2, last: int = 19) -> str:
    """Kill a worker in this phase of the first of these iterations that has it."""
    return ",".join(f"{worker}@{iteration}:{phase}:kill" for iteration in range(first, last + 1))


TO_SIX_AND_BACK = "0@17:backward:kill,3@17:reduce-scatter:kill,5@18:forward:kill"
CASES = {
    "back to three": (grown(DP2, 4, "3-16:6", TO_SIX_AND_BACK), 6, 3),
    "back to three in pairs": (grown(TP2, 4, "3-16:4", "1@17:backward:kill,5@18:agree:kill"), 4, 3),
    "a newcomer without its state dies": (grown(DP2, 4, "3-:5", at(3, "regroup#1")), 5, 5),
    "a newcomer with its state dies": (grown(DP2, 4, "3-:5", at(3, "regroup#2")), 5, 5),
    "a newcomer dies in its first step": (grown(DP2, 4, "3-:5", at(3, "backward")), 0, 5),
    "a newcomer's mate dies": (grown(TP2, 4, "3-:3", at(4, "regroup#1")), 3, 3),
    "a giver dies": (grown(DP2, 4, "3-:5", at(1, "transfer")), 5, 5),
    "a giver and a newcomer die": (grown(DP2, 4, "3-:4", f"{at(0, 'transfer')},{at(4, 'regroup#2')}"), 4, 4),
    "a giver dies at the boundary": (grown(DP2, 4, "3-:5", at(0, "recovery")), 0, 5),
    "a stage that gives dies": (grown(PP2, 4, "3-:3", at(2, "transfer")), 3, 3),
    "a newcomer is replaced": (replace(grown(DP2, 2, "3-16:4,22-:4", "2@17:backward:kill", 4, 28), restarts=1), 4, 4),
    "all of the launch die": (grown(DP2, 4, "3-16:6", "0@17:backward:kill,1@17:agree:kill"), 6, 4),
    "all of the launch and a newcomer die one after the other": (
        grown(DP2, 4, "3-16:6", "1@17:optimizer:kill,0@18:all-gather:kill,2@19:agree:kill"),
        6,
        3,
    ),
}
"""Name -> the run, the most replicas that it must have had (0: that is a matter of time), those at its end."""


def grows(runs: Runs, case: Case, most: int, last: int) -> None:
    result = equal(runs, case)
    assert not most or max(result.replicas) == most, result.replicas
    assert result.replicas[-1] == last, result.replicas


@pytest.mark.parametrize("name", some("growing", list(CASES), 2))
def test_a_run_grows_and_shrinks_whoever_dies_and_trains_the_same(runs: Runs, name: str) -> None:
    grows(runs, *CASES[name])


def sharded(layout: Layout, newcomers: int, when: str, deaths: str = "", iterations: int = 22) -> Case:
    return grown(layout, newcomers, when, deaths, iterations=iterations, model=SHARDED)


ONE_AFTER_THE_OTHER = "0@17:backward:kill,3@18:update:kill,5@19:param-gather:kill"
SHARDED_CASES = {
    "back to three": (sharded(DP2, 4, "3-16:6", ONE_AFTER_THE_OTHER), 6, 3),
    "back to three in pairs": (sharded(TP2, 4, "3-16:4", "1@17:update:kill"), 4, 3),
    "stages": (sharded(PP2, 2, "3-:3"), 3, 3),
    "overlapped": (sharded(replace(DP2, name="dp2-overlap", flags=OVERLAP), 4, "3-16:6", ONE_AFTER_THE_OTHER), 6, 3),
    "a newcomer without its state dies": (sharded(DP2, 4, "3-:5", at(3, "regroup#1")), 0, 5),
    "a newcomer with its state dies": (sharded(DP2, 4, "3-:5", at(3, "regroup#2")), 5, 5),
    "a newcomer dies while shards change hands": (sharded(DP2, 4, "3-:5", at(4, "repartition")), 0, 5),
    "a newcomer dies when shards have changed hands": (sharded(DP2, 4, "3-:5", at(4, "repartition#2")), 0, 5),
    "a giver dies": (sharded(DP2, 4, "3-:5", at(1, "transfer")), 5, 5),
    "a giver dies while shards change hands": (sharded(DP2, 4, "3-:5", at(1, "repartition")), 0, 5),
    "all of the launch die": (sharded(DP2, 4, "3-16:6", "0@17:update:kill,1@18:norm:kill"), 6, 4),
}


@pytest.mark.parametrize("name", some("growing sharded", list(SHARDED_CASES), 2))
def test_the_distributed_optimizer_is_spread_over_all_that_have_come_and_over_those_that_are_left(
    runs: Runs, name: str
) -> None:
    grows(runs, *SHARDED_CASES[name])


def with_flags(name: str, flags: str, *, sharded: bool = False, **fields: Any) -> Case:
    """Two replicas that become four and are three at the end."""
    layout = Layout(f"grown-{name}", 2, flags=flags, **fields)
    model = SHARDED if sharded else MODEL
    first = 2 * layout.positions
    deaths = f"0@17:backward:kill,{first}@18:reduce-scatter:kill"
    return grown(layout, first, "3-16:4", deaths, model=model)


FEATURES = {
    "experts": with_flags("ep2", SPREAD, inner_ranks=2),
    "experts, sharded": with_flags("ep2-sharded", SPREAD, sharded=True, inner_ranks=2),
    "context": with_flags("cp2", f"{ROPE} --normalization RMSNorm", context=2),
    "interleaved": with_flags("interleaved", INTERLEAVED, pipeline=2, samples=24),
    "averaged": with_flags("averaged", "--ddp-average-in-collective"),
    "per token": with_flags("per-token", "--calculate-per-token-loss"),
    "growing batch": with_flags("rampup", "--rampup-batch-size 2 2 24"),
    "overlap": with_flags("overlap", "--overlap-grad-reduce --ddp-bucket-size 2000"),
    "dropout": replace(with_flags("dropout", ""), dropout=True),
    "balanced": replace(case := with_flags("balanced", ""), flags=(*case.flags, "--recover-balance")),
    "evaluated": replace(case := with_flags("evaluated", ""), model=MODEL[4:], evaluated=True),
    "evaluated by some": replace(
        case := with_flags("evaluated-by-some", "--eval-global-batch-size 2"), model=MODEL[4:], evaluated=True
    ),
    "evaluated by some pipelines": replace(
        case := with_flags(
            "evaluated-by-some-vpp", f"{INTERLEAVED} --eval-global-batch-size 4", pipeline=2, samples=24
        ),
        model=MODEL[4:],
        evaluated=True,
    ),
    "verified": replace(case := with_flags("verified", ""), flags=(*case.flags, "--recover-verify-interval", "1")),
}


@pytest.mark.parametrize("name", some("growing features", list(FEATURES), 1))
def test_what_users_combine_grows_as_well(runs: Runs, name: str) -> None:
    result = equal(runs, FEATURES[name])
    if result.case.evaluated:
        check_evaluations(result, runs.reference(result.case))
    assert max(result.replicas) == 4, result.replicas
    assert result.replicas[-1] < 4, result.replicas


def test_a_grown_run_goes_back_to_the_snapshots_that_it_has_taken_since(runs: Runs) -> None:
    """The newcomers are on the node of worker 1, which is lost as a whole: it held shards with all their shadows."""
    case = sharded(DP2, 2, "3-16:4", "1@20:forward:kill,2@20:forward:kill,3@20:forward:kill")
    case = replace(case, nodes=("a", "b"), flags=(*case.flags, "--recover-memory-interval", "1"))
    result = runs.check(case, by=check_sharded)
    assert [plan["rollback"]["source"] for plan in result.plans.values() if plan["rollback"]][:1] == ["memory"]
    assert (max(result.replicas), result.replicas[-1]) == (4, 1), result.replicas


def test_spares_that_are_asked_for_stay_spares(runs: Runs) -> None:
    case = grown(DP2, 2, "3-17:3", "0@18:backward:kill,1@18:backward:kill")
    when = case.train_with[1] + ",20-:2"
    case = replace(case, flags=(*case.flags, "--recover-spares", "1"), train_with=(case.train_with[0], when, OURS))
    result = equal(runs, case)
    assert max(result.replicas) == 3, result.replicas
    assert result.replicas[-1] == 2, "the spare has taken the place of one of the launch"


def test_a_node_with_replicas_that_have_come_is_drained(runs: Runs) -> None:
    case = replace(grown(DP2, 2, "3-18:4"), nodes=("a", "b"))
    script = (*case.train_with[:2], str(Path(__file__).with_name("draining.py")), "19:b", OURS)
    result = equal(runs, replace(case, train_with=script))
    assert max(result.replicas) == 4, result.replicas
    assert result.replicas[-1] == 1, "the newcomers are on the last node"
    assert said(result)[1] == DrainExit.DRAINED


@pytest.mark.parametrize("flags", some("resuming", ["", "--use-distributed-optimizer"], 1))
def test_stock_megatron_resumes_at_the_launchs_size_what_a_grown_run_saved(
    forkserver: ForkServer, reference: Reference, tmp_path: Path, flags: str
) -> None:
    training = [OURS, *TINY, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", "16", *flags.split()]
    training += ["--save", str(tmp_path / "checkpoints"), "--save-interval", "12"]
    patient = str(Path(__file__).with_name("patient.py"))
    recover = ["--recover", "--recover-log-dir", str(tmp_path), "--recover-max-replicas", "4"]
    recover += SLOW_TO_SEE_A_HANG
    assert forkserver.run(2, [patient, "3-11:4", *training, *recover], tmp_path, spares=2).ok
    steps = list(read_steps(tmp_path / "steps.jsonl"))
    assert [audit_problem(step) for step in steps] == [None] * 16
    assert steps[11].replicas == 4
    out = tmp_path / "resumed"
    stock = [*training, "--load", str(tmp_path / "checkpoints"), "--ckpt-step", "12"]
    assert forkserver.run(2, stock, out, losses=out / "losses.jsonl").ok
    expected = [step.loss for step in steps[12:]]
    assert [step["loss"] for step in losses(out / "losses.jsonl")] == pytest.approx(expected, rel=1e-5)
