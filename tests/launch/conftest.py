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
from pathlib import Path

import pytest

from tests.harness import REPOSITORY
from tests.harness.processes import processes_with
from tests.harness.waiting import DEADLINE, eventually

TOKEN = "LAUNCH_TEST_TOKEN"


class Launch:
    """One recover-run; its output is collected by threads and can be waited for."""

    def __init__(self, argv: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self.token = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "recover_megatron.launch", *argv],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment, TOKEN: self.token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
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
        assert launch.wait() == ends, launch.err
        return launch

    def workers(self, folder: str = "logs", count: int = 1) -> list[dict]:
        """What workers.json says, once ``count`` workers in it have a pid: it may come after what they print."""
        path = self.folder / folder / "workers.json"

        def started() -> bool:
            return path.exists() and sum(w["pid"] is not None for w in json.loads(path.read_text())) >= count

        eventually(started, f"{count} workers in {path}")
        return json.loads(path.read_text())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for launch in bench.launches:
        launch.clean_up()
        print(launch.pid, launch.process.args, launch.out, launch.err, sep="\n")  # shown with a failure
