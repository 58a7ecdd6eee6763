"""Start processes that die with the launcher; find and kill their descendants; execute the launcher again.

A process belongs to a launch if any of these conditions is true:

- its initial environment (/proc/PID/environ) contains the launch id, which every descendant inherits, even if it calls
  setsid or loses its parent;
- it is in the session of a worker (each worker leads a separate session);
- its parent belongs to the launch, or it is in a session whose leader belongs to the launch.

So a process escapes only if it cleared its environment, left the session *and* lost its parent.  While the launcher is
live, not even such a process escapes: the launcher is a subreaper, so descendants without a parent become its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from recover_megatron.network.event_loop import EventLoop, is_ready
from recover_megatron.network.system import lacking
from recover_megatron.variables import ATTEMPT_VARIABLE, LAUNCH_ID_VARIABLE, WITHOUT_VARIABLE, WORKER_ID_VARIABLE

_PR_SET_CHILD_SUBREAPER = 36
_EXEC_WORKER = str(Path(__file__).with_name("exec_worker.py"))
_MOST_ROUNDS = 100
_ASK_TO_END = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
_RESET_SIGNALS = [*_ASK_TO_END, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ]

DEAF_TO = [*_ASK_TO_END, signal.SIGUSR1, signal.SIGUSR2]
"""Signals that helper processes of the launch block: SLURM sends a signal to *every* process of a step, but workers
need the helpers until the workers have exited; then the launcher terminates the helpers."""


class Process(NamedTuple):
    """Entry of the process table; ``start``, in clock ticks since boot, distinguishes processes that reuse a pid."""

    pid: int
    state: str
    parent: int
    session: int
    start: int

    @property
    def alive(self) -> bool:
        """Return whether the process can still run; a zombie cannot: it only waits to be reaped."""
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
    """Start ``command`` in a new session, as a process that the kernel kills when the calling thread ends.

    Call it from the main thread: the parent-death signal follows the thread.  stdin is /dev/null; of the caller's other
    descriptors, the process inherits only ``inherit``.  ``deaf``: True to start it with ``DEAF_TO`` blocked.
    Returns the pid and a pidfd.  Raises OSError, and leaves no process, if the process cannot be started or watched.
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
    """Start ``command``, a Python program, as the leader of a new session.  Return its pid; raises OSError.

    ``options``: arguments of posix_spawn.  The program must call ``lead_session``: an old glibc cannot set the session.
    """
    try:
        return os.posix_spawn(command[0], command, environment, setsid=True, **options)
    except NotImplementedError:  # this Python was built with a glibc before 2.26
        return os.posix_spawn(command[0], command, environment, **options)


def lead_session() -> None:
    """Make this process a session leader, if it is not one yet."""
    if os.getsid(0) != os.getpid():
        os.setsid()


_own_children: set[int] = set()
"""Pids of children whose end is awaited by the code that started them; ``Subreaper`` reaps all other children."""


def open_pidfd(pid: int) -> int:
    """Open a pidfd of a child that was just started; on failure, kill the child and raise OSError.

    If the kernel has no pidfds, return the reading end of a pipe, whose writing end a thread closes at the child's end.
    """
    _own_children.add(pid)
    try:
        return _wait_in_thread(pid) if lacking("pidfd_open") else os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        reap(pid)
        raise


def _wait_in_thread(pid: int) -> int:
    ends, writing_end = os.pipe()

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):  # after ``forget``, the Subreaper has reaped the child
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(writing_end)

    try:
        threading.Thread(target=wait, name="recover-wait", daemon=True).start()
    except RuntimeError as error:
        os.close(ends)
        os.close(writing_end)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
    return ends


def reap(pid: int) -> int:
    """Wait for the end of ``pid``, a child of ``open_pidfd``, and reap it; return its exit code or minus the signal."""
    _, status = os.waitpid(pid, 0)
    _own_children.discard(pid)
    return os.waitstatus_to_exitcode(status)


class Child:
    """Child process of this launcher, whose end the event loop watches."""

    def __init__(
        self, loop: EventLoop, started: tuple[int, int], on_end: Callable[[int], None], *, with_group: bool = False
    ) -> None:
        """Watch the child.  ``started``: pid and pidfd; ``on_end`` receives the exit code, or minus the signal.

        ``with_group``: True to kill the child's complete process group before the child is reaped.
        """
        self.pid, self._pidfd = started
        self._loop = loop
        self._with_group = with_group
        loop.add_reader(self._pidfd, lambda: on_end(self.reap()))

    def reap(self) -> int:
        """Wait until the child has ended; return its exit code, or minus the signal, without calling ``on_end``."""
        if self._with_group:
            kill_group(self.pid)
        status = reap(self.pid)
        self.forget()
        return status

    def forget(self) -> None:
        """Stop watching the child; ``on_end`` will not be called."""
        _own_children.discard(self.pid)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)  # the pid of an unreaped process is not reused

    def wait(self, seconds: float) -> None:
        """Wait until the child has ended, at most ``seconds``."""
        is_ready(self._pidfd, seconds)


def program(module: str, *options: str) -> list[str]:
    """Return a command that runs ``main()`` of ``module`` in any folder and environment; ``options``: of Python."""
    boot = f"import sys; sys.path.insert(0, sys.argv.pop(1)); from {module} import main; sys.exit(main())"
    return [sys.executable, "-I", *options, "-c", boot, str(Path(__file__).resolve().parents[3])]


def become_subreaper() -> None:
    """Make this process, in place of init, the new parent of descendants that lose their parent.  Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def process_table() -> dict[int, Process]:
    """Return all processes of this machine (of this pid namespace) by pid."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (process := _read_process(int(name))):
            table[process.pid] = process
    return table


def _read_process(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field, the name in parentheses, may itself contain spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None  # the process has just ended
    if len(fields) < 20:
        return None
    return Process(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def carries(pid: int, variables: Mapping[str, str]) -> bool:
    """Return whether the initial environment of ``pid`` contains all of ``variables``; False if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return False
    return all(f"{name}={value}".encode() in entries for name, value in variables.items())


def belonging(
    table: Mapping[int, Process], seeds: Iterable[int], sessions: Iterable[int], spared: Iterable[int]
) -> set[int]:
    """Return the pids of all processes of ``table`` that belong to ``seeds`` or ``sessions``: see the module docstring.

    The result never includes ``spared``, nor processes that belong only through a spared process.
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
    """Return the live processes of a launch, or of ``worker_id`` only.

    ``subreaper``: pid of the launcher if all of its children belong to the launch.
    """
    table, variables = process_table(), {LAUNCH_ID_VARIABLE: launch_id}
    if worker_id is not None:
        variables[WORKER_ID_VARIABLE] = str(worker_id)
    marked = {pid for pid, process in table.items() if process.parent == subreaper or carries(pid, variables)}
    return [table[pid] for pid in belonging(table, marked, sessions, spared) if table[pid].alive]


def kill_group(leader: int) -> None:
    """SIGKILL the process group of ``leader``, which must not be reaped yet: otherwise the pid may be reused."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def tracks_resources(pid: int) -> bool:
    """Return whether ``pid`` is a resource tracker of Python, which cleans up /dev/shm after its users have ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def kill_found(find: Callable[[], list[Process]], *, trackers: bool = False) -> set[Process]:
    """SIGKILL the processes that ``find`` returns, until it returns no new process.  Return the signalled processes.

    Killed processes may take a moment to disappear; their newest children are found by the next call of ``find``.
    ``trackers``: True to also kill resource trackers; False to let them finish their work.
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
    """SIGKILL the processes that ``find`` returns and wait until none is left, at most ``timeout`` seconds.

    Returns the processes that are left.  The list is empty if ``find`` has returned nothing twice; once is not enough,
    because during exec a process has no environment for a moment.  Resource trackers have TRACKER_SECONDS to exit.
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
    """Send SIGKILL to ``process``, but not to a later process that has the same pid."""
    try:
        pidfd = None if lacking("pidfd_send_signal") else os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        current = _read_process(process.pid)
        if current and _identity(current) == _identity(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pidfd is None:  # race: another process may get this pid just now
                    os.kill(process.pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _wait_for_exits(pids: Sequence[int], timeout: float) -> None:
    """Wait until one of ``pids`` has ended, at most ``timeout`` seconds; without pidfds, wait 0.02 s."""
    if lacking("pidfd_open"):
        pids, timeout = (), min(timeout, 0.02)
    with selectors.PollSelector() as running, contextlib.ExitStack() as opened:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                opened.callback(os.close, pidfd := os.pidfd_open(pid))
                running.register(pidfd, selectors.EVENT_READ)
        if not pids or running.get_map():
            running.select(timeout)


LAST_SWEEP_SECONDS = 10.0
TRACKER_SECONDS = 5.0


class Subreaper:
    """Makes the launcher the parent of all descendants that lose their parent, reaps them and kills them at the end.

    Create it before any process is started.  Raises OSError if the kernel refuses.
    """

    def __init__(self) -> None:
        # If a shell became recover-run by exec, this process may have earlier children, which do not belong to the
        # launch.  Then an inherited child may be a descendant of an earlier child.  Zombies are of an earlier start of
        # this launch (``start_again``).
        children = [process for process in process_table().values() if process.parent == os.getpid()]
        self._owns_all_children = not any(child.alive for child in children)
        become_subreaper()

    def reap(self) -> None:
        """Reap the inherited children that have ended.  Call it after each round of the event loop."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in _own_children:
                return  # until the child's callback has reaped this zombie, waitid reports no other
            # A library may start processes in another thread (as torch's import does), and may reap them first.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, 0)

    def kill_all(self, launch_id: str, spared: Iterable[int]) -> list[Process]:
        """Kill every process of the launch.  Return the processes that still exist after LAST_SWEEP_SECONDS."""
        parent = os.getpid() if self._owns_all_children else None
        return kill_until_none_left(partial(find_launch, launch_id, (), spared, parent), timeout=LAST_SWEEP_SECONDS)


START_AGAIN = -1
"""Value that replaces the exit code of a launch if all launchers must start again."""
AGAIN_SECONDS = 30.0
"""Longest time, in seconds, that launchers wait for each other after a new start; all were live just before it."""


def take_attempt() -> int:
    """Return the number of earlier attempts to start; remove its variable, which no other process must inherit."""
    text = os.environ.pop(ATTEMPT_VARIABLE, "")
    return int(text) if text.isdecimal() else 0


def take_left_out() -> tuple[int, ...]:
    """Return the nodes that this start leaves out; remove their variable, as ``take_attempt`` does."""
    return tuple(int(word) for word in os.environ.pop(WITHOUT_VARIABLE, "").split(",") if word.isdecimal())


def keep_attempt(attempt: int) -> None:
    """Make ``start_again`` use ``attempt``, the attempt number of the other launchers."""
    os.environ[ATTEMPT_VARIABLE] = str(attempt)


def leave_out(nodes: Iterable[int]) -> None:
    """Make ``start_again`` leave out ``nodes``."""
    os.environ[WITHOUT_VARIABLE] = ",".join(map(str, nodes))


def start_again(attempt: int) -> None:
    """Repeat the start of a launch: execute this launcher's command line again, with the same process id.

    All launchers call it after they have stopped all of their workers (``StartUp``).  The store, the coordinators and
    the run id are new, so no message of one attempt can be mistaken for one of the next.

    ``attempt``: number of attempts so far.  Never returns; raises OSError if the command cannot be executed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))  # up to the last one: the limit may be a billion
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {ATTEMPT_VARIABLE: str(attempt), **os.environ})
