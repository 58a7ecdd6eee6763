"""The road from a closed socket to the next plan: docs/architecture.md lists the files of it, and calls go down."""

from __future__ import annotations

import fcntl
import re
import socket
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from recover_megatron.membership import EpochRevoked, Secret, Session, Settings
from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.io.journal import Journal
from recover_megatron.membership.io.server import CoordinatorServer
from recover_megatron.membership.records import CoordinatorLost
from recover_megatron.membership.sides.node_agent import NodeAgent
from tests.harness import REPOSITORY

PACKAGE = str(REPOSITORY / "recover_megatron") + "/"
HEADING = "### From a closed socket to a plan in every worker\n"
PATIENT = Settings(heartbeat_interval=500.0, heartbeat_timeout=2000.0, hang_timeout=3000.0, start_timeout=3000.0)
"""No clock has a part in what is recorded."""
SECRET = Secret(b"a secret that is long enough")

Call = tuple[str, str]
"""The file of a caller and that of the function called, below the package."""


class Recorder:
    """Records the calls of the package's functions, in all threads started after it was installed."""

    def __init__(self) -> None:
        self.on = False
        self.calls: set[Call] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
            self.calls.add((caller.removeprefix(PACKAGE), frame.f_code.co_filename.removeprefix(PACKAGE)))

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = threading.getprofile()
        threading.setprofile(self)
        try:
            yield
        finally:
            threading.setprofile(before)


class Worker(threading.Thread):
    """Waits for a commit until the epoch is over, joins the next one, and leaves when it is told to."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.begun, self.planned, self.over = threading.Event(), threading.Event(), threading.Event()
        self.members = frozenset[int]()
        self._session = session

    def run(self) -> None:
        self._session.join({})
        self.begun.set()
        try:
            self._session.agree(1)
        except EpochRevoked:
            self.members = self._session.join({}).members
        self.planned.set()
        self.over.wait()
        self._session.leave()


def recorded(folder: Path) -> set[Call]:
    """The calls from the end of one of three workers' connections to the plan in the other two."""
    recorder = Recorder()
    with recorder.installed():
        listener, journal = socket.create_server(("127.0.0.1", 0)), Journal(folder / "events.jsonl")
        server = CoordinatorServer(Coordinator(3, PATIENT, salt=1, now=time.monotonic()), listener, SECRET, journal)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        address = listener.getsockname()[:2]
        lost, *others = (Session.connect([address], number, SECRET, PATIENT) for number in (2, 0, 1))
        workers = [Worker(session) for session in others]
        for worker in workers:
            worker.start()
        lost.join({})
        for worker in workers:
            worker.begun.wait()
        recorder.on = True
        lost._client._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        for worker in workers:
            worker.planned.wait()
        recorder.on = False
        for worker in workers:
            worker.over.set()
        for thread in [*workers, serving]:
            thread.join()
    lost._client.close()
    server.close()
    journal.close()
    assert [worker.members for worker in workers] == [{0, 1}] * 2
    return recorder.calls


def listed() -> list[str]:
    """The files in the first column of the section's table."""
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8").partition(HEADING)[2]
    section = re.split(r"^#+ ", text, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^\| `([a-z_/]+\.py)` \|", section, flags=re.MULTILINE)


def test_the_files_of_the_docs_are_those_that_are_entered_and_no_part_calls_the_coordinator(tmp_path: Path) -> None:
    calls = recorded(tmp_path)
    assert sorted(listed()) == sorted({called for _, called in calls})
    coordinator = "membership/coordinator.py"
    assert {caller for caller, called in calls if called == coordinator} == {coordinator, "membership/io/server.py"}


class Quiet:
    """A launcher that has nothing to do."""

    def __getattr__(self, name: str) -> Any:
        return lambda *told, **more: None


def test_what_a_worker_has_said_is_heard_before_its_launchers_word_that_it_is_dying() -> None:
    """It gave the run up and ended: both have come when the coordinator looks, and the launcher is read first."""
    listener = socket.create_server(("127.0.0.1", 0))
    records: list[Mapping[str, Any]] = []
    server = CoordinatorServer(Coordinator(2, PATIENT, salt=1, now=time.monotonic()), listener, SECRET, records.append)
    codes, held, waiting = list[int](), threading.Event(), threading.Event()
    selector = server._loop.selector
    select = selector.select

    def select_late(timeout: float | None) -> Any:
        if not held.is_set():
            return select(0.01)
        waiting.set()
        worker, launcher = (server.coordinator.roster.workers[1].session, server.coordinator.roster.node_agents["n"])
        wanted = [server._connections[number].line.descriptor for number in (launcher.session, worker)]
        while not all(_pending(descriptor) for descriptor in wanted):
            time.sleep(0.001)
        held.clear()
        ready = {key.fileobj: (key, mask) for key, mask in select(0)}
        return [ready[descriptor] for descriptor in wanted]

    selector.select = select_late  # type: ignore[method-assign]
    serving = threading.Thread(target=lambda: codes.append(server.serve_forever()))
    serving.start()
    address = listener.getsockname()[:2]
    agent = NodeAgent([address], "n", SECRET, Quiet(), PATIENT)
    sessions = [Session.connect([address], number, SECRET, PATIENT, node_agent="n") for number in range(2)]
    joining = threading.Thread(target=sessions[0].join, args=({},))
    joining.start()
    sessions[1].join({})
    joining.join()
    held.set()
    waiting.wait()
    sessions[1].give_up(7, "it cannot be")
    agent.ended(1, "exit code 7")
    with pytest.raises(CoordinatorLost, match="it cannot be"):
        sessions[0].join({})
    serving.join()
    for client in (*sessions, agent):
        client._client.close()
    server.close()
    assert codes == [7]


def _pending(descriptor: int) -> int:
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), "little")
