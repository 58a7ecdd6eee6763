"""Workers that are started while the run goes on: which, under which ids, after which test; those that come too late.

::

    worker ended --of()--> nobody
                     '---> STARTING, in the table --start()--> its device is tested --passed--> RUNNING
                                                    |  |              '--failed--> left out: KILLED, with a note
                                                    |  '--(no test: the host device)--> RUNNING
                                                    '--those before it have failed alike--> it waits, then the same
                                                                                      '--the run ends--> KILLED

The ids::

    launch         0 .. W-1                   the ranks
    spares         W .. W+S-1                 started with the launch by its last node (--recover-spares S)
    replacements   W+S + k*nodes + node       the k-th of that node, k = 0, 1, ..; at most --max-restarts of them
    joined         JOINED_FROM and above      a block at a random place, by a launcher with --join

No id is used twice, so that no process is ever taken for one that has died. All but the first are newcomers to the
coordinator: they are admitted while the run goes on, when they are ready.

Replacements that fail one after the other in the same words (a folder that cannot be written), or that one signal kills
before they have a place in the training (no memory is left), would use up all that may be started within a
minute: from the second on the next one waits, each time twice as long, and the last one is kept for another cause.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from recover_megatron.launch import messages
from recover_megatron.launch.command_line.plan import LaunchPlan
from recover_megatron.launch.device_test import DeviceTests
from recover_megatron.launch.nodes.control_plane import ControlPlane
from recover_megatron.launch.workers.loop import EventLoop
from recover_megatron.launch.workers.states import REFUSED, RUN_VERDICTS, WorkerProcess, WorkerState
from recover_megatron.launch.workers.worker_table import WorkerTable
from recover_megatron.membership.ending import alike
from recover_megatron.membership.records import EXIT_FENCED, JOINED_FROM, MAX_WORKERS, WorkerId

WAIT_SECONDS, LONGEST_WAIT_SECONDS = 30.0, 600.0
"""How long the next replacement waits after two in a row have failed alike, and at most."""
JOIN_SECONDS = 60.0


def launched(plan: LaunchPlan) -> list[WorkerProcess]:
    """The workers of this node that the launch has from the beginning; of one that joins: none yet."""
    if plan.joins:
        return []
    workers = [_worker(plan, plan.worker_id(n), n, plan.worker_id(n)) for n in range(plan.nproc_per_node)]
    if plan.node_rank == plan.nnodes - 1:
        taken = [plan.nproc_per_node * node + n for node in plan.without for n in range(plan.nproc_per_node)]
        spares = [plan.world_size + n for n in range(plan.spares - len(taken))]
        for local_rank, number in enumerate([*taken, *spares], start=plan.nproc_per_node):
            workers.append(_worker(plan, number, local_rank, number if number < plan.world_size else None))
    return workers


def joined(plan: LaunchPlan, taken: frozenset[int], draw: Callable[[int], int]) -> list[WorkerProcess]:
    """The workers of a launcher that joins a run; ``draw(n)``: a random number below n."""
    count = plan.nproc_per_node + plan.max_restarts
    while True:
        first = JOINED_FROM + draw(MAX_WORKERS - JOINED_FROM - count)
        if taken.isdisjoint(range(first, first + count)):
            return [_worker(plan, first + n, n, None) for n in range(plan.nproc_per_node)]


class Replacements:
    """What is started in place of a worker that has ended."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._started = 0
        self._words = ""
        self.alike = 0
        """So many replacements have failed in the same words, one after the other."""
        self.wait = 0.0
        """Seconds before the one that ``of`` has returned last is started."""
        self.kept = False
        """Whether there is one more, which is kept for another cause than that of the last end."""
        self.put_out: set[int] = set()
        """Workers that the coordinator has put out of the run."""

    def of(
        self, worker: WorkerProcess, first_joined: int, words: str = "", *, had_place: bool = True
    ) -> WorkerProcess | None:
        """The one that takes the place of ``worker``, which has ended while the run goes on; None: there is none.

        ``words``: the last ones of ``worker``, or how it was killed; ``had_place``: it has been in a plan.
        ``first_joined``: the lowest id of a launcher that joins.

        A worker that finished, or ended by what is decided about the run or about itself, or was refused, would end so
        again; one that was put out for a hang is left to people.
        """
        plan = self._plan
        self.kept, repeated = False, False
        if worker.replaces is not None and (worker.state is WorkerState.FAILED or not had_place):
            self.alike = self.alike + 1 if alike(words) == self._words else 1
            self._words = alike(words)
            repeated = self.alike > 1
        self.wait = min(WAIT_SECONDS * 2 ** (self.alike - 2), LONGEST_WAIT_SECONDS) if repeated else 0.0
        if self._started >= plan.max_restarts or worker.state is WorkerState.FINISHED:
            return None
        if worker.exit_code in (REFUSED, *RUN_VERDICTS, EXIT_FENCED) or worker.worker_id in self.put_out:
            return None
        if repeated and self._started == plan.max_restarts - 1:
            self.kept = True
            return None
        number = plan.world_size + plan.spares + self._started * plan.nnodes + plan.node_rank
        if plan.joins:
            number = first_joined + plan.nproc_per_node + self._started
        self._started += 1
        successor = _worker(plan, number, worker.local_rank, worker.rank)
        successor.replaces = worker.worker_id
        return successor


def _worker(plan: LaunchPlan, worker_id: int, local_rank: int, rank: int | None) -> WorkerProcess:
    log = str(path) if (path := plan.log_file(worker_id)) else None
    return WorkerProcess(
        WorkerId(worker_id), None, plan.host, WorkerState.STARTING, plan.node_rank, local_rank, log=log, rank=rank
    )


@dataclass(eq=False)
class Successors:
    """What starts replacements, when their devices have passed their tests."""

    _plan: LaunchPlan
    _loop: EventLoop
    _table: WorkerTable
    _say: Callable[[str], None]
    _launch: Callable[[WorkerProcess], None]
    """Starts the process of a worker; raises OSError."""
    _left_out: Callable[[], None]
    """Is told of a worker that was not started."""

    def __post_init__(self) -> None:
        self._replacements = Replacements(self._plan)
        self._stopped = False
        self._waiting: list[WorkerProcess] = []
        self._tests = DeviceTests(self._loop, self._plan.device_test, self._plan.device_test_timeout)

    def put_out(self, worker_id: int) -> None:
        """The coordinator has put this worker out of the run: nobody takes its place."""
        self._replacements.put_out.add(worker_id)

    def stop(self, stopped: bool = True) -> bool:
        """Start no replacement from now on, nor one that is tested now; False: do again.  Returns whether it is new."""
        before, self._stopped = self._stopped, stopped
        return before is not stopped

    def of(self, worker: WorkerProcess, *, had_place: bool = True) -> WorkerProcess | None:
        """The worker that is to take the place of one that has ended; it is in the table from now on.

        ``had_place``: the one that has ended was in a plan of the run.
        """
        if self._stopped:
            return None
        killed = worker.state is WorkerState.KILLED
        words = f"killed by {worker.how}" if killed else self._table.last_words.get(worker.worker_id, "")
        successor = self._replacements.of(worker, self._table.first_id, words, had_place=had_place)
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
        """A replacement that still waits is not started any more."""
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


@dataclass(eq=False)
class LateNewcomers:
    """Kills newcomers that no plan has had when the run is over: nobody tells them so, and they would wait for ever.

    While the run goes on it says which newcomer of the library has not come JOIN_SECONDS after its start.
    """

    _plan: LaunchPlan
    _loop: EventLoop
    _table: WorkerTable
    _control: ControlPlane
    _say: Callable[[str], None]
    _run_is_over: bool = False
    _killed: set[int] = field(default_factory=set)

    def run_over(self) -> None:
        """From now on no newcomer is admitted."""
        self._run_is_over = True
        self.look()

    def told_of(self, worker: WorkerProcess) -> bool:
        """Whether the end of ``worker`` is no news."""
        return worker.worker_id in self._killed

    def started(self, worker: WorkerProcess) -> None:
        """``worker`` has been started, perhaps too late."""
        self.look()
        if self._plan.elastic and worker.worker_id >= self._plan.world_size:
            self._loop.call_later(JOIN_SECONDS, partial(self._look_for, worker))

    def _look_for(self, worker: WorkerProcess) -> None:
        if worker.state is WorkerState.RUNNING and worker.worker_id not in self._control.agent.planned:
            self._say(messages.not_joined(worker, JOIN_SECONDS))
            self._table.note(worker.worker_id, f"it had not joined the run {JOIN_SECONDS:g} s after its start")

    def look(self) -> None:
        """Kill those that are too late, if the run is over."""
        if not self._run_is_over:
            return
        for worker in self._table.running:
            if worker.worker_id >= self._plan.world_size and worker.worker_id not in self._control.agent.planned:
                self._killed.add(worker.worker_id)
                self._say(messages.late(worker))
                self._table.note(worker.worker_id, messages.TOO_LATE)
                self._table.signal([worker], signal.SIGKILL)
