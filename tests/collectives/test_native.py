"""The backend's own collectives: one operation under way, bounded scratch, whole results whatever is revoked when.

The backend here is one in this process whose operations end when the test lets them: an operation takes effect at all
members when all have enqueued it; a member *sees* its first ``limit`` operations end, and no more until the limit is
raised.  After a revocation every operation counts as done, and what was not seen has left garbage (NaN) in its output,
as NCCL may.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.ledger import Bucket, Ledger, Reduced, Span
from recover_megatron.collectives.native import ALIGNED_BYTES, Message, NativeBackend, NativeGroup, Operation, rounds
from recover_megatron.collectives.nccl import library
from recover_megatron.collectives.ring.progress import ProgressThread
from recover_megatron.collectives.ring.schedule import within
from tests.collectives.together import DEADLINE, PlainEpoch, together
from tests.doubles.nccl import library as nccl_double


@dataclass
class Asked:
    """What one member enqueued."""

    kind: str
    outputs: list[torch.Tensor]
    sources: list[torch.Tensor]
    to: tuple[int, ...] = ()
    of: tuple[int, ...] = ()


class World:
    """The members' common side.  ``asked``: by rank, what it enqueued, in order.  ``limits``: by rank."""

    def __init__(self, size: int, limits: Sequence[int] | None = None) -> None:
        self.size = size
        self.limits = [1 << 30] * size if limits is None else list(limits)
        self.asked: list[list[Asked]] = [[] for _ in range(size)]
        self.performed = 0
        self.changed = threading.Condition()

    def enqueue(self, rank: int, asked: Asked) -> int:
        with self.changed:
            self.asked[rank].append(asked)
            while all(len(member) > self.performed for member in self.asked):
                self._perform([member[self.performed] for member in self.asked])
                self.performed += 1
            self.changed.notify_all()
            return len(self.asked[rank]) - 1

    def let(self, limit: int) -> None:
        """Every member may see so many operations end."""
        with self.changed:
            self.limits = [limit] * self.size
            self.changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE)

    def stuck(self, rank: int, total: int) -> bool:
        """Whether ``rank`` waits for an operation that it does not see end, or has enqueued all of ``total``."""
        return len(self.asked[rank]) > min(self.limits[rank], self.performed) or len(self.asked[rank]) == total

    def _perform(self, members: Sequence[Asked]) -> None:
        assert len({member.kind for member in members}) == 1, "the members enqueued different operations"
        if members[0].kind == "reduce_scatter":
            total = sum(member.sources[0] for member in members).chunk(self.size)
            for member, part in zip(members, total, strict=True):
                member.outputs[0].copy_(part)
        elif members[0].kind == "all_gather":
            everything = torch.cat([member.sources[0] for member in members])
            for member in members:
                member.outputs[0].copy_(everything)
        else:
            for rank, member in enumerate(members):
                for other, output in zip(member.of, member.outputs, strict=True):
                    output.copy_(members[other].sources[members[other].to.index(rank)])


class HeldBackend(NativeBackend):
    def __init__(self, world: World, rank: int, cancel_token: CancelToken) -> None:
        self._world = world
        self._rank = rank
        self._cancel_token = cancel_token
        cancel_token.on_cancel(self._spoil)

    def over(self, number: int) -> bool:
        seen = number < min(self._world.performed, self._world.limits[self._rank])
        return seen or self._cancel_token.cancelled

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        return self._enqueue(Asked("reduce_scatter", [output], [source]))

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        return self._enqueue(Asked("all_gather", [output], [source]))

    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        to, of = tuple(rank for _, rank in sends), tuple(rank for _, rank in receives)
        return self._enqueue(Asked("transfer", [tensor for tensor, _ in receives], [t for t, _ in sends], to, of))

    def _enqueue(self, asked: Asked) -> Operation:
        self._cancel_token.check()
        return self._world.enqueue(self._rank, asked)

    def wait(self, operation: Operation) -> None:
        self._world.until(lambda: self.over(operation))
        self._cancel_token.check()

    def settle(self) -> None:
        return None

    def close(self) -> None:
        return None

    def _spoil(self) -> None:
        with self._world.changed:
            for asked in self._world.asked[self._rank][self._world.limits[self._rank] :]:
                for output in asked.outputs:
                    output.fill_(torch.nan)
            self._world.changed.notify_all()


class Members:
    """The groups of one epoch, over one world; use as a context."""

    def __init__(self, world: World, number: int = 1) -> None:
        self.world = world
        self.epochs = [PlainEpoch(number, list(range(world.size)), rank) for rank in range(world.size)]
        self.groups: list[NativeGroup] = []
        for rank, epoch in enumerate(self.epochs):
            token = CancelToken(number)
            epoch.on_revoke(token.cancel)
            progress = ProgressThread(token, "of a test")
            self.groups.append(NativeGroup(epoch, progress, HeldBackend(world, rank, token)))

    def each(self, work: Callable[[NativeGroup], Any]) -> list[Any]:
        """What ``work`` returns at each member, in a thread each."""
        with ThreadPoolExecutor(self.world.size) as pool:
            futures = [pool.submit(work, group) for group in self.groups]
            return [future.result(DEADLINE) for future in futures]

    def revoke(self) -> None:
        for epoch in self.epochs:
            epoch.revoke("the test ends it")

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *error: object) -> None:
        self.revoke()
        for group in self.groups:
            group.close()


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
    together(4, over_nccl, collective="native")


def test_an_operation_is_enqueued_when_the_one_before_is_over_however_many_buckets_are_handed_in() -> None:
    world = World(2, limits=[0, 0])
    with Members(world) as members:
        buckets = [[Bucket(gradient(rank, 100)) for _ in range(3)] for rank in range(2)]
        handles = [
            [group.all_reduce(bucket) for bucket in mine] for group, mine in zip(members.groups, buckets, strict=True)
        ]
        for over in range(3 * PER_BUCKET):
            world.until(lambda enqueued=over + 1: all(len(asked) == enqueued for asked in world.asked))
            for its, mine in zip(handles, buckets, strict=True):
                assert [bucket.ledger.complete for bucket in mine] == [at < over // PER_BUCKET for at in range(3)]
                assert not its[over // PER_BUCKET].done()
            world.let(over + 1)
        for its, mine in zip(handles, buckets, strict=True):
            for handle, bucket in zip(its, mine, strict=True):
                handle.wait(DEADLINE)
                assert torch.equal(bucket.flat, total(2, 100))


@pytest.mark.parametrize("size", [2, 5])
def test_scratch_is_at_most_one_bucket_however_many_are_handed_in(size: int) -> None:
    sizes = [1000 + 97 * number for number in range(12)]
    bound = max(sizes) * 4 + size * ALIGNED_BYTES

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
