"""Which samples a microbatch has: those that Megatron's own samplers give the rank whose it is."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.megatron_hooks.microbatches import InOrder, InTurn, Shuffled


def megatrons(total: int, size: int, ranks: int, *, sharded: bool, rounds: int, consumed: int = 0) -> list[list[int]]:
    """The samples of the microbatches of ``rounds`` rounds, one of each rank in turn."""
    from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler

    def of(rank: int) -> list[list[int]]:
        sampler = MegatronPretrainingRandomSampler(None, total, consumed, size, rank, ranks, sharded)
        endless = itertools.chain.from_iterable(itertools.repeat(sampler))
        return list(itertools.islice(endless, rounds))

    return [batch for each in zip(*map(of, range(ranks)), strict=True) for batch in each]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("total", "size", "ranks"), [(24, 2, 3), (26, 2, 3), (13, 1, 4), (15, 1, 4), (22, 2, 4), (100, 3, 2)]
)
def test_shuffled_is_megatrons_order_over_several_epochs(total: int, size: int, ranks: int, sharded: bool) -> None:
    order = Shuffled(total, size, ranks, sharded=sharded)
    rounds = 3 * order.epoch // order.round
    ours = [order.samples(first) for first in range(0, rounds * order.round, size)]
    assert ours == megatrons(total, size, ranks, sharded=sharded, rounds=rounds)
    later = order.epoch + order.round
    again = megatrons(total, size, ranks, sharded=sharded, rounds=1, consumed=later)
    assert [order.samples(later + rank * size) for rank in range(ranks)] == again


@pytest.mark.slow
@pytest.mark.parametrize(("total", "ranks"), [(12, 3), (13, 3), (14, 3), (5, 5), (9, 1)])
def test_in_turn_is_megatrons_order_of_full_validation_over_several_evaluations(total: int, ranks: int) -> None:
    from megatron.training.datasets.data_samplers import MegatronFullValidationSampler

    samplers = [MegatronFullValidationSampler(total, rank, ranks) for rank in range(ranks)]
    order = InTurn(total, ranks)
    assert order.rounds == max(map(len, samplers))
    endless = [itertools.chain.from_iterable(itertools.repeat(sampler)) for sampler in samplers]
    expected = [next(endless[first % ranks]) for first in range(4 * total)]
    assert [order.samples(first) for first in range(4 * total)] == expected


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 60), st.booleans())
def test_an_epoch_has_no_sample_twice(size: int, ranks: int, more: int, sharded: bool) -> None:
    total = size * ranks + more
    order = Shuffled(total, size, ranks, sharded=sharded)
    seen = [sample for first in range(0, order.epoch, size) for sample in order.samples(first) or []]
    assert len(seen) == order.epoch == len(set(seen))
    assert max(seen) < total


def test_in_order_ends_with_the_data_set() -> None:
    order = InOrder(7, 3)
    assert [order.samples(first) for first in (0, 3, 6)] == [[0, 1, 2], [3, 4, 5], None]


def test_a_data_set_of_less_than_one_round_is_refused() -> None:
    with pytest.raises(ValueError, match="3 samples are not enough for one microbatch of 2 on each of 2 ranks"):
        Shuffled(3, 2, 2, sharded=True)
