"""Launch real processes, wait for what they print or leave behind, and leave nothing behind oneself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from recover_megatron.launch import command
from recover_megatron.launch.command_line.script import Script
from recover_megatron.launch.command_line.spec import LaunchSpec
from tests.harness import REPOSITORY
from tests.harness.processes import free_port, processes_with, python
from tests.harness.waiting import DEADLINE, eventually, written_lines

TOKEN = "LAUNCH_TEST_TOKEN"
SECRET = {"RECOVER_SECRET": "one that all launchers of a test share"}
UNTIL_TOLD = """
    import os, sys, time
    print("UP", os.environ["RANK"], os.getpid(), flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    print("DONE", os.environ["RANK"], flush=True)
    """
IN_THE_RUN = """
    import os, time
    from recover_megatron.membership.io.session import connect

    session = connect()
    session.join({})
    print("JOINED", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    session.leave()
    """


def recover_run(
    argv: Sequence[str], cwd: Path, environment: Mapping[str, str] = MappingProxyType({}), **streams: object
) -> subprocess.Popen[bytes]:
    """Start one."""
    return subprocess.Popen(
        [sys.executable, "-m", "recover_megatron.launch", *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        **streams,
    )


class Launch:
    """One recover-run; its output is collected by threads and can be waited for."""

    def __init__(self, argv: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self.token = uuid.uuid4().hex
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = recover_run(argv, cwd, {**environment, TOKEN: self.token}, **pipes)
        self.pid = self.process.pid
        self._news = threading.Condition()
        self._fragments: dict[str, list[bytes]] = {"out": [], "err": []}
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream) -> None:
        while data := os.read(stream.fileno(), 65536):
            with self._news:
                self._fragments[name].append(data)
                self._news.notify_all()

    @property
    def out(self) -> str:
        return self.bytes_out.decode(errors="replace")

    @property
    def bytes_out(self) -> bytes:
        return b"".join(self._fragments["out"])

    @property
    def err(self) -> str:
        return b"".join(self._fragments["err"]).decode(errors="replace")

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until ``text`` has been printed ``times`` times."""
        deadline = time.monotonic() + DEADLINE
        with self._news:
            while (self.out + self.err).count(text) < times:
                if not self._news.wait(deadline - time.monotonic()):
                    pytest.fail(f"{text!r} was not printed {times} times:\n{self.out}\n{self.err}")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end.  Returns the exit code (minus the signal)."""
        try:
            code = self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"recover-run did not end:\n{self.out}\n{self.err}")
        for reader in self._readers:
            reader.join(DEADLINE)
        return code

    def ends(self, code: int = 0) -> None:
        """Wait for the end, which is with this exit code, and leaves no process."""
        assert self.wait() == code, self.out[-3000:] + self.err
        assert self.left() == []

    def left(self) -> list[int]:
        """Living processes of this launch, the launcher included."""
        return processes_with(f"{TOKEN}={self.token}")

    def clean_up(self) -> None:
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + DEADLINE
        while (left := self.left()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(DEADLINE)
        self.process.stdout.close()
        self.process.stderr.close()


class Bench:
    """A folder for scripts, and launches in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launches: list[Launch] = []

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script.  Returns its name, relative to the folder in which launches run."""
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def start(self, *argv: object, environment: Mapping[str, str] | None = None) -> Launch:
        launch = Launch([str(word) for word in argv], self.folder, environment or {})
        self.launches.append(launch)
        return launch

    def run(self, *argv: object, environment: Mapping[str, str] | None = None, ends: int = 0) -> Launch:
        """To its end, with this exit code."""
        launch = self.start(*argv, environment=environment)
        launch.ends(ends)
        return launch

    def up(
        self,
        workers: int,
        *argv: object,
        says: str = "UP",
        logs: str = "logs",
        environment: Mapping[str, str] | None = None,
    ) -> Launch:
        """A launch of so many workers into a log folder, once each of them has said that it is there."""
        launch = self.start("--nproc-per-node", workers, "--log-dir", logs, *argv, environment=environment)
        launch.wait_for(says, times=workers)
        return launch

    def nodes(
        self, count: int, *argv: object, per_node: int = 2, environment: Mapping[str, str] = SECRET
    ) -> list[Launch]:
        """A launcher for each node of one launch, all on this machine."""
        options = ["--nnodes", count, "--nproc-per-node", per_node, "--master-port", free_port(), "--log-dir", "logs"]
        return [self.start(*options, "--node-rank", node, *argv, environment=environment) for node in range(count)]

    def go(self, name: str = "go") -> None:
        """Make the file that scripts wait for."""
        (self.folder / name).touch()

    def log(self, worker: int = 0, folder: str = "logs") -> str:
        """What a worker's log has by now."""
        return (self.folder / folder / f"worker-{worker}.log").read_text()

    def events(self, *kinds: str, candidate: int = 0, folder: str = "logs") -> list[dict]:
        """What a candidate coordinator has logged by now, of these kinds."""
        found = map(json.loads, written_lines(self.folder / folder / f"events-{candidate}.jsonl"))
        return [event for event in found if event["event"] in kinds]

    def lease_claims(self) -> list[list[list[int]]]:
        """The members, as runs, of each side that has had the lease, one after the other."""
        # One that is being written has another name, with a second dot: it is no claim yet.
        files = sorted(path for path in (self.folder / "logs").glob("lease-*.*") if path.suffixes == [path.suffix])
        return [json.loads(path.read_text())["members"] for path in files]

    def kill(self, worker: int, count: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one of ``count`` workers, once they have started."""
        os.kill(self.workers(count=count)[worker]["pid"], number)

    def status(self, folder: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """recover-status of a log folder, with no variable of ours but these."""
        told = (self.folder / folder, *options)
        return python("-m", "recover_megatron.status", *told, clean=True, **environment)

    def shell(self, command: str) -> int:
        """Run a line of sh, with recover-run as ``$RUN``.  Returns the exit code."""
        run = f"{sys.executable} -m recover_megatron.launch"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RUN": run}
        how = {"cwd": self.folder, "env": environment, "timeout": DEADLINE, "start_new_session": True}
        return subprocess.run(["sh", "-c", command], **how).returncode

    def workers(self, folder: str = "logs", count: int = 1) -> list[dict]:
        """What workers.json says, once ``count`` workers in it have a pid: it may come after what they print."""
        path = self.folder / folder / "workers.json"

        def started() -> bool:
            return path.exists() and sum(w["pid"] is not None for w in json.loads(path.read_text())) >= count

        eventually(started, f"{count} workers in {path}")
        return json.loads(path.read_text())

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for launch in self.launches:
            launch.clean_up()
            print(launch.pid, launch.process.args, launch.out, launch.err, sep="\n")  # shown with a failure


@pytest.fixture(scope="session", autouse=True)
def as_from_a_terminal() -> None:
    """Whoever has started these tests: recover-run leaves signals of a terminal alone where they are ignored."""
    for number, handler in {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


@pytest.fixture
def refused_here(bench, monkeypatch, capsys):
    """What is said of a command line that must be refused; run in this process, it fails if anything would start."""

    def refused_here(*argv):
        monkeypatch.chdir(bench.folder)
        monkeypatch.setattr(command, "Supervisor", lambda *_: pytest.fail("it would be started"))
        assert command.run([str(word) for word in argv]) == 2
        return capsys.readouterr().err

    return refused_here


def spec_of(
    *,
    script: str = "",
    script_args: Sequence[str] = (),
    fault_tolerant: bool = True,
    spares: int = 0,
    control_plane: bool = True,
    joins: tuple[tuple[str, int], ...] = (),
    node_address: str | None = None,
    **fields: object,
) -> LaunchSpec:
    """That of four workers on one node, but for these fields."""
    read = Script.read(script, script_args)
    words = replace(read, recover=replace(read.recover, enabled=fault_tolerant, spares=spares))
    environ = {**(SECRET if control_plane else {}), **({"RECOVER_HOST": node_address} if node_address else {})}
    common = {"nproc_per_node": 4, "master_addr": "a", "master_port": 1, "launch_id": "l", "run_id": "r", "host": "h"}
    return LaunchSpec(
        **{**common, "environ": environ, **fields}, script=words, join=bool(joins), coordinators=joins
    )  # fmt: skip
