"""Hybrid sharding without Megatron: who sums with whom, and what becomes of the mates of a dead worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from recover_megatron.collectives.column import Column, ShardGroup, whole_shard_groups
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.membership import Session
from recover_megatron.membership.records import EXIT_FENCED
from recover_megatron.membership.wire import read_secret_file
from tests.collectives.together import DEADLINE
from tests.membership.cluster import Cluster, cluster


@pytest.mark.parametrize(
    ("workers", "shards", "whole"),
    [([0, 1, 2, 3], 2, [0, 1]), ([0, 2, 3], 2, [1]), ([1, 2], 2, []), ([], 2, []), ([0, 2], 1, [0, 2]),
     ([3, 4, 5, 6, 8], 3, [1])],
)  # fmt: skip
def test_a_shard_group_is_whole_if_all_of_its_workers_are_there(
    workers: list[int], shards: int, whole: list[int]
) -> None:
    assert whole_shard_groups(workers, shards) == whole


class Told:
    """A session that was told who is left."""

    def __init__(self) -> None:
        self.opened_members = self.left = frozenset[int]()
        self.epoch = 1
        self.callbacks: list[Callable[[int, str], None]] = []

    def on_revoke(self, callback: Callable[[int, str], None]) -> None:
        self.callbacks.append(callback)

    def wait_lost(self, workers: frozenset[int], seconds: float) -> bool:
        return not self.opened_members.issuperset(workers)

    def revoke(self, members: set[int], left: set[int]) -> None:
        self.opened_members, self.left = frozenset(members), frozenset(left)
        for callback in self.callbacks:
            callback(2, "told")


@pytest.mark.parametrize(
    ("me", "shards", "members", "left", "ends"),
    [(0, 2, {0, 2, 3}, set(), True), (3, 2, {0, 2, 3}, set(), False), (5, 3, {0, 1, 2, 4, 5}, set(), True),
     (0, 2, {0, 2, 3}, {1}, False), (0, 1, {0, 2}, set(), False)],
    ids=["its mate", "another one's mate", "one of two mates", "a mate that has finished", "has no mates"],
)  # fmt: skip
def test_a_worker_ends_when_a_mate_is_lost_and_only_then(
    me: int, shards: int, members: set[int], left: set[int], ends: bool
) -> None:
    session: Any = Told()
    ended: list[int] = []
    group = ShardGroup(session, me, shards, ended.append)
    session.revoke(members, left)
    assert ended == [EXIT_FENCED] * ends
    group.end_if_broken()
    assert ended == [EXIT_FENCED] * 2 * ends


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


def test_each_shard_is_summed_over_the_whole_shard_groups(control: Cluster) -> None:
    control.start_coordinators(4)
    secret = read_secret_file(control.secret_file)

    def member(me: int) -> tuple[Any, ...]:
        column = Column(Session.connect(control.addresses, me, secret), me, b"the ring's", shards=2)
        try:
            bucket = Bucket(torch.full((10,), 10.0**me))
            assert not column.opened([bucket]), "there is no epoch yet"
            column.join({"me": me})
            assert column.opened([bucket])
            column.group([bucket]).all_reduce(bucket).wait(DEADLINE)
            column.agree(1)
            return column.shard_groups, column.column, bucket.flat.unique().tolist()
        finally:
            column.leave()

    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(member, range(4)))
    assert seen == [([0, 1], [0, 2], [101.0]), ([0, 1], [1, 3], [1010.0])] * 2


def test_the_gradients_of_a_sharded_module_accumulate_into_the_bucket() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).double()
        x = torch.randn(5, 3, dtype=torch.float64)
        wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        bucket = Bucket.of_gradients(model.parameters(), extra=2)
        for _ in range(2):
            model(x).sum().backward()
        assert torch.allclose(bucket.flat[:-2], 2 * torch.cat([g.reshape(-1) for g in wanted]))
        bucket.flat.fill_(0.5)
        before = [p.to_local().clone() for p in model.parameters()]
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert all(torch.equal(p.to_local(), old - 0.5) for p, old in zip(model.parameters(), before, strict=True))
    finally:
        dist.destroy_process_group()
