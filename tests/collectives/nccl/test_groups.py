"""Groups over NCCL's double in threads: a member leaves in the middle, the others go on in the next epoch.

Real deaths of real processes are in tests/collectives/test_deaths.py; here a member just does nothing any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import open_group, progress_thread
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.nccl.renewal import Keeper
from tests.collectives.together import DEADLINE, SECRET, Dictionary, PlainEpoch
from tests.doubles.nccl import library as nccl_double
from tests.doubles.nccl.core import Errors
from tests.harness.waiting import eventually


def gradient(worker: int, bucket: int, numel: int) -> torch.Tensor:
    return torch.randint(-8, 8, (numel,), generator=torch.Generator().manual_seed(97 * bucket + worker)).float()


def total(workers: Iterable[int], bucket: int, numel: int) -> torch.Tensor:
    return sum((gradient(worker, bucket, numel) for worker in workers), torch.zeros(numel))


class Member:
    """``leaves``: before which bucket it stops for good; None: never."""

    def __init__(self, me: int, sizes: list[int], leaves: int | None) -> None:
        self.me = me
        self.leaves = leaves
        self.buckets = [Bucket(gradient(me, at, numel)) for at, numel in enumerate(sizes)]
        self.keeper = Keeper()
        self.epoch = PlainEpoch(0, [], me)

    def open(self, number: int, members: list[int], store: Any, all_heard: Callable[[], object]) -> Group:
        self.epoch = PlainEpoch(number, members, self.me)
        token, device = CancelToken(number, lambda: (all_heard(), None)[1]), torch.device("cpu", self.me)
        self.epoch.on_revoke(token.cancel)
        return open_group(
            self.epoch, store, name="column", secret=SECRET, timeout=DEADLINE, collective="native",
            communicators=self.keeper, device=device, progress=progress_thread(token, device, "sums", "native"),
        )  # fmt: skip

    def first(self, group: Group) -> None:
        """Sum all buckets, or leave on the way."""
        last = len(self.buckets) if self.leaves is None else self.leaves
        try:
            for handle in [group.all_reduce(bucket) for bucket in self.buckets[:last]]:
                handle.wait(DEADLINE)
            if self.leaves is not None:
                group.abort("this member leaves")
        except EpochRevoked:
            pass
        finally:
            group.close()

    def again(self, group: Group) -> None:
        group.pull(self.buckets)
        for handle in [group.all_reduce(bucket) for bucket in self.buckets]:
            handle.wait(DEADLINE)
        group.close()


def two_epochs(sizes: list[int], leaving: dict[int, int], size: int) -> list[Member]:
    """The survivors, after an epoch in which some leave, and one of those who are left."""
    everybody = list(range(size))
    members = [Member(me, sizes, leaving.get(me)) for me in everybody]
    survivors = [member for member in members if member.leaves is None]
    with ThreadPoolExecutor(size) as pool:
        first, second = Dictionary(), Dictionary()
        told = threading.Event()
        groups = list(pool.map(lambda it: it.open(1, everybody, first, told.wait), members))
        ends = [pool.submit(member.first, group) for member, group in zip(members, groups, strict=True)]
        if leaving:  # the first one to leave ends the epoch, for who leaves later, too
            eventually(lambda: any(groups[me].revoked for me in leaving), "the first one has left", every=0.001)
            for member in members:
                member.epoch.revoke("a member left")
        told.set()
        for end in ends:
            end.result(DEADLINE)
        left = [member.me for member in survivors]
        groups = list(pool.map(lambda it: it.open(2, left, second, told.wait), survivors))
        list(pool.map(Member.again, survivors, groups))
    for member in members:
        member.keeper.close()
    return survivors


@settings(max_examples=16)
@given(st.data())
def test_any_members_may_leave_before_any_bucket(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    sizes = data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=4))
    who = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size - 1))
    leaving = {me: data.draw(st.integers(0, len(sizes))) for me in who}
    polls, seed = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 100))
    library = nccl_double(polls=polls, errors=Errors.NEVER, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "load", lambda: library)
        survivors = two_epochs(sizes, leaving, size)
    left = [member.me for member in survivors]
    for at, numel in enumerate(sizes):
        sums = {1: total(range(size), at, numel), 2: total(left, at, numel)}
        for bucket in [member.buckets[at] for member in survivors]:
            assert bucket.ledger.complete
            for span in bucket.ledger.reduced:
                assert torch.equal(bucket.flat[span.start : span.stop], sums[span.epoch][span.start : span.stop])
    assert library.core.calls.count("init") == size if not leaving else size + len(left) * (len(left) > 1)
    eventually(lambda: not library.core.live, "every communicator is aborted")


def test_nothing_of_a_member_that_hears_early_is_believed_by_one_that_hears_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel of the first one, aborted, would have that of the second one complete, with garbage and no error."""
    library = nccl_double(errors=Errors.NEVER)
    monkeypatch.setattr(libraries, "load", lambda: library)
    run, kernels = library.core.Communicator._run, []
    monkeypatch.setattr(library.core.Communicator, "_run", lambda its, parts: (kernels.append(its), run(its, parts)))
    members, store = [Member(me, [100, 100], None) for me in range(3)], Dictionary()
    asked, told = threading.Event(), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda it: it.open(1, [0, 1, 2], store, lambda: (asked.set(), told.wait())), members))
        for handle in [group.all_reduce(it.buckets[0]) for group, it in zip(groups, members, strict=True)]:
            handle.wait(DEADLINE)
        before = len(kernels)
        early, late = (group.reduce_scatter(it.buckets[1]) for group, it in zip(groups[:2], members[:2], strict=True))
        eventually(lambda: len(kernels) == before + 2, "both kernels have begun")
        members[0].epoch.revoke("the third one has died")
        eventually(lambda: asked.is_set() or late.done(), "the early one comes to its end")
        members[1].epoch.revoke("the third one has died")
        told.set()
        for handle, member in ((early, members[0]), (late, members[1])):
            with pytest.raises(EpochRevoked):
                handle.wait(DEADLINE)
            assert member.buckets[1].ledger.reduced == ()
        list(pool.map(Group.close, groups))
        for member in members:
            member.keeper.close()
