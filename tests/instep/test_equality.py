"""The invariant, by equality: a run in which workers die is the run in which none does, but for rounding.

Real processes, killed by real signals at every phase of an iteration.  See ``cells`` for what is drawn, ``runs`` for
what is compared.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.drawn import EVERYTHING, SEED, some
from tests.instep.cells import (
    BEFORE_THE_COMMIT,
    IN_THE_RING,
    PHASES,
    WHEN,
    Cell,
    case_of,
    cells,
    drawn,
    row,
    rows,
    visits,
)
from tests.instep.conftest import Runs
from tests.instep.runs import (
    CLIPPED,
    INTERLEAVED,
    LAYOUTS,
    NO_EVALUATION,
    SHARDED,
    SLOW_TO_SEE_A_HANG,
    Case,
    Layout,
    Strike,
    check_parameters,
)

pytestmark = pytest.mark.slow

DP4, OVERLAP, TP2, PP2, TP2_PP2 = LAYOUTS
VPP = Layout("vpp2-pp2-dp4", 4, pipeline=2, flags=INTERLEAVED, samples=16)
"""Four replicas of two stages with two chunks of layers each; a rank of the launch runs four microbatches."""
VPP_OVERLAP = Layout("vpp2-pp2-dp4-overlap", 4, pipeline=2, samples=16,
                 flags=f"{INTERLEAVED} --overlap-grad-reduce --ddp-bucket-size 2000")  # fmt: skip
GROUPS = Layout("vpp2-pp2-dp4-groups-of-3", 4, pipeline=2, samples=20,
                flags=f"{INTERLEAVED} --microbatch-group-size-per-virtual-pipeline-stage 3")  # fmt: skip
CELLS = cells() if EVERYTHING else drawn(SEED)
INTERLEAVED_CELLS = [
    Cell(layout, phase, position, when, False)
    for layout in (VPP, VPP_OVERLAP, GROUPS)
    for phase in PHASES
    for position in range(2)
    for when in WHEN
]
KINDS = {
    kind: [Cell(layout, phase, 0, "later", False, kind) for layout in (DP4, PP2) for phase in PHASES]
    for kind in ("stop", "raise", "exit")
}
DRAWN_KINDS = [
    cell for kind, count in (("stop", 1), ("raise", 2), ("exit", 1)) for cell in some(kind, KINDS[kind], count)
]
AT_ONCE = Case(TP2, (Strike(0, 1, 3, "backward"), Strike(2, 0, 3, "backward")))
ROWS = [AT_ONCE, *itertools.islice(rows(SEED), 100 if EVERYTHING else 3)]


@pytest.mark.parametrize("cell", [*CELLS, *some("interleaved cells", INTERLEAVED_CELLS, 1)], ids=str)
def test_a_death_at_any_phase_changes_nothing_but_rounding(runs: Runs, cell: Cell) -> None:
    runs.check(case_of(cell, SEED))


@pytest.mark.parametrize("cell", DRAWN_KINDS, ids=str)
def test_hangs_exceptions_and_exits_are_survived_as_kills_are(runs: Runs, cell: Cell) -> None:
    runs.check(case_of(cell, SEED))


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_deaths_down_to_one_replica_change_nothing_but_rounding(runs: Runs, case: Case) -> None:
    runs.check(case)


LINGERING = [
    *(Case(DP4, (Strike(1, 0, 3, phase),)) for phase in ("backward", "agree", "eval", "checkpoint")),
    *(Case(OVERLAP, (Strike(2, 0, 3, phase),)) for phase in IN_THE_RING),
    *(Case(layout, (Strike(0, 1, 3, phase),)) for layout in (TP2, PP2) for phase in ("forward", "backward")),
    *(Case(DP4, (Strike(0, 0, 3, phase),), model=SHARDED) for phase in ("shadow", "param-gather")),
    Case(TP2, (Strike(0, 0, 3, "backward"), Strike(1, 1, 3, "recovery"))),
]


@pytest.mark.parametrize("case", some("lingering", LINGERING, 3), ids=str)
def test_nobody_waits_until_the_connections_of_a_dead_worker_have_ended(runs: Runs, case: Case) -> None:
    """The kernel closes them when it has taken the memory of the process apart: here, when all others have ended."""
    runs.check(case.lingers())


@pytest.mark.parametrize(
    ("phase", "slow"), [("agree", "agree@4=0.5,agree@5=1,met@2=0.5"), ("optimizer", "optimizer@4=0.5,met@2=0.5")]
)
def test_a_worker_that_hears_of_a_commit_before_it_goes_on_does_what_the_others_do(
    runs: Runs, phase: str, slow: str
) -> None:
    """All but a worker of the replica that breaks have reported the step, or the barrier behind it, when 4 dies.

    The plan cannot tell yet that it is committed: 5 could have missed it.  A moment later 5 says that it has no part
    any more, and then it is: 2 is told before it looks.
    """
    case = Case(TP2, (Strike(2, 0, 3, phase),))
    runs.check(case.altered("pacing.slow", slow))


def test_who_repeats_what_is_committed_meanwhile_goes_on_with_its_mates_when_the_epoch_ends(runs: Runs) -> None:
    """Column 0 has reported the step when 5, of column 1, dies; when 1 and 3 have, in the next epoch, it is committed.

    Then 3 dies, while 0 has not come to its sums once more. 1 goes on to the update, for which it needs 0.
    """
    case = Case(TP2, (Strike(2, 1, 3, "reduce-scatter"), Strike(1, 1, 3, "optimizer")))
    runs.check(case.altered("pacing.slow", "reduce-scatter@5=0.2,again@0=1.5"))


def test_the_workers_of_a_replica_begin_an_evaluation_together_though_one_of_them_knows_that_the_epoch_is_over(
    runs: Runs,
) -> None:
    """When 2 has died in it, 3 begins it again and waits for its mate 0, which comes when 1 has died, too."""
    case = Case(PP2, (Strike(2, 0, 3, "eval"), Strike(1, 0, 3, "eval", visit=3)))
    runs.check(case.altered("pacing.slow", "met@0=2"))


def test_a_worker_that_has_not_taken_up_the_first_plan_yet_survives_another_ones_death(runs: Runs) -> None:
    """Before the first step all meet; there worker 1 dies, when worker 3 has been told that the run has begun."""
    case = Case(DP4, (Strike(1, 0, 1, "agree"),))
    runs.check(case.altered("pacing.slow", "joined@3=2"))


def test_a_replica_that_runs_no_microbatch_ends_each_step_with_the_others(runs: Runs) -> None:
    """It is the first one, which writes the log: each row has the loss."""
    result = runs.check(Case(DP4, (Strike(2, 0, 5, "backward"),)).altered("faulty.idle_from", 0, 2))
    idle = [step.iteration for step in result.steps if not step.microbatches.get(0)]
    assert idle == list(range(6, len(result.steps) + 1))
    assert idle
    assert [step.iteration for step in result.steps if step.loss is None] == []


@pytest.mark.parametrize("layout", [DP4, PP2], ids=lambda layout: layout.name)
def test_with_64_bits_nothing_is_left_of_the_difference(runs: Runs, layout: Layout) -> None:
    """So it was rounding: an error in the sum would be there with any number of bits."""
    deaths = (Strike(1, 0, 2, "reduce-scatter"), Strike(0, 0, 4, "forward", visit=2))
    case = Case(layout, deaths, dropout=True).throughout("instruments.double")
    result, its = runs.check(case), runs.reference(case)
    assert {tensor.dtype for tensor in its.left[0]["parameters"].values()} == {torch.float64}
    check_parameters(result, its, bound=1e-10)


# ---- endurance: eight workers, kills drawn by a seed, until one replica is left or with another worker for each

EIGHT = [Layout("dp8", 8, samples=16), Layout("tp2-dp4", 4, tensor=2)]
SEEDS = range(SEED, SEED + (20 if EVERYTHING else 1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", EIGHT, ids=lambda layout: layout.name)
def test_kills_down_to_the_last_replica_change_nothing_but_rounding(runs: Runs, layout: Layout, seed: int) -> None:
    runs.check(row(random.Random(f"soak {layout.name} {seed}"), layout))


REJOINED = [Layout("tp2-dp4", 4, tensor=2), Layout("tp2-pp2-dp2", 2, tensor=2, pipeline=2)]
REJOINED_SEEDS = range(SEED, SEED + (10 if EVERYTHING else 1))
# A long run at the others' pace amplifies any rounding difference a millionfold, whoever dies.
MODEL = (*NO_EVALUATION, "--lr", "0.03", "--min-lr", "0.01") if EVERYTHING else CLIPPED


def deaths(source: random.Random, layout: Layout) -> Case:
    """Kills one after another, in positions that differ from kill to kill, each when the run is whole again.

    (With two replicas a position's state would be lost else: whoever is to take the place of the one that broke last
    might still be on its way.)  In a long run the newcomers of the first kills are alone in their columns when the
    later ones come.
    """
    victims = [(replica, position) for replica in range(layout.replicas) for position in range(layout.positions)]
    first, count = source.sample(range(layout.positions), layout.positions), 6 if EVERYTHING else layout.positions
    iterations = 300 if EVERYTHING else 11 * count + 12
    strikes: list[Strike] = []
    for number in range(count):
        position = first[number % len(first)]
        victim = source.choice([v for v in victims if v[1] == position])
        victims.remove(victim)
        # Who is alone in its column has no ring.
        phases = [p for p in BEFORE_THE_COMMIT if visits(layout, position, p) and p not in IN_THE_RING]
        gap = source.randrange(1, iterations // count - 10)  # at least, from the last one
        iteration = (strikes[-1].iteration if strikes else 1) + gap
        strikes.append(Strike(*victim, iteration, source.choice(phases), until=iterations - 12))
    case = Case(layout, tuple(strikes), iterations, restarts=len(strikes), model=MODEL, flags=SLOW_TO_SEE_A_HANG)
    return case.throughout("instruments.double") if EVERYTHING else case


@pytest.mark.parametrize("seed", REJOINED_SEEDS)
@pytest.mark.parametrize("layout", some("rejoined", REJOINED, 1), ids=lambda layout: layout.name)
def test_with_others_in_their_place_the_run_ends_whole_and_nothing_changes_but_rounding(
    runs: Runs, layout: Layout, seed: int
) -> None:
    case = deaths(random.Random(f"rejoin {layout.name} {seed}"), layout)
    order = ",".join(str(strike.worker(layout)) for strike in case.strikes)
    runs.check(case.altered("pacing.whole", layout.replicas, order), replicas=layout.replicas)


EXPERTS = Layout("vpp2-pp2-ep2-dp3", 3, pipeline=2, inner_ranks=2, samples=24, flags=f"{INTERLEAVED} --num-experts 4 "
                 "--moe-router-topk 2 --disable-bias-linear --expert-model-parallel-size 2")  # fmt: skip
ADAM = ("--use-distributed-optimizer", *"--optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4".split())


def shares(counted: dict[int, list[int]]) -> list[int]:
    return sorted(map(len, counted.values()))


@pytest.mark.parametrize(
    ("layout", "after"),
    some("uneven shares", [
        (VPP, [[4, 4, 4, 4], [5, 5, 6], [8, 8]]), (GROUPS, [[5, 5, 5, 5], [6, 7, 7], [10, 10]]),
    ], 1),
    ids=["layout"] if not EVERYTHING else [VPP.name, GROUPS.name],
)  # fmt: skip
def test_shares_differ_by_one_microbatch_after_losses(runs: Runs, layout: Layout, after: list[list[int]]) -> None:
    case = Case(layout, (Strike(1, 1, 3, "backward", visit=2), Strike(3, 0, 5, "reduce-scatter")))
    result = runs.check(case)
    at = {step.iteration: shares(step.microbatches) for step in result.steps}
    assert at[2] == after[0]
    assert at[4] == after[1]
    assert at[8] in (after[2], after[1])  # orphans of both may be one more replica by then


@pytest.mark.parametrize(
    "case",
    some("interleaved", [
        Case(VPP, (Strike(0, 1, 3, "norm"), Strike(2, 0, 5, "forward", visit=3)), model=ADAM),
        Case(VPP_OVERLAP, (Strike(0, 0, 2, "backward"), Strike(1, 1, 2, "recovery"), Strike(3, 1, 6, "all-gather"))),
        Case(VPP, (Strike(0, 0, 2, "forward"), Strike(1, 0, 4, "forward", "stop"), Strike(3, 1, 6, "agree"))),
        Case(EXPERTS, (Strike(1, 2, 3, "reduce-scatter"), Strike(0, 0, 5, "backward"))),
        Case(VPP, (Strike(2, 1, 3, "forward", visit=4),), dropout=True),
    ], 1),
    ids=str,
)  # fmt: skip
def test_what_is_combined_with_interleaved_pipelines_survives_losses_too(runs: Runs, case: Case) -> None:
    runs.check(case)
