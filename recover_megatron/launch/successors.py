"""Workers that are started in place of others: whether there is one, its device's test, its start.

worker ended --of()--> nobody
                 '---> STARTING, in the table --start()--> its device is tested --passed--> RUNNING
                                                |  |              '--failed--> left out: KILLED, with a note
                                                |  '--(no test: the host device)--> RUNNING
                                                '--those before it have failed alike--> it waits, then the same
                                                                                  '--the run ends--> KILLED
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from recover_megatron.launch import messages
from recover_megatron.launch.device_tests import DeviceTests
from recover_megatron.launch.loop import EventLoop
from recover_megatron.launch.newcomers import Replacements
from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.launch.states import WorkerProcess
from recover_megatron.launch.worker_table import WorkerTable


class Successors:
    """``launch`` starts the process of a worker (raises OSError); ``left_out`` is told of one that was not started."""

    def __init__(
        self, plan: LaunchPlan, loop: EventLoop, table: WorkerTable, say: Callable[[str], None],
        launch: Callable[[WorkerProcess], None], left_out: Callable[[], None],
    ) -> None:  # fmt: skip
        self._plan = plan
        self._table = table
        self._say = say
        self._launch = launch
        self._left_out = left_out
        self._replacements = Replacements(plan)
        self._stopped = False
        self._loop = loop
        self._waiting: list[WorkerProcess] = []
        self._tests = DeviceTests(loop, plan.device_test, plan.device_test_timeout)

    @property
    def pids(self) -> set[int]:
        """Of tests that are not reaped yet."""
        return self._tests.pids

    def put_out(self, worker_id: int) -> None:
        """The coordinator has put this worker out of the run: nobody takes its place."""
        self._replacements.put_out.add(worker_id)

    def stop(self, stopped: bool = True) -> bool:
        """Nobody takes a place from now on, who is being tested included, or somebody does again; True: that is new."""
        before, self._stopped = self._stopped, stopped
        return before is not stopped

    def of(self, worker: WorkerProcess) -> WorkerProcess | None:
        """The worker that is to take the place of one that has ended; it is in the table from now on."""
        if self._stopped:
            return None
        words = self._table.last_words.get(worker.worker_id, "")
        successor = self._replacements.of(worker, self._table.first_id, words)
        if successor is not None:
            self._table.add([successor])
        if self._replacements.kept or (successor and self._replacements.wait):
            self._say(messages.failed_alike(self._replacements.alike, words, successor, self._replacements.wait))
        return successor

    def start(self, worker: WorkerProcess, environment: Mapping[str, str]) -> None:
        """Start ``worker``, which ``of`` has just returned, when its device has passed its test."""
        if wait := self._replacements.wait:
            self._waiting.append(worker)
            self._loop.call_later(wait, partial(self._begin, worker, environment))
        else:
            self._begin(worker, environment)

    def run_over(self) -> None:
        """Nobody who still waits is started."""
        if waiting := [worker for worker in self._waiting if worker.live and worker.pid is None]:
            self._table.abandon(waiting)
            self._left_out()

    def _begin(self, worker: WorkerProcess, environment: Mapping[str, str]) -> None:
        if worker in self._waiting:
            self._waiting.remove(worker)
        if not worker.live:
            return
        try:
            if self._plan.device_test:
                self._tests.begin(environment, partial(self._tested, worker))
            else:
                self._tested(worker, "")
        except OSError as error:
            self._leave_out(worker, f"worker {worker.worker_id} cannot be started: {error}")

    def _tested(self, worker: WorkerProcess, failed: str) -> None:
        if not worker.live:
            return  # the launch ends
        if self._stopped:
            worker.note = messages.DRAINED_BEFORE_ITS_START
            self._table.abandon([worker])
            self._left_out()
            return
        if failed:
            worker.note = messages.device_failed(worker, failed)
            self._leave_out(worker, messages.left_out(worker, failed))
            return
        try:
            self._launch(worker)
        except OSError as error:
            self._leave_out(worker, f"worker {worker.worker_id} cannot be started: {error}")

    def _leave_out(self, worker: WorkerProcess, why: str) -> None:
        self._say(why)
        self._table.abandon([worker])
        self._left_out()
