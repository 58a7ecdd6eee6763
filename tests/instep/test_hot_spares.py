"""Hot spares: their models are built before anybody is lost, so a hole is filled at the next boundary.

What is compared is what test_equality.py compares; see ``runs``.  The run waits until all spares are ready, and then
the first worker dies.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.drawn import some
from tests.instep.conftest import Runs
from tests.instep.runs import LAYOUTS, NO_EVALUATION, SLOW_TO_SEE_A_HANG, Case, Layout, Strike, check, check_sharded
from tests.instep.test_sharded import SHARDED

pytestmark = pytest.mark.slow

DP4, TP2 = LAYOUTS[0], LAYOUTS[2]
SHARDED_DP4 = Layout("sharded-dp4", 4)
MODEL = (*NO_EVALUATION, "--clip-grad", "0.2")
STRUCK = 5
"""The run waits for the spares before it."""


def hot(layout: Layout, spares: int, *strikes: Strike, model: tuple[str, ...] = MODEL) -> Case:
    case = Case(layout, strikes, spares=spares, model=model, flags=SLOW_TO_SEE_A_HANG)
    workers = range(layout.grid.world, layout.grid.world + spares)
    ready = ";".join(f"worker-{worker}.log:worker {worker} is ready for position" for worker in workers)
    when = f"2-{STRUCK}:{ready}"
    case = case.altered("pacing.awaiting", when)
    return case if _at_once(case) else case.patient(f"{STRUCK + 2}-:{_left(case)}")


def _at_once(case: Case) -> bool:
    """Whether whoever takes a place only waits for it, and nothing else is lost: so it is there at the boundary."""
    lost = {strike.replica for strike in case.strikes}
    return len(lost) == 1 and len(case.strikes) == case.layout.positions


def _left(case: Case) -> int:
    """The replicas at the end."""
    return case.layout.replicas - max(0, len(case.strikes) - case.spares)


CASES = {
    phase: hot(DP4, 1, Strike(1, 0, STRUCK, phase))
    for phase in ("data", "forward", "backward", "reduce-scatter", "all-gather", "agree", "optimizer")
} | {
    "sharded": hot(SHARDED_DP4, 1, Strike(2, 0, STRUCK, "backward"), model=SHARDED),
    "a-donor-dies": hot(DP4, 1, Strike(1, 0, STRUCK, "backward"), Strike(0, 0, STRUCK + 1, "transfer")),
    "another-dies-at-the-boundary": hot(DP4, 2, Strike(1, 0, STRUCK, "backward"), Strike(2, 0, STRUCK + 1, "recovery")),
}
CASES["node"] = replace(
    hot(TP2, 2, Strike(1, 0, STRUCK, "forward"), Strike(1, 1, STRUCK, "forward")), nodes=("a", "a", "b", "b", "c", "c")
)
"""All that a node had: the spares, on another one, are a whole replica."""
CASES["mate"] = replace(hot(TP2, 2, Strike(1, 1, STRUCK, "backward")), iterations=14)
"""Its mate must come out of the training first: a boundary or two later."""


@pytest.mark.parametrize("name", some("hot spares", list(CASES), 1))
def test_a_hole_is_filled_at_the_next_boundary_and_nothing_is_built_for_it(
    runs: Runs, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    result = runs(case)
    (check_sharded if name == "sharded" else check)(result, runs.reference(case))
    world = case.layout.grid.world
    logs = [(tmp_path / f"worker-{worker}.log").read_text() for worker in range(world + case.spares)]
    assert [log.count("builds the model of position") for log in logs] == [0] * world + [1] * case.spares
    if _at_once(case):
        assert result.replicas[STRUCK:] == [case.layout.replicas] * 3, result.replicas
    assert result.replicas[-1] == _left(case), result.replicas
