"""Strangers and bad input: the connection they came by is closed, it is logged, and nobody else notices."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, cluster

from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.events import CoordinatorEffect, CoordinatorEvent, Tick
from recover_megatron.membership.io.server import CoordinatorServer
from recover_megatron.membership.messages.fields import Message
from recover_megatron.membership.records import SecretError, Settings
from recover_megatron.membership.wire import MAX_TO_COORDINATOR, Secret, find_secret, read_secret_file
from recover_megatron.network import messages as wire
from recover_megatron.network.system import use_all_descriptors
from tests.harness.processes import python
from tests.harness.waiting import DEADLINE, eventually


def connect(run: Cluster) -> socket.socket:
    return socket.create_connection(run.addresses[0], timeout=DEADLINE)


def receive[M: Message](sock: socket.socket, kind: type[M]) -> M:
    """A message of the handshake."""
    decoder, stage = wire.Decoder(), wire.Schema(kind, wire.MAX_HANDSHAKE)
    while (message := decoder.message(stage)) is None:
        data = sock.recv(4096)
        if not data:
            raise EOFError
        decoder.feed(data)
    return message


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def ends(sock: socket.socket) -> bool:
    """Waits until the other side closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    return True


def prove(run: Cluster) -> socket.socket:
    sock = connect(run)
    auth, owed = read_secret_file(run.secret_file).answer(receive(sock, wire.Challenge))
    sock.sendall(wire.encode(auth))
    assert receive(sock, wire.Proof).mac == owed
    return sock


def unharmed(run: Cluster) -> None:
    """The workers still commit, in the first epoch."""
    for process in run.workers.values():
        assert process.event("commit", start=process.says())["epoch"] == 1


@pytest.mark.slow
def test_malformed_input_costs_only_the_connection_it_came_by(tmp_path: Path) -> None:
    with cluster(tmp_path, workers=2) as run:
        before = [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            os.urandom(4096),
            struct.pack(">I", 0xFFFFFFFF),
            struct.pack(">I", 5) + b"[[[[[",
            framed(b'{"type":"attach"}'),
        ]
        for data in before:
            with connect(run) as sock:
                sock.sendall(data)
                assert ends(sock)
        with connect(run) as sock:  # a wrong secret
            auth, _ = Secret(b"another secret, long enough").answer(receive(sock, wire.Challenge))
            sock.sendall(wire.encode(auth))
            assert ends(sock)
        with connect(run) as sock:  # a proof sent back as one's own
            theirs = receive(sock, wire.Challenge).nonce
            sock.sendall(wire.encode(wire.Auth(theirs, "0" * 64)))
            assert ends(sock)
        for data in (struct.pack(">I", MAX_TO_COORDINATOR + 1), framed(b'{"type":"done","epoch":"x"}')):
            with prove(run) as sock:
                sock.sendall(data)
                assert ends(sock)
        with connect(run) as sock:  # truncated, then gone
            sock.sendall(struct.pack(">I", 100) + b"{")
        unharmed(run)
        reasons = " ".join(event["reason"] for event in run.logged("rejected"))
        assert "does not know the job's secret" in reasons
        assert "malformed" in reasons


@pytest.mark.slow
def test_a_thousand_silent_connections_and_a_slow_one_keep_nobody_out(tmp_path: Path) -> None:
    with cluster(tmp_path) as run:
        run.start_coordinators(3)
        run.start_worker(0)
        run.start_worker(1)
        crowd = [connect(run) for _ in range(1000)]
        slow = connect(run)
        run.start_worker(2)  # comes through the crowd
        run.all_commit()
        started = time.monotonic()
        try:
            while time.monotonic() - started < DEADLINE:
                slow.sendall(b"\0")
                time.sleep(0.2)
            raise AssertionError("a connection that feeds one byte at a time was never closed")
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert all(ends(sock) for sock in crowd[:20])
        for sock in [*crowd, slow]:
            sock.close()
        unharmed(run)
        assert 0 < len(run.logged("rejected")) < 100  # the log is limited


@pytest.mark.slow
def test_a_worker_with_a_wrong_secret_ends_soon_and_says_why(tmp_path: Path) -> None:
    with cluster(tmp_path) as run:
        run.start_coordinators(2)
        wrong = tmp_path / "wrong"
        wrong.touch(mode=0o600)
        wrong.write_text("not the secret of this job")
        worker = run.start_worker(0, secret_file=str(wrong))
        ended = lambda: worker.popen.poll() is not None  # noqa: E731
        eventually(lambda: ended() or run.logged("attached"), "it has ended, or is taken for a worker")
        assert not run.logged("attached")
        assert worker.exit_code() == 2
        assert "secret" in worker.event("out")["reason"]


@pytest.mark.slow
def test_a_member_presents_nothing_to_a_coordinator_that_does_not_know_the_secret(tmp_path: Path) -> None:
    with cluster(tmp_path, start_timeout=10.0) as run, socket.create_server(("127.0.0.1", 0)) as impostor:
        impostor.settimeout(DEADLINE)
        worker = run.start_worker(0, addresses=[impostor.getsockname()[:2]])
        connection, _ = impostor.accept()
        with connection:
            connection.settimeout(DEADLINE)
            connection.sendall(wire.encode(wire.Challenge(wire.PROTOCOL_VERSION, "0" * 64)))
            message = receive(connection, wire.Auth)
            connection.sendall(wire.encode(wire.Proof(message.mac)))  # its own, sent back
            assert connection.recv(4096) == b""
        impostor.close()
        assert worker.exit_code() != 0


@pytest.mark.slow
def test_a_secret_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x" * 32)
    for mode in (0o640, 0o604, 0o620, 0o644):
        path.chmod(mode)
        with pytest.raises(SecretError, match="chmod 600"):
            read_secret_file(path)
    path.chmod(0o600)
    assert "x" not in repr(read_secret_file(path))
    with pytest.raises(SecretError, match="at least 16"):
        find_secret({"RECOVER_SECRET": "short"})
    with pytest.raises(SecretError, match="RECOVER_SECRET"):
        find_secret({})


@pytest.mark.slow
def test_a_users_mistake_gets_a_sentence_and_no_traceback() -> None:
    command = ["-m", "recover_megatron.membership", "--world", "2"]
    for extra, word in (
        ([], "RECOVER_SECRET"),
        (["--listen", "nowhere"], "RECOVER_SECRET"),
        (["--world", "0"], "--world"),
    ):
        done = python(*command, *extra, clean=True)
        assert done.returncode == 2
        assert word in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_coordinator_listens_on_loopback_by_default(tmp_path: Path) -> None:
    with cluster(tmp_path) as run:
        run.start_coordinators(1)
        assert run.addresses[0][0] == "127.0.0.1"


TICKS = 6


class Counting(Coordinator):
    """Tells when it has ticked ``TICKS`` times."""

    ticks = 0
    enough = threading.Event()

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorEffect]:
        if isinstance(event, Tick):
            Counting.ticks += 1
            if Counting.ticks >= TICKS:
                Counting.enough.set()
        return super().handle(event, now)


class Full:
    """A listener whose ``accept`` finds no descriptor left, until ``free`` is set."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.free = threading.Event()
        self.refused = 0

    def accept(self) -> Any:
        if not self.free.is_set():
            self.refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_a_coordinator_without_descriptors_does_not_spin_and_goes_on_later() -> None:
    records: list[Mapping[str, Any]] = []
    listener = Full(socket.create_server(("127.0.0.1", 0)))
    core = Counting(1, Settings(heartbeat_interval=0.2), salt=1)
    server = CoordinatorServer(core, listener, Secret(b"x" * 32), records.append)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    with socket.create_connection(listener.getsockname(), DEADLINE) as waiting:
        thread.start()
        assert Counting.enough.wait(DEADLINE)
        assert 1 <= listener.refused <= Counting.ticks + 1
        listener.free.set()
        assert b"challenge" in waiting.recv(4096)
    assert len([record for record in records if record["event"] == "accept_failed"]) <= 10


class Faulty(Coordinator):
    handled = 0

    def handle(self, event: CoordinatorEvent, now: float) -> Any:
        Faulty.handled += 1
        raise ValueError("a fault")


def test_a_coordinator_with_a_fault_decides_nothing_more_before_it_ends() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = CoordinatorServer(Faulty(1, Settings(), salt=1), listener, Secret(b"x" * 32), print)
    for _ in range(2):
        server.post(Tick())
    with pytest.raises(ValueError, match="a fault"):
        server.serve_forever()
    server.close()
    assert Faulty.handled == 1


def test_a_process_of_a_run_may_have_as_many_files_as_its_host_allows() -> None:
    code = (
        "import resource; from recover_megatron.network.system import use_all_descriptors; use_all_descriptors();"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # noqa: E731
    told = subprocess.run([sys.executable, "-c", code], preexec_fn=low, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [str(hard), str(hard)]
    use_all_descriptors()  # harmless where it is done already
