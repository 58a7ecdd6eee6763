"""The peer store by which the members of an epoch find each other: what is set is told, strangers are not heard."""

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

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked, PeerLost, await_key
from recover_megatron.collectives.peers import PeerStoreClient
from recover_megatron.network import connection
from recover_megatron.network import peer_store as store_module
from recover_megatron.network.connection import Challenge
from recover_megatron.network.peer_store import PeerStoreServer
from tests.harness.patience import patient
from tests.harness.waiting import DEADLINE

SECRET = b"what the workers of the test share"
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def peer_store() -> PeerStoreServer:
    return PeerStoreServer(HOST, SECRET)


@pytest.fixture
def two(peer_store: PeerStoreServer) -> Iterator[tuple[PeerStoreClient, PeerStoreClient]]:
    both = PeerStoreClient(peer_store.address, SECRET), PeerStoreClient(peer_store.address, SECRET)
    yield both
    for pinned in both:
        pinned.close()


def test_a_value_is_told_to_who_asked_before_and_to_who_asks_after(
    two: tuple[PeerStoreClient, PeerStoreClient],
) -> None:
    one, other = two
    assert not other.check(["early"])
    one.set("early", "a")
    assert await_key(other, "early", CancelToken(1), DEADLINE) == "a"
    one.set("late", "b")
    assert await_key(one, "late", CancelToken(1), DEADLINE) == "b"
    assert await_key(other, "late", CancelToken(1), DEADLINE) == "b"


def test_what_belongs_to_epochs_is_forgotten_with_them_and_the_rest_is_kept() -> None:
    peer_store = PeerStoreServer(HOST, SECRET)
    lasting = PeerStoreClient(peer_store.address, SECRET)
    lasting.set("replica", "kept")
    peer_store.put("0", "mine", 0)
    for epoch in range(1, 50):
        one, other = (
            PeerStoreClient(peer_store.address, SECRET, epoch),
            PeerStoreClient(peer_store.address, SECRET, epoch),
        )
        one.set(f"group/{epoch}", "port")
        assert not one.check([f"nobody/{epoch}"])  # a wait that ends with its epoch
        assert await_key(other, f"group/{epoch}", CancelToken(epoch), DEADLINE) == "port"
        one.close()
        other.close()
    assert await_key(lasting, "replica", CancelToken(1), DEADLINE) == "kept"
    assert sorted(peer_store._values) == ["group/46", "group/47", "group/48", "group/49", "replica"]
    eventually = time.monotonic() + DEADLINE
    while peer_store._wanted and time.monotonic() < eventually:
        time.sleep(0.01)  # the ends of the connections are on their way
    assert not peer_store._wanted
    lasting.close()


def test_torch_can_use_it_as_a_store(two: tuple[PeerStoreClient, PeerStoreClient]) -> None:
    """As NCCL does, through a prefix, with bytes of any value."""
    one, other = (dist.PrefixStore("nccl", pinned) for pinned in two)
    value = bytes(range(256))
    reader = threading.Thread(target=lambda: one.set("id", value))
    reader.start()
    assert other.get("id") == value
    reader.join()
    with pytest.raises(dist.DistStoreError, match="nobody published"):
        two[1].wait(["never"], timedelta(milliseconds=10))


def test_a_revocation_ends_the_wait(two: tuple[PeerStoreClient, PeerStoreClient]) -> None:
    cancel_token = CancelToken(3)
    threading.Timer(0.05, lambda: cancel_token.cancel("over")).start()
    with pytest.raises(EpochRevoked):
        await_key(two[0], "nobody sets it", cancel_token, DEADLINE)


SERVES = """
import sys, time
from recover_megatron.network.peer_store import PeerStoreServer
board = PeerStoreServer("127.0.0.1", sys.argv[1].encode())
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
    pinned = PeerStoreClient(address, SECRET)
    pinned.set("before", "x")
    assert pinned.get("before") == b"x"
    end(process)
    with pytest.raises(PeerLost, match="out of reach"):
        await_key(pinned, "after", CancelToken(1), DEADLINE)
    with pytest.raises(PeerLost):
        pinned.set("after", "y")


def test_a_board_that_has_gone_silent_blocks_nobody_and_the_revocation_ends_the_wait() -> None:
    process, address = other_process(SECRET)
    os.kill(process.pid, signal.SIGSTOP)
    pinned = PeerStoreClient(address, SECRET)
    pinned.set("mine", "x")  # at once
    cancel_token = CancelToken(1)
    threading.Timer(0.05, lambda: cancel_token.cancel("its host is silent")).start()
    with pytest.raises(EpochRevoked):
        await_key(pinned, "theirs", cancel_token, DEADLINE)
    pinned.close()
    end(process)


def test_a_board_of_another_run_is_not_believed() -> None:
    process, address = other_process(b"the secret of another run")
    with pytest.raises(PeerLost):
        PeerStoreClient(address, SECRET).get("key")
    end(process)


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def next_frame(stream: BinaryIO) -> dict[str, Any]:
    (length,) = struct.unpack(">I", stream.read(4))
    return connection.parse(stream.read(length))


@pytest.mark.parametrize("said", [b"{}", b"nonsense", b'{"nonce": "a", "mac": "b"}', b'["set"]', None])
def test_a_stranger_is_sent_away_and_hurts_nobody(
    peer_store: PeerStoreServer, two: tuple[PeerStoreClient, PeerStoreClient], said: bytes | None
) -> None:
    host, port = peer_store.address.split(" ")
    with socket.create_connection((host, int(port))) as stranger, stranger.makefile("rb") as stream:
        assert set(next_frame(stream)) == {"nonce"}
        stranger.sendall((b"" if said is None else framed(said)) + framed(b'{"set": "poison", "value": "x"}'))
        stranger.shutdown(socket.SHUT_WR)
        assert stream.read() == b""
    two[0].set(f"after {said!r}", "fine")
    assert two[1].get(f"after {said!r}") == b"fine"
    assert not two[1].check(["poison"])


# ---- strangers


def connect(peer_store: PeerStoreServer) -> socket.socket:
    host, port = peer_store.address.split(" ")
    return socket.create_connection((host, int(port)), DEADLINE)


def hung_up(sock: socket.socket) -> bool:
    """Whether the peer store has closed the connection: waits for it."""
    sock.settimeout(DEADLINE)
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def works(peer_store: PeerStoreServer) -> bool:
    pinned = PeerStoreClient(peer_store.address, SECRET)
    try:
        pinned.set("key", "value")
        return await_key(pinned, "key", CancelToken(1), DEADLINE) == "value"
    finally:
        pinned.close()


def test_silent_connections_are_dropped_the_oldest_first_and_after_a_while_all(
    peer_store: PeerStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "HANDSHAKE_SECONDS", patient(5.0))
    strangers = [connect(peer_store) for _ in range(store_module.MOST_UNPROVED + 20)]
    try:
        assert all(hung_up(stranger) for stranger in strangers[:20])
        assert works(peer_store)
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
    peer_store: PeerStoreServer, line: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(peer_store) as stranger:
        stranger.sendall(line)
        assert hung_up(stranger)
    assert works(peer_store)
    assert "Traceback" not in capfd.readouterr().err


def test_deep_nesting_of_one_who_knows_the_secret_is_an_error_of_its_connection(
    peer_store: PeerStoreServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(peer_store) as sock, sock.makefile("rb") as stream:
        nonce = next_frame(stream)["nonce"]
        mac = Challenge(SECRET, store_module.PURPOSE).of_client(nonce, "mine")
        sock.sendall(connection.encode({"nonce": "mine", "mac": mac}, 1 << 10))
        next_frame(stream)
        sock.sendall(framed(b"[" * 200_000))
        assert hung_up(sock)
    assert works(peer_store)
    assert "Traceback" not in capfd.readouterr().err


WITHOUT_DESCRIPTORS = """
import resource, socket, sys, threading, time
from recover_megatron.network import peer_store as module
from recover_megatron.collectives.peers import PeerStoreClient
from recover_megatron.network.peer_store import PeerStoreServer
from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.epoch import await_key
module.HANDSHAKE_SECONDS = 600.0
board = PeerStoreServer("127.0.0.1", b"secret")
board.put("ready", "yes")
host, port = board.address.split(" ")
own = [socket.socket() for _ in range(150)]
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
print(port, flush=True)
sys.stdin.readline()  # strangers have come, more than there are descriptors
for sock in own:
    sock.close()
pinned = PeerStoreClient(board.address, b"secret")
assert await_key(pinned, "ready", CancelToken(1), 600) == "yes"
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
    strangers = [socket.create_connection(("127.0.0.1", port), DEADLINE) for _ in range(120)]
    try:
        assert any(hung_up(stranger) for stranger in strangers[:1])
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith("served")
        assert process.wait(DEADLINE) == 0
        lines = process.stderr.read().splitlines()
        assert len([line for line in lines if "the peer store of this worker" in line]) == 1
        assert "Traceback" not in "".join(lines)
    finally:
        process.kill()
        for stranger in strangers:
            stranger.close()
