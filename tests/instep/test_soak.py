"""Endurance: eight workers, kills drawn by a seed, and the result is the failure-free one.

Until one replica is left; or with another worker started in place of each: the run ends as whole as it began.
"""

from __future__ import annotations

import random

import pytest

from tests.drawn import EVERYTHING, SEED, some
from tests.instep.cells import BEFORE_THE_COMMIT, IN_THE_RING, row, visits
from tests.instep.conftest import Runs
from tests.instep.runs import NO_EVALUATION, SLOW_TO_SEE_A_HANG, Case, Layout, Strike

pytestmark = pytest.mark.slow

EIGHT = [Layout("dp8", 8, samples=16), Layout("tp2-dp4", 4, tensor=2)]
SEEDS = range(SEED, SEED + (20 if EVERYTHING else 1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", EIGHT, ids=lambda layout: layout.name)
def test_kills_down_to_the_last_replica_change_nothing_but_rounding(runs: Runs, layout: Layout, seed: int) -> None:
    case = row(random.Random(f"soak {layout.name} {seed}"), layout)
    runs.check(case)


REJOINED = [Layout("tp2-dp4", 4, tensor=2), Layout("tp2-pp2-dp2", 2, tensor=2, pipeline=2)]
REJOINED_SEEDS = range(SEED, SEED + (10 if EVERYTHING else 1))
MODEL = (*NO_EVALUATION, "--clip-grad", "0.2")
if EVERYTHING:  # A long run at the others' pace amplifies any rounding difference a millionfold, whoever dies.
    MODEL = (*NO_EVALUATION, "--lr", "0.03", "--min-lr", "0.01")


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
    result = runs.check(case.altered("pacing.whole", layout.replicas, order))
    assert result.replicas[-1] == layout.replicas, result.replicas
