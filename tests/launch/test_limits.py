"""What a training takes of a host, what a host allows and has, and what recover-run does without what it has not."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recover_megatron.chaos.__main__ import main as chaos
from recover_megatron.collectives.transport.handshake import RingListener
from recover_megatron.launch.command_line import preflight
from recover_megatron.launch.command_line.forecast import Needs, needs_of
from recover_megatron.launch.command_line.script import Script
from recover_megatron.launch.command_line.spec import HostLimits
from recover_megatron.launch.workers import processes
from recover_megatron.network import system
from recover_megatron.network.event_loop import is_ready
from recover_megatron.network.system import TaskLimit
from tests.harness import REPOSITORY
from tests.harness.processes import alive
from tests.harness.waiting import DEADLINE, eventually

from .test_death import leaves_nothing, reaper_of, start_family

TENSOR, PIPELINE = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
NO_LOADERS = ["--num-workers", "0"]


@pytest.mark.parametrize(
    ("flags", "world", "files", "tasks"),
    [
        (NO_LOADERS, 2, 129, 126),
        (NO_LOADERS, 4, 151, 243),
        ([], 4, 176, 268),
        ([*NO_LOADERS, *TENSOR], 4, 153, 243),
        ([*NO_LOADERS, *PIPELINE], 4, 143, 236),
        ([*NO_LOADERS, *TENSOR, *PIPELINE], 8, 179, 456),
        (NO_LOADERS, 8, 195, 456),
        (["--async-save", "--eval-interval", "2"], 4, 206, 346),
        ([*NO_LOADERS, "--disable-gloo-process-groups"], 2, 114, 114),
        ([*NO_LOADERS, "--disable-gloo-process-groups"], 4, 130, 212),
    ],
)
def test_what_a_training_needs_is_bounded_by_what_was_counted(
    flags: list[str], world: int, files: int, tasks: int
) -> None:
    """``files`` of the worker with most, ``tasks`` of all: the most that was seen in /proc, every 0.15 s of a run."""
    needs = needs_of(Script.read("", flags), world, world, {}, cpu=True)
    assert needs.least_files < files <= needs.files <= 2 * files
    assert needs.least_tasks < tasks <= needs.tasks <= 2 * tasks


def test_a_limit_of_files_at_which_gloo_has_ended_the_workers_is_refused() -> None:
    """In their first step, after half a minute: "Too many open files", by an abort that names no limit."""
    needs = needs_of(Script(), 3, 3, {}, cpu=True)
    (reason,) = preflight.compare(needs, "3 workers", HostLimits(**{**ROOMY, "files": 130})).reasons
    assert "ulimit -n 130 is too low: a worker opens up to 283 files" in reason


def test_of_more_workers_than_were_counted_no_higher_limit_is_known_to_be_too_low() -> None:
    small, counted, large = (needs_of(Script(), world, 8, {}, cpu=True).least_files for world in (8, 64, 512))
    assert small < counted == large


def test_of_what_was_never_counted_no_limit_is_known_to_be_too_low() -> None:
    needs = needs_of(Script(), 8, 8, {}, cpu=False)
    assert (needs.least_files, needs.least_tasks) == (0, 0)
    assert needs_of(Script(), 1, 1, {"OMP_NUM_THREADS": "64"}, cpu=True).tasks > 64


def test_batches_of_loaders_are_as_large_as_their_samples() -> None:
    flags = ["--num-workers", "2", "--micro-batch-size", "4", "--seq-length", "1024"]
    masks = 1024 * 1024
    assert needs_of(Script.read("", flags), 8, 8, {}, cpu=True).shared == 8 * 2 * 3 * 4 * (1024 * 28 + masks)
    flags += ["--no-create-attention-mask-in-dataloader", *TENSOR]
    assert needs_of(Script.read("", flags), 8, 8, {}, cpu=True).shared == 4 * 2 * 3 * 4 * 1024 * 28


NEEDS = Needs(files=200, least_files=100, tasks=300, least_tasks=150, shared=1 << 20)
ROOMY = {"files": 1000, "tasks": [], "longest": None, "shared": 1 << 30}
PROCESSES = "run ulimit -u {} before recover-run"


@pytest.mark.parametrize(
    ("less", "reason", "note"),
    [
        ({}, "", ""),
        ({"files": 200, "tasks": [TaskLimit("ulimit -u", 310, 10, PROCESSES)], "shared": 1 << 20}, "", ""),
        ({"files": 99}, "ulimit -n 99 is too low: a worker opens up to 200 files and connections: run ulimit -n 2", ""),
        ({"files": 100}, "", "ulimit -n 100 may be too low"),
        ({"tasks": [TaskLimit("ulimit -u", 149, 9, PROCESSES)]}, "149 is too low (in use: 9): 4 workers", ""),
        ({"tasks": [TaskLimit("ulimit -u", 309, 10, PROCESSES)]}, "", "300 processes and threads: run ulimit -u 512"),
        ({"longest": 1 << 20}, "", "ulimit -f limits every file to 1048576 bytes"),
        ({"shared": 0}, "", "/dev/shm has 0 MiB left, but the batches of loaders may need 1 MiB"),
    ],
)  # fmt: skip
def test_a_limit_is_refused_where_it_cannot_do_and_told_of_where_it_may_not(less: dict, reason: str, note: str) -> None:
    found = preflight.compare(NEEDS, "4 workers", HostLimits(**{**ROOMY, **less}))
    assert [len(found.reasons), len(found.notes)] == [bool(reason), bool(note)]
    assert reason in "".join(found.reasons)
    assert note in "".join(found.notes)


@pytest.mark.parametrize(
    ("line", "folders", "told"),
    [
        ("0::/job/step", ["job/step", "job", ""], [(40, 7), (90, 7)]),
        ("8:pids:/job", ["pids/job", "pids"], [(40, 7)]),
        ("8:memory:/job", [], []),
    ],
    ids=["2", "1", "none"],
)
def test_processes_are_counted_against_the_limit_of_every_group_around(
    tmp_path: Path, line: str, folders: list[str], told: list[tuple[int, int]]
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"{line}\n")
    for most, folder in zip(["max", "40", "90"], folders, strict=False):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "pids.max").write_text(f"{most}\n")
        (tmp_path / folder / "pids.current").write_text("7\n")
    found = system.task_limits(tmp_path, tmp_path)
    assert [(limit.most, limit.used) for limit in found if limit.name != "ulimit -u"] == told


@pytest.mark.parametrize(("rights", "bound"), [("0000000000000000", True), ("0000000001000000", False)])
def test_the_limit_of_a_user_holds_where_it_has_no_rights_beyond_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rights: str, bound: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 60))
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid or 12345)
    for name in ("self", "7/task/7", "7/task/8"):
        (tmp_path / name).mkdir(parents=True)
    os.chown(tmp_path / "7", os.getuid(), -1)
    (tmp_path / "self" / "status").write_text(f"Name:\tx\nCapEff:\t{rights}\n")
    assert [(its.name, its.most, its.used) for its in system.task_limits(tmp_path, tmp_path)] == (
        [("ulimit -u", 50, 2)] if bound else []
    )


FLAGS = ["--recover", "--recover-device", "cpu", "--mock-data"]


def test_too_few_descriptors_are_refused_at_once_with_the_line_to_run(bench) -> None:
    script = Path(bench.script("", "pretrain_x.py"))
    line = f"ulimit -n 96; $RUN --nproc-per-node 4 {script} {' '.join(FLAGS)} 2>said"
    assert bench.shell(line) == 2
    assert "ulimit -n 96 is too low" in (bench.folder / "said").read_text()
    assert bench.shell(f"$RUN --check --nproc-per-node 4 {script} {' '.join(FLAGS)} 2>said") == 0
    assert "307 open files in each worker (of" in (bench.folder / "said").read_text()


def test_the_launcher_opens_as_many_files_as_it_may(bench) -> None:
    """It has a connection of each worker of the run, and workers raise their own limit."""
    script = bench.script("import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")
    assert bench.shell(f"ulimit -Sn 40; ulimit -Hn 200; $RUN --nproc-per-node 2 {script} --recover >said 2>&1") == 0
    assert (bench.folder / "said").read_text().count("200 200") == 2


# ---- a Python that was built for an older Linux, and a kernel that answers ENOSYS: in a sitecustomize.py

OLD_PYTHON = """
import fcntl, os, signal
spawn = os.posix_spawn
def without_sessions(*args, **kwargs):
    if kwargs.get("setsid"):
        raise NotImplementedError
    return spawn(*args, **kwargs)
os.posix_spawn = without_sessions
del os.pidfd_open, os.memfd_create, os.MFD_CLOEXEC, fcntl.F_ADD_SEALS, signal.pidfd_send_signal
"""
SECCOMP = """
import ctypes, os, struct
arm = os.uname().machine == "aarch64"
numbers = [434, 424, 279 if arm else 319]
skip = [part for n in numbers for part in (struct.pack("HBBI", 0x15, 0, 1, n), struct.pack("HBBI", 6, 0, 0, 0x50026))]
code = b"".join([struct.pack("HBBI", 0x20, 0, 0, 0), *skip, struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)])
held = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
"""


@pytest.fixture(params=[OLD_PYTHON, SECCOMP], ids=["python", "kernel"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "sitecustomize.py").write_text(request.param)
    return {"PYTHONPATH": f"{tmp_path / 'old'}:{REPOSITORY}"}


def test_without_pidfds_and_memory_files_ends_are_seen_and_nothing_is_left(bench, old: dict[str, str]) -> None:
    launch = start_family(bench, environment=old)
    assert launch.err.count("pidfd_open") == launch.err.count("memfd_create") == 1
    for pid in (reaper_of(launch), *(worker["pid"] for worker in bench.workers(count=2))):
        eventually(lambda pid=pid: os.getsid(pid) == pid, f"{pid} leads a session")
    bench.kill(0, 2)
    launch.wait_for("was killed by SIGKILL")
    launch.wait_for("that it left behind")
    launch.send(signal.SIGKILL)
    leaves_nothing(launch)


def test_where_prctl_is_refused_nothing_is_started(bench) -> None:
    text = SECCOMP.replace("[434, 424, 279 if arm else 319]", "[167 if arm else 157]")
    assert text != SECCOMP
    bench.script(text, "sitecustomize.py")
    launch = bench.run(bench.script(""), environment={"PYTHONPATH": f"{bench.folder}:{REPOSITORY}"}, ends=2)
    assert "prctl(PR_GET_CHILD_SUBREAPER) is refused (Function not implemented)" in launch.err


def test_without_proc_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.host() == ([], [])
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/proc"))
    assert ["/proc is not mounted" in reason for reason in preflight.host()[0]] == [True]


@pytest.fixture
def no_pidfds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.delattr(os, "memfd_create")
    system.lacking.cache_clear()
    yield
    system.lacking.cache_clear()


def test_a_thread_tells_of_an_end_and_leaves_the_child_to_be_reaped(no_pidfds: None) -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)"], {})
    ends = processes.open_pidfd(pid)
    assert not is_ready(ends)
    os.kill(pid, signal.SIGTERM)
    assert is_ready(ends, 30)
    assert processes.reap(pid) == -signal.SIGTERM
    os.close(ends)


def test_a_process_is_ended_by_its_pid_where_there_are_no_pidfds(
    no_pidfds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)"], {})
    started = processes.process_table()[pid]
    with monkeypatch.context() as no_kill:
        no_kill.setattr(os, "kill", lambda pid, _: pytest.fail(f"another process had the pid {pid} before"))
        processes._kill(started._replace(start=started.start - 1))
    assert processes.kill_until_none_left(lambda: [p for p in [processes.process_table()[pid]] if p.alive], 30) == []
    eventually(lambda: not alive(pid), "it has ended")
    os.waitpid(pid, 0)


@pytest.mark.parametrize("refused", [errno.EPERM, errno.ENOSYS])
def test_a_process_is_ended_by_its_pid_where_a_filter_refuses_signals_by_pidfd(
    monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    system.lacking.cache_clear()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)"], {})
    try:
        processes._kill(processes.process_table()[pid])
        assert is_ready(os.pidfd_open(pid), DEADLINE), "it has ended"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        system.lacking.cache_clear()


def test_without_pidfds_no_worker_is_struck_from_outside(
    no_pidfds: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        chaos(["--log-dir", str(tmp_path), "--mtbf", "1", "--seed", "1"])
    assert "has no pidfds" in capsys.readouterr().err


def test_a_memory_file_lies_where_there_is_memory(no_pidfds: None) -> None:
    descriptor = system.memory_file("x")
    os.pwrite(descriptor, b"beat", 0)
    assert os.pread(descriptor, 8, 0) == b"beat"
    assert os.fstat(descriptor).st_nlink == 0
    os.close(descriptor)


@pytest.mark.parametrize("why", ["no memfd_create", "ulimit -f", "no boot id"])
def test_where_no_memory_can_be_shared_a_ring_goes_over_its_connections(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def too_long(descriptor: int, length: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    if why == "no memfd_create":
        monkeypatch.delattr(os, "memfd_create")
    elif why == "ulimit -f":
        monkeypatch.setattr(os, "ftruncate", too_long)
    else:
        monkeypatch.setattr(Path, "read_text", lambda _: (_ for _ in ()).throw(FileNotFoundError()))
    before = len(os.listdir("/proc/self/fd"))
    listener = RingListener("127.0.0.1", (3, 1000))
    assert listener.address.endswith(" -")
    assert listener.take_slots() is None
    listener.close()
    assert len(os.listdir("/proc/self/fd")) == before
