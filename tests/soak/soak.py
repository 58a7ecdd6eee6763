"""One long run whose workers are killed one after the other, each replaced; its coordinators stop and die beside them.

What its processes hold must not grow.

    python -m tests.soak.soak FOLDER KILLS [SEED]

Real: recover-run --max-restarts, its two coordinators, SIGKILL and SIGSTOP; workers are forked by one process that has
imported what they need (``template``). One worker, each fourth time two at once, are killed at a random time
after the run is whole again; worker 0 never, so that it has seen every recovery by the end. Coordinators are stopped at
any time, for less than the heartbeat timeout; the leading one is killed after a quarter of the kills.

    FOLDER/run/...          the log folder of the run
    FOLDER/reference/...    that of the same run without any of this
    FOLDER/samples.jsonl    what the processes held, once after each recovery
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from recover_megatron.launch.command_line.forecast import needs_of
from recover_megatron.launch.command_line.script import Script
from recover_megatron.membership.io.observer import Observer
from recover_megatron.membership.records import MembershipError
from recover_megatron.membership.wire import Secret
from recover_megatron.run_log.steps import read_steps, violations
from recover_megatron.status.model import RunStatus, read
from tests.harness import REPOSITORY
from tests.harness.patience import patient
from tests.harness.processes import children, command_line
from tests.instep.runs import MODEL, check_rows
from tests.launch.conftest import recover_run

MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One look at one process."""

    process: str
    """What it is to the run."""
    pid: int
    kills: int
    """How many there had been."""
    iteration: int
    memory: int
    """Resident, in bytes."""
    descriptors: int
    threads: int
    seconds: float
    """Of processor time, so far."""
    files: int = 0
    """In /dev/shm, as this process sees it."""
    logs: int = 0
    """Bytes in the run's log folder."""


def sample(process: str, pid: int, kills: int, iteration: int, logs: int = 0) -> Sample:
    """Raises psutil.NoSuchProcess for a process that has ended."""
    seen = psutil.Process(pid)
    used, times = seen.memory_info().rss, seen.cpu_times()
    descriptors, threads = seen.num_fds(), seen.num_threads()
    files = len(os.listdir(f"/proc/{pid}/root/dev/shm"))
    return Sample(process, pid, kills, iteration, used, descriptors, threads, times.user + times.system, files, logs)


def told(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Those that are looked at: the first tenth is left out, since what is allocated once is there by then."""
    return samples[len(samples) // 10 :]


FEWEST = 8
"""Samples that are needed to tell growth."""


def growth(samples: Sequence[Sample]) -> list[str]:
    """What one process has more of late in a run than early, in words; empty: nothing.

    The first and the last quarter are compared, by their medians: a sample may fall into the middle of a recovery.
    """
    looked_at = told(samples)
    if len(looked_at) < FEWEST:
        return []
    quarter = len(looked_at) // 4
    early, late = looked_at[:quarter], looked_at[-quarter:]
    found = []
    for what, slack in (("descriptors", 2.0), ("threads", 1.0), ("memory", 6.0 * MIB), ("files", 2.0)):
        before, after = (statistics.median(getattr(one, what) for one in part) for part in (early, late))
        if after > 1.03 * before + slack:
            found.append(f"{samples[0].process}: {what} {before:.0f} -> {after:.0f}")
    # The slack is that of a coordinator: it shows each worker that it has ever known to whoever looks, and we do.
    for what, slack in (("seconds", 0.005), ("logs", 1000.0)):
        before, after = (_each(part, what) for part in (early, late))
        if len(looked_at) >= 100 and after > 1.5 * before + slack:
            found.append(f"{samples[0].process}: {what} per iteration {before:.4f} -> {after:.4f}")
    return found


def _each(part: Sequence[Sample], what: str) -> float:
    """Processor seconds, or bytes of logs, per iteration, from one kill to the next, so with a recovery every few.

    Not per kill: on a busy machine a newcomer takes longer, and more iterations pass meanwhile.
    """
    pairs = [(early, late) for early, late in itertools.pairwise(part) if late.iteration > early.iteration]
    each = [(getattr(b, what) - getattr(a, what)) / (b.iteration - a.iteration) for a, b in pairs]
    return statistics.median(each) if each else 0.0


WORKERS, BATCH = 4, 12
HEARTBEAT_TIMEOUT = 5.0
ITERATIONS_PER_KILL = 30
"""Enough: a kill and the rejoin of a worker take some ten, on a busy machine twenty."""
ASK_SECONDS = 0.2
STUCK_SECONDS = patient(300)
SCRIPT = str(REPOSITORY / "tests" / "soak" / "paced.py")
FLAGS = [*MODEL, "--log-interval", "100", "--eval-interval", "1000000", "--eval-iters", "0"]
FLAGS += ["--lr", "0.001", "--min-lr", "0.001", "--hidden-dropout", "0", "--attention-dropout", "0"]
FLAGS += ["--global-batch-size", str(BATCH)]


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of the files in a log folder, those together whose names differ by a number alone."""
    found: defaultdict[str, int] = defaultdict(int)
    for path in folder.rglob("*"):
        if path.is_file() and "pids" not in path.parts:  # those are the template's
            found[re.sub(r"\d+", "#", str(path.relative_to(folder)))] += path.stat().st_size
    return dict(found)


class Stuck(AssertionError):
    """The run does not become whole again, or has ended."""


@dataclass
class Report:
    """What a soak did, and what it found."""

    kills: int = 0
    pauses: int = 0
    coordinators_killed: int = 0
    iterations: int = 0
    seconds: float = 0.0
    """From a kill to the run being whole again, the median of the last tenth of them."""
    logs: dict[str, float] = field(default_factory=dict)
    """Files of the log folder (# for a number) -> bytes for each kill: they grow by design."""
    judged: list[str] = field(default_factory=list)
    """The processes of which there were samples enough to tell growth."""
    problems: list[str] = field(default_factory=list)


class Launch:
    """One recover-run."""

    def __init__(self, folder: Path, iterations: int, restarts: int, secret: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        argv = ["--nproc-per-node", str(WORKERS), "--log-dir", str(folder), "--max-restarts", str(restarts)]
        argv += [SCRIPT, *FLAGS, "--train-iters", str(iterations), "--recover"]
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment |= {"SOAK_FOLDER": str(folder), "RECOVER_SECRET": secret}
        with (folder / "template.log").open("wb") as log:
            self._template = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.template", str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=REPOSITORY,
            )  # fmt: skip
        assert self._template.stdout is not None
        while (said := self._template.stdout.readline()) != b"ready\n":
            assert said, "the template has ended: " + (folder / "template.log").read_text()[-2000:]
        with (folder / "console.log").open("wb") as console:
            self.process = recover_run(
                argv, REPOSITORY, environment, stdout=console, stderr=console, preexec_fn=self._enter
            )
        self.secret = Secret(secret.encode())

    def _enter(self) -> None:
        """See the /dev/shm that the template has made for itself, if it could."""
        with open(f"/proc/{self._template.pid}/ns/mnt", "rb") as its, open("/proc/self/ns/mnt", "rb") as mine:
            if not os.path.sameopenfile(its.fileno(), mine.fileno()):
                os.setns(its.fileno(), os.CLONE_NEWNS)
                os.chdir(REPOSITORY)

    @property
    def console(self) -> str:
        return (self.folder / "console.log").read_text(errors="replace")

    def workers(self) -> dict[int, int]:
        """Worker -> pid, of those that live."""
        rows = json.loads((self.folder / "workers.json").read_text())
        found = {}
        for row in rows:
            with contextlib.suppress(FileNotFoundError, ValueError):  # not forked yet
                if row["state"] == "running":
                    found[row["worker_id"]] = int((self.folder / "pids" / str(row["pid"])).read_text())
        return found

    def candidates(self) -> list[int]:
        """The pids of the coordinators."""
        name, below = "recover_megatron.membership.__main__", children(self.process.pid, all_below=True)
        return sorted(pid for pid in below if any(name in word for word in command_line(pid)))

    def others(self) -> dict[str, int]:
        """The processes that last as long as the run."""
        found = {"launcher": self.process.pid}
        found |= {f"coordinator {pid}": pid for pid in self.candidates()}
        workers = self.workers()
        return {**found, "worker 0": workers[0]} if 0 in workers else found

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(patient(60))
        self._template.communicate()  # it ends with its stdin


class Eyes:
    """What the coordinator that leads tells of the run; the connection is kept from one look to the next."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._observer: Observer | None = None
        self._addresses: list[tuple[str, int]] = []

    def look(self) -> RunStatus | None:
        """None: nobody leads just now, or answers."""
        if not self._addresses:
            said = self._launch.console.partition("--recover-coordinator ")[2].split(" ")[0]
            pairs = [address.rpartition(":") for address in said.split(",") if address]
            self._addresses = [(host, int(port)) for host, _, port in pairs]
        if self._observer is not None:
            if (status := self._ask(self._observer)) is not None:
                return status
            self._observer.close()
            self._observer = None
        for address in self._addresses:
            with contextlib.suppress(MembershipError):
                observer = Observer(address, self._launch.secret, 2.0)
                if (status := self._ask(observer)) is not None:
                    self._observer = observer
                    return status
                observer.close()
        return None

    @staticmethod
    def _ask(observer: Observer) -> RunStatus | None:
        try:
            status = read(observer.ask(), observer.name)
        except MembershipError:
            return None
        return status if status.state in ("rendezvous", "steady") else None


class Soak:
    """Made once per run; ``run`` returns what it found."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        self._folder, self._kills = folder, kills
        self._random = random.Random(f"soak {seed}")
        self._iterations = ITERATIONS_PER_KILL * (kills + 2)
        self._samples: dict[str, list[Sample]] = defaultdict(list)
        self._seconds: list[float] = []
        self.report = Report()

    def run(self) -> Report:
        """Raises Stuck where the run does not go on."""
        secret = "of this soak alone, and of no use elsewhere"
        launch = Launch(self._folder / "run", self._iterations, self._kills + 8, secret)
        try:
            self._strike_all(launch)
            (launch.folder / "hurry").touch()
            if launch.process.wait(patient(3600)) != 0:
                raise Stuck(f"exit code {launch.process.returncode}\n{launch.console[-3000:]}")
        finally:
            launch.end()
        reference = Launch(self._folder / "reference", self._iterations, 0, secret)
        try:
            (reference.folder / "hurry").touch()
            assert reference.process.wait(patient(3600)) == 0, reference.console[-3000:]
        finally:
            reference.end()
        self._judge(launch.folder, reference.folder)
        return self.report

    def _strike_all(self, launch: Launch) -> None:
        eyes = Eyes(launch)
        self._wait_whole(launch, eyes)
        while self.report.kills < self._kills:
            iteration = self._wait_whole(launch, eyes).iteration
            if iteration + 2 * ITERATIONS_PER_KILL > self._iterations:
                raise Stuck(f"{self._iterations} iterations are not enough for {self._kills} kills")
            self._note(launch, iteration)
            pauses = self._pause(launch) if self._random.random() < 0.4 else None
            time.sleep(self._random.uniform(0.0, 0.5))
            if self.report.kills >= self._kills // 4 and not self.report.coordinators_killed:
                os.kill(launch.candidates()[0], signal.SIGKILL)
                self.report.coordinators_killed += 1
            alive = launch.workers()
            count = min(2 if len(self._seconds) % 4 == 3 else 1, self._kills - self.report.kills)
            victims = self._random.sample(sorted(worker for worker in alive if worker != 0), count)
            struck = time.monotonic()
            (launch.folder / "awaits").touch()
            for victim in victims:
                os.kill(alive[victim], signal.SIGKILL)
            self.report.kills += len(victims)
            self._wait_whole(launch, eyes, without=victims)
            self._seconds.append(time.monotonic() - struck)
            (launch.folder / "awaits").unlink()
            if pauses is not None:
                pauses.join()
        self._note(launch, 0)

    def _pause(self, launch: Launch) -> threading.Thread:
        """Stop a coordinator, from some time before the kill to some time after it."""
        pid, seconds = self._random.choice(launch.candidates()), self._random.uniform(0.05, 0.5 * HEARTBEAT_TIMEOUT)

        def pause() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(seconds)
                os.kill(pid, signal.SIGCONT)

        self.report.pauses += 1
        thread = threading.Thread(target=pause)
        thread.start()
        return thread

    def _wait_whole(self, launch: Launch, eyes: Eyes, without: Sequence[int] = ()) -> RunStatus:
        """Until every replica is there again, and the killed workers are in none."""
        until = time.monotonic() + STUCK_SECONDS
        while time.monotonic() < until:
            if launch.process.poll() is not None:
                raise Stuck(f"the run has ended: {launch.console[-3000:]}")
            status = eyes.look()
            if status is not None and status.state == "steady" and len(status.grid) == WORKERS:
                placed = {worker.worker for replica in status.grid for worker in replica.workers}
                if placed.isdisjoint(without):
                    return status
            time.sleep(ASK_SECONDS)
        raise Stuck(f"not whole within {STUCK_SECONDS:.0f} s after {self.report.kills} kills: {launch.console[-3000:]}")

    def _note(self, launch: Launch, iteration: int) -> None:
        logs = sum(sizes(launch.folder).values())
        for name, pid in launch.others().items():
            # A standby that has become the leader holds more than before.
            process = f"{name}, {self.report.coordinators_killed} leaders killed" if "coordinator" in name else name
            with contextlib.suppress(psutil.NoSuchProcess):
                one = sample(process, pid, self.report.kills, iteration, logs)
                self._samples[process].append(one)
                with (self._folder / "samples.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(one)) + "\n")

    def _judge(self, run: Path, reference: Path) -> None:
        report = self.report
        steps = list(read_steps(run / "steps.jsonl"))
        report.iterations = len(steps)
        if [step.iteration for step in steps] != list(range(1, self._iterations + 1)):
            report.problems.append("an iteration is missing, or is there twice")
        report.problems += [str(problem) for problem in violations(steps, BATCH)]
        try:
            check_rows(steps, read_steps(reference / "steps.jsonl"))
        except AssertionError as error:
            report.problems.append(f"another training than the reference: {error}")
        for process, samples in self._samples.items():
            report.problems += growth(samples)
            report.judged += [process] * (len(told(samples)) >= FEWEST)
        report.logs = {name: size / report.kills for name, size in sizes(run).items()}
        used, needs = self._samples["worker 0"], needs_of(Script.read("", FLAGS), WORKERS, WORKERS, {}, cpu=True)
        files, tasks = max(one.descriptors for one in used), WORKERS * max(one.threads for one in used)
        if not needs.least_files < files <= needs.files <= 2 * files or not tasks <= needs.tasks <= 2 * tasks:
            report.problems.append(f"recover-run counts with {needs}: worker 0 had {files} files, all {tasks} threads")
        last = sorted(self._seconds[-max(1, len(self._seconds) // 10) :])
        report.seconds = last[len(last) // 2]


if __name__ == "__main__":
    soak = Soak(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    try:
        soak.run()
    finally:
        print(json.dumps(asdict(soak.report), indent=1))
