"""The backend's own collectives: several buckets under way, bounded scratch, whole results whatever is revoked when."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.ledger import Bucket, Ledger, Reduced, Span
from recover_megatron.collectives.native import ALIGNED_BYTES, NativeGroup, rounds
from recover_megatron.collectives.nccl import library
from recover_megatron.collectives.ring.schedule import within
from tests.collectives.held_backend import Members, World
from tests.collectives.together import DEADLINE, together
from tests.doubles.nccl import library as nccl_double

PER_BUCKET = 2
"""Operations of an all-reduce."""


def gradient(rank: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) % 7 + 100 * rank


def total(size: int, numel: int) -> torch.Tensor:
    return sum((gradient(rank, numel) for rank in range(size)), torch.zeros(numel))


def shards_of(cuts: list[int], numel: int) -> list[list[Span]]:
    """Of each rank what lies between two cuts."""
    bounds = [0, *sorted(cuts), numel]
    return [[Span(a, b)] if a < b else [] for a, b in pairwise(bounds)]


def owned(shards: list[list[Span]], rank: int, shadows: int) -> list[Span]:
    """What ``rank`` has REDUCED in the end."""
    return [span for hop in range(shadows + 1) for span in shards[(rank - hop) % len(shards)]]


def whole(flat: torch.Tensor, spans: list[Span]) -> torch.Tensor:
    return torch.cat([flat[span.start : span.stop] for span in spans] or [flat[:0]])


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(0, 500), st.integers(0, 5), st.data())
def test_each_member_gets_its_own_shard_and_those_that_it_shadows(
    size: int, numel: int, shadows: int, data: st.DataObject
) -> None:
    shards = shards_of(data.draw(st.lists(st.integers(0, numel), min_size=size - 1, max_size=size - 1)), numel)
    shadows = min(shadows, size - 1)

    def work(group: NativeGroup) -> None:
        bucket = Bucket(gradient(group.rank, numel))
        group.reduce_scatter(bucket, shards, shadows=range(1, shadows + 1)).wait(DEADLINE)
        mine = owned(shards, group.rank, shadows)
        assert torch.equal(whole(bucket.flat, mine), whole(total(size, numel), mine))
        assert sum(map(len, bucket.ledger.reduced)) == sum(map(len, mine))
        rest = list(bucket.ledger.local)
        assert torch.equal(whole(bucket.flat, rest), whole(gradient(group.rank, numel), rest))

    with Members(World(size)) as members:
        members.each(work)


def test_a_shadows_chunk_goes_to_its_holder_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(4)
    with Members(world) as members:
        members.each(
            lambda group: group.reduce_scatter(Bucket(gradient(group.rank, 64)), shadows=(1, 2)).wait(DEADLINE)
        )
    for rank, asked in enumerate(world.asked):
        assert [operation.kind for operation in asked] == ["reduce_scatter", "transfer"]
        assert asked[1].to == ((rank + 1) % 4, (rank + 2) % 4)
        assert asked[1].of == ((rank - 1) % 4, (rank - 2) % 4)
        assert all(tensor.numel() == 16 for tensor in asked[1].sources + asked[1].outputs)

    def over_nccl(group: Group) -> None:
        bucket = Bucket(gradient(group.rank, 66))
        shards = shards_of([20, 30, 30], 66)
        group.reduce_scatter(bucket, shards, shadows=(1, 2)).wait(DEADLINE)
        mine = owned(shards, group.rank, 2)
        assert torch.equal(whole(bucket.flat, mine), whole(total(4, 66), mine))

    double = nccl_double()
    monkeypatch.setattr(library, "load", lambda: double)
    together(4, over_nccl, collective="native", transport_kind="nccl")


def test_two_buckets_are_under_way_before_the_first_is_over_and_never_more() -> None:
    world = World(2, limits=[0, 0])

    def enqueued(buckets: int) -> Any:
        return lambda: all(len(asked) == buckets * PER_BUCKET for asked in world.asked)

    with Members(world) as members:
        buckets = [[Bucket(gradient(rank, 100)) for _ in range(5)] for rank in range(2)]
        handles = [[group.all_reduce(mine[0])] for group, mine in zip(members.groups, buckets, strict=True)]
        world.until(enqueued(1))
        for group, mine, its in zip(members.groups, buckets, handles, strict=True):
            its.append(group.all_reduce(mine[1]))  # while the first is under way and nobody lets it end
        world.until(enqueued(2))
        for group, mine, its in zip(members.groups, buckets, handles, strict=True):
            its += [group.all_reduce(bucket) for bucket in mine[2:]]
        world.let(1 * PER_BUCKET)
        world.until(enqueued(3))
        for its, mine in zip(handles, buckets, strict=True):
            its[0].wait(DEADLINE)
            assert mine[0].ledger.complete
            assert not any(handle.done() for handle in its[1:])
            assert not any(bucket.ledger.reduced for bucket in mine[1:])
        assert enqueued(3)(), "a third bucket was begun while two are under way"
        world.let(5 * PER_BUCKET)
        for its, mine in zip(handles, buckets, strict=True):
            for handle, bucket in zip(its, mine, strict=True):
                handle.wait(DEADLINE)
                assert torch.equal(bucket.flat, total(2, 100))


@pytest.mark.parametrize("size", [2, 5])
def test_scratch_is_at_most_two_buckets_however_many_are_handed_in(size: int) -> None:
    sizes = [1000 + 97 * number for number in range(12)]
    bound = 2 * (max(sizes) * 4 + size * ALIGNED_BYTES)

    def work(group: NativeGroup) -> None:
        buckets = [Bucket(gradient(group.rank, numel)) for numel in sizes]
        for handle in [group.all_reduce(bucket) for bucket in buckets]:
            handle.wait(DEADLINE)
        everything = [Reduced(0, max(sizes), 1)] if group.rank == 1 else []
        group.pull([Bucket(gradient(1, max(sizes)), Ledger(max(sizes), everything)) for _ in range(3)])
        assert max(sizes) * 4 <= group.scratch_peak <= bound

    with Members(World(size)) as members:
        members.each(work)


def test_buckets_that_lie_as_the_backend_wants_them_are_not_copied_before() -> None:
    world, flats = World(4), [gradient(rank, 4 * 32) for rank in range(4)]
    with Members(world) as members:
        members.each(lambda group: group.all_reduce(Bucket(flats[group.rank])).wait(DEADLINE))
    for flat, (reduce, gather) in zip(flats, world.asked, strict=True):
        assert reduce.sources[0].data_ptr() == flat.data_ptr()
        assert gather.outputs[0].data_ptr() != flat.data_ptr()


@given(
    st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(0, 60), min_size=size, max_size=size)),
    st.integers(1, 40),
    st.integers(0, 60),
)
def test_rounds_share_every_element_out_once_in_rows_that_are_short_enough(
    lengths: list[int], longest: int, hole: int
) -> None:
    cuts = [sum(lengths[:at]) for at in range(1, len(lengths))]
    numel = sum(lengths)
    spans = [Span(0, min(hole, numel)), Span(min(hole + 5, numel), numel)]
    chunks = within([span for span in spans if len(span)], shards_of(cuts, numel))
    elements: list[list[int]] = [[] for _ in chunks]
    for part in rounds(chunks, longest):
        assert 0 < part.width <= longest
        for rank, mine in enumerate(elements):
            copies = list(part.copies(rank, rank))
            mine += [element for copy in copies for element in range(copy.bucket, copy.bucket + copy.length)]
            in_row = [at for copy in copies for at in range(copy.scratch, copy.scratch + copy.length)]
            assert in_row == list(range(rank * part.width, rank * part.width + len(in_row)))
            assert len(in_row) <= part.width
    assert elements == [[e for span in chunk for e in range(span.start, span.stop)] for chunk in chunks]


def cut_off(limits: list[int], numels: list[int], operation: str) -> None:
    """Members that see ``limits`` operations end are revoked; what they hold then, and after the next epoch."""
    size = len(limits)
    buckets = [[Bucket(gradient(rank, numel)) for numel in numels] for rank in range(size)]
    shards = [shards_of([numel // 3, 2 * numel // 3], numel) for numel in numels]

    def begin(group: NativeGroup) -> list[Any]:
        if operation == "all_reduce":
            return [group.all_reduce(bucket) for bucket in buckets[group.rank]]
        return [
            group.reduce_scatter(bucket, its, shadows=(1,))
            for bucket, its in zip(buckets[group.rank], shards, strict=True)
        ]

    with Members(World(size, limits)) as members:
        handles = [begin(group) for group in members.groups]
        world, every = members.world, PER_BUCKET * len(numels)
        world.until(lambda: all(world.stuck(rank, every) for rank in range(size)))
        members.revoke()
        for its, mine in zip(handles, buckets, strict=True):
            for handle, bucket in zip(its, mine, strict=True):
                try:
                    handle.wait(DEADLINE)
                    assert bucket.ledger.reduced
                except EpochRevoked:
                    pass
    for rank, mine in enumerate(buckets):
        for bucket, its in zip(mine, shards, strict=True):
            numel = bucket.ledger.numel
            finished = [Span(0, numel)] if operation == "all_reduce" else owned(its, rank, 1)
            reduced = [element for span in bucket.ledger.reduced for element in range(span.start, span.stop)]
            assert reduced in ([], sorted(e for span in finished for e in range(span.start, span.stop)))
            for span in bucket.ledger.reduced:
                assert torch.equal(bucket.flat[span.start : span.stop], total(size, numel)[span.start : span.stop])
            for span in bucket.ledger.local:
                assert torch.equal(bucket.flat[span.start : span.stop], gradient(rank, numel)[span.start : span.stop])

    def resume(group: NativeGroup) -> None:
        group.pull(buckets[group.rank])
        for handle in [group.all_reduce(bucket) for bucket in buckets[group.rank]]:
            handle.wait(DEADLINE)

    with Members(World(size), number=2) as members:
        members.each(resume)
    for mine in buckets:
        assert all(torch.equal(bucket.flat, total(size, bucket.ledger.numel)) for bucket in mine)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("limit", range(PER_BUCKET * 3 + 1))
def test_a_revocation_at_any_point_leaves_each_bucket_whole(operation: str, limit: int) -> None:
    """At the same point at all members, and at points drawn for each."""
    numels = [60, 63, 300]
    cut_off([limit] * 3, numels, operation)
    draw = random.Random(f"{operation} {limit}")
    for _ in range(3):
        cut_off([draw.randrange(PER_BUCKET * 3 + 1) for _ in range(3)], numels, operation)
