"""--outer-dp-sharding-strategy optim: the optimizer's state is spread over the shard groups and survives by shadows.

As in the rest of the matrix a kill is a signal to a real process, and the whole trajectory is compared with the
failure-free run's; and all holders of a part of the state have the same bits at the end.  What Megatron 0.19.2 itself
does with this flag is not what plain data parallelism does, so the numbers are those of ``no_shard``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from recover_megatron.membership.records import EXIT_STATE_LOST
from tests.drawn import some
from tests.instep.conftest import Reference, Runs
from tests.instep.hsdp import ALL_PHASES, NEAR, OUTER_SIXTEEN, OUTER_THREE, OUTER_TWO, UNSHARDED, drawn
from tests.instep.runs import Case, Layout, Strike, check_rows, check_sharded, check_steps
from tests.megatron_hooks.tiny import STOCK

pytestmark = pytest.mark.slow

TWO_SHADOWS = ("--recover-shadow-shards", "2")


@pytest.mark.parametrize("layout", some("outer parity", list(UNSHARDED), 1), ids=lambda layout: layout.name)
def test_without_a_death_every_number_is_that_of_shard_groups_that_have_all_of_the_state(
    reference: Reference, layout: Layout
) -> None:
    check_steps(reference(Case(layout)), reference(Case(UNSHARDED[layout])), 0.1 * NEAR.get(layout, 1.0))


CELLS = drawn("outer faults", list(UNSHARDED), ALL_PHASES, 1)
ROWS = [
    Case(OUTER_THREE, (Strike(0, 1, 2, "backward"), Strike(2, 1, 4, "param-gather"))),
    Case(OUTER_THREE, (Strike(0, 1, 3, "forward"), Strike(2, 0, 4, "repartition")), flags=TWO_SHADOWS),
    Case(OUTER_THREE, (Strike(1, 1, 3, "update", visit=2), Strike(2, 0, 3, "update")), flags=TWO_SHADOWS),
    Case(OUTER_TWO, (Strike(1, 1, 3, "backward"),)).over_nccl("native"),
    Case(OUTER_TWO, (Strike(1, 1, 3, "param-gather"),), flags=("--recover-shadow-device", "cpu")),
]


@pytest.mark.parametrize("case", [*CELLS, *some("outer rows", ROWS, 1)], ids=str)
def test_a_fault_at_any_point_changes_nothing_but_rounding(runs: Runs, case: Case) -> None:
    runs.check(case, NEAR.get(case.layout, 1.0), by=check_sharded)


def test_when_the_last_copy_goes_the_run_ends_and_says_so(runs: Runs) -> None:
    case = Case(OUTER_TWO, (Strike(1, 1, 3, "backward"),), 4, flags=("--recover-shadow-shards", "0"))
    result = runs(case)
    assert result.ended.codes == [EXIT_STATE_LOST, EXIT_STATE_LOST, EXIT_STATE_LOST, -9], result.told()
    assert "had no other copy" in result.log(0)


TOGETHER = {
    "orphans": Case(OUTER_THREE, (Strike(0, 1, 3, "backward"), Strike(2, 0, 3, "forward")), 10, flags=TWO_SHADOWS),
    "spare": Case(OUTER_TWO, (Strike(1, 1, 3, "backward"),), 10, spares=1),
    "restart in 16 bits": Case(OUTER_SIXTEEN, (Strike(1, 1, 3, "backward"),), 10, restarts=1),
}


@pytest.mark.parametrize("way", some("outer places", list(TOGETHER), 1))
def test_who_takes_a_place_in_a_shard_group_gets_its_part_of_the_state(runs: Runs, way: str) -> None:
    case = TOGETHER[way]
    result = runs.check(case.patient("5-:2"), NEAR.get(case.layout, 1.0), by=check_sharded)
    assert result.replicas[-1] == 2, result.replicas


@pytest.mark.parametrize("layout", some("outer saved", [OUTER_TWO, OUTER_SIXTEEN], 1), ids=lambda layout: layout.name)
@pytest.mark.parametrize("reader", some("outer readers", ["megatron alone", "spread again"], 1))
def test_a_checkpoint_that_is_written_after_a_death_goes_on_as_the_failure_free_run_did(
    runs: Runs, tmp_path: Path, layout: Layout, reader: str
) -> None:
    folder, near = tmp_path / "checkpoints", NEAR.get(layout, 1.0)
    case = Case(layout, (Strike(1, 1, 3, "backward"),), flags=("--save", str(folder), "--save-interval", "4"))
    runs.check(case, near, by=check_sharded)
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    if reader == "spread again":
        rows = runs(Case(layout, (Strike(0, 0, 7, "update"),), flags=("--load", str(folder))), "again").steps
    else:
        rows = runs.stock(Case(UNSHARDED[layout]), "--load", str(folder), script=STOCK).recorded
    check_rows(runs.reference(case).steps[4:], rows, near)
