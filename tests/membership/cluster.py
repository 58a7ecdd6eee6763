"""Real coordinators and workers as processes, on loopback or in network namespaces, read line by line."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recover_megatron.membership import NodeAgent, Settings
from recover_megatron.membership.sides.node_agent import NodeAgentEvents
from recover_megatron.membership.wire import read_secret_file
from tests.harness.patience import patient
from tests.harness.waiting import DEADLINE, eventually

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
QUICK = {
    "heartbeat_interval": 0.2, "heartbeat_timeout": 3.0, "hang_timeout": 4.0, "stall_timeout": 4.0,
    "start_timeout": 60.0,
}  # fmt: skip
"""Times, in seconds of an idle machine, with which a test need not wait long for anything."""


class Process:
    """A child whose stdout is JSON lines."""

    def __init__(self, argv: Sequence[str], log: Path, namespace: str | None = None) -> None:
        prefix = ["ip", "netns", "exec", namespace] if namespace else []
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self._err = log.open("ab")
        self.popen = subprocess.Popen(
            [*prefix, *argv], stdout=subprocess.PIPE, stderr=self._err, env=environ, start_new_session=True, text=True
        )
        self.lines: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.popen.pid

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self.changed:
                self.lines.append(json.loads(line))
                self.changed.notify_all()
        with self.changed:
            self.lines.append({"event": "closed"})
            self.changed.notify_all()

    def wait_for(
        self, what: Callable[[dict[str, Any]], bool], timeout: float = DEADLINE, start: int = 0
    ) -> dict[str, Any]:
        """The first line from number ``start`` on for which ``what`` holds."""
        end = time.monotonic() + timeout
        with self.changed:
            while True:
                for line in self.lines[start:]:
                    if what(line):
                        return line
                left = end - time.monotonic()
                assert left > 0, f"process {self.pid} never said it; last lines: {self.lines[-6:]}"
                self.changed.wait(left)

    def event(self, name: str, timeout: float = DEADLINE, start: int = 0, **fields: Any) -> dict[str, Any]:
        """The first line of that event with these fields."""
        return self.wait_for(
            lambda line: line.get("event") == name and all(line.get(k) == v for k, v in fields.items()), timeout, start
        )

    def says(self) -> int:
        """How many lines there are now: a ``start`` for what comes later."""
        with self.changed:
            return len(self.lines)

    def kill(self, number: int = signal.SIGKILL) -> float:
        """Send a signal; the time."""
        now = time.monotonic()
        os.kill(self.pid, number)
        return now

    def end(self) -> None:
        """Kill the whole process group and reap the child."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(timeout=DEADLINE)
        self._reader.join(timeout=DEADLINE)
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self._err.close()

    def exit_code(self, timeout: float = DEADLINE) -> int:
        return self.popen.wait(timeout=timeout)


class KillOrders(NodeAgentEvents):
    """A launcher that does what it is told, and hears nothing else."""

    def __init__(self, workers: dict[int, Process]) -> None:
        self._workers = workers

    def evict(self, worker: int, reason: str) -> None:
        self._workers[worker].kill()


class Cluster:
    """Coordinators, workers and, as this very process, their launcher."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self.secret_file = folder / "secret"
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_text(secrets.token_hex(16))
        self.coordinators: list[Process] = []
        self.workers: dict[int, Process] = {}
        self.addresses: list[tuple[str, int]] = []
        self.first_coordinator: Path | None = None
        """A program of its own for the first candidate."""
        self.node_agent: NodeAgent | None = None

    # -- starting -----------------------------------------------------------------------------------------------------

    def start_coordinators(
        self, world: int, count: int = 1, listen: Sequence[str] = (), namespaces: Sequence[str] = (), *extra: str
    ) -> None:
        s = self.settings
        for k in range(count):
            program = [str(self.first_coordinator)] if k == 0 and self.first_coordinator else None
            argv = [sys.executable, *(program or ["-m", "recover_megatron.membership"]), "--world", str(world)]
            argv += ["--secret-file", str(self.secret_file), "--events", str(self.events_file(k))]
            argv += ["--heartbeat-interval", str(s.heartbeat_interval), "--heartbeat-timeout", str(s.heartbeat_timeout)]
            argv += ["--hang-timeout", str(s.hang_timeout), "--stall-timeout", str(s.stall_timeout)]
            argv += ["--start-timeout", str(s.start_timeout), *extra]
            if listen:
                argv += ["--listen", listen[k]]
            process = Process(argv, self.folder / f"coordinator{k}.err", namespaces[k] if namespaces else None)
            self.coordinators.append(process)
        for process in self.coordinators:
            host, _, port = process.wait_for(lambda line: "listening" in line)["listening"].rpartition(":")
            self.addresses.append((host, int(port)))

    def start_node_agent(self, node: str = "node0") -> None:
        """Play the launcher: report ends, obey kill orders."""
        secret = read_secret_file(self.secret_file)
        self.node_agent = NodeAgent(self.addresses, node, secret, KillOrders(self.workers), self.settings)

    def start_worker(
        self, number: int, namespace: str | None = None, addresses: Sequence[tuple[str, int]] = (), **options: Any
    ) -> Process:
        options = {
            "worker": number,
            "addresses": list(addresses) or self.addresses,
            "secret_file": str(self.secret_file),
            "settings": self.settings.__dict__,
            "node_agent": "node0" if self.node_agent else None,
            **options,
        }
        argv = [sys.executable, str(HERE / "worker_program.py"), json.dumps(options)]
        process = Process(argv, self.folder / f"worker{number}.err", namespace)
        self.workers[number] = process
        if self.node_agent is not None:
            self.node_agent.spawned(number, process.pid)
            threading.Thread(target=self._watch, args=(number, process), daemon=True).start()
        return process

    def _watch(self, number: int, process: Process) -> None:
        code = process.popen.wait()
        if self.node_agent is not None:
            self.node_agent.ended(number, f"exit code {code}")

    def start(
        self, world: int, its: Mapping[int, Any] | None = None, candidates: int = 1, launcher: bool = False, **all_: Any
    ) -> None:
        """Coordinators, perhaps a launcher, and workers with the options of ``all_`` and of each alone (``its``)."""
        self.start_coordinators(world, candidates)
        if launcher:
            self.start_node_agent()
        for number in range(world):
            self.start_worker(number, **{**all_, **(its or {}).get(number, {})})

    def start_workers(self, count: int, **options: Any) -> None:
        """And wait until they commit."""
        for number in range(count):
            self.start_worker(number, **options)
        self.all_commit()

    # -- looking ------------------------------------------------------------------------------------------------------

    def events_file(self, candidate: int) -> Path:
        return self.folder / f"events{candidate}.jsonl"

    def events(self, candidate: int = 0) -> list[dict[str, Any]]:
        path = self.events_file(candidate)
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def logged(self, *names: str, candidate: int = 0) -> list[dict[str, Any]]:
        """The events of these names."""
        return [event for event in self.events(candidate) if event["event"] in names]

    def wait_event(self, name: str, candidate: int = 0, **fields: Any) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            fits = {"event": name, **fields}.items()
            return [event for event in self.events(candidate) if fits <= event.items()]

        eventually(found, f"coordinator {candidate} logs {name} {fields}")
        return found()[0]

    def leader(self, since: float = 0.0) -> int:
        """The candidate that was the last to lead, once one has begun to after ``since``."""
        led: list[tuple[float, int]] = []

        def one_leads() -> bool:
            candidates = range(len(self.coordinators))
            led[:] = [(event["mono"], k) for k in candidates for event in self.logged("lead", candidate=k)]
            return bool(led) and max(led)[0] > since

        eventually(one_leads, f"a candidate leads since {since}")
        return max(led)[1]

    def said(self) -> dict[int, int]:
        """How many lines each worker has said by now."""
        return {number: process.says() for number, process in self.workers.items()}

    def all_commit(self) -> None:
        """Every worker has committed."""
        for process in self.workers.values():
            process.event("commit")

    def commit_again(self, *workers: int) -> None:
        """These, else all: each commits after this."""
        for number in workers or self.workers:
            process = self.workers[number]
            process.event("commit", start=process.says())

    def plan_again(self, since: Mapping[int, int]) -> None:
        """Each of these workers gets a plan after it had said so many lines, and then commits."""
        for number, start in since.items():
            self.workers[number].event("plan", start=start)
            self.commit_again(number)

    def continue_without(self, *gone: int) -> None:
        """Every other worker gets a plan without the gone and then commits."""
        for number, process in self.workers.items():
            if number not in gone:
                process.wait_for(lambda line: line["event"] == "plan" and not set(gone) & set(line["members"]))
                self.commit_again(number)

    def exit_codes(self, *workers: int) -> list[int]:
        """Of these, else of all."""
        return [self.workers[number].exit_code() for number in workers or self.workers]

    def end(self) -> None:
        if self.node_agent is not None:
            self.node_agent.close()
            self.node_agent = None
        for process in [*self.workers.values(), *self.coordinators]:
            process.end()


@contextlib.contextmanager
def cluster(
    folder: Path, workers: int = 0, candidates: int = 1, launcher: bool = False, step: float = 0.02, **settings: float
) -> Iterator[Cluster]:
    """A cluster that leaves nothing behind and has one lineage.  Its timeouts are those of an idle machine.

    So many ``workers`` have committed, with so many candidate coordinators and perhaps a launcher; 0: none is started.
    """
    idle = Settings(**settings)  # type: ignore[arg-type]
    times = ("heartbeat_timeout", "hang_timeout", "stall_timeout", "start_timeout")
    made = Cluster(folder, replace(idle, **{name: patient(getattr(idle, name)) for name in times}))
    try:
        if workers:
            made.start(workers, candidates=candidates, launcher=launcher, step=step)
            made.all_commit()
        yield made
        check_one_lineage(made)
    finally:
        made.end()


def check_one_lineage(made: Cluster) -> None:
    """No two epochs with the same number and different members; iterations commit once, in order, at every worker."""
    epochs: dict[int, list[int]] = {}
    for process in made.workers.values():
        last = 0
        for line in list(process.lines):
            if line["event"] == "plan":
                assert epochs.setdefault(line["epoch"], line["members"]) == line["members"]
                last = max(last, line["committed"])
            elif line["event"] == "commit":
                assert line["iteration"] == last + 1
                last = line["iteration"]
