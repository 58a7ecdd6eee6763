"""Process that a launcher starts in advance, so that a replacement worker need not wait for the imports of Megatron.

::

    none --begin()--> prepared --the next replacement starts: take()--> a worker, in the WorkerTable
                         |--it ends by itself: reported----> none; the next replacement is a new process
                         '--end(): killed, not reported----> none

The process has the command, the output streams and the id of the next replacement.  It waits in ``load`` of
``megatron_hooks.entry.program`` for the variables that depend on the replaced worker (``network/handover.py``).  While
it waits it is no worker: it is not in workers.json, and its end changes neither the run nor the exit code.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from recover_megatron.launch import messages
from recover_megatron.launch.workers.states import WorkerProcess
from recover_megatron.launch.workers.worker_table import WorkerTable, cause_of
from recover_megatron.network.event_loop import EventLoop
from recover_megatron.network.handover import Handover
from recover_megatron.variables import SPARE_VARIABLE

OF_A_PLACE = ("RANK", "LOCAL_RANK", "ROLE_RANK", SPARE_VARIABLE)
"""Variables that depend on the worker that will be replaced.  A prepared process must not have them, so that no module
can use a wrong value during its import."""


@dataclass(eq=False)
class Prepared:
    """Prepared process of this launcher: at most one at a time."""

    _loop: EventLoop
    _table: WorkerTable
    _say: Callable[[str], None]
    _environment: Callable[[WorkerProcess], Mapping[str, str]]
    """Function that returns the environment of a worker."""

    def __post_init__(self) -> None:
        self._process: tuple[WorkerProcess, Handover] | None = None
        self._ending: WorkerProcess | None = None  # killed by ``end``, and not reaped yet
        self._failed: int | None = None  # id of the worker for which a process has been prepared in vain

    def begin(self, process: WorkerProcess) -> None:
        """Start a process that will become the worker ``process``, unless there is one, or one has failed for it."""
        if self._process is not None or self._failed == process.worker_id:
            return
        self._reap_killed()
        known = self._environment(process).items()
        try:
            handover = Handover({name: value for name, value in known if name not in OF_A_PLACE})
            try:
                pidfd = self._table.spawn(process, handover.environment, [handover.descriptor])
            except OSError:
                handover.close()
                raise
            finally:
                os.close(handover.descriptor)
        except OSError as error:
            self._failed = process.worker_id
            self._say(messages.not_prepared(process, str(error)))
            return
        self._process, process.started = (process, handover), time.time()
        self._loop.add_reader(pidfd, self._ended, process)

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

    def end(self) -> None:
        """Kill the prepared process, if there is one, because it is not needed."""
        if process := self._forget():
            self._ending = process
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)  # the pid of an unreaped process is not reused

    def _forget(self) -> WorkerProcess | None:
        if self._process is None:
            return None
        (process, handover), self._process = self._process, None
        handover.close()
        return process

    def _reap_killed(self) -> None:
        if self._ending is not None:
            self._ended(self._ending)

    def _ended(self, process: WorkerProcess) -> None:
        """Kill and reap ``process`` and its children, and report its end, unless ``end`` has killed it."""
        self._table.reap(process)
        cause = cause_of(process, self._table.close(process))
        if process is self._ending:
            self._ending = None
        else:
            self._forget()
            self._failed = process.worker_id
            self._say(messages.prepared_ended(process, cause))
