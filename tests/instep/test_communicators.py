"""The communicators of NCCL that workers hold while replicas break and are put together again: none is left over."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.progress import ProgressThread, Task
from recover_megatron.instep.decision import Decision
from recover_megatron.instep.groups.epoch_groups import CommunicationConfig
from recover_megatron.instep.groups.model_parallel_groups import calls_under_way
from recover_megatron.instep.meeting.assignment import Assignment
from recover_megatron.megatron_hooks.parallel_groups import Groups
from recover_megatron.membership.records import Fenced
from recover_megatron.network.peer_store import PeerStoreServer
from recover_megatron.workload.grid import Slot, launch_grid
from tests.doubles.nccl import library as nccl_double
from tests.harness.patience import patient
from tests.harness.waiting import DEADLINE, eventually

SECRET = b"the secret of a test"
GRID = launch_grid(4, tensor=2, context=1, pipeline=1, inner_ranks=1)
CPU = torch.device("cpu")
SOON = patient(10)


class Worker:
    """The first one of its replica; ``plan`` is what the rendezvous does after an epoch."""

    def __init__(self, me: int) -> None:
        self.session: Any = SimpleNamespace(epoch=0, revoked=False, wait_all_heard=Mock(), wait_in_touch=Mock())
        config = CommunicationConfig(PeerStoreServer("127.0.0.1", SECRET), SECRET, CPU, collective="native")
        self.address = config.peer_store.address
        self.mine = Assignment(self.session, me, GRID, config)

    def plan(self, epoch: int, grid: Mapping[int, tuple[int, ...]], addresses: Mapping[int, str]) -> None:
        everybody = {worker: addresses.get(worker, "") for workers in grid.values() for worker in workers}
        self.session.epoch = epoch
        self.mine.take_up(Decision(epoch, grid, (), peer_stores=everybody))

    def sum(self) -> float:
        bucket = Bucket(torch.ones(4))
        column = [slot for slot in map(Slot, (0, 2)) if slot in self.mine.live]
        self.mine.epoch_groups.ring(column).all_reduce(bucket).wait(DEADLINE)
        return bucket.flat[0].item()


@pytest.mark.parametrize("leaves", [True, False], ids=["it waits as a spare", "it is placed at once"])
def test_no_communicator_is_left_over_of_an_orphan_or_of_a_column_of_one(
    monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """The mate of worker 0 dies again and again; worker 2 goes on alone until there is another one."""
    library = nccl_double()
    monkeypatch.setattr(libraries, "load", lambda: library)
    both = orphan, other = Worker(0), Worker(2)
    addresses, live = {0: orphan.address, 2: other.address}, library.core.live
    with ThreadPoolExecutor(2) as pool:
        for mate in (1, 4, 5, 6):
            for worker in both:
                worker.plan(2 * mate, {0: (0, mate), 1: (2, 3)}, addresses)
            assert list(pool.map(Worker.sum, both)) == [2.0, 2.0]
            eventually(lambda: len(live) == 2, "the one that is in use at each", SOON)
            for worker in both:
                worker.mine.end("a worker is lost")
            if leaves:
                orphan.mine.close()
            other.mine.epoch_groups.close()
            other.plan(2 * mate + 1, {1: (2, 3)}, addresses)
            assert other.sum() == 1.0
            eventually(lambda: len(live) == (0 if leaves else 1), "nobody sums with anybody", SOON)
    orphan.mine.close()


def test_a_worker_that_is_cut_off_from_the_coordinator_believes_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been put out: then others have aborted, and what it has been given is garbage."""
    library = nccl_double()
    monkeypatch.setattr(libraries, "load", lambda: library)
    both = cut_off, other = Worker(0), Worker(2)
    cut_off.session.wait_in_touch = Mock(side_effect=Fenced("it was put out"))
    for worker in both:
        worker.plan(1, {0: (0, 1), 1: (2, 3)}, {0: cut_off.address, 2: other.address})
    with ThreadPoolExecutor(2) as pool:
        sums = [pool.submit(worker.sum) for worker in both]
        with pytest.raises(Fenced):
            sums[0].result()
        other.mine.end("a worker is lost")
    for worker in both:
        worker.mine.close()


def test_an_orphan_closes_its_columns_while_somebody_watches_its_way_out() -> None:
    """That may wait for a device that is stuck."""
    order: list[str] = []
    groups = Groups(Slot(0), (), CPU)
    manager: Any = SimpleNamespace(release=lambda: order.append("closed"))
    groups.inside.left = lambda: order.append("left")  # type: ignore[method-assign]
    groups.left(manager)
    assert order == ["closed", "left"]


def test_a_main_thread_that_waits_for_a_column_to_close_is_in_one_call() -> None:
    """So it is ended after a while (``Leaving``)."""
    over, seen = threading.Event(), []
    executor: Any = SimpleNamespace(busy=True, add=lambda task: None, advance=over.wait, close=lambda: None)
    column, task = ProgressThread(CancelToken(1), "a column whose device is stuck"), Task()
    column.serve(executor)
    column.submit(executor, task)

    def look() -> None:
        eventually(lambda: calls_under_way() & calls_under_way(), "the main thread waits")
        seen.append(True)
        task.handle.finish()
        executor.busy = False
        over.set()

    threading.Thread(target=look, daemon=True).start()
    column.close(executor)
    assert seen
