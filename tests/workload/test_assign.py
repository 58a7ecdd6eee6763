"""The microbatches of each replica: every id once, own ids stay, and nobody could finish the lost ones earlier."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.workload import assign, quotas, reassign
from recover_megatron.workload.assign import group_size, runs
from tests.workload.test_quotas import SPEEDS, sharings


def nominal(replica: int, inner_rank: int, inner_ranks: int, launch: int, total: int) -> list[int]:
    """The ids of one data-parallel rank in stock Megatron."""
    ranks = launch * inner_ranks
    return [n * ranks + replica * inner_ranks + inner_rank for n in range(total // ranks)]


def everything(shares: dict[int, list[list[int]]]) -> list[int]:
    return sorted(j for lists in shares.values() for ids in lists for j in ids)


@st.composite
def iterations(draw: st.DrawFn) -> tuple[int, int, list[int], dict[int, int], int]:
    """total, inner ranks, replicas, counts, launch_replicas."""
    launch, inner_ranks = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    total = launch * inner_ranks * draw(st.integers(0, 5))
    ids = draw(st.lists(st.integers(0, launch + 2), min_size=1, max_size=launch + 3, unique=True))
    rows = total // inner_ranks
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=len(ids) - 1, max_size=len(ids) - 1)))
    parts = [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    return total, inner_ranks, ids, {i: part * inner_ranks for i, part in zip(ids, parts, strict=True)}, launch


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 6))
def test_the_nominal_counts_on_all_replicas_give_exactly_the_nominal_order(
    launch: int, inner_ranks: int, each: int
) -> None:
    total = launch * inner_ranks * each
    shares = assign(total, inner_ranks, range(launch), dict.fromkeys(range(launch), each * inner_ranks), launch)
    assert shares == {
        replica: [nominal(replica, inner_rank, inner_ranks, launch, total) for inner_rank in range(inner_ranks)]
        for replica in range(launch)
    }


@given(iterations())
def test_every_id_is_assigned_exactly_once_and_every_lane_gets_its_part(case) -> None:
    total, inner_ranks, ids, counts, launch = case
    shares = assign(total, inner_ranks, ids, counts, launch)
    assert everything(shares) == list(range(total))
    assert list(shares) == sorted(ids)
    for replica, lists in shares.items():
        assert [len(inner_rank) for inner_rank in lists] == [counts[replica] // inner_ranks] * inner_ranks


@given(iterations())
def test_a_replica_runs_its_own_first_ids_first_and_others_in_order_and_what_ran_in_lock_step_still_does(case) -> None:
    total, inner_ranks, ids, counts, launch = case
    for replica, lists in assign(total, inner_ranks, ids, counts, launch).items():
        for inner_rank, got in enumerate(lists):
            own = nominal(replica, inner_rank, inner_ranks, launch, total) if replica < launch else []
            kept = min(len(own), counts[replica] // inner_ranks)
            assert got[:kept] == own[:kept]
            assert got[kept:] == sorted(got[kept:])
        for row in zip(*lists, strict=True):
            assert row == tuple(range(row[0], row[0] + inner_ranks))
            assert row[0] % inner_ranks == 0


def test_four_replicas_of_which_one_died() -> None:
    counts = quotas(8, [0, 1, 3])
    assert assign(8, 1, [0, 1, 3], counts, 4) == {0: [[0, 4, 2]], 1: [[1, 5, 6]], 3: [[3, 7]]}


@st.composite
def losses(draw: st.DrawFn) -> tuple[list[int], int, dict[int, int], dict[int, float], int]:
    """lost, inner ranks, load, speeds, least."""
    inner_ranks, least = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (2, 3), (2, 4), (3, 2)]))
    fewest = -(-least // inner_ranks)
    size = draw(st.sampled_from([0, *range(fewest, 8)])) * inner_ranks
    lost = draw(st.lists(st.integers(0, 99), min_size=size, max_size=size, unique=True))
    ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    return lost, inner_ranks, {i: draw(st.integers(0, 12)) for i in ids}, {i: draw(SPEEDS) for i in ids}, least


@given(losses(), st.randoms(use_true_random=False))
def test_every_lost_id_is_shared_out_exactly_once_in_passes_that_can_be_run(case, random) -> None:
    """The same whatever the order of the arguments."""
    lost, inner_ranks, load, speeds, least = case
    shares = reassign(lost, inner_ranks, list(load), load=load, speeds=speeds, least=least)
    ids, shuffled = list(load), list(lost)
    random.shuffle(ids)
    random.shuffle(shuffled)
    assert reassign(shuffled, inner_ranks, ids, load=load, speeds=speeds, least=least) == shares
    assert everything(shares) == sorted(lost)
    assert list(shares) == sorted(load)
    for lists in shares.values():
        assert len({len(ids) for ids in lists}) == 1
        assert sum(map(len, lists)) == 0 or sum(map(len, lists)) >= least
        assert all(ids == sorted(ids) for ids in lists)


@given(losses())
def test_no_other_sharing_of_the_lost_ids_finishes_earlier(case) -> None:
    lost, inner_ranks, load, speeds, least = case
    shares = reassign(lost, inner_ranks, list(load), load=load, speeds=speeds, least=least)

    def end(i: int, given: int) -> float:
        return (load[i] + given) / speeds[i] if given or least == 1 else 0.0  # who runs none delays nobody

    fewest = -(-least // inner_ranks)
    best = min(
        max(end(i, part * inner_ranks) for i, part in zip(load, parts, strict=True))
        for parts in sharings(len(lost) // inner_ranks, len(load), 0)
        if all(part == 0 or part >= fewest for part in parts)
    )
    assert max(end(i, sum(map(len, lists))) for i, lists in shares.items()) <= best * (1 + 1e-12)


def test_who_has_less_left_to_run_takes_more() -> None:
    assert reassign([2, 6, 10], 1, [0, 1, 3]) == {0: [[2]], 1: [[6]], 3: [[10]]}
    assert reassign([2, 6, 10], 1, [0, 1, 3], load={0: 4, 1: 1}) == {0: [[]], 1: [[2]], 3: [[6, 10]]}
    assert reassign([2, 6, 7, 10], 1, [0, 1, 3], least=2) == {0: [[2, 7]], 1: [[6, 10]], 3: [[]]}
    assert reassign([4, 5, 12, 13], 2, [0, 1]) == {0: [[4], [5]], 1: [[12], [13]]}


@given(st.integers(1, 16), st.integers(0, 200), st.integers(1, 40))
def test_any_number_from_that_of_the_stages_on_can_be_run(stages: int, more: int, usual: int) -> None:
    count = stages + more
    group = group_size(count, stages, usual)
    assert runs(count, stages, group)
    if runs(count, stages, usual):
        assert group == usual
    elif group > usual:
        assert not any(runs(count, stages, other) for other in range(1, group))
    else:
        assert not any(runs(count, stages, other) for other in range(group + 1, usual))


def test_the_groups_are_as_large_as_they_must_be() -> None:
    assert [group_size(count, 8, 8) for count in (8, 9, 16, 31, 32, 33, 34)] == [8, 9, 8, 11, 8, 11, 12]
    assert group_size(10, 2, 3) == 2  # 3, 3, 3, 1 cannot be


@pytest.mark.parametrize(
    "call",
    [
        partial(assign, 8, 1, [], {}, 4),
        partial(assign, 8, 0, [0], {0: 8}, 4),
        partial(assign, 8, 1, [0], {0: 7}, 4),
        partial(assign, 8, 1, [0, 1], {0: 8}, 4),
        partial(assign, 8, 2, [0, 1], {0: 5, 1: 3}, 2),
        partial(assign, 8, 1, [0, 1], {0: 9, 1: -1}, 4),
        partial(assign, 7, 1, [0, 1], {0: 4, 1: 3}, 4),
        partial(assign, 8, 1, [0, 1], {0: 4, 1: 4, 2: 1}, 4),
        partial(assign, 8, 1, [0, 1], {0: 4, 1: 4}, 0),
        partial(reassign, [1], 1, []),
        partial(reassign, [1, 1], 1, [0]),
        partial(reassign, [1, 2, 3], 2, [0]),
        *(partial(reassign, [1, 2], 1, [0], least=least) for least in (4, 0)),
        partial(reassign, [1], 0, [0]),
        partial(reassign, [1], 1, [0], load={0: -1}),
        partial(reassign, [1], 1, [0], speeds={0: 0.0}),
        *(partial(group_size, count, stages, 8) for count, stages in ((0, 2), (7, 8), (3, 0))),
    ],
)
def test_nonsense_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        call()
