"""Quotas: sums and optimum against brute force; the balance finds a slow replica at once, and nothing fidgets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.workload import Balance, quotas
from recover_megatron.workload.quotas import CONFIRM, GAIN, STEP, rebalanced
from tests.workload.paces import constant, simulate

SPEEDS = st.floats(0.01, 100)


def sharings(units: int, replicas: int, least: int) -> Iterator[tuple[int, ...]]:
    """All ways to share ``units`` out, at least ``least`` each."""
    for parts in itertools.product(range(least, units + 1), repeat=replicas):
        if sum(parts) == units:
            yield parts


def time(shares: Mapping[int, int], speeds: Mapping[int, float]) -> float:
    return max(count / speeds[replica] for replica, count in shares.items())


def test_thirtytwo_microbatches_on_seven_replicas_go_to_the_lower_ids_first() -> None:
    assert list(quotas(32, [8, 1, 2, 3, 5, 6, 7]).items()) == [(1, 5), (2, 5), (3, 5), (5, 5), (6, 4), (7, 4), (8, 4)]


@given(st.integers(0, 200), st.integers(1, 30), st.integers(1, 8))
def test_equal_replicas_differ_by_one_unit_at_most(units: int, replicas: int, multiple: int) -> None:
    shares = quotas(units * multiple, range(replicas), multiple_of=multiple)
    assert sum(shares.values()) == units * multiple
    assert all(count % multiple == 0 for count in shares.values())
    assert max(shares.values()) - min(shares.values()) <= multiple
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, dict[int, float], int, int]:
    """units, speeds, multiple_of, units that a replica runs at least."""
    ids = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4, unique=True))
    fewest = draw(st.integers(1, 3))
    units = draw(st.sampled_from([0, *range(fewest, 10)]))
    return units, {i: draw(SPEEDS) for i in ids}, draw(st.integers(1, 4)), fewest


@given(pipelines(), st.randoms(use_true_random=False))
def test_a_replica_runs_none_or_as_many_as_its_pipeline_needs_and_no_other_sharing_is_faster(case, random) -> None:
    """The same whatever the order of the arguments; ``fewest`` 1: a replica that is no interleaved pipeline."""
    units, speeds, multiple, fewest = case
    least = fewest * multiple - (multiple - 1)  # rounded up to whole units
    shares = quotas(units * multiple, list(speeds), speeds=speeds, multiple_of=multiple, least=least)
    assert sum(shares.values()) == units * multiple
    assert all(count % multiple == 0 and (count == 0 or count >= least) for count in shares.values())
    enough = units >= fewest * len(speeds)
    assert not enough or all(shares.values())
    best = min(
        time({i: part * multiple for i, part in zip(speeds, parts, strict=True)}, speeds)
        for parts in sharings(units, len(speeds), fewest if enough else 0)
        if all(part == 0 or part >= fewest for part in parts)
    )
    assert time(shares, speeds) <= best * (1 + 1e-12)
    shuffled = list(speeds)
    random.shuffle(shuffled)
    told = {i: speeds[i] for i in shuffled}
    again = quotas(units * multiple, shuffled, speeds=told, multiple_of=multiple, least=least)
    assert list(again.items()) == list(shares.items())


def test_replicas_of_an_interleaved_pipeline_differ_by_one_microbatch_too() -> None:
    assert quotas(25, range(2), least=2) == {0: 13, 1: 12}
    assert sorted(quotas(2048, range(63), least=8).values()) == [32] * 31 + [33] * 32
    assert quotas(24, range(4), least=8) == {0: 8, 1: 8, 2: 8, 3: 0}


def test_a_straggler_gets_fewer_but_never_nothing() -> None:
    assert quotas(32, range(4), speeds={0: 1, 1: 1, 2: 1, 3: 0.5}) == {0: 10, 1: 9, 2: 9, 3: 4}
    assert quotas(8, range(4), speeds={0: 1, 1: 1, 2: 1, 3: 1e-6}) == {0: 3, 1: 2, 2: 2, 3: 1}


def test_a_replica_that_was_never_measured_counts_as_a_median_one() -> None:
    speeds = {0: 1.0, 1: 2.0, 2: 4.0}
    assert quotas(36, range(4), speeds=speeds) == quotas(36, range(4), speeds=speeds | {3: 2.0})


SEEDS = range(3)
NOISES = 0.03, 0.1, 0.2


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("replicas", [2, 8, 32])
def test_equal_workers_on_a_noisy_host_keep_equal_quotas(replicas: int, noise: float) -> None:
    for seed in SEEDS:
        run = simulate(constant(*[1.0] * replicas), 16 * replicas, 200, noise=noise, seed=seed)
        uneven = [counts for counts in run.quotas if len(set(counts.values())) > 1]
        assert len(uneven) <= 20, f"{len(uneven)} of 200 iterations, {uneven[:3]}"
        assert fmean(run.ratios) < 1.01


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("slowness", [2.0, 3.0])
def test_a_slow_worker_is_found_within_three_iterations(slowness: float, noise: float) -> None:
    for seed in SEEDS:
        run = simulate(constant(1, 1, 1, slowness), 24, 6, noise=noise, outliers=0.0, seed=seed)
        assert all(counts[3] == 6 for counts in run.quotas[:CONFIRM])
        assert run.quotas[CONFIRM][3] < 6


@pytest.mark.parametrize("noise", [0.03, 0.1])
@pytest.mark.parametrize("total", [24, 128])
@pytest.mark.parametrize("slowness", [1.2, 2.0, 3.0])
def test_the_iteration_is_within_a_tenth_of_the_best_for_the_true_speeds(
    slowness: float, total: int, noise: float
) -> None:
    for seed in SEEDS:
        run = simulate(constant(1, 1, 1, slowness), total, 200, noise=noise, seed=seed)
        settled = run.ratios[2 * CONFIRM :]
        assert fmean(settled) < 1.1
        assert sum(ratio > 1.1 for ratio in settled) <= 0.1 * len(settled)


@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_quotas_settle_within_one_microbatch(noise: float) -> None:
    for seed in SEEDS:
        run = simulate(constant(1, 1, 1, 2), 24, 200, noise=noise, outliers=0.0, seed=seed)
        settled = run.quotas[2 * CONFIRM :]
        for replica in range(4):
            counts = [quota[replica] for quota in settled]
            assert max(counts) - min(counts) <= 1, counts
        assert run.changes <= 10


def test_a_worker_that_is_slow_for_two_iterations_now_and_then_moves_nothing() -> None:
    run = simulate(lambda t: {0: 1, 1: 1, 2: 1, 3: 2 if t % 6 > 3 else 1}, 24, 200, noise=0.03, outliers=0.0, seed=1)
    assert run.changes == 0


def test_a_worker_that_becomes_slow_for_long_is_found_within_three_iterations_and_gets_its_work_back() -> None:
    run = simulate(lambda t: {0: 1, 1: 1, 2: 1, 3: 2 if 50 <= t < 100 else 1}, 28, 150, noise=0.03, seed=3)
    shares = [counts[3] for counts in run.quotas]
    assert set(shares[:50]) == {7}
    assert shares[50 + CONFIRM] == 4
    assert set(shares[60:100]) == {4}
    assert set(shares[105:]) == {7}


def test_a_single_outlier_moves_nothing() -> None:
    balance, even = Balance(), quotas(24, range(4))
    for iteration in range(60):
        balance.measured({0: 1.0, 1: 1.01, 2: 0.99, 3: 50.0 if iteration % 9 == 5 else 1.0})
        assert balance.counts(even, 24) == even


def test_what_slows_all_alike_changes_nothing() -> None:
    balance, now = Balance(), {0: 7, 1: 7, 2: 7, 3: 3}
    for iteration in range(20):
        common = 1.0 + iteration
        balance.measured({0: common, 1: common, 2: common, 3: 2 * common})
        now = balance.counts(now, 24)
    assert now == {0: 7, 1: 7, 2: 7, 3: 3}


@given(st.lists(st.lists(st.floats(0.01, 100), min_size=3, max_size=3), min_size=1, max_size=20))
def test_two_that_were_told_the_same_say_the_same_whatever_one_was_told_before_the_plan(rounds) -> None:
    one, other, total = Balance(), Balance(), 30
    one.measured({0: 1.0, 1: 9.0, 5: 0.1})
    counts = quotas(total, range(3))
    for balance in (one, other):
        balance.begin({1: 2.0})
    for seconds in rounds:
        for balance in (one, other):
            balance.measured(dict(enumerate(seconds)))
        assert one.paces == other.paces
        assert one.counts(counts, total) == other.counts(counts, total)


def test_a_plan_brings_the_paces_that_its_members_told() -> None:
    balance = Balance()
    balance.begin({0: 1.0, 3: 2.0})
    assert balance.paces == {0: 1.0, 3: pytest.approx(2.0)}
    for _ in range(3):
        balance.measured({0: 1.0, 1: 1.0, 3: 2.0})
    assert balance.counts({0: 10, 1: 10, 3: 5}, 25) == {0: 10, 1: 10, 3: 5}


@st.composite
def paced(draw: st.DrawFn) -> tuple[dict[int, int], dict[int, float], int]:
    ids = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4, unique=True))
    multiple = draw(st.integers(1, 4))
    return (
        {i: multiple * draw(st.integers(0, 12)) for i in ids},
        {i: draw(st.floats(0.01, 100)) for i in ids},
        multiple,
    )


@given(paced())
def test_quotas_stay_whole_change_by_a_bounded_step_and_only_for_a_gain(case) -> None:
    current, paces, multiple = case
    total = sum(current.values())
    answer = rebalanced(current, paces, total, multiple_of=multiple)
    assert sum(answer.values()) == total
    for replica, count in answer.items():
        units, before = count // multiple, current[replica] // multiple
        assert count % multiple == 0
        assert min(before, max(1, before // STEP)) <= units
        assert units <= before * STEP or not before
    best = quotas(total, list(paces), speeds={i: 1 / pace for i, pace in paces.items()}, multiple_of=multiple)
    now = max(current[i] * paces[i] for i in current)
    then = max(best[i] * paces[i] for i in best)
    assert answer == current or then < now * (1 - GAIN)
    for _ in range(12):
        answer = rebalanced(answer, paces, total, multiple_of=multiple)
    assert max(answer[i] * paces[i] for i in answer) * (1 - GAIN) <= then * (1 + 1e-9)  # wherever they begin


@given(paced(), st.integers(1, 4))
def test_no_replica_of_a_pipeline_falls_below_what_the_pipeline_can_run(case, fewest: int) -> None:
    current, paces, multiple = case
    least = fewest * multiple
    current = {i: count if count >= least else 0 for i, count in current.items()}
    for _ in range(4):
        answer = rebalanced(current, paces, sum(current.values()), multiple_of=multiple, least=least)
        assert sum(answer.values()) == sum(current.values())
        assert all(count % multiple == 0 and (count == 0 or count >= least) for count in answer.values())
        current = answer


def test_the_balance_measures_neither_the_idle_nor_the_dead() -> None:
    assert rebalanced({0: 8, 1: 8, 4: 0}, {0: 1.0, 1: 1.0, 3: 9.0}, 16) == {0: 6, 1: 5, 4: 5}


@pytest.mark.parametrize(
    "call",
    [
        partial(quotas, 8, []),
        partial(quotas, 8, [1, 1]),
        partial(quotas, -4, [0]),
        partial(quotas, 9, [0, 1], multiple_of=2),
        partial(quotas, 8, [0, 1], multiple_of=0),
        *(partial(quotas, 8, [0, 1], speeds={0: bad, 1: 1.0}) for bad in (0.0, -1.0, float("nan"), float("inf"))),
        *(partial(quotas, total, range(2), least=least) for total, least in ((3, 4), (8, 0))),
        partial(rebalanced, {}, {}, 0),
        partial(rebalanced, {0: 4}, {0: 1.0}, 5),
        partial(rebalanced, {0: 3, 1: 1}, {0: 1.0, 1: 1.0}, 4, multiple_of=2),
        *(partial(rebalanced, {0: 4}, {0: bad}, 4) for bad in (0.0, float("nan"))),
    ],
)
def test_nonsense_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        call()
