"""Plain data parallelism: the column meets without a store, goes on after an epoch, and keeps what is finished."""

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

from recover_megatron.collectives import column as column_module
from recover_megatron.collectives.column import Column
from recover_megatron.collectives.epoch import EpochRevoked, Known
from recover_megatron.collectives.group_factory import open_group, open_ring_listener
from recover_megatron.collectives.ledger import Bucket, Reduced, Span
from recover_megatron.collectives.transport.handshake import RingListener
from recover_megatron.membership import Session
from recover_megatron.membership.records import CoordinatorLost
from recover_megatron.membership.wire import read_secret_file
from tests.collectives.together import DEADLINE, PlainEpoch
from tests.membership.cluster import Cluster, cluster

SECRET = b"the secret of a test"


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


def columns(control: Cluster, size: int, work: Callable[[Column], Any]) -> list[Any]:
    """What ``work`` returns at each of ``size`` members, by worker id; a real coordinator, members as threads."""
    control.start_coordinators(size)
    secret = read_secret_file(control.secret_file)

    def member(me: int) -> Any:
        column = Column(Session.connect(control.addresses, me, secret), me, SECRET)
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
        column.group([bucket]).all_reduce(bucket).wait(DEADLINE)
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


def test_gradients_accumulate_into_the_bucket_and_the_optimizer_steps_with_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).double()
    bucket = Bucket.of_gradients(model.parameters(), extra=2)
    assert bucket.flat.dtype == torch.float64
    assert bucket.flat.numel() == sum(p.numel() for p in model.parameters()) + 2
    x = torch.randn(5, 3, dtype=torch.float64)
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    model(x).sum().backward()
    model(x).sum().backward()
    assert torch.allclose(bucket.flat[:-2], 2 * torch.cat([g.reshape(-1) for g in wanted]))
    assert bucket.flat[-2:].tolist() == [0, 0]
    bucket.flat.fill_(0.5)
    before = [p.detach().clone() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(p, old - 0.5) for p, old in zip(model.parameters(), before, strict=True))


def test_a_cleared_bucket_is_zero_and_local() -> None:
    bucket = Bucket(torch.ones(6))
    bucket.ledger.mark(Span(1, 3), 7)
    bucket.clear()
    assert bucket.flat.tolist() == [0] * 6
    assert bucket.ledger.local == (Span(0, 6),)


@pytest.mark.parametrize("error", [None, KeyError], ids=["in order", "by an exception"])
def test_what_is_reduced_is_put_back_however_the_block_ends(error: type[Exception] | None) -> None:
    bucket = Bucket(torch.ones(6))
    bucket.ledger.mark(Span(1, 3), 7)
    with contextlib.suppress(KeyError), bucket.set_aside():
        bucket.flat += 1
        if error:
            raise error
    assert bucket.flat.tolist() == [2, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("transport_kind", ["tcp", "tcp-inline"])
def test_members_that_know_each_others_doors_need_no_store(transport_kind: Any) -> None:
    ring_listeners = [open_ring_listener(transport_kind=transport_kind) for _ in range(3)]
    known = Known({f"ring/column/1/{rank}": ring_listener.address for rank, ring_listener in enumerate(ring_listeners)})

    def member(rank: int) -> list[float]:
        epoch = PlainEpoch(1, [0, 1, 2], rank)
        group = open_group(
            epoch,
            known,
            name="column",
            secret=SECRET,
            transport_kind=transport_kind,
            timeout=DEADLINE,
            ring_listener=ring_listeners[rank],
        )
        bucket = Bucket(torch.full((100,), float(rank)))
        group.all_reduce(bucket).wait(DEADLINE)
        group.close()
        return bucket.flat.unique().tolist()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(member, range(3))) == [[3.0]] * 3
    assert all(ring_listener.listener.fileno() == -1 for ring_listener in ring_listeners), (
        "a door is closed when all have met"
    )


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
    assert any("nobody was lost" in text for text in said)
    assert len(set(epochs)) <= column_module.MOST + 2
    complaints = [event for event in control.events() if event["event"] == "complaint"]
    assert complaints
    assert {(event["worker"], event["peer"]) for event in complaints} >= {(0, 1)}
