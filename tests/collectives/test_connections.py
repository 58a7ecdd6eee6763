"""Who may speak to a ring, and what a stranger, a stale epoch or a forked child can do to it: nothing."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from recover_megatron.collectives import group_factory
from recover_megatron.collectives.device import Order
from recover_megatron.collectives.epoch import EpochRevoked, Known, PeerLost
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import open_group
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.collectives.peers import unreached
from recover_megatron.collectives.transport import handshake, interface
from recover_megatron.collectives.transport.handshake import MAC, NONCE, Handshake, SharedMemory, machine
from recover_megatron.collectives.transport.interface import Scratch
from recover_megatron.collectives.transport.tcp import TcpTransport
from tests.collectives.together import DEADLINE, SECRET, Dictionary, PlainEpoch, together
from tests.harness.waiting import eventually


def address(store: Dictionary, rank: int, name: str = "column", epoch: int = 1) -> tuple[str, int]:
    eventually(lambda: store.check([f"ring/{name}/{epoch}/{rank}"]))
    host, port, _ = store.get(f"ring/{name}/{epoch}/{rank}").decode().split(" ")
    return host, int(port)


def opening(
    store: Dictionary, rank: int, secret: bytes = SECRET, name: str = "column", timeout: float = DEADLINE
) -> Group:
    return open_group(PlainEpoch(1, [0, 1], rank), store, name=name, secret=secret, timeout=timeout)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def all_reduce(group: Group) -> list[float]:
    bucket = Bucket(torch.ones(10))
    try:
        group.all_reduce(bucket).wait(DEADLINE)
    finally:
        group.close()
    return bucket.flat.tolist()


def summed(pool: ThreadPoolExecutor, *members: Future[Group]) -> list[list[float]]:
    """What each of these members has after an all-reduce of ones."""
    groups = [member.result(DEADLINE) for member in members]
    return [future.result(DEADLINE) for future in [pool.submit(all_reduce, group) for group in groups]]


@pytest.mark.parametrize(
    "words",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * (NONCE + MAC), b"\0" * 5000],
    ids=["silent", "http", "wrong", "long"],
)
def test_strangers_on_the_port_hurt_nobody(pool: ThreadPoolExecutor, words: bytes) -> None:
    store = Dictionary()
    first = pool.submit(opening, store, 0)
    strangers = [socket.create_connection(address(store, 0)) for _ in range(80)]  # more than are served at a time
    for stranger in strangers:
        stranger.setblocking(False)
        with contextlib.suppress(ConnectionError):  # turned away already
            stranger.send(words)
    assert summed(pool, first, pool.submit(opening, store, 1)) == [[2.0] * 10] * 2
    for stranger in strangers:
        stranger.close()


def test_a_listener_that_does_not_know_the_secret_gets_no_data(pool: ThreadPoolExecutor) -> None:
    """Somebody answers at the address of the successor without knowing the secret."""
    store = Dictionary()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        store.set("ring/column/1/1", f"127.0.0.1 {impostor.getsockname()[1]} -")
        member = pool.submit(opening, store, 0)
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(b"n" * NONCE)
            assert len(connection.recv(NONCE + MAC, socket.MSG_WAITALL)) == NONCE + MAC
            connection.sendall(b"m" * MAC)
            with pytest.raises(EpochRevoked, match="refused"):
                member.result(DEADLINE)
            assert connection.recv(100) == b""


@pytest.mark.parametrize(("name", "secret"), [("another", SECRET), ("column", b"another secret")])
def test_a_connection_of_another_ring_or_with_another_secret_is_turned_away(
    pool: ThreadPoolExecutor, name: str, secret: bytes
) -> None:
    """Its own store points at this ring's listener."""
    store, other = Dictionary(), Dictionary()
    first = pool.submit(opening, store, 0)
    host, port = address(store, 0)
    other.set(f"ring/{name}/1/1", f"{host} {port} -")
    stray = pool.submit(opening, other, 0, name=name, secret=secret, timeout=2)
    with pytest.raises((EpochRevoked, TimeoutError)):
        stray.result(DEADLINE)
    assert summed(pool, first, pool.submit(opening, store, 1)) == [[2.0] * 10] * 2


def test_shared_memory_is_opened_only_when_it_is_what_a_ring_makes() -> None:
    slots = SharedMemory.make(3, 1000)
    again = SharedMemory.open(os.getpid(), slots.descriptor, 3, 1000)
    assert again is not None
    again.view(1, 10, torch.float32).fill_(7.0)
    assert slots.view(1, 10, torch.float32).tolist() == [7.0] * 10
    assert SharedMemory.open(os.getpid(), slots.descriptor, 4, 1000) is None, "of another size"
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 3000)
    assert SharedMemory.open(os.getpid(), unsealed, 3, 1000) is None, "its maker could take it away under our feet"
    os.close(unsealed)
    assert SharedMemory.open(os.getpid(), 1 << 20, 3, 1000) is None
    with pytest.raises(OSError, match="Operation not permitted"):
        os.ftruncate(slots.descriptor, 0)
    slots.close()
    again.close()


def test_an_epoch_that_ends_just_when_the_neighbours_have_met_is_told_as_that(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as a broken pipe, by which a worker would take itself for one whose replica is broken."""
    hold = Handshake.hold

    def then_revoked(self: Handshake, *args: Any) -> socket.socket:
        met = hold(self, *args)
        self._cancel_token.cancel("a worker died")
        return met

    monkeypatch.setattr(Handshake, "hold", then_revoked)
    store = Dictionary()
    for member in [pool.submit(opening, store, rank) for rank in range(2)]:
        with pytest.raises(EpochRevoked, match="a worker died"):
            member.result(DEADLINE)


def test_neighbours_that_cannot_share_memory_use_their_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedMemory, "open", classmethod(lambda *_: None))
    assert together(3, all_reduce) == [[3.0] * 10] * 3


def test_members_on_different_machines_do_not_try_to_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    here, number = machine(), itertools.count()
    monkeypatch.setattr("recover_megatron.collectives.transport.tcp.machine", lambda: f"{here}-{next(number)}")

    def no(*_: object) -> None:
        raise AssertionError("opened the memory of another machine")

    monkeypatch.setattr(SharedMemory, "open", classmethod(no))
    assert together(3, all_reduce) == [[3.0] * 10] * 3


def test_waiting_for_a_neighbour_takes_no_processor_time() -> None:
    waiting = threading.Barrier(2)

    def work(group: Group) -> float:
        if group.rank:
            waiting.wait(DEADLINE)
            return 0.0
        handle, before = group.all_reduce(Bucket(torch.ones(10))), time.process_time()
        select.select([], [], [], 0.5)
        used = time.process_time() - before
        group.abort("for the test")
        with pytest.raises(EpochRevoked):
            handle.wait(DEADLINE)
        waiting.wait(DEADLINE)
        return used

    assert together(2, work)[0] < 0.25


def test_a_member_without_descriptors_waits_and_is_no_fault_of_the_work(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, iter([errno.EMFILE] * 4)

    def full(self: socket.socket) -> Any:
        if code := next(failures, None):
            raise OSError(code, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", full)
    store = Dictionary()
    assert summed(pool, *(pool.submit(opening, store, rank) for rank in range(2))) == [[2.0] * 10] * 2
    assert next(failures, None) is None


def test_a_stranger_that_says_nothing_is_dropped_after_a_while(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "PROOF_SECONDS", 0.2)
    store, epoch = Dictionary(), PlainEpoch(1, [0, 1], 0)
    with socket.create_server(("127.0.0.1", 0)) as slow:  # a successor that takes its time
        store.set("ring/column/1/1", f"127.0.0.1 {slow.getsockname()[1]} -")
        first = pool.submit(open_group, epoch, store, name="column", secret=SECRET, timeout=DEADLINE)
        with socket.create_connection(address(store, 0), DEADLINE) as stranger:
            while stranger.recv(64):  # its nonce, and then the end
                pass
        assert not first.done()
        epoch.revoke("the test is over")
        with pytest.raises(EpochRevoked):
            first.result(DEADLINE)


def test_who_was_held_up_for_all_of_its_time_takes_nobody_that_answers_for_unreached() -> None:
    """It looks once behind its deadline: the kernels have made the connections meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as here, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = {worker: sock.getsockname()[1] for worker, sock in enumerate((here, closed))}
        assert unreached({worker: f"127.0.0.1 {port}" for worker, port in ports.items()}, seconds=0.0) == {1}


def test_a_refused_connection_names_the_member_that_refuses() -> None:
    with socket.socket() as bound:  # nobody listens there, and nobody else can take it meanwhile
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        known = Known({f"ring/named/1/{rank}": f"127.0.0.1 {port} -" for rank in range(3)})
        with pytest.raises(EpochRevoked) as raised:
            open_group(PlainEpoch(1, [7, 8, 9], 8), known, name="named", secret=SECRET)
    cause = raised.value.__cause__
    assert isinstance(cause, PeerLost)
    assert (cause.peer, cause.unreachable) == (9, True)


def test_a_neighbour_that_hangs_up_is_named_and_the_road_is_not_blamed(pool: ThreadPoolExecutor) -> None:
    store = Dictionary()

    def disconnect() -> None:
        group = opening(store, 0)
        group.abort("it fails here")
        group.close()

    hanging_up = pool.submit(disconnect)
    with contextlib.closing(opening(store, 1)) as group:
        with pytest.raises(EpochRevoked):
            group.all_reduce(Bucket(torch.zeros(100))).wait()
        lost = group.lost
    hanging_up.result(DEADLINE)
    assert lost is not None
    assert (lost.peer, lost.unreachable) == (0, False)


def test_a_bucket_on_a_gpu_is_sent_from_copies_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection reads a tensor by its address, as host memory.  A CPU tensor stands for the one on the GPU."""
    given: list[int] = []

    class Noted(TcpTransport):
        def send(self, tensor: torch.Tensor, tag: int) -> Any:
            given.append(tensor.data_ptr())
            return super().send(tensor, tag)

    monkeypatch.setattr(group_factory, "TcpTransport", Noted)
    monkeypatch.setattr(group_factory, "on_device", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(interface, "DeviceStream", lambda *_: Order())
    monkeypatch.setattr(interface, "Scratch", lambda *_, **__: Scratch(torch.device("cpu")))
    store, flats = Dictionary(), [torch.ones(1000) for _ in range(2)]

    def member(rank: int) -> None:
        epoch = PlainEpoch(1, [0, 1], rank)
        gpu = torch.device("cuda", rank)
        with contextlib.closing(
            open_group(epoch, store, name="column", secret=SECRET, timeout=DEADLINE, device=gpu)
        ) as group:
            group.all_reduce(Bucket(flats[rank])).wait(DEADLINE)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(member, range(2)))
    assert [flat.tolist() for flat in flats] == [[2.0] * 1000] * 2
    assert given
    assert not any(flat.data_ptr() <= at < flat.data_ptr() + flat.nbytes for at in given for flat in flats)
