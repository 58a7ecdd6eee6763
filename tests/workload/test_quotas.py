"""Quotas: the sums, and the optimum (against brute force)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.workload import quotas

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


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, dict[int, float], int, int]:
    """units, speeds, multiple_of, units that a replica runs at least."""
    ids = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4, unique=True))
    fewest = draw(st.integers(1, 3))
    units = draw(st.sampled_from([0, *range(fewest, 10)]))
    return units, {i: draw(SPEEDS) for i in ids}, draw(st.integers(1, 3)), fewest


@given(pipelines())
def test_a_replica_runs_none_or_as_many_as_its_pipeline_needs_and_no_other_sharing_is_faster(case) -> None:
    units, speeds, multiple, fewest = case
    least = fewest * multiple - (multiple - 1)  # rounded up to whole units
    shares = quotas(units * multiple, list(speeds), speeds=speeds, multiple_of=multiple, least=least)
    assert sum(shares.values()) == units * multiple
    assert all(count % multiple == 0 and (count == 0 or count >= least) for count in shares.values())
    enough = units >= fewest * len(speeds)
    best = min(
        time({i: part * multiple for i, part in zip(speeds, parts, strict=True)}, speeds)
        for parts in sharings(units, len(speeds), fewest if enough else 0)
        if all(part == 0 or part >= fewest for part in parts)
    )
    assert time(shares, speeds) <= best * (1 + 1e-12)
    shuffled = dict(reversed(speeds.items()))
    assert quotas(units * multiple, list(shuffled), speeds=shuffled, multiple_of=multiple, least=least) == shares


def test_replicas_of_an_interleaved_pipeline_differ_by_one_microbatch_too() -> None:
    assert quotas(25, range(2), least=2) == {0: 13, 1: 12}
    assert sorted(quotas(2048, range(63), least=8).values()) == [32] * 31 + [33] * 32
    assert quotas(24, range(4), least=8) == {0: 8, 1: 8, 2: 8, 3: 0}


@pytest.mark.parametrize(("total", "least"), [(3, 4), (8, 0)])
def test_fewer_microbatches_than_a_pipeline_can_run_are_refused(total: int, least: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        quotas(total, range(2), least=least)


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
