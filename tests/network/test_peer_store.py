"""The peer store: what is set is told, strangers are not heard; a forked process closes what its parent holds open."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, BinaryIO

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked, PeerLost, await_key
from recover_megatron.collectives.peers import Fetcher, PeerStoreClient
from recover_megatron.network import messages
from recover_megatron.network import peer_store as store_module
from recover_megatron.network.connection import PEER_STORE, accept, answer
from recover_megatron.network.messages import Challenge, Proof, Schema, encode
from recover_megatron.network.peer_store import MOST_BYTES, PeerStoreServer, Range, open_stream
from tests.harness.patience import patient
from tests.harness.processes import python
from tests.harness.waiting import DEADLINE, eventually

SECRET = b"what the workers of the test share"
HOST = "127.0.0.1"
Two = tuple[PeerStoreClient, PeerStoreClient]


@pytest.fixture(scope="module")
def peer_store() -> PeerStoreServer:
    peer_store = PeerStoreServer(HOST, SECRET)
    peer_store.source = give
    return peer_store


@pytest.fixture
def two(peer_store: PeerStoreServer) -> Iterator[Two]:
    both = PeerStoreClient(peer_store.address, SECRET), PeerStoreClient(peer_store.address, SECRET)
    yield both
    for pinned in both:
        pinned.close()


def test_a_value_is_told_to_who_asked_before_and_to_who_asks_after(
    two: Two,
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
        one, other = (PeerStoreClient(peer_store.address, SECRET, epoch) for _ in range(2))
        one.set(f"group/{epoch}", "port")
        assert not one.check([f"nobody/{epoch}"])  # a wait that ends with its epoch
        assert await_key(other, f"group/{epoch}", CancelToken(epoch), DEADLINE) == "port"
        one.close()
        other.close()
    assert await_key(lasting, "replica", CancelToken(1), DEADLINE) == "kept"
    assert sorted(peer_store._values) == ["group/46", "group/47", "group/48", "group/49", "replica"]
    eventually(lambda: not peer_store._wanted, "the ends of the connections have come")
    lasting.close()


def test_a_value_that_is_too_long_is_an_error_of_who_sets_it(two: Two, peer_store: PeerStoreServer) -> None:
    for store in (two[0].set, peer_store.put):
        with pytest.raises(ValueError, match="more than the limit"):
            store("long", "x" * (store_module.LONGEST_MESSAGE // 4 * 3))
    two[0].set("long", "x" * (1 << 20))
    assert two[1].get("long") == b"x" * (1 << 20)


def test_torch_can_use_it_as_a_store(two: Two) -> None:
    """As NCCL does, through a prefix, with bytes of any value."""
    one, other = (dist.PrefixStore("nccl", pinned) for pinned in two)
    value = bytes(range(256))
    reader = threading.Thread(target=lambda: one.set("id", value))
    reader.start()
    assert other.get("id") == value
    reader.join()
    with pytest.raises(dist.DistStoreError, match="no worker published"):
        two[1].wait(["never"], timedelta(milliseconds=10))


def test_a_revocation_ends_the_wait(two: Two) -> None:
    cancel_token = CancelToken(3)
    threading.Timer(0.05, lambda: cancel_token.cancel("over")).start()
    with pytest.raises(EpochRevoked):
        await_key(two[0], "nobody sets it", cancel_token, DEADLINE)


SERVES = """
import sys, time
from recover_megatron.network.peer_store import PeerStoreServer
board = PeerStoreServer("127.0.0.1", sys.argv[1].encode())
board.source = lambda update, parts: b"here"
print(board.address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def other_process() -> Iterator[tuple[int, str]]:
    """One with a peer store that gives to all who ask: its pid, its address."""
    argv = [sys.executable, "-c", SERVES, SECRET.decode()]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_the_death_of_its_worker_is_the_loss_of_a_peer_at_once() -> None:
    with other_process() as (pid, address):
        pinned, fetcher = PeerStoreClient(address, SECRET), Fetcher(address, SECRET, for_long)
        pinned.set("before", "x")
        assert (pinned.get("before"), fetcher.fetch(0, ONE)) == (b"x", b"here")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PeerLost):
            fetcher.fetch(0, ONE)
        with pytest.raises(PeerLost, match="unreachable"):
            await_key(pinned, "after", CancelToken(1), DEADLINE)
        with pytest.raises(PeerLost):
            pinned.set("after", "y")
        with pytest.raises(PeerLost):
            Fetcher(address, SECRET, for_long)


def test_a_board_that_has_gone_silent_blocks_nobody_and_the_revocation_ends_the_wait() -> None:
    with other_process() as (pid, address), contextlib.closing(PeerStoreClient(address, SECRET)) as pinned:
        os.kill(pid, signal.SIGSTOP)
        pinned.set("mine", "x")  # at once
        cancel_token = CancelToken(1)
        threading.Timer(0.05, lambda: cancel_token.cancel("its host is silent")).start()
        with pytest.raises(EpochRevoked):
            await_key(pinned, "theirs", cancel_token, DEADLINE)


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def hear[T](stream: BinaryIO, schema: Schema[T]) -> T:
    (length,) = struct.unpack(">I", stream.read(4))
    return schema.parse(stream.read(length))


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
    with contextlib.closing(PeerStoreClient(peer_store.address, SECRET)) as pinned:
        pinned.set("key", "value")
        return await_key(pinned, "key", CancelToken(1), DEADLINE) == "value"


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


TOO_LONG = framed(b"x" * (messages.MAX_HANDSHAKE + 1))


@pytest.mark.parametrize("said", [framed(b"{}"), encode(messages.Auth("0" * 64, "0" * 64)), TOO_LONG[:100], b""])
def test_a_stranger_is_sent_away_and_costs_its_own_connection_and_no_traceback(
    peer_store: PeerStoreServer, two: Two, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(peer_store) as stranger, stranger.makefile("rb") as stream:
        hear(stream, messages.CHALLENGE)
        stranger.sendall(said + encode(store_module.Value("poison", b"x")))
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # not all was read
            assert stream.read() == b""
    assert works(peer_store)
    assert not two[1].check(["poison"])
    assert "Traceback" not in capfd.readouterr().err


REQUESTS: list[dict[str, Any]] = [
    {"type": "value", "key": "poison", "value": "AA==", "epoch": 1},
    {"type": "want", "key": "poison"},
    {"type": "fetch", "update": 1, "parts": [[1, 2, 3]]},
    {"type": "stream", "name": "poison"},
]
WRONG: list[Any] = [True, -1, 1.5, 1 << 54, "x" * 70_001, [], {}, [[]], ["x"], [[1, 2, -3]]]


class Watched(PeerStoreServer):
    """A peer store that notes what a request makes it do, and what fails."""

    def note(self, *arguments: object) -> None:
        self.came = arguments

    _set = _hand_over = _send_fetched = _failed = note  # type: ignore[assignment]


@pytest.fixture(scope="module")
def watched() -> Watched:
    return Watched(HOST, SECRET)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(REQUESTS), st.data())
def test_a_spoiled_request_of_one_who_knows_the_secret_does_nothing_and_ends_the_connection(
    watched: Watched, sound: dict[str, Any], data: st.DataObject
) -> None:
    spoiled = {**sound, data.draw(st.sampled_from([*sound, "another"])): data.draw(st.sampled_from(WRONG))}
    with connect(watched) as sock, sock.makefile("rb") as stream:
        auth, owed = answer(SECRET, PEER_STORE, hear(stream, messages.CHALLENGE))
        sock.sendall(encode(auth))
        assert hear(stream, messages.PROOF) == Proof(owed)
        sock.sendall(framed(json.dumps(spoiled).encode()) + encode(store_module.Value("poison", b"x")))
        sock.shutdown(socket.SHUT_WR)
        assert hung_up(sock)
    assert not hasattr(watched, "came")
    assert not watched._wanted


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


DATA = bytes(range(256)) * 100_000


ONE = [(0, 0, 1)]


def give(update: int, parts: Sequence[Range]) -> bytes | None:
    [(_, start, stop)] = parts
    return DATA[start:stop] if stop <= len(DATA) else None


def for_long() -> None:
    """Waits for as long as it takes."""


def fetched(address: str, start: int, stop: int) -> bytes | None:
    """By a connection of its own."""
    with contextlib.closing(Fetcher(address, SECRET, for_long)) as fetcher:
        return fetcher.fetch(0, [(0, start, stop)])


@pytest.fixture
def fetcher(peer_store: PeerStoreServer) -> Iterator[Fetcher]:
    fetcher = Fetcher(peer_store.address, SECRET, for_long)
    yield fetcher
    fetcher.close()


def test_what_is_asked_for_comes_bit_for_bit_whatever_its_size(fetcher: Fetcher) -> None:
    for start, stop in ((0, 1), (10, 266), (5, 5 + MOST_BYTES), (7, 7)):
        assert fetcher.fetch(0, [(0, start, stop)]) == DATA[start:stop]


def test_what_the_other_one_does_not_have_is_none_and_the_next_question_is_answered(fetcher: Fetcher) -> None:
    assert fetcher.fetch(0, [(0, 0, len(DATA) + 1)]) is None
    assert fetcher.fetch(0, [(0, 3, 9)]) == DATA[3:9]


def test_a_board_that_was_given_no_source_has_nothing() -> None:
    assert fetched(PeerStoreServer(HOST, SECRET).address, 0, 1) is None


def test_a_fault_of_the_source_costs_the_connection_and_not_the_board(
    peer_store: PeerStoreServer, fetcher: Fetcher
) -> None:
    with pytest.raises(PeerLost, match="closed the connection"):
        fetcher.fetch(0, ONE * 2)  # too many values to unpack: a ValueError
    assert fetched(peer_store.address, 0, 3) == DATA[:3]


def test_a_board_still_tells_values_while_it_gives_bytes(peer_store: PeerStoreServer, fetcher: Fetcher) -> None:
    with contextlib.closing(PeerStoreClient(peer_store.address, SECRET)) as pinned:
        pinned.set("key", "value")
        assert fetcher.fetch(0, [(0, 0, MOST_BYTES)]) == DATA[:MOST_BYTES]
        assert pinned.get("key") == b"value"


NONCE = "0f" * 32
SOUND = encode(Challenge(messages.PROTOCOL_VERSION, NONCE))
OLD = messages.PROTOCOL_VERSION - 1


@pytest.mark.parametrize(
    ("secret", "challenge", "said", "why"),
    [
        (b"another", SOUND, b"", "does not know the run's secret"),
        (SECRET, encode(Challenge(OLD, NONCE)), b"", f"has protocol version {OLD}"),
        (SECRET, framed(b'{"nonce":"n"}'), b"", "ValidationError"),
        (SECRET, TOO_LONG, b"", "longer than the limit"),
        *((SECRET, SOUND, framed(body), "ValidationError") for body in (b'{"size":16777217}', b'{"key":"k"}', b"[]")),
    ],
    ids=range(7),
)
def test_an_answer_that_a_peer_store_of_this_run_does_not_give_is_not_taken(
    secret: bytes, challenge: bytes, said: bytes, why: str
) -> None:
    with socket.create_server((HOST, 0)) as poser, ThreadPoolExecutor() as pool:

        def pose() -> None:
            sock, _ = poser.accept()
            with sock, sock.makefile("rb") as stream, contextlib.suppress(struct.error):
                sock.sendall(challenge)
                proof = accept(secret, PEER_STORE, NONCE, hear(stream, messages.AUTH)) or Proof(NONCE)
                sock.sendall(encode(proof) + said)
                assert hung_up(sock)

        address = f"{HOST} {poser.getsockname()[1]}"
        posed = [pool.submit(pose) for _ in range(2)]
        with pytest.raises(PeerLost, match=why):
            fetched(address, 0, 1)
        with contextlib.closing(PeerStoreClient(address, SECRET)) as pinned, pytest.raises(PeerLost, match=why):
            pinned.get("k")
        for each in posed:
            each.result(DEADLINE)


def test_neither_end_of_a_connection_holds_a_small_message_back(peer_store: PeerStoreServer) -> None:
    """With Nagle's algorithm the second part of an answer waits up to 40 ms for an acknowledgement of the first."""
    client = open_stream(peer_store.address, SECRET, "kind/name")
    with client, peer_store.streams.take("kind/name", for_long) as server:
        assert all(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in (client, server))


def test_a_process_that_is_stopped_is_waited_for_only_as_long_as_patience_lasts() -> None:
    asked = 0

    def impatient() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise PeerLost("it is gone")

    with other_process() as (pid, address):
        fetcher = Fetcher(address, SECRET, impatient)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # until the last of its threads has stopped
        with pytest.raises(PeerLost, match="it is gone"):
            fetcher.fetch(0, ONE)
    assert asked == 2


PROGRAM = """
import os, socket, sys
from recover_megatron.network import system

class Held:
    def __init__(self, fails):
        self.sock, self.fails = socket.socket(), fails
        system.close_in_children(self)

    def close_in_child(self):
        if self.fails:
            os.close(-1)  # as where it was closed already
        self.sock.close()

def forked(check):
    pid = os.fork()
    if pid == 0:
        os._exit(check())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def watches():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        system.watch(sock)
        return system._watch._thread.is_alive()

held = [Held(True), Held(False), Held(True), Held(False)]
own = Held(False)
assert watches()

def child():
    if any(one.sock.fileno() >= 0 for one in held if not one.fails):
        return 1
    if not watches():
        return 2
    mine = Held(False)
    return forked(lambda: 0 if mine.sock.fileno() < 0 and watches() else 3)

print(forked(child), all(one.sock.fileno() >= 0 for one in held))
"""


def test_children_and_their_children_close_what_is_not_theirs_and_watch_connections_of_their_own() -> None:
    done = python("-c", PROGRAM)
    assert (done.stdout, done.returncode) == ("0 True\n", 0), done.stderr
