"""Native collectives over NCCL's double: one operation under way, bounded scratch, whole results whatever is revoked
when.  What all kinds of group have in common is in test_collectives.py."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.collectives.chunks import within
from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.ledger import Bucket, Ledger, Reduced, Span
from recover_megatron.collectives.native import ALIGNED_BYTES, Message, Operation, rounds
from recover_megatron.collectives.nccl import communicator, library, resources
from recover_megatron.collectives.nccl.resources import NcclNative
from tests.collectives.expected import elements
from tests.collectives.together import DEADLINE, together
from tests.doubles.nccl import library as nccl_double

PER_BUCKET = 2
"""Operations of an all-reduce, and of a reduce-scatter with shadows."""


class Watched(NcclNative):
    """``did``: what the member did.  ``limits``: by rank, how many operations it believes (none: all), one more than
    the least at most; there it is revoked, all at the same time, and its scratch is garbage, as NCCL may leave it."""

    limits: Sequence[int] = ()
    stopped: threading.Barrier

    def __init__(self, *its: Any) -> None:
        super().__init__(*its)
        self.did: list[tuple[str, Any]] = []
        self.over = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        self.did.append(("reduce_scatter", source.data_ptr()))
        return super().reduce_scatter(output, source)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        self.did.append(("all_gather", output.data_ptr()))
        return super().all_gather(output, source)

    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        self.did.append(("transfer", [[(tensor.numel(), rank) for tensor, rank in its] for its in (sends, receives)]))
        return super().transfer(sends, receives)

    def wait(self, operation: Operation) -> None:
        assert self.may_go_on.wait(DEADLINE)
        assert isinstance(operation, communicator.Operation)
        written = operation.tensors[0]
        if not self.limits or self.over <= min(self.limits):
            super().wait(operation)
        if self.limits and self._comm and self.over == self.limits[self._comm.rank]:
            self.stopped.wait(DEADLINE)
            self._cancel_token.cancel("the test ends it")
            torch.empty(0).set_(written.untyped_storage()).fill_(torch.nan)
            self._cancel_token.check()
        self.over += 1
        self.did.append(("over", None))


def members(size: int, work: Any, limits: Sequence[int] = (), **options: Any) -> list[Any]:
    """What ``work`` returns at each member of a group with ``Watched`` backends."""
    double = nccl_double()
    backend = type("Its", (Watched,), {"limits": limits, "stopped": threading.Barrier(size)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load", lambda: double)
        patch.setattr(resources, "NcclNative", backend)
        return together(size, work, collective="native", **options)


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
    return sorted(span for hop in range(shadows + 1) for span in shards[(rank - hop) % len(shards)])


def check(bucket: Bucket, rank: int, size: int) -> None:
    """Each element is what the ledger says."""
    numel = bucket.ledger.numel
    for spans, wanted in ((bucket.ledger.reduced, total(size, numel)), (bucket.ledger.local, gradient(rank, numel))):
        for span in spans:
            assert torch.equal(bucket.flat[span.start : span.stop], wanted[span.start : span.stop])


def test_a_shadows_chunk_goes_to_its_holder_alone() -> None:
    def work(group: Any) -> list[tuple[str, Any]]:
        group.reduce_scatter(Bucket(gradient(group.rank, 64)), shadows=(1, 2)).wait(DEADLINE)
        return list(group._backend.did)

    for rank, (first, _, second, _) in enumerate(members(4, work)):
        assert first[0] == "reduce_scatter"
        assert second == ("transfer", [[(16, (rank + hops) % 4) for hops in each] for each in ((1, 2), (-1, -2))])


def test_who_injects_faults_is_told_of_a_sum_under_way_and_of_what_has_arrived() -> None:
    by_thread = threading.local()

    def hook(boundary: str, _: int) -> None:
        by_thread.did.append((boundary, None))

    def work(group: Any) -> list[str]:
        assert group._executor._hook is hook
        its = group._backend
        begin = its.begin

        def first(token: object) -> None:
            by_thread.did = its.did
            begin(token)

        its.begin = first
        bucket = Bucket(gradient(group.rank, 64))
        group.reduce_scatter(bucket).wait(DEADLINE)
        group.all_gather(bucket).wait(DEADLINE)
        return [name for name, _ in its.did]

    for did in members(2, work, hook=hook):
        assert did == ["reduce_scatter", "add", "over", "store", "all_gather", "over", "gather"]


def test_an_operation_is_enqueued_when_the_one_before_is_over_however_many_buckets_are_handed_in() -> None:
    def work(group: Any) -> None:
        its = group._backend
        its.may_go_on.clear()
        buckets = [Bucket(gradient(group.rank, 100)) for _ in range(3)]
        handles = [group.all_reduce(bucket) for bucket in buckets]
        its.may_go_on.set()
        for done, (handle, bucket) in enumerate(zip(handles, buckets, strict=True), 1):
            handle.wait(DEADLINE)
            assert len(its.did) >= done * 2 * PER_BUCKET
            check(bucket, group.rank, 2)
        assert [name for name, _ in its.did] == ["reduce_scatter", "over", "all_gather", "over"] * 3

    members(2, work)


@pytest.mark.parametrize("size", [2, 5])
def test_scratch_is_at_most_one_bucket_however_many_are_handed_in(size: int) -> None:
    sizes = [1000 + 97 * number for number in range(12)]
    bound = max(sizes) * 4 + size * ALIGNED_BYTES

    def work(group: Group) -> None:
        buckets = [Bucket(gradient(group.rank, numel)) for numel in sizes]
        for handle in [group.all_reduce(bucket) for bucket in buckets]:
            handle.wait(DEADLINE)
        everything = [Reduced(0, max(sizes), 1)] if group.rank == 1 else []
        group.pull([Bucket(gradient(1, max(sizes)), Ledger(max(sizes), everything)) for _ in range(3)])
        assert max(sizes) * 4 <= group.scratch_peak <= bound

    members(size, work)


def test_buckets_that_lie_as_the_backend_wants_them_are_not_copied_before() -> None:
    def work(group: Any) -> None:
        flat = gradient(group.rank, 4 * 32)
        group.all_reduce(Bucket(flat)).wait(DEADLINE)
        (_, source), _, (_, output), _ = group._backend.did
        assert source == flat.data_ptr() != output

    members(4, work)


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
    found: list[list[int]] = [[] for _ in chunks]
    for part in rounds(chunks, longest):
        assert 0 < part.width <= longest
        for rank, mine in enumerate(found):
            copies = list(part.copies(rank, rank))
            mine += [element for copy in copies for element in range(copy.bucket, copy.bucket + copy.length)]
            in_row = [at for copy in copies for at in range(copy.scratch, copy.scratch + copy.length)]
            assert in_row == list(range(rank * part.width, rank * part.width + len(in_row)))
            assert len(in_row) <= part.width
    assert found == [elements(chunk) for chunk in chunks]


def cut_off(limits: list[int], numels: list[int], operation: str) -> None:
    """Members that believe ``limits`` operations are revoked; what they hold then, and after the next epoch."""
    size = len(limits)
    buckets = [[Bucket(gradient(rank, numel)) for numel in numels] for rank in range(size)]
    shards = {numel: shards_of([numel // 3, 2 * numel // 3], numel) for numel in numels}

    def begin(group: Any) -> None:
        mine = buckets[group.rank]
        if operation == "all_reduce":
            handles = [group.all_reduce(bucket) for bucket in mine]
        else:
            handles = [group.reduce_scatter(bucket, shards[bucket.ledger.numel], shadows=(1,)) for bucket in mine]
        ended = []
        for handle in handles:
            with suppress(EpochRevoked):
                handle.wait(DEADLINE)
                ended.append(handle)
        if len(ended) == len(handles):  # nobody else's end may come before it
            group._backend.stopped.wait(DEADLINE)
        for bucket, its in zip(mine, handles, strict=True):
            numel = bucket.ledger.numel
            whole = [Span(0, numel)] if operation == "all_reduce" else owned(shards[numel], group.rank, 1)
            assert elements(bucket.ledger.reduced) == (elements(whole) if its in ended else [])
            check(bucket, group.rank, size)
        assert len(ended) == limits[group.rank] // PER_BUCKET

    def resume(group: Group) -> None:
        group.pull(buckets[group.rank])
        for handle in [group.all_reduce(bucket) for bucket in buckets[group.rank]]:
            handle.wait(DEADLINE)

    members(size, begin, limits)
    members(size, resume)
    for mine in buckets:
        assert all(torch.equal(bucket.flat, total(size, bucket.ledger.numel)) for bucket in mine)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("limit", range(PER_BUCKET * 3 + 1))
def test_a_revocation_at_any_point_leaves_each_bucket_whole(operation: str, limit: int) -> None:
    """At the same point at all members; and where some have believed one more, as nobody can be further ahead."""
    cut = partial(cut_off, numels=[60, 63, 300], operation=operation)
    cut([limit] * 3)
    draw = random.Random(f"{operation} {limit}")
    for _ in range(3):
        ahead = [min(limit + draw.randrange(2), PER_BUCKET * 3) for _ in range(2)]
        cut(draw.sample([limit, *ahead], 3))
