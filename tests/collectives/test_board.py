"""The board by which the members of an epoch find each other: what is set is told, and no stranger is listened to."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, BinaryIO

import pytest
import torch.distributed as dist

from recover_megatron.collectives.board import Pinned
from recover_megatron.collectives.epoch import Revocation
from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.collectives.rendezvous import await_key
from recover_megatron.network import frames
from recover_megatron.network import store as store_module
from recover_megatron.network.proof import Challenge
from recover_megatron.network.store import Board

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


def test_what_belongs_to_epochs_is_forgotten_with_them_and_the_rest_is_kept() -> None:
    board = Board(HOST, SECRET)
    lasting = Pinned(board.address, SECRET)
    lasting.set("replica", "kept")
    board.put("0", "mine", 0)
    for epoch in range(1, 50):
        one, other = Pinned(board.address, SECRET, epoch), Pinned(board.address, SECRET, epoch)
        one.set(f"group/{epoch}", "port")
        assert not one.check([f"nobody/{epoch}"])  # a wait that ends with its epoch
        assert await_key(other, f"group/{epoch}", Revocation(epoch), 60) == "port"
        one.close()
        other.close()
    assert await_key(lasting, "replica", Revocation(1), 60) == "kept"
    assert sorted(board._values) == ["group/46", "group/47", "group/48", "group/49", "replica"]
    eventually = time.monotonic() + 60
    while board._wanted and time.monotonic() < eventually:
        time.sleep(0.01)  # the ends of the connections are on their way
    assert not board._wanted
    lasting.close()


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
from recover_megatron.network.store import Board
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


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def next_frame(stream: BinaryIO) -> dict[str, Any]:
    (length,) = struct.unpack(">I", stream.read(4))
    return frames.parse(stream.read(length))


@pytest.mark.parametrize("said", [b"{}", b"nonsense", b'{"nonce": "a", "mac": "b"}', b'["set"]', None])
def test_a_stranger_is_sent_away_and_hurts_nobody(board: Board, two: tuple[Pinned, Pinned], said: bytes | None) -> None:
    host, port = board.address.split(" ")
    with socket.create_connection((host, int(port))) as stranger, stranger.makefile("rb") as stream:
        assert set(next_frame(stream)) == {"nonce"}
        stranger.sendall((b"" if said is None else framed(said)) + framed(b'{"set": "poison", "value": "x"}'))
        stranger.shutdown(socket.SHUT_WR)
        assert stream.read() == b""
    two[0].set(f"after {said!r}", "fine")
    assert two[1].get(f"after {said!r}") == b"fine"
    assert not two[1].check(["poison"])


# ---- strangers


def connect(board: Board) -> socket.socket:
    host, port = board.address.split(" ")
    return socket.create_connection((host, int(port)), 60)


def hung_up(sock: socket.socket) -> bool:
    """Whether the board has closed the connection: waits for it."""
    sock.settimeout(60)
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def works(board: Board) -> bool:
    pinned = Pinned(board.address, SECRET)
    try:
        pinned.set("key", "value")
        return await_key(pinned, "key", Revocation(1), 60) == "value"
    finally:
        pinned.close()


def test_silent_connections_are_dropped_the_oldest_first_and_after_a_while_all(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "HANDSHAKE_SECONDS", 3.0)
    strangers = [connect(board) for _ in range(store_module.MOST_UNPROVED + 20)]
    try:
        assert all(hung_up(stranger) for stranger in strangers[:20])
        assert works(board)
        assert all(hung_up(stranger) for stranger in strangers)
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize(
    "line",
    [
        b"x" * 5000,
        framed(b"[" * 900),
        framed(b"{" * 900),
        framed(b"17"),
        framed(b'{"nonce": [], "mac": {}}'),
        framed(b"\xff"),
        framed(b"x" * 1025)[:100],
    ],
    ids=["no frame", "deep list", "deep object", "number", "wrong types", "no text", "too long"],
)
def test_a_stranger_costs_its_own_connection_and_no_traceback(
    board: Board, line: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(board) as stranger:
        stranger.sendall(line)
        assert hung_up(stranger)
    assert works(board)
    assert "Traceback" not in capfd.readouterr().err


def test_deep_nesting_of_one_who_knows_the_secret_is_an_error_of_its_connection(
    board: Board, capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(board) as sock, sock.makefile("rb") as stream:
        nonce = next_frame(stream)["nonce"]
        mac = Challenge(SECRET, store_module.PURPOSE).of_client(nonce, "mine")
        sock.sendall(frames.encode({"nonce": "mine", "mac": mac}, 1 << 10))
        next_frame(stream)
        sock.sendall(framed(b"[" * 200_000))
        assert hung_up(sock)
    assert works(board)
    assert "Traceback" not in capfd.readouterr().err


WITHOUT_DESCRIPTORS = """
import resource, socket, sys, threading, time
from recover_megatron.network import store as module
from recover_megatron.collectives.board import Pinned
from recover_megatron.network.store import Board
from recover_megatron.collectives.epoch import Revocation
from recover_megatron.collectives.rendezvous import await_key
module.HANDSHAKE_SECONDS = 600.0
board = Board("127.0.0.1", b"secret")
board.put("ready", "yes")
host, port = board.address.split(" ")
own = [socket.socket() for _ in range(150)]
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
print(port, flush=True)
sys.stdin.readline()  # strangers have come, more than there are descriptors
for sock in own:
    sock.close()
pinned = Pinned(board.address, b"secret")
assert await_key(pinned, "ready", Revocation(1), 60) == "yes"
print("served", time.process_time(), flush=True)
"""


def test_a_board_without_descriptors_lets_go_of_strangers_and_serves_on() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    port = int(process.stdout.readline())
    strangers = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(120)]
    try:
        assert any(hung_up(stranger) for stranger in strangers[:1])
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith("served")
        assert process.wait(60) == 0
        lines = process.stderr.read().splitlines()
        assert len([line for line in lines if "the board of this worker" in line]) == 1
        assert "Traceback" not in "".join(lines)
    finally:
        process.kill()
        for stranger in strangers:
            stranger.close()
