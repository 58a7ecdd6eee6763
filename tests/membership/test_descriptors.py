"""A coordinator without a free descriptor: it lets nobody in for a moment, and does not spin; later it goes on."""

from __future__ import annotations

import errno
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.events import CoordinatorEffect, CoordinatorEvent, Tick
from recover_megatron.membership.records import Settings
from recover_megatron.membership.server import CoordinatorServer
from recover_megatron.membership.wire import Secret
from recover_megatron.network.system import use_all_descriptors
from tests.harness.waiting import DEADLINE

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
