"""Start processes that die with the launcher; find and kill whatever is left of them; execute the launcher anew.

A process belongs to a launch if any of these holds:

- its initial environment (/proc/PID/environ) carries the launch id: inherited by every descendant, also by those that
  called setsid or lost their parent;
- it is in the session of a worker: each worker leads a session of its own;
- its parent belongs to the launch, or it is in the session of a process that does.

So a process escapes only if it cleared its environment, left the session *and* lost its parent.  While the launcher
lives not even that helps: it is the subreaper of its descendants, so they become its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from recover_megatron.launch.workers.loop import EventLoop
from recover_megatron.network.system import lacking
from recover_megatron.variables import ATTEMPT_VARIABLE, LAUNCH_ID_VARIABLE, WITHOUT_VARIABLE, WORKER_ID_VARIABLE

_PR_SET_CHILD_SUBREAPER = 36
_EXEC_WORKER = str(Path(__file__).with_name("exec_worker.py"))
_MOST_ROUNDS = 100
_ASK_TO_END = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
_RESET_SIGNALS = [*_ASK_TO_END, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ]

DEAF_TO = [*_ASK_TO_END, signal.SIGUSR1, signal.SIGUSR2]
"""What helpers of the launch block: SLURM sends a signal to *every* process of a step, and these must outlive it, since
the workers that were asked to end still need them.  They end with the launcher."""


class Process(NamedTuple):
    """One line of the process table.  ``start`` (clock ticks since boot) tells two users of one pid apart."""

    pid: int
    state: str
    parent: int
    session: int
    start: int

    @property
    def alive(self) -> bool:
        """Whether it can still run: a zombie only waits for its parent."""
        return self.state not in "ZX"


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: int,
    stderr: int,
    inherit: Sequence[int] = (),
    *,
    deaf: bool = False,
) -> tuple[int, int]:
    """Start ``command`` in a session of its own; the kernel kills it when the calling thread ends.

    Call it from the main thread (the parent-death signal follows the thread).  stdin is /dev/null; of the caller's
    other descriptors only ``inherit`` is passed on.  ``deaf``: it begins with ``DEAF_TO`` blocked.  Returns the pid and
    a pidfd.  Raises OSError if it cannot be started, or its end not be seen: then there is none.
    """
    for descriptor in inherit:
        os.set_inheritable(descriptor, True)
    try:
        pid = spawn_leader(
            [sys.executable, "-I", "-S", _EXEC_WORKER, str(os.getpid()), *command],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, stdout, 1),
                (os.POSIX_SPAWN_DUP2, stderr, 2),
            ],
            setsigmask=DEAF_TO if deaf else [],
            setsigdef=_RESET_SIGNALS,
        )
    finally:
        for descriptor in inherit:
            os.set_inheritable(descriptor, False)
    return pid, open_pidfd(pid)


def spawn_leader(command: list[str], environment: Mapping[str, str], **options: Any) -> int:
    """Start this interpreter, which leads a session of its own.  Returns its pid; raises OSError.

    ``options``: posix_spawn's.  Where Python cannot ask for a session what is started has to call ``lead_session``.
    """
    try:
        return os.posix_spawn(command[0], command, environment, setsid=True, **options)
    except NotImplementedError:  # it was built with a glibc before 2.26
        return os.posix_spawn(command[0], command, environment, **options)


def lead_session() -> None:
    """Lead a session, if this process does not yet."""
    if os.getsid(0) != os.getpid():
        os.setsid()


_own_children: set[int] = set()
"""Pids of those that were started here, each to be reaped when its end is handled; all others are inherited."""


def open_pidfd(pid: int) -> int:
    """A pidfd of a child that was just started.  Where none can be had it is ended; raises OSError.

    Without pidfds the reading end of a pipe, which becomes readable at the same moment: a thread waits.
    """
    _own_children.add(pid)
    try:
        return _wait_in_thread(pid) if lacking("pidfd_open") else os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        reap(pid)
        raise


def _wait_in_thread(pid: int) -> int:
    ends, its = os.pipe()

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):  # it was forgotten, and reaped as any other
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(its)

    try:
        threading.Thread(target=wait, name="recover-wait", daemon=True).start()
    except RuntimeError as error:
        os.close(ends)
        os.close(its)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
    return ends


def reap(pid: int) -> int:
    """Wait for the end of a child that was started here: its exit code, or minus the signal that killed it."""
    _, status = os.waitpid(pid, 0)
    _own_children.discard(pid)
    return os.waitstatus_to_exitcode(status)


class Child:
    """A process that this launcher has started, watched by its loop."""

    def __init__(
        self, loop: EventLoop, started: tuple[int, int], on_end: Callable[[int], None], *, with_group: bool = False
    ) -> None:
        """``started``: pid and pidfd.  ``on_end`` gets the exit code, or minus the signal, when it has been reaped.

        ``with_group``: what is left of its process group is killed before.
        """
        self.pid, self._pidfd = started
        self._loop = loop
        self._with_group = with_group
        loop.watch(self._pidfd, lambda: on_end(self.reap()))

    def reap(self) -> int:
        """Wait until it has ended.  Returns what ``on_end`` gets, which is not called."""
        if self._with_group:
            kill_group(self.pid)
        status = reap(self.pid)
        self.forget()
        return status

    def forget(self) -> None:
        """Its end is of no interest from now on."""
        _own_children.discard(self.pid)
        self._loop.unwatch(self._pidfd)
        os.close(self._pidfd)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)  # it is ours to reap: nobody else can have its pid

    def wait(self, seconds: float) -> None:
        """Wait until it has ended; so long at most."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll(1000 * seconds)


def program(module: str, *options: str) -> list[str]:
    """The command that runs a module's ``main`` whatever folder and variables are; ``options``: the interpreter's."""
    boot = f"import sys; sys.path.insert(0, sys.argv.pop(1)); from {module} import main; sys.exit(main())"
    return [sys.executable, "-I", *options, "-c", boot, str(Path(__file__).resolve().parents[3])]


def become_subreaper() -> None:
    """Make descendants that lose their parent children of this process instead of init's.  Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def process_table() -> dict[int, Process]:
    """All processes of this machine (of this pid namespace) by pid."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (process := _read_process(int(name))):
            table[process.pid] = process
    return table


def _read_process(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may contain anything, also spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None  # it ended while we looked
    if len(fields) < 20:
        return None
    return Process(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def carries(pid: int, variables: Mapping[str, str]) -> bool:
    """Whether the initial environment of ``pid`` contains all of ``variables``; False if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return False
    return all(f"{name}={value}".encode() in entries for name, value in variables.items())


def belonging(
    table: Mapping[int, Process], seeds: Iterable[int], sessions: Iterable[int], spared: Iterable[int]
) -> set[int]:
    """The closure described at the top of this module: pids of ``table`` that belong with ``seeds`` or ``sessions``.

    ``spared`` are never included, nor anything that belongs only through them.
    """
    spared = set(spared)
    sessions = set(sessions)
    found = {pid for pid in seeds if pid in table} - spared
    found |= {pid for pid, process in table.items() if process.session in sessions} - spared
    while True:
        led = sessions | {pid for pid in found if table[pid].session == pid}
        more = {pid for pid, process in table.items() if process.parent in found or process.session in led}
        more -= found | spared
        if not more:
            return found
        found |= more


def find_launch(
    launch_id: str,
    sessions: Iterable[int],
    spared: Iterable[int],
    subreaper: int | None = None,
    worker_id: int | None = None,
) -> list[Process]:
    """The living processes of a launch, or of one worker; all children of ``subreaper``, the launcher, belong."""
    table, variables = process_table(), {LAUNCH_ID_VARIABLE: launch_id}
    if worker_id is not None:
        variables[WORKER_ID_VARIABLE] = str(worker_id)
    marked = {pid for pid, process in table.items() if process.parent == subreaper or carries(pid, variables)}
    return [table[pid] for pid in belonging(table, marked, sessions, spared) if table[pid].alive]


def kill_group(leader: int) -> None:
    """SIGKILL the process group of ``leader``.  Its pid must not have been reaped, or it may mean another group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def tracks_resources(pid: int) -> bool:
    """Whether it is a resource tracker of Python's: when all are gone that hold what it tracks, it removes from
    /dev/shm what they have left there, and ends."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def kill_found(find: Callable[[], list[Process]], *, trackers: bool = False) -> set[Process]:
    """SIGKILL what ``find`` returns, again while it returns processes not yet signalled.  Returns those signalled.

    Killed processes may take a moment to disappear; processes that fork while we look are met in the next round.
    ``trackers``: resource trackers, too; else they are left to their work.
    """
    signalled: set[Process] = set()
    for _ in range(_MOST_ROUNDS):
        new = [process for process in find() if _identity(process) not in {_identity(old) for old in signalled}]
        new = [process for process in new if trackers or not tracks_resources(process.pid)]
        if not new:
            break
        for process in new:
            _kill(process)
            signalled.add(process)
    return signalled


def kill_until_none_left(find: Callable[[], list[Process]], timeout: float) -> list[Process]:
    """SIGKILL what ``find`` returns and wait until nothing is left.  Returns what is still there after ``timeout`` s.

    A process in the middle of exec has no environment for a moment; so "nothing left" is believed when seen twice.
    Resource trackers have TRACKER_SECONDS to end by themselves.
    """
    began = time.monotonic()
    deadline = began + timeout
    seen_none = 0
    while True:
        killed = kill_found(find, trackers=time.monotonic() >= began + TRACKER_SECONDS)
        left = [process for process in find() if process.alive]
        seen_none = 0 if left or killed else seen_none + 1
        if seen_none >= 2 or time.monotonic() >= deadline:
            return left
        _wait_for_exits([process.pid for process in left], timeout=1.0 if left else 0.02)


def _identity(process: Process) -> tuple[int, int]:
    return process.pid, process.start


def _kill(process: Process) -> None:
    """SIGKILL exactly ``process``, not a later user of its pid."""
    try:
        pidfd = None if lacking("pidfd_send_signal") else os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        now = _read_process(process.pid)
        if now and _identity(now) == _identity(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pidfd is None:  # nothing keeps another one from getting its pid at this very moment
                    os.kill(process.pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _wait_for_exits(pids: Sequence[int], timeout: float) -> None:
    """Wait until one of ``pids`` ends (at once if one has), at most ``timeout`` seconds; without pidfds a moment."""
    if lacking("pidfd_open"):
        pids, timeout = (), min(timeout, 0.02)
    poll = select.poll()
    descriptors = []
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptors.append(os.pidfd_open(pid))
                poll.register(descriptors[-1], select.POLLIN)
        if pids and not descriptors:
            return
        poll.poll(timeout * 1000)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


LAST_SWEEP_SECONDS = 10.0
TRACKER_SECONDS = 5.0


class Subreaper:
    """Makes descendants that lost their parent the launcher's children, to be reaped, and killed at the end.

    Make it before anything is started.  Raises OSError where the kernel refuses.
    """

    def __init__(self) -> None:
        # Children from before (of a shell that became recover-run by exec) are none of ours; once there are any, an
        # orphan that we inherit might be theirs.
        self._owns_all_children = all(process.parent != os.getpid() for process in process_table().values())
        become_subreaper()
        self.due = False
        """Whether there may be inherited children to reap."""

    def reap(self) -> None:
        """Reap the inherited children that have ended."""
        self.due = False
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in _own_children:
                self.due = True  # it hides other zombies; once it is reaped, after its event, look again
                return
            # A library may start processes of its own in another thread (torch's import does), and reap them first.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, 0)

    def kill_all(self, launch_id: str, spared: Iterable[int]) -> list[Process]:
        """Kill every process of the launch.  Returns those that are there after LAST_SWEEP_SECONDS all the same."""
        parent = os.getpid() if self._owns_all_children else None
        return kill_until_none_left(partial(find_launch, launch_id, (), spared, parent), timeout=LAST_SWEEP_SECONDS)


START_AGAIN = -1
"""In place of an exit code: all launchers make the start again."""
AGAIN_SECONDS = 30.0
"""So long the launchers wait for each other then, at most: all of them have just been there."""


def take_attempt() -> int:
    """How often the start was made before; the variable that says so is removed, so that no other process finds it."""
    text = os.environ.pop(ATTEMPT_VARIABLE, "")
    return int(text) if text.isdecimal() else 0


def take_left_out() -> tuple[int, ...]:
    """The nodes without which the start is made again; the variable is removed, as that of ``take_attempt``."""
    return tuple(int(word) for word in os.environ.pop(WITHOUT_VARIABLE, "").split(",") if word.isdecimal())


def keep_attempt(attempt: int) -> None:
    """Have ``start_again`` make the same start, the one that is made by now for the ``attempt``-th time again."""
    os.environ[ATTEMPT_VARIABLE] = str(attempt)


def leave_out(nodes: Iterable[int]) -> None:
    """Have ``start_again`` make the start without ``nodes``."""
    os.environ[WITHOUT_VARIABLE] = ",".join(map(str, nodes))


def start_again(attempt: int) -> None:
    """Make the start of a launch again: execute this launcher's own command line anew, with the same process id.

    All launchers call it when they have ended all of their workers, as for the end of the launch (``StartUp``): another
    store, other coordinators, another run id, so nothing of the first try can be mistaken for anything of the next.

    ``attempt``: how often the start has been made by now.  Raises OSError; else never returns.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for number in map(int, os.listdir("/proc/self/fd")):  # not all up to the limit: there may be a billion
        if number > 2:
            os.closerange(number, number + 1)  # ignores the one that listed them, which is closed
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {ATTEMPT_VARIABLE: str(attempt), **os.environ})
