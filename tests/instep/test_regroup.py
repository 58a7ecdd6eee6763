"""Replicas rebuilt around failed ranks: orphans, spares and newcomers are put together, and training stays the same.

Where the position of a new replica's workers is
named here, it is that of the launch: ``Strike(replica, position, ..)``.

When a new replica begins is a matter of time: its workers must have come out of what they were in.  So the tests say
how many replicas there are at the end, not in which iteration; faults that strike while one is put together have a
range of iterations (``until``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recover_megatron.membership.records import EXIT_STATE_LOST
from tests.doubles.nccl.core import Errors
from tests.drawn import some
from tests.instep.conftest import Runs
from tests.instep.pacing import BESIDE
from tests.instep.runs import (
    CLIPPED,
    CONTEXT_LAYOUTS,
    INTERLEAVED,
    LAYOUTS,
    Case,
    Layout,
    Result,
    Strike,
    check_parameters,
    check_steps,
    check_steps_until,
)

pytestmark = pytest.mark.slow

TP2_PP2 = Layout("tp2-pp2-dp3", 3, tensor=2, pipeline=2)
PP4 = Layout("pp4-dp2", 2, pipeline=4, flags="--num-layers 4")
TP2_DP2, TP2_DP4 = Layout("tp2-dp2", 2, tensor=2), Layout("tp2-dp4", 4, tensor=2)
DP4, TP2, PP2 = LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]
PREDICTING = next(layout for layout in CONTEXT_LAYOUTS if layout.name == "deepseek-pp2-dp3")
LONG = 10
"""Iterations of a run in which somebody builds a model: the training waits for it (``Case.patient``)."""


def equal(runs: Runs, case: Case, near: float = 1.0, when: str = "", replicas: int | None = None) -> Result:
    case = replace(case, model=(*case.model, *CLIPPED))
    return runs.check(case.patient(when) if when else case, near, replicas=replicas)


RECOMBINED = [
    Case(TP2_PP2, (Strike(0, 1, 3, "backward"), Strike(1, 2, iteration, phase)))
    for iteration, phase in [(3, "forward"), (3, "agree"), (5, "backward"), (5, "reduce-scatter")]
]


@pytest.mark.parametrize("case", some("recombined", RECOMBINED, 1), ids=str)
def test_the_survivors_of_two_broken_replicas_make_a_whole_one(runs: Runs, case: Case) -> None:
    result = equal(runs, case, when="7-:2", replicas=2)
    assert result.replicas[:2] == [3, 3]


LAST = [
    Case(PP4, (Strike(0, 1, 3, "backward"), Strike(1, 2, 3, "forward"))),
    Case(PP4, (Strike(0, 1, 3, "backward"), Strike(1, 2, 3, "optimizer"))),
    Case(PP4, (Strike(0, 1, 3, "backward"), Strike(1, 3, 8, "data")), 12),
    *(
        Case(PP4, (Strike(0, 1, 3, "backward"), Strike(1, 2, 8, phase)), 12)
        for phase in ("forward", "backward", "agree", "optimizer")
    ),
]


@pytest.mark.parametrize("case", some("last at once", LAST[:2], 1) + some("last ones", LAST[2:], 1), ids=str)
def test_out_of_two_broken_pipelines_and_none_whole_one_goes_on(runs: Runs, case: Case) -> None:
    """In different iterations: spares keep the state of the last replica, in step with it."""
    at_once = case.strikes[1].iteration == case.strikes[0].iteration
    result = equal(runs, case, when="" if at_once else "7-8:mirrors=3")
    assert result.replicas[-1] == 1


def test_spares_that_are_ready_when_all_replicas_break_make_another_one_beside_that_of_the_survivors(
    runs: Runs,
) -> None:
    strikes = (Strike(0, 1, 3, "backward"), Strike(1, 0, 3, "forward"))
    ready = ";".join(f"worker-{spare}.log:is ready for position" for spare in (4, 5))
    case = Case(TP2_DP2, strikes, LONG, spares=2).altered("pacing.awaiting", f"3:{ready}")
    equal(runs, case, when="5-:2", replicas=2)


@pytest.mark.parametrize("layout", [TP2, PREDICTING], ids=lambda layout: layout.name)
def test_who_is_there_twice_builds_the_model_of_the_position_that_is_missing(runs: Runs, layout: Layout) -> None:
    """The last stage of a pipeline that predicts further tokens needs other parts of a batch than those before it."""
    case = Case(layout, (Strike(1, 1, 3, "backward"), Strike(2, 1, 3, "forward")), LONG)
    result = equal(runs, case, when="5-:2", replicas=2)
    launch = {worker: case.layout.grid.place(worker)[1] for worker in range(case.layout.grid.world)}
    moved = [w for workers in result.grid.values() for position, w in enumerate(workers) if launch[w] != position]
    assert len(moved) == 1, result.grid
    assert f"worker {moved[0]} builds the model of position 1" in result.log(moved[0])


@pytest.mark.parametrize("newcomers", ["restart", "spare"])
def test_a_newcomer_brings_the_run_back_to_full_strength(runs: Runs, newcomers: str) -> None:
    """Neither it nor its mate stops the others, whose rings are open before a state has come; nor ends their epoch."""
    spare = newcomers == "spare"
    case = Case(TP2, (Strike(1, 1, 3, "backward"),), LONG, spares=int(spare), restarts=int(not spare))
    case = case.altered("pacing.late_states")
    # A spare that builds when the worker dies would keep its position, whichever it is, and the mate would move.
    case = case.altered("pacing.awaiting", "3:worker-6.log:is ready for position") if spare else case.over_nccl()
    result = equal(runs, case, when="5-:3", replicas=3)
    assert result.said.count(BESIDE) == 2, result.told()
    assert result.said.count("is transferred from device to device") == (0 if spare else 2), result.told()
    assert [epoch for epoch, plan in result.plans.items() if plan["fresh"]] == [result.steps[-1].epoch]
    assert next(workers for workers in result.grid.values() if TP2.grid.world in workers)[1] == TP2.grid.world


def test_a_newcomer_that_has_taken_a_place_builds_the_model_of_another_position_later(
    runs: Runs, tmp_path: Path
) -> None:
    """Of replicas 1 and 2 it and another one are left, both of position 1."""
    strikes = (Strike(1, 1, 3, "backward"), Strike(1, 0, LONG, "backward"), Strike(2, 0, LONG, "forward"))
    case = Case(TP2, strikes, 2 * LONG, restarts=1)
    result = equal(runs, case, when=f"5-{LONG - 1}:3,{LONG + 2}-:2")
    assert result.replicas[LONG - 2 :: LONG] == [3, 2], result.replicas
    newcomer = TP2.grid.world
    said = (tmp_path / f"worker-{newcomer}.log").read_text()
    assert [f"builds the model of position {position}" in said for position in (0, 1)] == [True, True]


def test_recombined_rebuilt_mirrored_and_joined_in_one_run(runs: Runs) -> None:
    strikes = (Strike(0, 1, 3, "backward"), Strike(1, 0, 3, "forward"), Strike(2, 1, 8, "agree", until=12))
    case = Case(TP2, strikes, 18, spares=1, restarts=2)
    # The last whole replica of the launch breaks when there is another one.
    equal(runs, case, when="8-8:2,13-:3", replicas=3)


@pytest.mark.parametrize("who", ["moved", "newcomer"])
def test_who_builds_a_model_after_a_resume_goes_on_with_what_the_checkpoint_has_and_the_flags_have_otherwise(
    runs: Runs, who: str
) -> None:
    """The schedules of learning rate and weight decay; with 64 bits, so that nothing else can differ."""
    moved = who == "moved"
    schedule = "--ckpt-format torch --weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay"
    changing = (*CLIPPED, *schedule.split())
    saved = Case(TP2, (), 4, model=(*changing, "0.5", "--lr-decay-iters", "40")).throughout("instruments.double")
    saving = runs(saved.with_flags("--save", str(runs.out / "saved"), "--save-interval", "4"), "1")
    assert saving.ended.ok, saving.told()
    resuming = ("--load", str(runs.out / "saved"), "--use-checkpoint-opt_param-scheduler")
    strikes = (Strike(1, 1, 6, "backward"), Strike(2, 1, 6, "forward"))
    case = Case(
        TP2, strikes if moved else strikes[:1], LONG + 4, restarts=int(not moved),
        model=(*changing, "0.1", "--lr-decay-iters", "400", *resuming),
    ).throughout("instruments.double")  # fmt: skip
    undisturbed = runs(case.failure_free, "2")
    result = runs(case.patient("8-:2" if moved else "8-:3"), "3")
    assert [step.iteration for step in result.steps] == list(range(5, LONG + 5)), result.told()
    assert result.replicas[-1] == (2 if moved else 3), result.replicas
    check_steps(result, undisturbed, near=1e-7)
    check_parameters(result, undisturbed, bound=1e-12)


TWO = (Strike(0, 0, 3, "backward"), Strike(1, 1, 3, "forward"))
"""In TP2_DP4: position 1 of replica 0 and position 0 of replica 1 make a new replica, by the states of replica 2."""
SECOND = {
    "a donor": Strike(2, 0, 4, "transfer", until=12),
    "a receiver in its groups": Strike(0, 1, 4, "regroup", until=12),
    "a receiver with its state": Strike(1, 0, 4, "regroup", visit=2, until=12),
    "a donor at the boundary": Strike(2, 1, 4, "recovery", until=12),
    "a bystander at the boundary": Strike(3, 1, 4, "recovery", until=12),
}


@pytest.mark.parametrize("victim", some("second", list(SECOND), 3))
def test_another_death_while_a_replica_is_put_together(runs: Runs, victim: str) -> None:
    second = SECOND[victim]
    case = Case(TP2_DP4, (*TWO, second), 14).until_struck(second.until, second.worker(TP2_DP4))
    case = case.over_nccl() if victim == "a donor" else case
    equal(runs, case, when=f"{second.until + 1}-:2", replicas=2)


def test_a_dead_donor_whose_connections_stay_open_is_not_waited_for(runs: Runs) -> None:
    """It dies in the middle of the state that it gives; the rest comes from the other worker of its column."""
    case = Case(TP2_DP4, TWO, 12, doomed=(4,)).altered("faulty.giving", 4, "stop").lingers()
    equal(runs, case, when="9-:2", replicas=2)


def test_a_worker_whose_session_connected_late_outlives_its_mate(runs: Runs) -> None:
    """What an orphan shuts when it leaves its replica are the replica's connections, not its own to the coordinator."""
    case = Case(TP2, (Strike(0, 0, 4, "forward"),), 6)
    runs.check(case.altered("pacing.late_session"))


def test_a_newcomer_that_dies_before_it_has_a_place_costs_nothing(runs: Runs) -> None:
    world = TP2.grid.world
    case = Case(TP2, (Strike(1, 1, 3, "backward"),), LONG, restarts=2, doomed=(world,))
    result = equal(runs, case.altered("faulty.newcomer", world), when="5-:3", replicas=3)
    assert result.ended.more[world] == -9, result.told()


ADAM = ("--optimizer", "adam", "--lr", "1e-3", "--min-lr", "1e-4")
BROKEN = (Strike(0, 0, 3, "backward"), Strike(1, 1, 3, "forward"))
SPREAD = "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --disable-bias-linear"
FEATURES = {
    "balanced": Case(DP4, (Strike(1, 0, 3, "backward"),), LONG, restarts=1, flags=("--recover-balance",)),
    "dropout": Case(TP2, BROKEN, dropout=True),
    "adam": Case(PP2, BROKEN, model=ADAM),
    "tied embeddings": Case(PP2, BROKEN),
    "interleaved": Case(Layout("pp2-interleaved", 3, pipeline=2, flags=INTERLEAVED), BROKEN),
    "experts": Case(Layout("ep2-dp3", 3, inner_ranks=2, flags=SPREAD), BROKEN),
}
NEAR = {"adam": 10.0}


@pytest.mark.parametrize("feature", some("features", list(FEATURES), 3))
def test_what_users_combine_is_put_together_as_well(runs: Runs, feature: str) -> None:
    case = FEATURES[feature]
    when = f"5-:{case.layout.replicas}" if case.restarts else "6-:2"
    equal(runs, case, NEAR.get(feature, 1.0), when, replicas=(4 if case.restarts else 2))


def test_a_state_that_differs_from_that_of_its_column_is_found_and_mended(runs: Runs) -> None:
    case = Case(TP2, flags=("--recover-verify-interval", "4")).altered("faulty.corrupt", "parameter", 3, 3)
    result = equal(runs, case.altered("pacing.late_states"))
    assert result.said.count(BESIDE) == 1, result.told()
    assert [plan["repaired"] for plan in result.plans.values() if plan["repaired"]] == [[3]]
    assert "differs from its column's state" in result.log(3)


@pytest.mark.parametrize("iteration", some("lost position", [3, 8], 1))
def test_a_position_whose_state_nobody_holds_ends_the_run_and_names_the_checkpoint(
    runs: Runs, tmp_path: Path, iteration: int
) -> None:
    case = Case(PP4, (Strike(0, 1, 3, "backward"), Strike(1, 1, iteration, "forward")), 12, model=CLIPPED)
    checkpoints = tmp_path / "checkpoints"  # one from which the run could not go on: without the optimizer's state
    saving = ("--save", str(checkpoints), "--save-interval", "2", "--no-save-optim")
    result = runs(case.with_flags(*saving))
    dead = [strike.worker(PP4) for strike in case.strikes]
    codes = dict(enumerate(result.ended.codes))
    assert [codes.pop(worker) for worker in dead] == [-9, -9], result.told()
    assert set(codes.values()) == {EXIT_STATE_LOST}, result.told()
    last = iteration - 1
    check_steps_until(result, runs.reference(case), last)
    saved = last - last % 2
    for worker in codes:
        said = result.log(worker)
        assert "no live worker has the state of one of the replica's positions" in said, said
        assert f"iteration {saved} in {checkpoints}" in said, said


PAIRS = Layout("tp2-dp2", 2, tensor=2, flags="--overlap-grad-reduce --ddp-bucket-size 2000")


@pytest.mark.parametrize("errors", some("over NCCL", list(Errors), 1))
def test_two_deaths_and_two_newcomers_leave_the_training_equal(runs: Runs, errors: Errors) -> None:
    """Of each replica one worker dies; what is left makes a whole one, and newcomers the second one."""
    case = Case(PAIRS, (Strike(0, 1, 3, "backward"), Strike(1, 0, 8, "forward")), 30, restarts=2)
    case = replace(case.over_nccl(errors=errors, seed=1), model=CLIPPED)
    result = runs.check(case)
    assert result.replicas[0] == result.replicas[-1] == 2, result.replicas
    calls = [line for log in result.ended.logs for line in log.read_text().splitlines() if "NCCL's double:" in line]
    assert sum(line.endswith("init") for line in calls) >= 4, "every worker of the launch has made one"
