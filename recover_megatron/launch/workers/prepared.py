"""Processes that a launcher starts in advance, so that workers need not wait for the imports of Megatron.

::

    none --begin()--> Prepared --the next replacement starts: take()--> a worker, in the WorkerTable
                         |--it ends by itself: reported----> none; the next replacement is a new process
                         '--end(): killed, not reported----> none

    none --begin()--> ForkServer: its imports --they have ended--> ready --a worker starts: take()--> forks the worker
                         |                                           |
                         '--it ends by itself, or must not fork: reported--> none; workers are new processes

Both have the command of a worker, and wait in ``load`` of ``megatron_hooks.entry.program``.  The prepared process has
the output streams and the id of the next replacement.  It gets the variables that depend on the replaced worker later
(``network/handover.py``), and so does a forked worker (``network/fork_server.py``).  While they wait they are no
workers: they are not in workers.json, and their end changes neither the run nor the exit code.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from recover_megatron.launch import messages
from recover_megatron.launch.workers.processes import open_pidfd
from recover_megatron.launch.workers.states import WorkerProcess
from recover_megatron.launch.workers.worker_table import WorkerTable, cause_of
from recover_megatron.network import fork_server
from recover_megatron.network.event_loop import EventLoop
from recover_megatron.network.handover import ROOM, Handover
from recover_megatron.variables import ROOM_VARIABLE, SPARE_VARIABLE

OF_A_PLACE = ("RANK", "LOCAL_RANK", "ROLE_RANK", SPARE_VARIABLE)
"""Variables that depend on the worker.  A process that waits must not have them, so that no module can use a wrong
value during its import."""


def _before_its_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` as a process has it while it waits."""
    return {**{name: value for name, value in environment.items() if name not in OF_A_PLACE}, ROOM_VARIABLE: ROOM}


@dataclass(eq=False)
class _Waiting[Link: (Handover, fork_server.ForkServer)]:
    """A process that waits in ``load``, and is no worker: at most one at a time."""

    _loop: EventLoop
    _table: WorkerTable
    _say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._process: tuple[WorkerProcess, Link] | None = None
        self._ending: WorkerProcess | None = None  # killed by ``end``, and not reaped yet

    def _start(self, process: WorkerProcess, link: Link) -> None:
        """Start ``process``, which inherits its end of ``link``.  Raises OSError."""
        try:
            pidfd = self._table.spawn(process, self._table.new(link.environment, [link.descriptor]))
        except OSError:
            link.close()
            raise
        finally:
            os.close(link.descriptor)
        self._process, process.started = (process, link), time.time()
        self._loop.add_reader(pidfd, self._ended, process)

    def end(self) -> None:
        """Kill the process, if there is one, because it is not needed."""
        if process := self._forget():
            self._ending = process
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)  # the pid of an unreaped process is not reused

    def _forget(self) -> WorkerProcess | None:
        if self._process is None:
            return None
        (process, link), self._process = self._process, None
        link.close()
        return process

    def _ended(self, process: WorkerProcess) -> None:
        """Kill and reap ``process`` and its children, and report its end, unless ``end`` has killed it."""
        self._table.reap(process)
        cause = cause_of(process, self._table.close(process))
        if process is self._ending:
            self._ending = None
        else:
            self._forget()
            self._lost(process, cause)

    def _lost(self, process: WorkerProcess, cause: str) -> None:
        """Report that ``process`` has ended by itself; ``cause``: see ``cause_of``."""
        raise NotImplementedError


@dataclass(eq=False)
class Prepared(_Waiting[Handover]):
    """Prepared process of this launcher."""

    _environment: Callable[[WorkerProcess], Mapping[str, str]]
    """Function that returns the environment of a worker."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._failed: int | None = None  # id of the worker for which a process has been prepared in vain

    def begin(self, process: WorkerProcess) -> None:
        """Start a process that will become the worker ``process``, unless there is one, or one has failed for it."""
        if self._process is not None or self._failed == process.worker_id:
            return
        self._reap_killed()
        try:
            self._start(process, Handover(_before_its_place(self._environment(process))))
        except OSError as error:
            self._failed = process.worker_id
            self._say(messages.not_prepared(process, str(error)))

    def take(self, worker: WorkerProcess, environment: Mapping[str, str]) -> bool:
        """Make the prepared process the process of ``worker``.  Return False if there is none for this worker."""
        self._reap_killed()
        if self._process is None or self._process[0].worker_id != worker.worker_id:
            return False
        process, handover = self._process
        if not handover.give(environment):
            self._ended(process)  # its end has not been noticed yet
            return False
        self._process, worker.pid = None, process.pid
        return True

    def _reap_killed(self) -> None:
        if self._ending is not None:
            self._ended(self._ending)

    def _lost(self, process: WorkerProcess, cause: str) -> None:
        self._failed = process.worker_id
        self._say(messages.prepared_ended(process, cause))


@dataclass(eq=False)
class ForkServer(_Waiting[fork_server.ForkServer]):
    """Fork server of this launcher, with --fork-workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.importing = False
        """True until the server is ready, or has ended: the first workers wait for this."""

    @property
    def alive(self) -> bool:
        return self._process is not None

    def begin(self, process: WorkerProcess, environment: Mapping[str, str], settled: Callable[[], None]) -> None:
        """Start the server; ``settled`` is called when it is ready, or has ended.

        ``process``: its record; ``environment``: variables that are the same for all workers of this node.
        """
        try:
            link = fork_server.ForkServer(_before_its_place(environment))
            self._start(process, link)
        except OSError as error:
            self._say(messages.forks_no_worker(process, f"the fork server cannot be started ({error})"))
            return
        self.importing, self._settled = True, settled
        self._loop.add_reader(link.channel, self._answered, process, link)

    def take(self, worker: WorkerProcess, environment: Mapping[str, str]) -> bool:
        """Fork the process of ``worker``.  Return False if this is not possible; raises OSError without descriptors."""
        if self._process is None or self.importing:
            return False
        (server, link), forked = self._process, replace(worker)
        handover = Handover(link.environment)

        def fork(stdout: int, stderr: int) -> tuple[int, int]:
            pid = link.fork([handover.descriptor, stdout, stderr])
            return pid, open_pidfd(pid)

        try:
            self._table.spawn(forked, fork)
        except OSError as error:
            self.end()
            why = f"process {server.pid} could not fork worker {worker.worker_id} ({error})"
            self._say(messages.forks_no_worker(server, why))
            return False
        else:
            if not handover.give(environment):
                self._table.reap(forked)
                self._table.close(forked)
                return False
        finally:
            os.close(handover.descriptor)
            handover.close()  # a process that the server forks too late ends
        worker.pid = forked.pid
        return True

    def _answered(self, process: WorkerProcess, link: fork_server.ForkServer) -> None:
        """Receive the first message of the server."""
        self._loop.remove_reader(link.channel)
        self.importing = False
        try:
            answer = link.answer()
        except OSError:
            self._ended(process)
            return
        if answer != fork_server.READY.decode():
            self.end()
            self._say(messages.forks_no_worker(process, answer))
        self._settled()

    def _forget(self) -> WorkerProcess | None:
        self.importing = False
        if self._process is not None:
            self._loop.remove_reader(self._process[1].channel)
        return super()._forget()

    def _lost(self, process: WorkerProcess, cause: str) -> None:
        self._say(messages.forks_no_worker(process, messages.fork_server_ended(process, cause)))
        self._settled()
