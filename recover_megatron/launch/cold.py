"""Cold start: each worker is an interpreter of its own, a child of the launcher.  Also: what workers come from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.launch.processes import spawn


@dataclass
class WorkerEvents:
    """What a source of workers calls."""

    started: Callable[[int, int, int], None]
    """Worker id, pid, pidfd (whose ownership passes on): the process exists."""
    kill_remains: Callable[[int, int], int]
    """Worker id, pid: it has ended and is still a zombie; kill what it left behind, and say how many that were."""
    reaped: Callable[[int, int, int], None]
    """Worker id, status (exit code, or minus the signal), processes it left behind: it is gone."""


class WorkerSource(Protocol):
    """Starts workers and reaps them: ``ColdStart``, or ``WarmParent``."""

    def start(self, worker_id: int, variables: Mapping[str, str], stdout: int, stderr: int) -> None:
        """Start a worker with ``variables`` added to its environment.  ``started`` is called, now or later.

        Raises OSError if it cannot be started.
        """

    def reap(self, worker_id: int, pid: int) -> None:
        """The worker has ended.  ``kill_remains`` and then ``reaped`` are called, now or later."""


class ColdStart:
    """Workers as children of this process."""

    def __init__(self, plan: LaunchPlan, environment: Mapping[str, str], events: WorkerEvents) -> None:
        self._command = plan.command
        self._environment = environment
        self._events = events

    def start(self, worker_id: int, variables: Mapping[str, str], stdout: int, stderr: int) -> None:
        pid = spawn(self._command, {**self._environment, **variables}, stdout, stderr)
        self._events.started(worker_id, pid, os.pidfd_open(pid))

    def reap(self, worker_id: int, pid: int) -> None:
        left_behind = self._events.kill_remains(worker_id, pid)
        _, status = os.waitpid(pid, 0)
        self._events.reaped(worker_id, os.waitstatus_to_exitcode(status), left_behind)
