"""Newcomers that no plan has had when the run is over: nobody tells them so, and they would wait for ever."""

from __future__ import annotations

import signal
from collections.abc import Callable

from recover_megatron.launch import messages
from recover_megatron.launch.control_plane import ControlPlane
from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.launch.states import WorkerProcess
from recover_megatron.launch.worker_table import WorkerTable


class LateNewcomers:
    """Kills them."""

    def __init__(self, plan: LaunchPlan, table: WorkerTable, control: ControlPlane, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._table = table
        self._control = control
        self._say = say
        self._run_is_over = False
        self._killed: set[int] = set()

    def run_over(self) -> None:
        """From now on no newcomer is admitted."""
        self._run_is_over = True
        self.look()

    def told_of(self, worker: WorkerProcess) -> bool:
        """Whether the end of ``worker`` is no news."""
        return worker.worker_id in self._killed

    def look(self) -> None:
        """A worker has been started, perhaps too late."""
        if not self._run_is_over:
            return
        for worker in self._table.running:
            if worker.worker_id >= self._plan.world_size and worker.worker_id not in self._control.agent.planned:
                self._killed.add(worker.worker_id)
                self._say(messages.late(worker))
                self._table.signal([worker], signal.SIGKILL)
