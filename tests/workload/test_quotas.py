"""Quotas: the sums, the optimum (against brute force), and the calm of the balance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.workload import balance, quotas

SPEEDS = st.floats(0.01, 100)


def sharings(units: int, replicas: int, least: int) -> Iterator[tuple[int, ...]]:
    """All ways to share ``units`` out, at least ``least`` each."""
    for parts in itertools.product(range(least, units + 1), repeat=replicas):
        if sum(parts) == units:
            yield parts


def time(shares: Mapping[int, int], speeds: Mapping[int, float]) -> float:
    return max(count / speeds[replica] for replica, count in shares.items())


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, dict[int, float], int]:
    ids = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4, unique=True))
    return draw(st.integers(0, 8)), {i: draw(SPEEDS) for i in ids}, draw(st.integers(1, 4))


def test_thirtytwo_microbatches_on_seven_replicas_go_to_the_lower_ids_first() -> None:
    assert list(quotas(32, [8, 1, 2, 3, 5, 6, 7]).items()) == [(1, 5), (2, 5), (3, 5), (5, 5), (6, 4), (7, 4), (8, 4)]


@given(st.integers(0, 200), st.integers(1, 30), st.integers(1, 8))
def test_equal_replicas_differ_by_one_unit_at_most(units: int, replicas: int, multiple: int) -> None:
    shares = quotas(units * multiple, range(replicas), multiple_of=multiple)
    assert sum(shares.values()) == units * multiple
    assert all(count % multiple == 0 for count in shares.values())
    assert max(shares.values()) - min(shares.values()) <= multiple
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


@given(cases())
def test_no_other_sharing_is_faster(case: tuple[int, dict[int, float], int]) -> None:
    units, speeds, multiple = case
    shares = quotas(units * multiple, list(speeds), speeds=speeds, multiple_of=multiple)
    least = 1 if units >= len(speeds) else 0
    assert sum(shares.values()) == units * multiple
    assert all(count % multiple == 0 and count >= least * multiple for count in shares.values())
    best = min(
        time({i: part * multiple for i, part in zip(speeds, parts, strict=True)}, speeds)
        for parts in sharings(units, len(speeds), least)
    )
    assert time(shares, speeds) <= best * (1 + 1e-12)


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_the_arguments_does_not_matter(case: tuple[int, dict[int, float], int], random) -> None:
    units, speeds, multiple = case
    shuffled = list(speeds)
    random.shuffle(shuffled)
    again = quotas(units * multiple, shuffled, speeds={i: speeds[i] for i in shuffled}, multiple_of=multiple)
    shares = quotas(units * multiple, list(speeds), speeds=speeds, multiple_of=multiple)
    assert list(again.items()) == list(shares.items())


def test_a_straggler_gets_fewer_but_never_nothing() -> None:
    assert quotas(32, range(4), speeds={0: 1, 1: 1, 2: 1, 3: 0.5}) == {0: 10, 1: 9, 2: 9, 3: 4}
    assert quotas(8, range(4), speeds={0: 1, 1: 1, 2: 1, 3: 1e-6}) == {0: 3, 1: 2, 2: 2, 3: 1}


def test_a_replica_that_was_never_measured_counts_as_a_median_one() -> None:
    speeds = {0: 1.0, 1: 2.0, 2: 4.0}
    assert quotas(36, range(4), speeds=speeds) == quotas(36, range(4), speeds=speeds | {3: 2.0})


@pytest.mark.parametrize(
    ("total", "replicas", "speeds", "multiple"),
    [
        (8, [], None, 1),
        (8, [1, 1], None, 1),
        (-4, [0], None, 1),
        (9, [0, 1], None, 2),
        (8, [0, 1], None, 0),
        (8, [0, 1], {0: 0.0, 1: 1.0}, 1),
        (8, [0, 1], {0: -1.0, 1: 1.0}, 1),
        (8, [0, 1], {0: float("nan"), 1: 1.0}, 1),
        (8, [0, 1], {0: float("inf"), 1: 1.0}, 1),
    ],
)
def test_nonsense_is_refused(total: int, replicas: list[int], speeds, multiple: int) -> None:
    with pytest.raises(ValueError, match=r".+"):
        quotas(total, replicas, speeds=speeds, multiple_of=multiple)


@st.composite
def noisy(draw: st.DrawFn) -> tuple[int, int, float, list[dict[int, float]]]:
    """Units, multiple_of, threshold, and measurements that differ from the first by what the threshold covers."""
    count = draw(st.integers(1, 5))
    threshold = draw(st.floats(0.02, 0.5))
    first = {i: draw(st.floats(0.1, 10)) for i in range(count)}
    low = (1 - threshold) ** 0.5 * 1.0001
    measurements = [first]
    for _ in range(draw(st.integers(1, 5))):
        common = draw(st.floats(0.5, 2))  # all replicas alike: no reason to change anything
        measurements.append({i: s * common * draw(st.floats(low, 1 / low)) for i, s in first.items()})
    return draw(st.integers(1, 60)), draw(st.integers(1, 3)), threshold, measurements


@given(noisy())
def test_the_balance_never_swings_for_noise_within_the_threshold(case) -> None:
    units, multiple, threshold, (first, *others) = case
    best = quotas(units * multiple, list(first), speeds={i: 1 / s for i, s in first.items()}, multiple_of=multiple)
    for seconds in others:
        assert balance(best, seconds, units * multiple, multiple_of=multiple, threshold=threshold) == best


@given(cases(), cases(), st.floats(0, 0.9))
def test_the_balance_changes_only_for_a_gain_beyond_the_threshold(old, new, threshold: float) -> None:
    units, speeds, multiple = old
    total = units * multiple
    current = quotas(total, list(speeds), speeds=speeds, multiple_of=multiple)
    factors = itertools.cycle(new[1].values())
    seconds = {i: 1 / (speed * next(factors)) for i, speed in speeds.items()}
    measured = {i: 1 / s for i, s in seconds.items()}
    answer = balance(current, seconds, total, multiple_of=multiple, threshold=threshold)
    best = quotas(total, list(speeds), speeds=measured, multiple_of=multiple)
    gain = 1 - time(best, measured) / time(current, measured) if total else 0
    assert answer == (best if gain > threshold + 1e-9 else current) or abs(gain - threshold) <= 1e-9
    assert sum(answer.values()) == total


def test_the_balance_takes_work_from_a_straggler() -> None:
    assert balance({0: 8, 1: 8}, {0: 0.1, 1: 0.1}, 16) == {0: 8, 1: 8}
    assert balance({0: 8, 1: 8}, {0: 0.1, 1: 0.105}, 16) == {0: 8, 1: 8}
    assert balance({0: 8, 1: 8}, {0: 0.1, 1: 0.3}, 16) == {0: 12, 1: 4}


def test_the_balance_measures_neither_the_idle_nor_the_dead() -> None:
    assert balance({0: 8, 1: 8, 4: 0}, {0: 0.1, 1: 0.1, 3: 9.0}, 16) == {0: 6, 1: 5, 4: 5}


@pytest.mark.parametrize(
    ("current", "seconds", "total", "multiple", "threshold"),
    [
        ({}, {}, 0, 1, 0.1),
        ({0: 4}, {0: 1.0}, 5, 1, 0.1),
        ({0: 3, 1: 1}, {0: 1.0, 1: 1.0}, 4, 2, 0.1),
        ({0: 4}, {0: 0.0}, 4, 1, 0.1),
        ({0: 4}, {0: 1.0}, 4, 1, 1.0),
    ],
)
def test_the_balance_refuses_nonsense(current, seconds, total: int, multiple: int, threshold: float) -> None:
    with pytest.raises(ValueError, match=r".+"):
        balance(current, seconds, total, multiple_of=multiple, threshold=threshold)
