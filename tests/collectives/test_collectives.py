"""Collectives when nobody dies: sums, their order, their bits, memory, and what is refused."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recover_megatron.collectives.chunks import even_chunks
from recover_megatron.collectives.epoch import CollectiveMismatch, EpochRevoked
from recover_megatron.collectives.gloo.abortable_groups import GlooGroups
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import cancel_token_of, open_group
from recover_megatron.collectives.ledger import Bucket, Ledger, Reduced, Span
from recover_megatron.collectives.nccl import library
from recover_megatron.collectives.ring.executor import RingGroup, Tuning
from tests.collectives.expected import elements, in_order_of_the_ring
from tests.collectives.together import DEADLINE, PlainEpoch, together
from tests.doubles.nccl import library as nccl_double
from tests.harness.waiting import eventually

SMALL = Tuning(segment_bytes=256, least_bytes=16)
WAYS = {
    "shared-memory": {"transport_kind": "tcp", "tuning": SMALL},
    "tcp": {"transport_kind": "tcp-inline", "tuning": SMALL},
    "staged": {"transport_kind": "tcp", "tuning": SMALL, "staged": True},
    "nccl": {"collective": "native"},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@pytest.fixture(autouse=True)
def _nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", cache(nccl_double))


@pytest.fixture
def store(tmp_path: Path) -> dist.Store:
    return dist.FileStore(str(tmp_path / "store"), -1)


def randoms(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def integers(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-8, 8, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def all_reduce(group: Group, *buckets: Bucket) -> list[torch.Tensor]:
    """All in flight at a time."""
    for handle in [group.all_reduce(bucket) for bucket in buckets]:
        handle.wait(DEADLINE)
    return [bucket.flat for bucket in buckets]


@ways
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_reduce_sums_buckets_of_every_size(store: Any, way: dict, size: int) -> None:
    sizes = [0, 1, 2, 3, 100, 1001]

    def work(group: Group) -> list[torch.Tensor]:
        buckets = [Bucket(integers(group.rank, numel)) for numel in sizes]
        sums = all_reduce(group, *buckets)
        assert all(bucket.ledger.complete for bucket in buckets)
        assert all(span.epoch == 1 for bucket in buckets for span in bucket.ledger.reduced)
        return sums

    for results in together(size, work, store, **way):
        for numel, result in zip(sizes, results, strict=True):
            assert torch.equal(result, sum(integers(rank, numel) for rank in range(size)))


@pytest.mark.parametrize("transport_kind", ["tcp", "tcp-inline"])
@pytest.mark.parametrize(("size", "depth", "shadows"), [(5, 2, 0), (6, 2, 1), (9, 4, 0)])
def test_a_ring_whose_slots_are_full_of_sent_partial_sums_goes_on(
    transport_kind: str, size: int, depth: int, shadows: int
) -> None:
    """The case of the model in test_schedule: as many partial sums as slots, in hundreds of segments a member."""
    tuning, buckets, numel = Tuning(segment_bytes=64, least_bytes=64, depth=depth), 8, size * depth * 8 * 16

    def work(group: Group) -> list[torch.Tensor]:
        mine = [Bucket(integers(group.rank, numel)) for _ in range(buckets)]
        for handle in [group.reduce_scatter(bucket, shadows=range(1, shadows + 1)) for bucket in mine]:
            handle.wait(DEADLINE)
        length = mine[0].flat.numel() // size
        return [bucket.flat[group.rank * length : (group.rank + 1) * length] for bucket in mine]

    wanted = sum(integers(rank, numel) for rank in range(size)).chunk(size)
    for rank, shards in enumerate(together(size, work, transport_kind=transport_kind, tuning=tuning)):
        assert all(torch.equal(shard, wanted[rank]) for shard in shards)


@settings(max_examples=60)
@given(
    size=st.integers(1, 6),
    cuts=st.lists(st.integers(0, 500), max_size=10).map(sorted),
    even=st.booleans(),
    shadows=st.integers(0, 5),
    way=st.sampled_from(sorted(WAYS)),
    random=st.randoms(use_true_random=False),
)
@example(size=4, cuts=[0, 20, 30, 50, 110, 120], even=False, shadows=2, way="nccl", random=Random(1))
def test_a_member_gets_the_sums_of_its_shard_and_of_those_it_shadows_and_keeps_the_rest(
    size: int, cuts: list[int], even: bool, shadows: int, way: str, random: Random
) -> None:
    """Shards are even ones, or any: empty, in several parts, not in the order of the ranks."""
    numel, shadows = max(cuts, default=0), min(shadows, size - 1)
    shards: list[list[Span]] = [[] for _ in range(size)]
    for start, stop in pairwise([0, *cuts]):
        shards[random.randrange(size)] += [Span(start, stop)] if start < stop else []
    if even:
        shards = [[Span(rank * numel // size, (rank + 1) * numel // size)] for rank in range(size)]

    def work(group: Group) -> None:
        wanted = integers(group.rank, numel)
        bucket = Bucket(wanted.clone())
        group.reduce_scatter(bucket, None if even else shards, shadows=range(1, shadows + 1)).wait(DEADLINE)
        owned = [span for behind in range(shadows + 1) for span in shards[(group.rank - behind) % size]]
        assert elements(bucket.ledger.reduced) == sorted(elements(owned))
        total = sum(integers(rank, numel) for rank in range(size))
        for span in owned:
            wanted[span.start : span.stop] = total[span.start : span.stop]
        assert torch.equal(bucket.flat, wanted)

    together(size, work, **WAYS[way])


@ways
def test_all_gather_gives_every_shard_to_all(store: Any, way: dict) -> None:
    def work(group: Group) -> torch.Tensor:
        bucket = Bucket(torch.full((100,), float(group.rank)))
        group.all_gather(bucket).wait(DEADLINE)
        assert bucket.ledger.complete
        return bucket.flat

    wanted = torch.cat([torch.full((25,), float(rank)) for rank in range(4)])
    assert all(torch.equal(result, wanted) for result in together(4, work, store, **way))


@ways
def test_what_is_missing_after_a_pull_comes_from_the_shards_of_those_who_are_left(store: Any, way: dict) -> None:
    """A part that arrived somewhere in an earlier epoch lies inside the shard of whoever speaks for it now."""

    def work(group: Group) -> torch.Tensor:
        bucket = Bucket(torch.full((100,), float(group.rank)))
        if group.rank == 2:
            bucket.flat[10:20] = 7.0
            bucket.ledger.mark(Span(10, 20), 1)
        group.pull([bucket])
        group.all_gather(bucket, [[Span(0, 60)], [], [Span(60, 100)]], missing=True).wait(DEADLINE)
        assert bucket.ledger.complete
        return bucket.flat

    wanted = torch.cat([torch.zeros(10), torch.full((10,), 7.0), torch.zeros(40), torch.full((40,), 2.0)])
    assert all(torch.equal(result, wanted) for result in together(3, work, store, **way))


@ways
def test_numbers_are_exchanged_bit_for_bit(store: Any, way: dict) -> None:
    def work(group: Group) -> list[list[float]]:
        return group.exchange_doubles([0.1 * group.rank, float("inf"), -0.0])

    for rows in together(3, work, store, **way):
        assert rows == [[0.1 * rank, float("inf"), -0.0] for rank in range(3)]


@ways
def test_pull_gives_what_is_reduced_anywhere_and_keeps_its_epoch(store: Any, way: dict) -> None:
    held = {0: [Reduced(0, 10, 3)], 1: [Reduced(5, 30, 3), Reduced(40, 50, 5)], 2: []}

    def work(group: Group) -> None:
        own = torch.full((60,), float(group.rank))
        bucket = Bucket(own.clone(), Ledger(60, held[group.rank]))
        for span in bucket.ledger.reduced:
            bucket.flat[span.start : span.stop] = 100.0 + span.epoch
        other = Bucket(torch.zeros(7))
        group.pull([bucket, other])
        assert bucket.ledger.reduced == (Reduced(0, 30, 3), Reduced(40, 50, 5))
        own[0:30], own[40:50] = 103.0, 105.0
        assert torch.equal(bucket.flat, own)
        assert other.ledger.reduced == ()
        # What is left is reduced among the members, and only that.
        group.all_reduce(bucket).wait(DEADLINE)
        own[30:40], own[50:60] = 3.0, 3.0
        assert torch.equal(bucket.flat, own)
        assert bucket.ledger.reduced == (Reduced(0, 30, 3), Reduced(30, 40, 1), Reduced(40, 50, 5), Reduced(50, 60, 1))

    together(3, work, store, **way)


@pytest.mark.parametrize("numel", [200, 4000, 300_000])
@pytest.mark.parametrize("size", [2, 4, 7])
@pytest.mark.parametrize("transport_kind", ["tcp", "tcp-inline"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scratch_is_at_most_two_chunks_and_two_segments(
    store: Any, transport_kind: str, size: int, numel: int, dtype: torch.dtype
) -> None:
    """In bytes of what travels, and of all buckets in flight together, not of each."""

    def work(group: Group) -> None:
        assert isinstance(group, RingGroup)
        all_reduce(group, *(Bucket(torch.ones(numel, dtype=dtype)) for _ in range(4)))
        chunk = -(-numel // size)
        segment = group.segment_elements(even_chunks([Span(0, numel)], size), dtype.itemsize)
        assert 0 < group.scratch_peak <= dtype.itemsize * (2 * chunk + 2 * segment)

    together(size, work, store, transport_kind=transport_kind, tuning=Tuning(segment_bytes=64 << 10))


def _all_reduce_what_is_left(group: Group, bucket: Bucket) -> None:
    """Somebody forgot to pull."""
    bucket.ledger.mark(Span(0, 100), 3)
    group.all_reduce(bucket).wait(DEADLINE)


OTHERS: dict[str, Any] = {
    "reduce-scatter": lambda group, bucket: group.reduce_scatter(bucket).wait(DEADLINE),
    "exchange": lambda group, _: group.exchange([1, 2, 3]),
    "another ledger": _all_reduce_what_is_left,
}


@pytest.mark.parametrize("transport_kind", ["tcp", "tcp-inline"])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_members_that_do_different_things_are_told_so(store: Any, transport_kind: str, other: Any) -> None:
    """A neighbour that speaks out of turn: the header does not match, nothing of it reaches the bucket."""

    def work(group: Group) -> str:
        own = torch.full((1000,), float(group.rank))
        bucket = Bucket(own.clone())
        try:
            if group.rank:
                group.all_reduce(bucket).wait(DEADLINE)
            else:
                other(group, bucket)
        except (CollectiveMismatch, EpochRevoked) as error:
            assert all(span.epoch == 3 for span in bucket.ledger.reduced)
            assert torch.equal(bucket.flat, own)
            return type(error).__name__
        return "returned"

    ends = together(3, work, store, transport_kind=transport_kind)
    assert "CollectiveMismatch" in ends
    assert "returned" not in ends


@ways
def test_a_revocation_while_nothing_is_in_flight_ends_the_next_operation(store: Any, way: dict) -> None:
    both = threading.Barrier(2)

    def work(group: Group) -> None:
        bucket = Bucket(torch.ones(10))
        group.all_reduce(bucket).wait(DEADLINE)
        both.wait(DEADLINE)  # who is done first would revoke what is in flight to the other
        group.abort("for the test")
        assert group.revoked
        with pytest.raises(EpochRevoked, match="epoch 1 was revoked: ") as caught:
            group.all_reduce(Bucket(torch.ones(10))).wait(DEADLINE)
        assert caught.value.epoch == 1
        assert bucket.ledger.complete

    together(2, work, store, **way)


@ways
def test_a_revocation_wakes_a_member_that_waits_for_a_silent_one(store: Any, way: dict) -> None:
    """Rank 1 never comes to its collective; the others are woken by their own revocation alone."""
    waiting = threading.Barrier(3)

    def work(group: Group) -> None:
        bucket = Bucket(torch.full((50,), 1.0 + group.rank))
        if group.rank == 1:
            waiting.wait(DEADLINE)
            return
        handle = group.all_reduce(bucket)
        assert not handle.done()
        threading.Timer(0.05, group.abort, ["for the test"]).start()
        with pytest.raises(EpochRevoked, match=r"for the test|broke"):
            handle.wait(DEADLINE)
        assert torch.equal(bucket.flat, torch.full((50,), 1.0 + group.rank)) or bucket.ledger.reduced
        waiting.wait(DEADLINE)

    together(3, work, store, **way)


def test_a_wait_may_be_given_up_and_taken_up_again(store: Any) -> None:
    started = threading.Event()

    def work(group: Group) -> None:
        if group.rank == 1:
            started.wait(DEADLINE)
        bucket = Bucket(torch.ones(10))
        handle = group.all_reduce(bucket)
        if group.rank == 0:
            with pytest.raises(TimeoutError):
                handle.wait(0.01)
            started.set()
        handle.wait(DEADLINE)
        assert handle.done()
        assert bucket.flat.tolist() == [2.0] * 10

    together(2, work, store)


def test_a_group_that_is_closed_takes_nothing_more(store: Any) -> None:
    def work(group: Group) -> None:
        group.close()
        group.close()
        with pytest.raises(RuntimeError, match="closed"):
            group.all_reduce(Bucket(torch.ones(3)))

    together(2, work, store)


def test_a_member_may_leave_when_its_own_part_is_done(store: Any) -> None:
    """The first to finish closes its group at once; the others still get everything."""

    def reduce_once(group: Group) -> list[float]:
        (flat,) = all_reduce(group, Bucket(torch.ones(3000)))
        group.close()
        return flat.tolist()

    for _ in range(20):
        results = together(4, reduce_once, store=None, transport_kind="tcp-inline", tuning=SMALL)
        assert all(result == [4.0] * 3000 for result in results)


@pytest.mark.parametrize(
    ("shards", "told"),
    [([[Span(0, 10)]], "2 members"), ([[Span(0, 6)], [Span(5, 10)]], "overlap"),
     ([[Span(0, 4)], [Span(5, 10)]], "gap"), ([[Span(0, 4)], [Span(4, 9)]], "end at element 9")],
)  # fmt: skip
def test_shards_that_are_no_partition_are_refused(store: Any, shards: list[list[Span]], told: str) -> None:
    def work(group: Group) -> None:
        with pytest.raises(ValueError, match=told):
            group.reduce_scatter(Bucket(torch.ones(10)), shards)

    together(2, work, store)


def test_a_bucket_must_be_contiguous() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Bucket(torch.ones(4, 4).t()[1:])


def test_gradients_must_be_floating_point_parameters_need_not(store: Any) -> None:
    def work(group: Group) -> list[int]:
        bucket = Bucket(torch.full((6,), group.rank, dtype=torch.uint8))
        with pytest.raises(ValueError, match="floating-point"):
            group.all_reduce(bucket)
        group.all_gather(bucket).wait(DEADLINE)
        return bucket.flat.tolist()

    assert together(2, work, store) == [[0, 0, 0, 1, 1, 1]] * 2


@settings(max_examples=30)
@given(
    size=st.integers(1, 5),
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    segment=st.sampled_from([16, 100, 1024, 1 << 16]),
    depth=st.integers(1, 4),
    way=st.sampled_from(["shared-memory", "tcp", "staged"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_ring_adds_in_the_documented_order_bit_for_bit(
    size: int, sizes: list[int], segment: int, depth: int, way: str, dtype: torch.dtype
) -> None:
    def work(group: Group) -> list[torch.Tensor]:
        return all_reduce(group, *(Bucket(randoms(group.rank, numel, dtype, seed=numel)) for numel in sizes))

    results = together(size, work, **WAYS[way] | {"tuning": Tuning(segment, 16, depth)})
    for at, numel in enumerate(sizes):
        gradients = [randoms(rank, numel, dtype, seed=numel) for rank in range(size)]
        wanted = in_order_of_the_ring(gradients, even_chunks([Span(0, numel)], size))
        for result in results:
            assert torch.equal(result[at].view(torch.uint8), wanted.view(torch.uint8))


def test_an_epoch_that_is_over_before_it_begins_opens_no_group(store: Any) -> None:
    epoch = PlainEpoch(4, [1, 2], 1)
    epoch.revoke("a worker died")
    with pytest.raises(EpochRevoked, match="epoch 4"):
        open_group(epoch, store, name="c", secret=b"s", timeout=DEADLINE)


def _open_gloo(epoch: PlainEpoch, store: Any) -> None:
    """As the groups of a replica are."""
    GlooGroups(0, {"all": [0, 1]}, store, cancel_token_of(epoch), ring="ring/c/1", timeout=DEADLINE)


@pytest.mark.parametrize(
    "open_it",
    [lambda epoch, store: open_group(epoch, store, name="c", secret=b"s", timeout=DEADLINE), _open_gloo],
    ids=["tcp", "gloo"],
)
def test_a_revocation_ends_the_opening_of_a_group(store: Any, open_it: Any) -> None:
    """A member died before it came: nobody waits for it."""
    epoch, ends = PlainEpoch(1, [1, 2], 1), []

    def opening() -> None:
        try:
            open_it(epoch, store)
        except EpochRevoked as error:
            ends.append(error)

    thread = threading.Thread(target=opening)
    thread.start()
    eventually(lambda: store.check(["ring/c/1/0"]))
    epoch.revoke("worker 2 died")
    thread.join(DEADLINE)
    assert [str(error) for error in ends] == ["epoch 1 was revoked: worker 2 died"]


@ways
def test_a_group_whose_epoch_is_over_gives_its_memory_back_without_the_garbage_collector(way: dict) -> None:
    """Training loops switch the collector off, and each epoch opens new groups."""
    done = threading.Barrier(2)

    def work(group: Any) -> list[weakref.ref[Any]]:
        group.all_reduce(Bucket(torch.ones(10))).wait(DEADLINE)
        done.wait(DEADLINE)
        group.abort("the epoch is over")
        return [weakref.ref(group), weakref.ref(group._executor)]

    gc.disable()
    try:
        assert [kept() for its in together(2, work, **way) for kept in its] == [None] * 4
    finally:
        gc.enable()
