"""The grid: one death breaks its replica and nobody else's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.workload import assemble


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[list[int]], set[int], set[int]]:
    """The launch grid, the live workers (some of them without a place), the replicas that are broken anyway."""
    replicas, size = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    workers = draw(st.permutations(range(replicas * size)))
    grid = [list(workers[r * size : (r + 1) * size]) for r in range(replicas)]
    live = draw(st.sets(st.integers(0, replicas * size + 2)))
    return grid, live, draw(st.sets(st.integers(0, replicas - 1)))


@given(grids())
def test_everybody_is_in_exactly_one_place(case) -> None:
    launch, live, broken = case
    grid = assemble(live, launch, broken=broken)
    assert sorted([*grid.workers, *grid.orphans, *grid.spares]) == sorted(live)
    assert set(grid.lost) == {worker for workers in launch for worker in workers} - live
    assert sorted([*grid.replicas, *grid.broken]) == list(range(len(launch)))


@given(grids())
def test_a_replica_is_whole_exactly_if_all_its_workers_live_and_it_was_not_broken(case) -> None:
    launch, live, broken = case
    grid = assemble(live, launch, broken=broken)
    for replica, workers in enumerate(launch):
        whole = replica not in broken and all(worker in live for worker in workers)
        assert grid.replicas.get(replica) == (tuple(workers) if whole else None)
        for position, worker in enumerate(workers):
            assert grid.orphans.get(worker) == (position if worker in live and not whole else None)


def test_two_replicas_of_two_and_a_death() -> None:
    grid = assemble([0, 1, 3, 7], [[0, 1], [2, 3]])
    assert (grid.replicas, grid.broken, grid.lost, grid.orphans, grid.spares) == ({0: (0, 1)}, (1,), (2,), {3: 1}, (7,))


@pytest.mark.parametrize(("grid", "broken"), [([[0, 1], [1, 2]], []), ([[0, 1], [2]], []), ([[]], []), ([[0]], [1])])
def test_nonsense_is_refused(grid: list[list[int]], broken: list[int]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        assemble([0], grid, broken=broken)
