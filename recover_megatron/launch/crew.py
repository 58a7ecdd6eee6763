"""The workers of one node: their records, streams and handles; how one is started, signalled and put out.

The keeping half of ``Supervisor``, which decides. Everything runs in the main thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from recover_megatron.launch import messages, newcomers
from recover_megatron.launch.cold import WorkerSource
from recover_megatron.launch.control_plane import ControlPlane
from recover_megatron.launch.exit_codes import Outcome
from recover_megatron.launch.loop import EventLoop
from recover_megatron.launch.output import Console, LogFile, Stream
from recover_megatron.launch.plan import LaunchPlan, launch_environment, worker_variables
from recover_megatron.launch.states import Worker, WorkerState


class Crew:
    """All workers that this launcher has started or is about to start, by worker id."""

    def __init__(self, plan: LaunchPlan, inherited: Mapping[str, str]) -> None:
        self._plan = plan
        self._inherited = inherited
        self._environment = launch_environment(plan, inherited)
        self._loop = EventLoop()
        self._console = Console(self._loop, plan.world_size - 1)
        self._control: ControlPlane | None = None
        self._workers = {worker.worker_id: worker for worker in newcomers.launched(plan)}
        self._replacements = newcomers.Replacements(plan)
        self._over = False
        """Whether the run is over, so that no newcomer can be admitted any more."""
        self._pidfds: dict[int, int] = {}
        self._streams: dict[int, list[Stream]] = {}
        self._logs: dict[int, LogFile] = {}

    def _start_worker(self, source: WorkerSource, worker: Worker, run_id: str) -> None:
        log = self._plan.log_file(worker.worker_id)
        log_file = LogFile(log, self._console.say) if log else None
        if log_file:
            self._logs[worker.worker_id] = log_file
        streams, stdout, stderr = self._console.attach(str(worker.worker_id), worker.worker_id, log_file)
        self._streams[worker.worker_id] = streams
        variables = worker_variables(self._plan, worker, run_id)
        if self._control:
            variables |= self._control.variables
        try:
            source.start(worker.worker_id, variables, stdout, stderr)
        finally:
            os.close(stdout)
            os.close(stderr)

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.state is WorkerState.RUNNING]

    def _signal_worker(self, worker: Worker, number: int) -> None:
        try:
            signal.pidfd_send_signal(self._pidfds[worker.worker_id], number)
        except ProcessLookupError:
            return  # it has ended: its pidfd says so in a moment

    def _launched(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.worker_id < self._plan.world_size]

    def _never_planned(self) -> bool:
        """Whether the run has not had its first plan."""
        return self._control is None or not self._control.planned

    def _successor_of(self, worker: Worker) -> Worker | None:
        """The worker that is to take the place of one that has ended; it is among the workers from now on."""
        if self._control is None or not self._control.under_way:
            return None
        successor = self._replacements.of(worker, min(self._workers))
        if successor is not None:
            self._workers[successor.worker_id] = successor
        return successor

    def _on_run_over(self) -> None:
        """Newcomers that no plan has had are told by nobody that the run is over."""
        self._over = True
        self._end_late_ones()

    def _end_late_ones(self) -> None:
        planned = self._control.planned if self._control else frozenset()
        for worker in self._running():
            if worker.worker_id >= self._plan.world_size and worker.worker_id not in planned:
                self._console.say(messages.late(worker))
                self._signal_worker(worker, signal.SIGKILL)

    # --- being told ---

    def _outcomes(self) -> list[Outcome]:
        return [
            Outcome(worker.worker_id, worker.exit_code, worker.signal, worker.ended or 0.0)
            for worker in self._workers.values()
        ]

    def _on_kill_order(self, worker_id: int, reason: str) -> None:
        """The coordinator has put a worker out.  Called in another thread."""
        self._loop.call_from_thread(lambda: self._put_out(worker_id, reason))

    def _put_out(self, worker_id: int, reason: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None and worker.state is WorkerState.RUNNING:
            self._replacements.put_out.add(worker_id)
            self._console.say(f"worker {worker_id} is out of the run ({reason}): killing it")
            self._signal_worker(worker, signal.SIGKILL)
