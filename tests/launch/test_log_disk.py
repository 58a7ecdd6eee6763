"""Every file that a launch writes, on a disk that is full or read-only while it runs: a warning each, and no more."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest

from recover_megatron.report.run_dir import read_run
from tests.harness.processes import mount
from tests.harness.waiting import DEADLINE
from tests.launch.conftest import Bench

WORKER = """
    import os, signal, sys, time
    from pathlib import Path
    from recover_megatron.membership.records import EpochRevoked
    from recover_megatron.membership.io.session import connect
    from recover_megatron.run_log.events import EventsFile
    from recover_megatron.run_log.steps import StepRecord, StepsFile

    me, session, folder = int(os.environ["RANK"]), connect(), Path("logs")
    last, writer, files = 0, None, ()
    while last < 90:
        try:
            if session.revoked or not last:
                plan = session.join({"hello": me})
                last = max(last, plan.committed)
            session.agree(last + 1)
        except EpochRevoked:
            plan = session.join({"hello": me})
            last = plan.committed
            continue
        last += 1
        if writer != min(plan.members):
            writer = min(plan.members)
            if writer == me:
                files = EventsFile(folder / "events.jsonl"), StepsFile(folder / "steps.jsonl", last)
        if files:
            files[0].append("plan", worker=me, iteration=last, epoch=plan.epoch)
            files[1].append(StepRecord(last, 2.0, 1.0, last, plan.epoch, len(plan.members), 0.1, {0: [0]}))
        print("iteration", last, "x" * 100, flush=True)  # a full tmpfs takes what fits into a file's last 4 KiB
        if last == 20:
            while not os.path.exists("go"):
                time.sleep(0.01)
        if last == 30 and me == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    while files and not os.path.exists("end"):
        time.sleep(0.01)
    for file in files:
        file.close()
    print("finished", flush=True)
    session.leave()
"""


@pytest.fixture
def disk(bench: Bench) -> Iterator[Path]:
    """A disk of its own for the log folder."""
    if os.geteuid():
        pytest.skip("only root may mount a file system")
    logs = bench.folder / "logs"
    logs.mkdir()
    mount("-t", "tmpfs", "-o", "size=256k", "none", logs)
    yield logs
    for launch in bench.launches:
        launch.clean_up()
    while subprocess.run(["umount", "-l", logs], capture_output=True, check=False).returncode == 0:
        pass


def fill(logs: Path) -> Callable[[], None]:
    """No byte is left; returns what makes room again."""
    rest = logs / "of-another-job"
    with rest.open("wb", buffering=0) as file:
        while os.statvfs(logs).f_bfree:  # files of the run are replaced meanwhile, and leave room
            with contextlib.suppress(OSError):
                file.write(bytes(512))
    return rest.unlink


def make_read_only(logs: Path) -> Callable[[], None]:
    """What is open can be written on, nothing can be opened, made or replaced; returns what undoes it.

    The disk is made read-only in another place and laid over ``logs`` then: a mount on which anybody has opened a file
    to write cannot become read-only.
    """
    other = logs.with_name("read-only")
    other.mkdir()
    mount("--bind", logs, other)
    mount("-o", "remount,bind,ro", other)
    mount("--bind", other, logs)
    subprocess.run(["umount", other], check=True)
    return lambda: subprocess.run(["umount", "-l", logs], check=True)


def test_a_disk_becomes_read_only_while_files_are_opened_on_it(disk: Path) -> None:
    """As a run does all the time: here some are open at every moment."""

    stop = threading.Event()

    def opens() -> int | None:
        kept = deque[IO[str]](maxlen=10)
        try:
            while not stop.is_set():
                kept.append((disk / "replaced").open("w"))
        except OSError as error:
            return error.errno
        return None

    with ThreadPoolExecutor() as pool:
        refused = pool.submit(opens)
        try:
            undo = make_read_only(disk)
            assert refused.result(DEADLINE) == errno.EROFS
        finally:
            stop.set()
    undo()
    (disk / "replaced").write_text("room")


LAST = {"events.jsonl", "steps.jsonl"}
"""Files that the next writer opens."""
FULL = LAST | {"worker-1.log", "worker-2.log", "events-0.jsonl"}
REPLACED = {"workers.json", "run.prom"}
"""Files that are replaced: they are written anew, not added to."""


@pytest.mark.parametrize(
    ("break_it", "why", "already_logged", "form"),
    [
        pytest.param(fill, "No space left on device", FULL | REPLACED, "json", id="full"),
        pytest.param(make_read_only, "Read-only file system", LAST | REPLACED, "plain", id="read-only"),
    ],
)  # fmt: skip
def test_a_disk_that_takes_nothing_more_costs_a_warning_for_each_file_and_no_iteration(
    bench: Bench,
    disk: Path,
    break_it: Callable[[Path], Callable[[], None]],
    why: str,
    already_logged: set[str],
    form: str,
) -> None:
    launch = bench.start(
        "--nproc-per-node", 3, "--log-dir", "logs", "--log-format", form, bench.script(WORKER), "--recover",
        "--recover-metrics-file", disk / "run.prom",
    )  # fmt: skip
    launch.wait_for("iteration 20 ", 3)
    undo = break_it(disk)
    (bench.folder / "go").touch()
    launch.wait_for("iteration 90 ", 2)
    for name in already_logged:
        launch.wait_for(f"{name} cannot be written ({why})")
    warnings = [line for line in (launch.out + launch.err).splitlines() if "cannot be written" in line]
    # Worker 0 writes the first 30 iterations, worker 1 the others: each of them says it of its file.
    most = {name: 2 if name in LAST else 1 for name in already_logged}
    for name in already_logged:
        assert 1 <= sum(f"/{name} " in line for line in warnings) <= most[name], warnings
    # The worker that was killed may have said it before, and a candidate that does not lead if it logged a delay of its
    # own.
    others = {"worker-0.log", "events-1.jsonl"}
    assert {line.partition(" cannot")[0].rpartition("/")[2] for line in warnings} <= already_logged | others
    undo()
    (bench.folder / "end").touch()
    launch.ends()
    assert launch.out.count("finished") == 2
    if form == "json":  # the coordinator and the process for metrics, too, which write past the launcher
        said = [json.loads(line) for line in (launch.out + launch.err).splitlines()]
        assert {(line["worker"], line["node"].rpartition("-")[2]) for line in said} == {
            (n, "0") for n in (0, 1, 2, "-")
        }
    # When there is room again all that was kept is written: what is missing went with the worker that was killed.
    states = {worker["worker_id"]: worker["state"] for worker in json.loads((disk / "workers.json").read_text())}
    assert states == {0: "killed", 1: "finished", 2: "finished"}
    assert [step.iteration for step in read_run(disk).steps][-3:] == [88, 89, 90]
    assert "finished" in (disk / "worker-1.log").read_text()
    assert f'recover_exit_code{{run="{disk}"}} 0.0' in (disk / "run.prom").read_text()
