"""The invariant, by equality: a run in which workers die is the run in which none does, but for rounding.

Real processes, killed by real signals at every phase of an iteration.  See ``cells`` for what is drawn, ``runs`` for
what is compared.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.drawn import EVERYTHING, SEED
from tests.instep.cells import PHASES, Cell, case_of, cells, drawn, rows
from tests.instep.conftest import Runs
from tests.instep.runs import LAYOUTS, Case, Layout, Strike, check, check_parameters

pytestmark = pytest.mark.slow

DP4, OVERLAP, TP2, PP2, TP2_PP2 = LAYOUTS
CELLS = cells() if EVERYTHING else drawn(SEED)
KINDS = [
    Cell(layout, phase, 0, "later", False, kind)
    for kind in ("stop", "raise", "exit")
    for layout in (DP4, PP2)
    for phase in PHASES
]
AT_ONCE = Case(TP2, (Strike(0, 1, 3, "backward"), Strike(2, 0, 3, "backward")))
ROWS = [AT_ONCE, *itertools.islice(rows(SEED), 100 if EVERYTHING else 3)]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_death_at_any_phase_changes_nothing_but_rounding(runs: Runs, cell: Cell) -> None:
    runs.check(case_of(cell, SEED))


@pytest.mark.parametrize("cell", KINDS if EVERYTHING else random.Random(f"kinds {SEED}").sample(KINDS, 5), ids=str)
def test_hangs_exceptions_and_exits_are_survived_as_kills_are(runs: Runs, cell: Cell) -> None:
    runs.check(case_of(cell, SEED))


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_deaths_down_to_one_replica_change_nothing_but_rounding(runs: Runs, case: Case) -> None:
    runs.check(case)


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


@pytest.mark.parametrize("layout", [DP4, PP2], ids=lambda layout: layout.name)
def test_with_64_bits_nothing_is_left_of_the_difference(runs: Runs, layout: Layout) -> None:
    """So it was rounding: an error in the sum would be there with any number of bits."""
    deaths = (Strike(1, 0, 2, "reduce-scatter"), Strike(0, 0, 4, "forward", visit=2))
    case = Case(layout, deaths, dropout=True).throughout("instruments.double")
    result, its = runs(case), runs.reference(case)
    check(result, its)
    assert {tensor.dtype for tensor in its.left[0]["parameters"].values()} == {torch.float64}
    check_parameters(result, its, bound=1e-10)
