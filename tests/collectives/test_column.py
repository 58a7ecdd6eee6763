"""Data parallelism without Megatron: the column meets without a store, goes on, and keeps what is finished.

With hybrid sharding: who sums with whom, and what becomes of the mates of a dead worker.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from examples import hsdp_pytorch
from recover_megatron.collectives import column as column_module
from recover_megatron.collectives.column import Column, ShardGroup, complete_shard_groups
from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.collectives.ledger import Bucket, Reduced, Span
from recover_megatron.collectives.transport.handshake import RingListener
from recover_megatron.membership import Session
from recover_megatron.membership.records import EXIT_FENCED, CoordinatorLost
from recover_megatron.membership.wire import read_secret_file
from tests.collectives.together import DEADLINE
from tests.membership.cluster import Cluster, cluster

SECRET = b"the secret of a test"


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


def columns(control: Cluster, size: int, work: Callable[[Column], Any], shards: int = 1) -> list[Any]:
    """What ``work`` returns at each of ``size`` members, by worker id; a real coordinator, members as threads."""
    control.start_coordinators(size)
    secret = read_secret_file(control.secret_file)

    def member(me: int) -> Any:
        column = Column(Session.connect(control.addresses, me, secret), me, SECRET, shards=shards)
        try:
            return work(column)
        finally:
            column.leave()

    with ThreadPoolExecutor(size) as pool:
        return [future.result(DEADLINE) for future in [pool.submit(member, me) for me in range(size)]]


def test_members_learn_everybodys_status_and_sum(control: Cluster) -> None:
    def work(column: Column) -> tuple[Any, ...]:
        bucket = Bucket(torch.full((1000,), float(column.me)))
        assert column.over
        assert column.members == []
        column.join({"mine": column.me})
        assert not column.over
        door: Any = column._ring_listener
        column.group([bucket]).all_reduce(bucket).wait(DEADLINE)
        assert door.listener.fileno() == -1, "a door is closed when all have met"
        column.agree(1)
        return column.committed, column.members, column.statuses, set(bucket.flat.tolist())

    statuses = {me: {"mine": me} for me in range(3)}
    assert columns(control, 3, work) == [(1, [0, 1, 2], statuses, {3.0})] * 3


def test_the_next_epoch_brings_what_was_finished_anywhere_to_all(control: Cluster) -> None:
    """Worker 1 asks for a new epoch when all have their groups of the first; worker 0 holds a finished half."""
    opened = threading.Barrier(3)

    def work(column: Column) -> list[float]:
        column.join({"epoch": 1})
        bucket = Bucket(torch.full((10,), float(column.me)))
        group = column.group([bucket])
        opened.wait(DEADLINE)
        if column.me == 1:
            column.join({"epoch": 2})
        else:
            if column.me == 0:
                bucket.flat[:5] = 100
                bucket.ledger.mark(Span(0, 5), column.session.epoch)
            with pytest.raises(EpochRevoked):
                group.all_reduce(Bucket(torch.ones(10))).wait(DEADLINE)
            assert column.over
            column.join({"epoch": 2})
        assert {status["epoch"] for status in column.statuses.values()} == {2}
        group = column.group([bucket])
        assert bucket.ledger.reduced == (Reduced(0, 5, 1),)
        assert column.group([bucket]) is group, "opened once"
        group.all_reduce(bucket).wait(DEADLINE)
        return bucket.flat.tolist()

    assert columns(control, 3, work) == [[100.0] * 5 + [3.0] * 5] * 3


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_gradients_accumulate_into_the_bucket_and_the_optimizer_steps_with_it(
    sharded: bool, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    if sharded:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        request.addfinalizer(dist.destroy_process_group)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))

    def held() -> list[torch.Tensor]:
        """What of the parameters is in this process's memory."""
        return [(p.to_local() if sharded else p).detach() for p in model.parameters()]

    bucket = Bucket.of_gradients(model.parameters(), extra=2)
    assert bucket.flat.dtype == torch.float64
    assert bucket.flat.numel() == sum(p.numel() for p in held()) + 2
    for _ in range(2):
        model(x).sum().backward()
    assert torch.allclose(bucket.flat[:-2], 2 * torch.cat([g.reshape(-1) for g in wanted]))
    assert bucket.flat[-2:].tolist() == [0, 0]
    bucket.flat.fill_(0.5)
    before = [p.clone() for p in held()]
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(p, old - 0.5) for p, old in zip(held(), before, strict=True))


def test_a_cleared_bucket_is_zero_and_local() -> None:
    bucket = Bucket(torch.ones(6))
    bucket.ledger.mark(Span(1, 3), 7)
    bucket.clear()
    assert bucket.flat.tolist() == [0] * 6
    assert bucket.ledger.local == (Span(0, 6),)


@pytest.mark.parametrize("error", [None, KeyError], ids=["in order", "by an exception"])
def test_what_is_reduced_is_put_back_however_the_block_ends(error: type[Exception] | None) -> None:
    bucket = Bucket(torch.ones(2, 3))
    bucket.ledger.mark(Span(1, 3), 7)
    with contextlib.suppress(KeyError), bucket.save_sums():
        bucket.flat += 1
        if error:
            raise error
    assert bucket.flat.tolist() == [2, 1, 1, 2, 2, 2]


def test_a_forked_child_does_not_keep_a_door_open() -> None:
    """Else the predecessor of a dead worker would wait at its ring listener instead of being refused."""
    ring_listener = RingListener("127.0.0.1", (2, 1 << 12))
    address = ring_listener.listener.getsockname()
    ours, theirs = socket.socketpair()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            theirs.send(b"up")
            ours.close()
            theirs.recv(1)
        os._exit(0)
    try:
        assert ours.recv(2) == b"up"
        ring_listener.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=DEADLINE)
    finally:
        ours.close()
        theirs.close()
        os.waitpid(child, 0)


def test_a_member_that_lives_and_cannot_be_reached_ends_the_run_after_some_epochs_and_is_named(
    control: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_module, "_LONGEST_PAUSE", 0.01)
    closed = socket.socket()  # bound, and nobody listens: no other process gets the port meanwhile
    closed.bind(("127.0.0.1", 0))
    nowhere = f"127.0.0.1 {closed.getsockname()[1]} -"
    epochs: list[int] = []

    def work(column: Column) -> str:
        join = column.session.join
        if column.me == 1:  # it tells a ring listener at which connections are refused

            def elsewhere(status: Any, reason: str = "") -> Any:
                return join({**status, "ring_listener": nowhere}, reason)

            monkeypatch.setattr(column.session, "join", elsewhere)
        bucket = Bucket(torch.zeros(10))

        def train() -> None:
            while True:
                with contextlib.suppress(EpochRevoked):
                    column.join({"nothing": "new"})
                    epochs.append(column.session.epoch)
                    column.group([bucket]).all_reduce(bucket).wait(DEADLINE)

        with pytest.raises(CoordinatorLost) as ended:
            train()
        assert ended.value.code == 11
        return str(ended.value)

    with closed:
        said = columns(control, 2, work)
    assert any("lost no worker" in text for text in said)
    assert len(set(epochs)) <= column_module.MOST + 2
    complaints = [event for event in control.events() if event["event"] == "complaint"]
    assert complaints
    assert {(event["worker"], event["peer"]) for event in complaints} >= {(0, 1)}


@pytest.mark.parametrize(
    ("workers", "shards", "whole"),
    [([0, 1, 2, 3], 2, [0, 1]), ([0, 2, 3], 2, [1]), ([1, 2], 2, []), ([], 2, []), ([0, 2], 1, [0, 2]),
     ([3, 4, 5, 6, 8], 3, [1])],
)  # fmt: skip
def test_a_shard_group_is_whole_if_all_of_its_workers_are_there(
    workers: list[int], shards: int, whole: list[int]
) -> None:
    assert complete_shard_groups(workers, shards) == whole


class ComparedStatus:
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
    session: Any = ComparedStatus()
    ended: list[int] = []
    group = ShardGroup(session, me, shards, ended.append)
    session.revoke(members, left)
    assert ended == [EXIT_FENCED] * ends
    group.end_if_broken()
    assert ended == [EXIT_FENCED] * 2 * ends


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "3"}, "3 workers cannot form complete shard groups of 2: start a multiple of that number"),
        ({"WORLD_SIZE": "4", "RECOVER_REPLACED": "1"}, "cannot replace lost workers"),
        ({"WORLD_SIZE": "4", "RECOVER_JOIN": "1"}, "or accept new ones: leave out --max-restarts"),
    ],
    ids=["no multiple", "a launch with newcomers", "a newcomer"],
)
def test_workers_that_cannot_be_shard_groups_are_refused_before_they_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environ: dict[str, str], words: str
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", **environ}.items():
        monkeypatch.setenv(name, value)
    for place, name in ((column_module, "connect"), (dist, "rendezvous"), (dist, "init_process_group")):
        monkeypatch.setattr(place, name, lambda *given, **named: pytest.fail("it would wait"))
    with pytest.raises(SystemExit) as end:
        hsdp_pytorch.main(shards=2, iterations=1)
    said = capsys.readouterr().err
    assert (end.value.code, len(said.splitlines())) == (2, 1)
    assert words in said


def test_whole_shard_groups_and_newcomers_that_are_one_each_are_not_refused() -> None:
    newcomer = {"WORLD_SIZE": "3", "RECOVER_REPLACED": "1", "RECOVER_JOIN": "1"}
    assert column_module.shard_group_problem(1, newcomer) == ""
    assert column_module.shard_group_problem(3, {"WORLD_SIZE": "3"}) == ""


def test_each_shard_is_summed_over_the_whole_shard_groups(control: Cluster) -> None:
    def work(column: Column) -> tuple[Any, ...]:
        bucket = Bucket(torch.full((10,), 10.0**column.me))
        assert not column.opened([bucket]), "there is no epoch yet"
        column.join({"me": column.me})
        assert column.opened([bucket])
        column.group([bucket]).all_reduce(bucket).wait(DEADLINE)
        column.agree(1)
        return column.shard_groups, column.column, bucket.flat.unique().tolist()

    seen = columns(control, 4, work, shards=2)
    assert seen == [([0, 1], [0, 2], [101.0]), ([0, 1], [1, 3], [1010.0])] * 2
