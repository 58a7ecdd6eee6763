"""Bytes of another worker, without meeting it: given to who knows the secret, refused to others, and never waited for
in vain."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator, Sequence

import pytest

from recover_megatron.collectives.epoch import PeerLost
from recover_megatron.collectives.peers import Fetcher, PeerStoreClient
from recover_megatron.network import connection as frames
from recover_megatron.network.peer_store import MOST_BYTES, PeerStoreServer
from tests.harness.waiting import DEADLINE

SECRET = b"what the workers of the test share"
HOST = "127.0.0.1"
DATA = bytes(range(256)) * 100_000


def give(what: Sequence[int]) -> bytes | None:
    start, stop = what
    return DATA[start:stop] if stop <= len(DATA) else None


def patient() -> None:
    """Waits for as long as it takes."""


@pytest.fixture(scope="module")
def peer_store() -> PeerStoreServer:
    peer_store = PeerStoreServer(HOST, SECRET)
    peer_store.source = give
    return peer_store


@pytest.fixture
def fetcher(peer_store: PeerStoreServer) -> Iterator[Fetcher]:
    fetcher = Fetcher(peer_store.address, SECRET, patient)
    yield fetcher
    fetcher.close()


def test_what_is_asked_for_comes_bit_for_bit_whatever_its_size(fetcher: Fetcher) -> None:
    for start, stop in ((0, 1), (10, 266), (5, 5 + MOST_BYTES), (7, 7)):
        assert fetcher.fetch((start, stop)) == DATA[start:stop]


def test_what_the_other_one_does_not_have_is_none_and_the_next_question_is_answered(fetcher: Fetcher) -> None:
    assert fetcher.fetch((0, len(DATA) + 1)) is None
    assert fetcher.fetch((3, 9)) == DATA[3:9]


def test_a_board_that_was_given_no_source_has_nothing() -> None:
    fetcher = Fetcher(PeerStoreServer(HOST, SECRET).address, SECRET, patient)
    assert fetcher.fetch((0, 1)) is None
    fetcher.close()


def test_a_fault_of_the_source_costs_the_connection_and_not_the_board(
    peer_store: PeerStoreServer, fetcher: Fetcher
) -> None:
    with pytest.raises(PeerLost, match="closed the connection"):
        fetcher.fetch((1, 2, 3))  # too many values to unpack: a ValueError
    again = Fetcher(peer_store.address, SECRET, patient)
    assert again.fetch((0, 3)) == DATA[:3]
    again.close()


def test_a_board_still_tells_values_while_it_gives_bytes(peer_store: PeerStoreServer, fetcher: Fetcher) -> None:
    pinned = PeerStoreClient(peer_store.address, SECRET)
    pinned.set("key", "value")
    assert fetcher.fetch((0, MOST_BYTES)) == DATA[:MOST_BYTES]
    assert pinned.get("key") == b"value"
    pinned.close()


def test_who_does_not_know_the_secret_gets_nothing(peer_store: PeerStoreServer) -> None:
    with pytest.raises(PeerLost):
        Fetcher(peer_store.address, b"another secret", patient)


def test_an_answer_of_somebody_who_does_not_know_the_secret_is_not_taken() -> None:
    """It is a peer store, but not one of this run: who asks checks, too."""
    with socket.create_server((HOST, 0)) as stranger:
        address = f"{HOST} {stranger.getsockname()[1]}"
        child = multiprocessing.get_context("spawn").Process(target=_pose, args=(address, SECRET), daemon=True)
        child.start()
        connection, _ = stranger.accept()
        with connection:
            connection.sendall(frames.encode({"nonce": "n"}, 100))
            connection.recv(1 << 16)
            connection.sendall(frames.encode({"mac": "made up"}, 100))
            child.join(DEADLINE)
        assert child.exitcode == 0


def _pose(address: str, secret: bytes) -> None:
    with pytest.raises(PeerLost, match="does not know the run's secret"):
        Fetcher(address, secret, patient)


def test_an_announcement_over_the_limit_is_not_waited_for() -> None:
    big = PeerStoreServer(HOST, SECRET)
    big.source = lambda what: bytes(MOST_BYTES + 1)
    fetcher = Fetcher(big.address, SECRET, patient)
    with pytest.raises(PeerLost, match="the limit is"):
        fetcher.fetch((0,))
    fetcher.close()


def _serve(told: socket.socket) -> None:
    peer_store = PeerStoreServer(HOST, SECRET)
    peer_store.source = lambda what: b"here"
    told.sendall(peer_store.address.encode())
    signal.pause()


@pytest.fixture
def other() -> Iterator[tuple[int, str]]:
    """Another process with a peer store: its pid, its address."""
    mine, its = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(its,), daemon=True)
    process.start()
    assert process.pid is not None
    yield process.pid, mine.recv(100).decode()
    process.kill()
    process.join()


def test_a_process_that_dies_is_lost_at_once(other: tuple[int, str]) -> None:
    pid, address = other
    fetcher = Fetcher(address, SECRET, patient)
    assert fetcher.fetch((0,)) == b"here"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLost):
        fetcher.fetch((0,))
    with pytest.raises(PeerLost):
        Fetcher(address, SECRET, patient)


def test_a_process_that_is_stopped_is_waited_for_only_as_long_as_patience_lasts(other: tuple[int, str]) -> None:
    pid, address = other
    asked = 0

    def impatient() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise PeerLost("it is gone")

    fetcher = Fetcher(address, SECRET, impatient)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)  # until the last of its threads has stopped
    with pytest.raises(PeerLost, match="it is gone"):
        fetcher.fetch((0,))
    assert asked == 2
