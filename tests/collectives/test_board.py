"""The board by which the members of an epoch find each other: what is set is told, and no stranger is listened to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from recover_megatron.collectives.board import Board, Pinned
from recover_megatron.collectives.epoch import Revocation
from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.collectives.rendezvous import await_key

SECRET = b"what the workers of the test share"
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def board() -> Board:
    return Board(HOST, SECRET)


@pytest.fixture
def two(board: Board) -> Iterator[tuple[Pinned, Pinned]]:
    both = Pinned(board.address, SECRET), Pinned(board.address, SECRET)
    yield both
    for pinned in both:
        pinned.close()


def test_a_value_is_told_to_who_asked_before_and_to_who_asks_after(two: tuple[Pinned, Pinned]) -> None:
    one, other = two
    assert not other.check(["early"])
    one.set("early", "a")
    assert await_key(other, "early", Revocation(1), 60) == "a"
    one.set("late", "b")
    assert await_key(one, "late", Revocation(1), 60) == "b"
    assert await_key(other, "late", Revocation(1), 60) == "b"


def test_torch_can_use_it_as_a_store(two: tuple[Pinned, Pinned]) -> None:
    """As NCCL does, through a prefix, with bytes of any value."""
    one, other = (dist.PrefixStore("nccl", pinned) for pinned in two)
    value = bytes(range(256))
    reader = threading.Thread(target=lambda: one.set("id", value))
    reader.start()
    assert other.get("id") == value
    reader.join()
    with pytest.raises(dist.DistStoreError, match="nobody published"):
        two[1].wait(["never"], timedelta(milliseconds=10))


def test_a_revocation_ends_the_wait(two: tuple[Pinned, Pinned]) -> None:
    revocation = Revocation(3)
    threading.Timer(0.05, lambda: revocation.throw("over")).start()
    with pytest.raises(EpochRevoked):
        await_key(two[0], "nobody sets it", revocation, 60)


SERVES = """
import sys, time
from recover_megatron.collectives.board import Board
board = Board("127.0.0.1", sys.argv[1].encode())
print(board.address, flush=True)
sys.stdin.read()
"""


def other_process(secret: bytes) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVES, secret.decode()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_the_death_of_its_worker_is_the_loss_of_a_peer() -> None:
    process, address = other_process(SECRET)
    pinned = Pinned(address, SECRET)
    pinned.set("before", "x")
    assert pinned.get("before") == b"x"
    end(process)
    with pytest.raises(PeerLost, match="out of reach"):
        await_key(pinned, "after", Revocation(1), 60)
    with pytest.raises(PeerLost):
        pinned.set("after", "y")


def test_a_board_that_has_gone_silent_blocks_nobody_and_the_revocation_ends_the_wait() -> None:
    process, address = other_process(SECRET)
    os.kill(process.pid, signal.SIGSTOP)
    pinned = Pinned(address, SECRET)
    pinned.set("mine", "x")  # at once
    revocation = Revocation(1)
    threading.Timer(0.05, lambda: revocation.throw("its host is silent")).start()
    with pytest.raises(EpochRevoked):
        await_key(pinned, "theirs", revocation, 60)
    pinned.close()
    end(process)


def test_a_board_of_another_run_is_not_believed() -> None:
    process, address = other_process(b"the secret of another run")
    with pytest.raises(PeerLost):
        Pinned(address, SECRET).get("key")
    end(process)


@pytest.mark.parametrize("said", [b"{}\n", b"nonsense\n", b'{"nonce": "a", "mac": "b"}\n', b'["set"]\n', b""])
def test_a_stranger_is_sent_away_and_hurts_nobody(board: Board, two: tuple[Pinned, Pinned], said: bytes) -> None:
    host, port = board.address.split(" ")
    with socket.create_connection((host, int(port))) as stranger, stranger.makefile("rb") as lines:
        assert set(json.loads(lines.readline())) == {"nonce"}
        stranger.sendall(said + json.dumps({"set": "poison", "value": "x"}).encode() + b"\n")
        stranger.shutdown(socket.SHUT_WR)
        assert lines.read() == b""
    two[0].set(f"after {said!r}", "fine")
    assert two[1].get(f"after {said!r}") == b"fine"
    assert not two[1].check(["poison"])
