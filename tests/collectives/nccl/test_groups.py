"""A group over NCCL's double in threads, of which two members hear of a revocation at different times.

Groups of which members leave in the middle are in tests/collectives/test_native.py, and, by real deaths of real
processes, in tests/collectives/test_deaths.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

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


class Member:
    def __init__(self, me: int) -> None:
        self.buckets = [Bucket(torch.full((100,), float(me))) for _ in range(2)]
        self.keeper = Keeper()
        self.epoch = PlainEpoch(1, [0, 1, 2], me)

    def open(self, store: Dictionary, all_heard: Callable[[], object]) -> Group:
        token, device = CancelToken(1, lambda: (all_heard(), None)[1]), torch.device("cpu", self.epoch.me)
        self.epoch.on_revoke(token.cancel)
        return open_group(
            self.epoch, store, name="column", secret=SECRET, timeout=DEADLINE, collective="native",
            communicators=self.keeper, device=device, progress=progress_thread(token, device, "sums", "native"),
        )  # fmt: skip


def test_nothing_of_a_member_that_hears_early_is_believed_by_one_that_hears_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel of the first one, aborted, would have that of the second one complete, with garbage and no error."""
    library = nccl_double(errors=Errors.NEVER)
    monkeypatch.setattr(libraries, "load", lambda: library)
    run, kernels = library.core.Communicator._run, []
    monkeypatch.setattr(library.core.Communicator, "_run", lambda its, parts: (kernels.append(its), run(its, parts)))
    members, store = [Member(me) for me in range(3)], Dictionary()
    asked, told = threading.Event(), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda it: it.open(store, lambda: (asked.set(), told.wait())), members))
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
