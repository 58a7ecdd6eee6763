"""Workers of one node: their records, the handles of their processes, and their shutdown.

A worker ends in these steps:

1. If dying.py notices that the worker is dying, ``fence`` is called; then the death may be reported.
2. The worker's pidfd becomes readable.  The worker is a zombie, so its pid, process group and session are not reused.
3. ``reap`` kills the worker's descendants and reaps the worker; then the end may be reported.
4. ``close`` reads the rest of the worker's output and closes the handles.

All functions are called in the main thread.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.workers import processes
from recover_megatron.launch.workers.dying import WRITES_CORE, Ending, ProcessWatch
from recover_megatron.launch.workers.log_folder import LogFolder
from recover_megatron.launch.workers.output import Console, LogFile, Stream
from recover_megatron.launch.workers.processes import find_launch, kill_found, spawn
from recover_megatron.launch.workers.reaper import Reaper
from recover_megatron.launch.workers.states import LIVE, ExitOutcome, WorkerProcess, WorkerState
from recover_megatron.membership.records import WorkerId, ranges
from recover_megatron.network import system
from recover_megatron.network.death_notice import FATAL, DeathWatch
from recover_megatron.network.event_loop import EventLoop

FORK_SERVER = WorkerId(-1)
"""Worker id in the record of a fork server (prepared.py), which is no worker."""
MakeProcess = Callable[[int, int], tuple[int, int]]
"""Function that starts a process, given its stdout and stderr, and returns its pid and a pidfd; raises OSError."""
TakePrepared = Callable[[WorkerProcess, Mapping[str, str]], bool]
"""Function that makes a prepared process the process of a worker with an environment; see ``prepared.Prepared.take``.
"""


@dataclass
class _Handles:
    """Handles of the process of a worker, or of a prepared process, from its start until ``WorkerTable.close``."""

    pidfd: int
    streams: list[Stream]
    log: LogFile | None
    watch: ProcessWatch | None = None
    """None for a prepared process."""


@dataclass(eq=False)
class WorkerTable:
    """Records and processes of the workers that this launcher has started or is about to start."""

    _spec: LaunchSpec
    _loop: EventLoop
    _console: Console
    _folder: LogFolder
    _reaper: Reaper
    _on_exit: Callable[[WorkerProcess], None]
    """Callback for a worker whose process has ended; the callback calls ``reap`` and ``close``."""
    _on_dying: Callable[[WorkerProcess, Ending], None]
    """Callback for a dying worker, called before ``_on_exit``; not called if the worker has left the run normally."""

    def __post_init__(self) -> None:
        self._reaper.dropped = self._output_dropped
        self._workers: dict[int, WorkerProcess] = {}
        self._handles: dict[int, _Handles] = {}
        self.changed = True
        """True if records have changed since workers.json was written."""
        self.last_words: dict[int, str] = {}
        """Worker id -> report of the fatal signal that killed the worker, else the last line of the worker's stderr."""
        self._killed: set[int] = set()  # workers to which this launcher has sent SIGKILL
        self._memory_kills = system.memory_kills()  # number of out-of-memory kills when a worker last ended
        self._kernel_log = system.KernelLog()

    def add(self, workers: Iterable[WorkerProcess]) -> None:
        self._workers |= {worker.worker_id: worker for worker in workers}

    # --- the records ---

    @property
    def all(self) -> list[WorkerProcess]:
        return list(self._workers.values())

    @property
    def running(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if worker.state is WorkerState.RUNNING]

    @property
    def launched(self) -> list[WorkerProcess]:
        """Return the workers that were launched with the run, without spares and newcomers."""
        return [worker for worker in self._workers.values() if worker.worker_id < self._spec.world_size]

    @property
    def live(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if worker.state in LIVE]

    @property
    def first_id(self) -> int:
        return min(self._workers)

    @property
    def outcomes(self) -> list[ExitOutcome]:
        """Return the ends of all workers, for the exit code; the end of a live worker counts as exit code 0."""
        return [worker.outcome for worker in self._workers.values()]

    def running_worker(self, worker_id: int) -> WorkerProcess | None:
        """Return the worker ``worker_id``; None if this launcher has no running worker with that id."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.state is WorkerState.RUNNING else None

    def note(self, worker_id: int, text: str) -> None:
        """Set the note of a worker in workers.json; ignore unknown ids."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.note, self.changed = text, True

    # --- the processes ---

    def start(self, worker: WorkerProcess, environment: Mapping[str, str], take_prepared: TakePrepared) -> int:
        """Start and watch the process of ``worker``.  Return its pid; raises OSError if it cannot be started."""
        notice = DeathWatch.make() if self._spec.control_plane else None
        watch = ProcessWatch(self._loop, partial(self._on_dying, worker), notice)
        variables = {**environment, **(notice.variables if notice is not None else {})}
        try:
            if not take_prepared(worker, variables):
                self.spawn(worker, self.new(variables))
        except OSError:
            watch.close()
            raise
        assert worker.pid is not None
        worker.started, worker.state = time.time(), WorkerState.RUNNING
        self.changed = True
        handles = self._handles[worker.worker_id]
        handles.watch = watch
        for stream in handles.streams:
            stream.fatal.on_first_line = watch.fatal
            stream.forget_last_line()
        watch.begin(worker.pid)
        self._loop.add_reader(handles.pidfd, self._on_exit, worker)
        return worker.pid

    def new(self, environment: Mapping[str, str], inherit: Sequence[int] = ()) -> MakeProcess:
        """Return a function that starts a process with the command of a worker.

        ``inherit``: descriptors of a process that waits to become a worker, which is started with signals blocked.
        """
        return lambda out, err: spawn(self._spec.command, environment, out, err, inherit, deaf=bool(inherit))

    def spawn(self, worker: WorkerProcess, make: MakeProcess) -> int:
        """Start a process with the output streams of ``worker``.  Return its pidfd, which the caller watches.

        Raises OSError if the process cannot be started.
        """
        is_worker = worker.worker_id != FORK_SERVER
        log = self._folder.open_log(Path(worker.log)) if worker.log else None
        # A newcomer that runs Megatron with --recover prints the line that ``ConsoleFilter`` awaits.
        prints = self._spec.fault_tolerant and self._spec.script.takes_megatron_flags
        newcomer = worker.worker_id >= self._spec.world_size and prints
        streams, stdout, stderr = self._console.attach(
            str(worker.worker_id) if is_worker else "imports",
            worker.worker_id,
            log,
            newcomer=newcomer and not self._spec.coordinators,
        )
        try:
            worker.pid, pidfd = make(stdout, stderr)
        except OSError:
            for stream in streams:
                stream.drain_and_close()
            if log:
                log.close()
            raise
        finally:
            os.close(stdout)
            os.close(stderr)
        self._handles[worker.worker_id] = _Handles(pidfd, streams, log)
        self._reaper.add_session(worker.pid, [stream.pipe for stream in streams])
        # The loop reads the output from its next iteration on; before that, the supervisor updates workers.json.
        self._console.read(streams)
        return pidfd

    def signal(self, workers: Iterable[WorkerProcess], number: int) -> None:
        """Send the signal ``number`` to ``workers``, which are running."""
        for worker in workers:
            if number == signal.SIGKILL:
                self._killed.add(worker.worker_id)
            if worker.pid is not None:  # the pid of an unreaped process is not reused
                os.kill(worker.pid, number)

    def fence(self, worker: WorkerProcess, end: Ending) -> str:
        """Make sure that the dying ``worker`` runs no more code.  Return its end in words, for the coordinator.

        Raises OSError if SIGKILL cannot be sent; the caller must not report the death then.
        """
        watch = self._handles[worker.worker_id].watch
        assert watch is not None, "a worker that dies has started"
        watch.fence(end)
        if end.must_kill:
            self._killed.add(worker.worker_id)
        if end.code is not None:
            self._ask_kernel(worker, end.code)
        return f"{end.how}, {worker.kernel}" if worker.kernel else end.how

    def reap(self, worker: WorkerProcess) -> int:
        """Kill the processes that ``worker``, which has ended, left behind; then reap ``worker``.

        Returns the number of processes that were left behind.
        """
        assert worker.pid is not None
        handles = self._handles[worker.worker_id]
        self._loop.remove_reader(handles.pidfd)
        if handles.watch is not None:
            handles.watch.close()
        find = partial(find_launch, self._spec.launch_id, [worker.pid], self._reaper.spared, worker_id=worker.worker_id)
        killed = {process.pid for process in kill_found(find)}
        worker.end(status := processes.reap(worker.pid), time.time())
        self._ask_kernel(worker, status)
        if worker.note.startswith(WRITES_CORE):
            worker.note = ""
        self.changed = True
        return len(killed - {worker.pid})

    def _ask_kernel(self, worker: WorkerProcess, status: int) -> None:
        """Set ``worker.kernel`` if the kernel reports why the worker ended; ``status``: exit code or minus signal."""
        before, self._memory_kills = self._memory_kills, system.memory_kills()
        if worker.kernel or worker.worker_id in self._killed:
            return
        if status == -signal.SIGKILL and self._memory_kills > before:
            worker.kernel = "out of memory"
        elif status and worker.pid is not None:
            worker.kernel = self._kernel_log.xid(worker.pid)

    def close(self, worker: WorkerProcess) -> str:
        """Close the handles of ``worker``, which was reaped.  Return its entry of ``last_words``."""
        assert worker.pid is not None
        self._reaper.remove_session(worker.pid)
        handles = self._handles.pop(worker.worker_id)
        os.close(handles.pidfd)
        for stream in handles.streams:
            stream.drain_and_close()
        if handles.log:
            handles.log.close()
        fatal = next((stream.fatal.text for stream in handles.streams if stream.fatal.text), "")
        self.last_words[worker.worker_id] = (worker.signal and fatal) or handles.streams[-1].last_line
        return self.last_words[worker.worker_id]

    def _output_dropped(self, pid: int, lines: int) -> None:
        """Log that the reaper dropped lines of a worker while this launcher did not run."""
        if (worker := next((worker for worker in self.running if worker.pid == pid), None)) is not None:
            text = f"{lines} lines of worker {worker.worker_id} are missing here, because this launcher was stopped"
            self._console.say(text)
            if (log := self._handles[worker.worker_id].log) is not None:
                log.write(None, f"recover-run: {text}\n".encode())

    def abandon(self, workers: Iterable[WorkerProcess]) -> None:
        """Record ``workers``, which were never started or cannot be killed, as killed by SIGKILL."""
        for worker in workers:
            worker.end(-signal.SIGKILL, time.time())
            self.changed = True


def cause_of(worker: WorkerProcess, words: str) -> str:
    """Return ``words``, the ``last_words`` of a worker that has ended, if they may explain its end; else ""."""
    return words if worker.state is WorkerState.FAILED or words.startswith(FATAL.decode()) else ""


UNKILLABLE_SECONDS = 10.0


@dataclass(eq=False)
class Shutdown:
    """Stops the workers of this node: with SIGTERM, then with SIGKILL.

    ::

        begin --SIGTERM--> they exit --grace--> kill --SIGKILL--> --UNKILLABLE_SECONDS--> given up

    Created once per launch.  ``_given_up`` is called in the main thread UNKILLABLE_SECONDS after SIGKILL, even if all
    workers have ended.
    """

    _loop: EventLoop
    _table: WorkerTable
    _say: Callable[[str], None]
    _given_up: Callable[[], None]

    def begin(self, grace: float, *, at_once: bool) -> None:
        """Send SIGTERM now and SIGKILL after ``grace`` seconds; ``at_once``: True to send SIGKILL now, too."""
        running = self._table.running
        if at_once:
            self._table.signal(running, signal.SIGKILL)
        self._loop.call_later(grace, self.kill)
        self._table.signal(running, signal.SIGTERM)

    def kill(self) -> None:
        running = self._table.running
        if running:
            ids = ranges([worker.worker_id for worker in running])
            self._say(f"SIGKILL to {'worker' if len(running) == 1 else 'workers'} {ids}")
        self._table.signal(running, signal.SIGKILL)
        self._loop.call_later(UNKILLABLE_SECONDS, self._given_up)
