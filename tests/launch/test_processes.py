"""Which processes belong to a launch; how the launcher hears of signals, and reaps what it inherits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.launch.workers import processes
from recover_megatron.launch.workers import reaper as reaper_module
from recover_megatron.launch.workers.processes import (
    Process,
    Subreaper,
    belonging,
    carries,
    find_launch,
    kill_found,
    process_table,
    spawn,
)
from recover_megatron.launch.workers.reaper import Reaper, beat
from recover_megatron.launch.workers.signals import LaunchSignals
from recover_megatron.launch.workers.states import WorkerProcess, WorkerState
from recover_megatron.launch.workers.worker_table import WorkerTable
from recover_megatron.network import system
from recover_megatron.network.event_loop import EventLoop, is_ready
from tests.harness.processes import children, environment
from tests.harness.waiting import eventually


@pytest.mark.parametrize(
    ("entries", "seeds", "sessions", "spared", "found"),
    [
        pytest.param(
            [(10, 1, 10), (11, 10, 10), (12, 11, 12), (13, 1, 12), (20, 1, 20)], [10], [], [], {10, 11, 12, 13},
            id="descendants and sessions of a seed",
        ),
        pytest.param(
            [(11, 1, 10), (12, 11, 12), (20, 1, 20)], [], [10], [], {11, 12}, id="a session whose leader is gone"
        ),
        pytest.param(
            [(10, 1, 10), (11, 10, 10), (12, 10, 10)], [11], [], [], {11},
            id="not somebody's login session, which a seed does not lead",
        ),
        pytest.param(
            [(10, 1, 10), (11, 10, 10), (12, 11, 11), (13, 12, 11)], [10], [], [11], {10},
            id="not the spared, nor what belongs through them",
        ),
    ],
)  # fmt: skip
def test_what_belongs_to_a_launch(entries, seeds, sessions, spared, found):
    """``entries``: pid, parent, session of all processes."""
    processes = {pid: Process(pid, "S", parent, session, 0) for pid, parent, session in entries}
    assert belonging(processes, seeds, sessions, spared) == found


def test_own_process_is_in_the_table_with_its_session():
    mine = process_table()[os.getpid()]
    assert (mine.parent, mine.session) == (os.getppid(), os.getsid(0))
    assert mine.alive


@contextlib.contextmanager
def started(**environment):
    """A process with these variables, which ends with the block."""
    program = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(program, env={**os.environ, **environment}, **pipes) as child:
        child.stdout.readline()
        yield child


def test_an_environment_entry_matches_whole_or_not_at_all():
    with started(SOME_MARK="abc") as child:
        assert carries(child.pid, {"SOME_MARK": "abc"})
        assert not carries(child.pid, {"SOME_MARK": "ab"})
        assert not carries(child.pid, {"MARK": "abc"})
        assert not carries(child.pid, {"SOME_MARK": "abc", "OTHER": "x"})


def test_kill_found_kills_the_marked_and_reports_them():
    with started(RECOVER_LAUNCH_ID="test-kill-found") as child:
        killed = kill_found(lambda: find_launch("test-kill-found", [], [os.getpid()]))
        assert {process.pid for process in killed} == {child.pid}
        assert child.wait() == -signal.SIGKILL


def test_a_process_whose_end_could_not_be_seen_is_not_started(monkeypatch):
    def none_left(pid):
        raise OSError(errno.EMFILE, "Too many open files")

    before = children(os.getpid())
    monkeypatch.setattr(os, "pidfd_open", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        spawn([sys.executable, "-c", "import signal; signal.pause()"], dict(os.environ), 2, 2)
    assert children(os.getpid()) == before


def test_a_reaper_that_cannot_be_replaced_is_tried_again_and_ends_nothing(monkeypatch):
    loop, said = EventLoop(), []
    monkeypatch.setattr(reaper_module, "AGAIN_SECONDS", 0.01)
    reaper = Reaper(loop, "a launch of this test", said.append)
    first = reaper.pid

    def no_process(*args, **kwargs):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as no_more:
        no_more.setattr(os, "posix_spawn", no_process)
        os.kill(first, signal.SIGKILL)
        while not said:
            loop.run_once()
        reaper.add_session(os.getpid(), [0])
        reaper.remove_session(os.getpid())
        loop.run_once()
    while len(said) == 1:
        loop.run_once()
    assert said == [
        f"the reaper (pid {first}) was killed, and no new one can be started now (Resource temporarily unavailable): "
        "trying again every second",
        f"the reaper (pid {first}) was killed; a new one (pid {reaper.pid}) took its place",
    ]
    reaper.finish()
    loop.close()


def test_a_reaper_starts_where_python_finds_its_library_by_a_variable_and_has_no_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("RECOVER_SECRET", "not for the reaper")
    monkeypatch.delenv("TMPDIR", raising=False)
    loop = EventLoop()
    reaper = Reaper(loop, "a launch of this test", print)
    # The kernel shows none until the new program is loaded.
    eventually(lambda: environment(reaper.pid), "the reaper's program is loaded")
    assert environment(reaper.pid) == {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(tmp_path)}
    reaper.finish()
    loop.close()


WATCHES = """
import sys
from recover_megatron.launch.workers import reaper
reaper.LOOK_SECONDS = reaper.RELIEF_SECONDS = 0.01
launch, sessions = reaper._watch()
print(launch, *sorted(sessions), file=sys.stderr)
"""


def test_a_launcher_that_is_killed_with_words_of_its_reaper_unread_is_heard_to_be_gone():
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pulse, (read, write) = os.memfd_create("pulse"), os.pipe()
    os.set_blocking(read, False)
    os.write(write, b"x\n" * (fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) // 2))
    with (
        subprocess.Popen(
            [sys.executable, "-c", WATCHES], stdin=its, stdout=pulse, stderr=subprocess.PIPE, text=True
        ) as reaper,
        its,
        ours,
    ):
        ours.send(b"a launch")
        socket.send_fds(ours, [b"+7"], [read])
        is_ready(write, None, select.POLLOUT)  # the reaper has read what the launcher does not
        beat(pulse)
        is_ready(ours.fileno(), None)  # which is left unread
        ours.send(b"+8")
        ours.close()
        assert reaper.stderr.read() == "a launch 7 8\n"


@pytest.fixture
def reaper(monkeypatch: pytest.MonkeyPatch) -> Subreaper:
    """One that leaves this process what it is."""
    monkeypatch.setattr(processes, "become_subreaper", lambda: None)
    return Subreaper()


def test_a_child_that_another_thread_has_reaped_meanwhile_ends_nothing_and_hides_no_other(
    reaper: Subreaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`import torch`, in a thread, asks ldconfig: its process ends between two calls of the launcher's."""
    children = [subprocess.Popen(["true"]) for _ in range(2)]
    seen = [os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) for child in children]
    reaped_elsewhere, inherited = children
    assert reaped_elsewhere.wait() == 0
    answers: list[Any] = [*seen, None]
    monkeypatch.setattr(os, "waitid", lambda *how: answers.pop(0))

    reaper.reap()

    assert not answers
    with pytest.raises(ChildProcessError):
        os.waitpid(inherited.pid, os.WNOHANG)
    inherited.wait()


NUMBER = signal.SIGUSR1


@pytest.fixture
def before() -> Iterator[list[int]]:
    """Signals that came to the handler of before."""
    came: list[int] = []
    handler = signal.signal(NUMBER, lambda number, _frame: came.append(number))
    yield came
    signal.signal(NUMBER, handler)


def test_a_signal_that_nobody_has_looked_at_is_told_when_they_are_given_back(before: list[int]) -> None:
    told: list[int] = []
    loop = EventLoop()
    signals = LaunchSignals(loop, SimpleNamespace(pass_on=told.append))
    os.kill(os.getpid(), NUMBER)
    signals.give_back()
    assert (told, before) == ([NUMBER], [])
    os.kill(os.getpid(), NUMBER)
    loop.close()
    assert (told, before) == ([NUMBER], [NUMBER])


def test_a_signal_is_told_however_many_calls_of_threads_have_come_before_it(before: list[int]) -> None:
    """The calls fill the socket that wakes asyncio's loop."""
    told: list[int] = []
    loop = EventLoop()
    signals = LaunchSignals(loop, SimpleNamespace(pass_on=told.append))
    for _ in range(1000):
        loop.call_from_thread(bool)
    os.kill(os.getpid(), NUMBER)
    loop.run_once(0)
    signals.give_back()
    loop.close()
    assert (told, before) == ([NUMBER], [])


def test_where_none_has_come_nothing_is_told(before: list[int]) -> None:
    told: list[int] = []
    loop = EventLoop()
    LaunchSignals(loop, SimpleNamespace(pass_on=told.append)).give_back()
    loop.close()
    assert (told, before) == ([], [])


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/job/step", "job/step/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("0::/", "memory.events", "oom 3\noom_kill 2\n"),
        ("4:memory:/job", "memory/job/memory.oom_control", "under_oom 0\noom_kill 2\n"),
        ("4:memory:/of/the/host", "memory/memory.oom_control", "under_oom 0\noom_kill 2\n"),
        ("4:memory:/old", "memory/old/memory.oom_control", "under_oom 0\n"),
    ],
    ids=["2", "2 in a container", "1", "1 in a container", "a kernel that does not count"],
)
def test_what_the_kernel_has_killed_for_want_of_memory_is_counted_by_the_cgroup(tmp_path, line, file, text):
    table, told = tmp_path / "cgroup", tmp_path / "fs" / file
    assert system.memory_kills(table, tmp_path / "fs") == 0
    table.write_text(f"9:name=systemd:/\n{line}\n")
    assert system.memory_kills(table, tmp_path / "fs") == 0
    told.parent.mkdir(parents=True)
    told.write_text(text)
    assert system.memory_kills(table, tmp_path / "fs") == (2 if "oom_kill 2" in text else 0)


def test_an_xid_is_told_of_the_process_that_it_names_and_one_that_names_none_for_a_minute(tmp_path):
    log = tmp_path / "kmsg"
    now = int(1e6 * time.clock_gettime(time.CLOCK_MONOTONIC_RAW))
    log.write_text(f"4,1,{now},-;NVRM: Xid (PCI:0000:01:00): 31, pid=7, name=python, Ch 00000010\n")
    known = system.KernelLog(str(log))
    assert known.xid(7) == ""  # of before
    with log.open("a") as kernel:
        kernel.write(f"4,2,{now - 61_000_000},-;NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', name=<unknown>, GPU\n")
        kernel.write(f"6,3,{now},-;eth0: Xid (PCI:0000:09:00): 1, pid=7\n SUBSYSTEM=net\n")
        kernel.write(f"4,4,{now},-;NVRM: Xid (PCI:0000:03:00): 94, pid=7, name=python, Ch 00000010\n")
    assert [known.xid(7), known.xid(8)] == ["Xid 94 of GPU 0000:03:00", ""]
    with log.open("a") as kernel:
        kernel.write(f"4,5,{now},-;NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU is off\n")
    assert [known.xid(7), known.xid(8)] == ["Xid 94 of GPU 0000:03:00", "Xid 79 of GPU 0000:c1:00"]
    assert system.KernelLog(str(tmp_path / "none")).xid(7) == ""


@pytest.mark.parametrize(
    ("number", "kills", "ours", "told"),
    [
        (signal.SIGKILL, [1, 2], False, "out of memory"),
        (signal.SIGKILL, [1, 1], False, "Xid 79"),
        (signal.SIGKILL, [1, 2], True, ""),
        (signal.SIGTERM, [1, 2], False, "Xid 79"),
    ],
    ids=["by the kernel", "by somebody", "by this launcher", "by another signal"],
)
def test_what_the_kernel_tells_of_a_workers_end_is_told(monkeypatch, number, kills, ours, told):
    counts = iter(kills)
    monkeypatch.setattr(system, "memory_kills", lambda: next(counts))
    monkeypatch.setattr(system, "KernelLog", lambda: SimpleNamespace(xid=lambda pid: "Xid 79"))
    loop = SimpleNamespace(remove_reader=lambda _: None)
    plan, reaper = SimpleNamespace(launch_id="x"), SimpleNamespace(spared=[])
    table = WorkerTable(plan, loop, None, None, reaper, lambda _: None, lambda *_: None)
    pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {}, setpgroup=0)
    worker = WorkerProcess(0, pid, "h", WorkerState.RUNNING, 0, 0)
    closed: list[bool] = []
    watch = SimpleNamespace(close=lambda: closed.append(True))
    table._handles[0] = SimpleNamespace(pidfd=os.pidfd_open(pid), watch=watch)
    worker.note = "writing a core (SIGABRT); its device is free after that"
    if ours:
        table.signal([worker], number)
    else:
        os.kill(pid, number)
    is_ready(table._handles[0].pidfd, None)
    table.reap(worker)
    os.close(table._handles[0].pidfd)
    assert (worker.signal, worker.kernel, worker.note, closed) == (number, told, "", [True])


def test_zombies_of_an_earlier_start_are_no_foreign_children() -> None:
    text = (
        "import os, time; from recover_megatron.launch.workers.processes import Subreaper; "
        "os.fork() or os._exit(0); os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT); "
        "owns = Subreaper()._owns_all_children; os.fork() or time.sleep(1000); "
        "print(owns, Subreaper()._owns_all_children, flush=True); os.kill(0, 9)"
    )
    done = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, process_group=0, timeout=60)
    assert done.stdout.split() == ["True", "False"]
