"""The death of a worker, told before its process has gone: by a thread's robust mutex, by the core that is written.

The order of events is compared, never seconds: a process of a gigabyte is taken apart for a tenth of a second.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from uuid import uuid4

import pytest

from recover_megatron.launch import messages
from recover_megatron.launch.command_line import preflight
from recover_megatron.launch.supervisor import Supervisor
from recover_megatron.launch.workers import dying
from recover_megatron.launch.workers.dying import Ending, ProcessWatch, ending, writes_core
from recover_megatron.launch.workers.output import Console
from recover_megatron.launch.workers.states import WorkerProcess, WorkerState
from recover_megatron.launch.workers.worker_table import WorkerTable
from recover_megatron.membership.io.session import Session
from recover_megatron.network import death_notice, system
from recover_megatron.network.death_notice import DeathWatch
from recover_megatron.network.event_loop import EventLoop, is_ready
from recover_megatron.status.model import Gone, _ended
from tests.harness import REPOSITORY
from tests.harness.processes import python
from tests.harness.waiting import DEADLINE, eventually

WORKER = """
    import ctypes, os, resource, signal, sys, threading, time
    from recover_megatron.network import death_notice, system

    go = threading.Event()
    memory = b"1" * (int(os.environ["MIB"]) << 20)
    {before}
    assert death_notice.hold(os.environ)
    print("ready", flush=True)
    input()
    {then}
    """
SLEEP = "print('there', flush=True); time.sleep(1000)"
NO_CORE = "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"


class Started:
    """A process that runs ``WORKER``, and what is told of its end."""

    def __init__(self, folder: Path, then: str, before: str, mebibytes: int, wrapper: Sequence[str]) -> None:
        self.watch = DeathWatch.make()
        assert self.watch is not None
        self.told: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """When it is told: whether the pidfd was readable then."""
        variables = {**os.environ, **self.watch.variables, "PYTHONPATH": str(REPOSITORY), "MIB": str(mebibytes)}
        self.folder = folder
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-c", textwrap.dedent(WORKER).format(then=then, before=before)],
            cwd=folder, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.pid = self.process.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        self.watch.begin(lambda: self.told.put(self.has_gone))

    @property
    def has_gone(self) -> bool:
        return is_ready(self.pidfd)

    def go(self, says: bytes = b"") -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        if says:
            assert self.process.stdout.readline() == says

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, or children of it are left
        self.process.communicate()
        self.watch.close()
        os.close(self.pidfd)


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Started] = []

    def start(then: str = "", before: str = "", mebibytes: int = 1, wrapper: Sequence[str] = ()) -> Started:
        started.append(Started(tmp_path, then, before, mebibytes, wrapper))
        return started[-1]

    yield start
    for its in started:
        its.close()


@pytest.mark.parametrize(
    ("then", "code"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, id="killed"),
        pytest.param(f"{NO_CORE}; os.abort()", -signal.SIGABRT, id="aborted", marks=pytest.mark.slow),
        pytest.param(f"{NO_CORE}; ctypes.string_at(0)", -signal.SIGSEGV, id="segfault", marks=pytest.mark.slow),
        pytest.param("os._exit(3)", 3, id="exited", marks=pytest.mark.slow),
    ],
)
def test_the_death_of_a_process_of_a_gigabyte_is_told_before_it_has_gone(start: Start, then: str, code: int) -> None:
    worker = start(then, mebibytes=1024)
    worker.go()
    assert worker.told.get(timeout=DEADLINE) is False
    assert ending(worker.pid).code in (code, None)


@pytest.mark.slow
def test_the_death_of_a_process_that_the_kernel_kills_for_its_memory_is_told_before_it_has_gone(start: Start) -> None:
    group = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").exists() else "/sys/fs/cgroup", uuid4().hex)
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if group.parent.name == "memory" else "memory.max")).write_text("1G")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    worker = start(f"open('{group}/cgroup.procs', 'w').write('0'); memory = [b'1' * (64 << 20) for _ in range(64)]")
    worker.go()
    assert worker.told.get(timeout=DEADLINE) is False
    assert ending(worker.pid).code in (-signal.SIGKILL, None)
    worker.process.wait(DEADLINE)
    group.rmdir()


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        (f"{NO_CORE}; os.abort()", -signal.SIGABRT),
        (f"{NO_CORE}; ctypes.string_at(0)", -signal.SIGSEGV),
        ("sys.exit(3)", 3),
        ("os._exit(0)", 0),
    ],
    ids=["killed", "aborted", "segmentation fault", "exit code", "no fault"],
)
def test_it_is_known_how_a_process_is_being_ended(start: Start, then: str, code: int) -> None:
    worker = start(then)
    worker.go()
    worker.told.get(timeout=DEADLINE)
    end = ending(worker.pid)
    assert end.code in (code, None)  # None: the kernel does not tell yet, before Linux 5.17
    assert not end.must_kill
    assert worker.process.wait(DEADLINE) == code


EXEC = "os.execv('/bin/sleep', ['sleep', '1000'])"
ENDING_THREAD = (
    "death_notice._Page.hold = lambda page, tried: (page._libc.pthread_mutex_lock(page._mutex), "
    "setattr(page, 'holder', os.getpid()), page.post(), tried.set())"
)


@pytest.mark.parametrize(
    ("then", "before"), [(EXEC, ""), (SLEEP, ENDING_THREAD)], ids=["another program", "a thread that ends"]
)
def test_a_process_that_goes_on_without_its_thread_is_killed_before_it_is_told_to_be_dead(
    start: Start, then: str, before: str
) -> None:
    worker = start(then, before)
    worker.go()
    worker.told.get(timeout=DEADLINE)
    end = ending(worker.pid)
    assert end == Ending(-signal.SIGKILL, must_kill=True)
    assert not worker.has_gone
    fence(worker, end)
    assert worker.process.wait(DEADLINE) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("looks", "end"),
    [
        (3 * [("S", 0x400000, 0, True)], Ending(None)),
        (3 * [("S", 0x400004, 0, False)], Ending(None)),
        ([("S", 0x400000, 0, False), ("S", 0x400004, 0, False)], Ending(None)),
        ([("Z", 0x400004, 0, False)], Ending(0)),
        ([("D", 0x400004, 9, False)], Ending(-9)),
        ([], Ending(None)),
        (3 * [("S", 0x400000, 0, False)], Ending(-9, must_kill=True)),
    ],
    ids=["SIGKILL pending", "exiting", "exiting soon", "zombie", "5.17", "reaped by a wrapper", "goes on"],
)
def test_older_kernels_do_not_tell_how_a_process_is_being_ended(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[str, int, int, bool]], end: Ending
) -> None:
    def stat(pid: int) -> tuple[str, int, int]:
        if not looks:
            raise FileNotFoundError
        *told, pending = looks.pop(0)
        monkeypatch.setattr(dying, "_has_sigkill", lambda pid: pending)
        return tuple(told)

    monkeypatch.setattr(dying, "_stat", stat)
    assert ending(7) == end


def test_under_a_wrapper_the_worker_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    for name in ("ending", "writes_core"):
        monkeypatch.setattr(dying, name, lambda pid: looked_at.append(pid) or Ending(-9))
        loop = SimpleNamespace(call_from_thread=print)
        watch = ProcessWatch(loop, lambda end: None, SimpleNamespace(holder=8, left=False, begin=lambda told: None))
        watch.begin(7)
        watch._released() if name == "ending" else watch.fatal()
    assert looked_at == [8, 8]


def fence(worker: Started, end: Ending) -> str:
    watch = ProcessWatch(None, pytest.fail, worker.watch)
    watch._pid = worker.pid
    table = WorkerTable(*[SimpleNamespace()] * 7)
    table._handles[1] = SimpleNamespace(watch=watch)
    return table.fence(WorkerProcess(1, worker.pid, "h", WorkerState.RUNNING, 0, 1), end)


def test_what_a_dying_worker_has_started_is_killed_with_it(start: Start) -> None:
    worker = start("child = os.posix_spawn('/bin/sleep', ['sleep', '1000'], {}); print(child, flush=True); os._exit(1)")
    worker.go()
    child = os.pidfd_open(int(worker.process.stdout.readline()))
    worker.told.get(timeout=DEADLINE)
    assert fence(worker, ending(worker.pid)) in ("exit code 1", dying.UNKNOWN)
    assert is_ready(child, DEADLINE), "it has ended"
    os.close(child)


def test_a_forked_child_neither_hides_the_death_of_a_worker_nor_tells_of_one(start: Start) -> None:
    child = "assert death_notice._held is None; os.fork() or time.sleep(1000); os._exit(0)"
    worker = start(f"if os.fork() == 0: exec({child!r})\nassert os.wait()[1] == 0; {SLEEP}")
    worker.go(b"there\n")  # a child has ended, and one lives
    assert worker.told.empty()
    os.kill(worker.pid, signal.SIGKILL)
    worker.told.get(timeout=DEADLINE)


@pytest.mark.parametrize(("then", "must_kill"), [("sys.exit(3)", False), (EXEC, True)], ids=["ends", "goes on"])
def test_a_wrapper_is_left_alone_when_its_worker_is_dying(start: Start, then: str, must_kill: bool) -> None:
    """It has more to do, and its exit code is the one that counts."""
    worker = start(then, wrapper=["sh", "-c", '"$@"; read line; exit 7', "sh"])
    worker.go()
    worker.told.get(timeout=DEADLINE)
    end = ending(worker.watch.holder)
    assert end.must_kill is must_kill
    fence(worker, end)
    assert not worker.has_gone
    worker.go()
    assert worker.process.wait(DEADLINE) == 7


def test_a_worker_that_has_left_in_order_is_not_told_to_be_dead(start: Start) -> None:
    loop, told = EventLoop(), list[Ending]()
    for then, expected in (("death_notice.leaving()", 0), ("", 1)):
        worker = start(then)
        watch = ProcessWatch(loop, told.append, worker.watch)
        worker.watch.begin = lambda on_dying, seen=worker.told: [seen.get(timeout=DEADLINE), on_dying()]
        worker.go()
        watch.begin(worker.pid)
        loop.run_once()
        assert len(told) == expected
    loop.close()


def test_a_page_of_another_worker_is_not_held() -> None:
    """The number of its descriptor may have been another page's before."""
    watch = DeathWatch.make()
    assert watch is not None
    ((variable, value),) = watch.variables.items()
    name, path = value.split()
    code = "import os, faulthandler as f; from recover_megatron.network import death_notice as d; "
    code += "print(d.hold(os.environ), f.is_enabled())"
    told = [python("-c", code, **{variable: f"{its} {path}"}).stdout for its in (name[::-1], name)]
    watch.close()
    assert told == ["False True\n", "True True\n"]


def test_where_no_robust_mutex_is_to_be_had_the_pidfd_tells_and_check_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.host() == ([], [])
    monkeypatch.setattr(death_notice, "memory_file", lambda name: os.open("/dev/null", os.O_RDWR))
    death_notice.lacking.cache_clear()
    assert DeathWatch.make() is None
    (note,) = preflight.host()[1]
    death_notice.lacking.cache_clear()
    assert "robust mutexes are not available here" in note
    assert "0.1 to 0.6 s per gigabyte" in note


# -- a core -----------------------------------------------------------------------------------------------------------


def test_a_worker_whose_core_is_written_is_told_to_be_dead_and_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, told, looks = EventLoop(), list[Ending](), iter([None, None, Ending(-6, writes_core=True)])
    monkeypatch.setattr(dying, "writes_core", lambda pid: next(looks))
    watch = ProcessWatch(loop, told.append, None)
    watch.begin(7)
    watch.fatal()
    while not told:
        loop.run_once()
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("its core would be cut short"))
    monkeypatch.setattr(dying, "ending", lambda pid: pytest.fail("it is told twice"))
    assert fence(SimpleNamespace(pid=7, watch=None), told[0]) == "SIGABRT, writing a core"
    watch._released()
    loop.close()


def test_a_worker_that_survives_its_fatal_signal_is_not_told_to_be_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ProcessWatch(loop := EventLoop(), lambda end: pytest.fail(str(end)), None)
    watch.begin(os.getpid())
    watch.fatal()
    for _ in range(3):
        loop.run_once()
    watch.close()
    monkeypatch.setattr(loop, "call_later", lambda *_: pytest.fail("it is looked at again"))
    loop.run_once()
    loop.close()


@pytest.mark.slow
def test_a_core_of_half_a_gigabyte_is_written_whole_while_the_worker_is_told_to_be_dead(start: Start) -> None:
    """Where this host writes cores at all, and into the folder of the process."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if "/" in pattern or pattern.startswith("|"):
        pytest.skip(f"cores are not written into the folder of the process here: {pattern}")
    worker = start("resource.setrlimit(resource.RLIMIT_CORE, (-1, -1)); os.abort()", mebibytes=512)
    worker.go()
    while (end := writes_core(worker.pid)) is None:
        assert not worker.has_gone
    assert (end.code, worker.told.empty()) == (-signal.SIGABRT, True)
    assert fence(worker, end) == "SIGABRT, writing a core"
    worker.told.get(timeout=DEADLINE)
    assert worker.process.wait(DEADLINE) == -signal.SIGABRT
    (core,) = Path(worker.folder).glob("core*")
    assert core.stat().st_size > 512 << 20


def test_the_line_of_a_fatal_signal_is_the_last_word_of_a_worker_and_has_its_core_looked_for() -> None:
    loop, looked_for = EventLoop(), list[bool]()
    streams, stdout, stderr = Console(loop, 0, None).attach("0", 0, None)
    streams[1].fatal.on_first_line = lambda: looked_for.append(True)
    threads = (
        b'\n\nThread 0x1 (most recent call first):\n  File "b.py"\n\nCurrent thread 0x2 (most recent call first):\n'
    )
    for written, times in (
        (b"what(): no memory\nFatal Python err", 0),
        (b"or: Aborted" + threads + b'  File "a.py", line 3 in f\n  File "a.py"\n\nExtension modules: a.b\n', 1),
    ):
        os.write(stderr, written)
        streams[1]._read()
        assert len(looked_for) == times
    assert streams[1].fatal.text == 'Fatal Python error: Aborted: File "a.py", line 3 in f'
    assert streams[1].last_line == "Extension modules: a.b"
    for stream, end in zip(streams, (stdout, stderr), strict=True):
        os.close(end)
        stream.drain_and_close()
    loop.close()


# -- recover-run ------------------------------------------------------------------------------------------------------


def test_a_coordinator_is_told_when_the_process_can_do_nothing_more_and_no_sooner() -> None:
    order: list[str] = []
    table = SimpleNamespace(fence=lambda worker, end: order.append("fence") or end.how, note=lambda *_: None)
    agent = SimpleNamespace(ended=lambda worker, how: order.append(how))
    launcher = SimpleNamespace(_table=table, _control=SimpleNamespace(agent=agent), _console=SimpleNamespace(say=print))
    launcher.run_continues, launcher._successors = lambda: True, SimpleNamespace(prepare=lambda planned: None)
    agent.planned = frozenset()
    launcher._early, launcher.worker_dying = {}, lambda worker, end: Supervisor.worker_dying(launcher, worker, end)
    worker = WorkerProcess(1, 77, "h", WorkerState.RUNNING, 0, 1)
    Supervisor.worker_dying(launcher, worker, Ending(-9))
    assert order == ["fence", "SIGKILL"]
    said: list[object] = []
    table.note, launcher._console.say = (lambda number, note: said.append(note)), said.append
    for end in (Ending(-6, writes_core=True), Ending(-9, must_kill=True)):
        Supervisor.worker_dying(launcher, worker, end)
    assert [str(text)[:10] for text in said] == ["writing a ", "worker 1 o", "killed: it", "worker 1 o"]
    order[2:] = []
    table.fence = Mock(side_effect=PermissionError)
    Supervisor.worker_dying(launcher, worker, Ending(-9))  # it may be running: it is not told to be dead
    table.fence = lambda worker, end: order.append("fence") or end.how
    launcher.run_continues = lambda: False  # before the first plan, or at the end
    Supervisor.worker_dying(launcher, worker, Ending(-9))
    assert order == ["fence", "SIGKILL"]
    launcher.run_continues = lambda: True
    for _ in range(2):  # the first plan has reached the worker, which then died, before it reaches the launcher
        Supervisor.epoch_formed(launcher)
    assert order == 2 * ["fence", "SIGKILL"]


HELD_OPEN = """
    import os, time
    from contextlib import suppress
    from recover_megatron.membership.io.session import connect

    session = connect()
    session.join({})
    if os.environ["RECOVER_WORKER_ID"] == "1":  # a child keeps its connections open
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # the folder's own is closed by now
                os.set_inheritable(descriptor, True)
        os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)
    print("JOINED", os.getpid(), flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    session.leave()
    """


def test_a_death_is_reported_before_the_process_has_gone_and_its_successor_is_started_after_that(bench):
    """A wrapper stands for a teardown of any length: the launcher's child exists until the test permits its end."""
    wrapper = bench.folder / "freed-late"
    wrapper.write_text('#!/bin/sh\n"$@"\ncode=$?\nuntil [ -e freed ]; do sleep 0.01; done\nexit $code\n')
    wrapper.chmod(0o755)
    script = bench.script(HELD_OPEN)
    command = ("--no-python", "./freed-late", sys.executable, script, "--recover")
    launch = bench.up(2, "--max-restarts", 1, *command, says="JOINED")
    os.kill(int(re.findall(r"\[1\] JOINED (\d+)", launch.out)[0]), signal.SIGKILL)
    eventually(lambda: bench.events("fault"), "the launcher's report")
    assert len(bench.workers()) == 2, "a successor was started while the process exists"
    bench.go("freed")
    successor = bench.workers(count=3)[2]
    bench.go()
    assert launch.wait() == 0, launch.err
    (fault,) = bench.events("fault")
    assert fault["time"] < bench.workers()[1]["ended"] <= successor["started"]
    assert "process has ended" in fault["reason"]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (
            Ending(-6, writes_core=True),
            "was killed by SIGABRT, and the kernel writes its core: the run continues without",
        ),
        (Ending(None, writes_core=True), "was killed by a fatal signal, and the kernel writes its core"),
    ],
)
def test_of_a_core_people_are_told_what_waits_for_it(end: Ending, told: str) -> None:
    said, note = messages.writes_core(WorkerProcess(1, 77, "h", WorkerState.RUNNING, 0, 1), end)
    assert told in said
    assert note.startswith(dying.WRITES_CORE)
    assert "its device is free after that" in note


def test_people_are_told_where_a_fatal_signal_has_struck() -> None:
    worker = WorkerProcess(1, 77, "h", WorkerState.RUNNING, 0, 1)
    worker.end(-signal.SIGSEGV, 1.0)
    fatal = 'Fatal Python error: Segmentation fault: File "a.py", line 3 in f'
    assert f"SIGSEGV (signal 11) ({fatal}) after" in messages.worker_ended(worker, 1, 0, None, 0, fatal)


def test_what_the_kernel_tells_of_a_dying_worker_is_told_with_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "KernelLog", lambda: SimpleNamespace(xid=lambda pid: "Xid 79"))
    table = WorkerTable(*[SimpleNamespace()] * 7)
    table._handles = {n: SimpleNamespace(watch=SimpleNamespace(fence=lambda end: None)) for n in (1, 2)}
    workers = [WorkerProcess(n, 70 + n, "h", WorkerState.RUNNING, 0, n) for n in (1, 2)]
    assert table.fence(workers[0], Ending(-6)) == "SIGABRT, Xid 79"
    assert table.fence(workers[1], Ending(-9, must_kill=True)) == "SIGKILL"  # it was this launcher


@pytest.mark.parametrize(("status", "words"), [(-11, "Fatal Python error: x"), (1, "RuntimeError: y")])
def test_a_fatal_signal_of_a_child_is_not_the_last_word_of_its_worker(status: int, words: str) -> None:
    """A loader may have died of one, and the worker by an exception."""
    table = WorkerTable(*[SimpleNamespace(remove_session=lambda pid: None)] * 7)
    worker = WorkerProcess(1, 71, "h", WorkerState.RUNNING, 0, 1)
    worker.end(status, 1.0)
    fatal = SimpleNamespace(text="Fatal Python error: x")
    stream = SimpleNamespace(fatal=fatal, last_line="RuntimeError: y", drain_and_close=lambda: None)
    table._handles[1] = SimpleNamespace(pidfd=os.pidfd_open(os.getpid()), streams=[stream], log=None)
    assert table.close(worker) == words


def test_a_worker_says_that_it_leaves_in_order_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    session, order = Mock(), list[str]()
    session._say = lambda said: order.append("bye")
    monkeypatch.setattr(death_notice, "leaving", lambda: order.append("leaving"))
    Session.leave(session)
    assert order == ["leaving", "bye"]


def test_a_dead_worker_that_still_writes_its_core_is_shown_so() -> None:
    gone = Gone(1, "dead", "h", "its process has ended (SIGABRT, writing a core)", 1.0)
    running = {"state": "running", "note": "writing a core (SIGABRT)", "signal": None, "exit_code": None}
    assert _ended(gone, running).exit == "writing a core (SIGABRT)"
    assert _ended(gone, {**running, "state": "killed", "note": "", "signal": 6}).exit == "SIGABRT"
