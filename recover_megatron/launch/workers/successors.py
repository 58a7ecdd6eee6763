"""Workers started during the run: their ids, the pause and the device test before their start; and the end of newcomers
that are too late to get a place.

::

    worker ended --of()--> no replacement
                     '---> STARTING, in the table --start()--> its device is tested --passed--> RUNNING
                                                    |  |              '--failed--> left out: KILLED, with a note
                                                    |  '--(host device: no test)--> RUNNING
                                                    '--earlier ones failed in the same way--> pause, then as above
                                                                                                '--run ends--> KILLED

The ids of W launched workers and S spares::

    launch         0 .. W-1                   the ranks
    spares         W .. W+S-1                 started at the launch by the last node (--recover-spares S)
    replacements   W+S + k*nodes + node       the k-th replacement of a node, k = 0, 1, ..; at most --max-restarts
    joined         JOINED_FROM and above      a random block of ids for each launcher with --join

No id is used twice, so that a process is never mistaken for a dead worker.  The coordinator treats all
workers except 0 .. W-1 as newcomers: it admits them during the run, when they are ready.

Replacements may fail one after the other with the same message (a folder that cannot be written), or be killed by the
same signal before they have a place in the training (out of memory).  Without a pause, this would use up --max-restarts
within a minute.  So from the second such failure on, each replacement waits twice as long as the previous one, and the
last replacement is reserved for another cause.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import partial

from recover_megatron.launch import messages
from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.device_test import DeviceTests
from recover_megatron.launch.nodes.control_plane import ControlPlane
from recover_megatron.launch.workers.prepared import ForkServer, Prepared
from recover_megatron.launch.workers.states import REFUSED, RUN_VERDICTS, WorkerProcess, WorkerState
from recover_megatron.launch.workers.worker_table import FORK_SERVER, WorkerTable
from recover_megatron.membership.ending import alike
from recover_megatron.membership.records import EXIT_FENCED, JOINED_FROM, MAX_WORKERS, WorkerId
from recover_megatron.network.event_loop import EventLoop

WAIT_SECONDS, LONGEST_WAIT_SECONDS = 30.0, 600.0
"""First and longest pause, in seconds, before the start of a replacement after consecutive replacements have failed in
the same way."""
JOIN_SECONDS = 60.0


def launched(spec: LaunchSpec) -> list[WorkerProcess]:
    """Return the workers with which this node starts; empty for a launcher that joins a run."""
    if spec.coordinators:
        return []
    workers = [_worker(spec, spec.worker_id(n), n, spec.worker_id(n)) for n in range(spec.nproc_per_node)]
    if spec.node_rank == spec.nnodes - 1:
        taken = [spec.nproc_per_node * node + n for node in spec.without for n in range(spec.nproc_per_node)]
        spares = [spec.world_size + n for n in range(spec.spares - len(taken))]
        for local_rank, number in enumerate([*taken, *spares], start=spec.nproc_per_node):
            workers.append(_worker(spec, number, local_rank, number if number < spec.world_size else None))
    return workers


def joined(spec: LaunchSpec, taken: frozenset[int], draw: Callable[[int], int]) -> list[WorkerProcess]:
    """Return the workers of a launcher that joins a run.

    ``taken``: ids that are in use; ``draw(n)`` returns a random number below n.
    """
    count = spec.nproc_per_node + spec.max_restarts
    while True:
        first = JOINED_FROM + draw(MAX_WORKERS - JOINED_FROM - count)
        if taken.isdisjoint(range(first, first + count)):
            return [_worker(spec, first + n, n, None) for n in range(spec.nproc_per_node)]


class Replacements:
    """Decides whether a worker that has ended is replaced, and with which id."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._started = 0
        self._words = ""
        self.alike = 0
        """Number of the latest consecutive replacements that have failed with the same message."""
        self.wait = 0.0
        """Seconds to wait before the start of the replacement that ``of`` returned last."""
        self.kept = False
        """True if the last call of ``of`` returned None because the last replacement is reserved for another cause."""
        self.evict: set[int] = set()
        """Ids of the workers that the coordinator has evicted from the run."""

    def of(
        self, worker: WorkerProcess, first_joined: int, words: str = "", *, had_place: bool = True
    ) -> WorkerProcess | None:
        """Return the replacement of ``worker``, which has ended during the run; None if it is not replaced.

        ``first_joined``: lowest worker id of this launcher, used if it joined the run; ``words``: last output line of
        ``worker``, or the signal that killed it; ``had_place``: True if ``worker`` has been in a plan.

        A worker is not replaced if it finished, was refused, or exited because of the run's end: the replacement would
        end in the same way.  An evicted worker is not replaced either: the operator should check its host first.
        """
        spec = self._spec
        self.kept, repeated = False, False
        if worker.replaces is not None and (worker.state is WorkerState.FAILED or not had_place):
            self.alike = self.alike + 1 if alike(words) == self._words else 1
            self._words = alike(words)
            repeated = self.alike > 1
        self.wait = min(WAIT_SECONDS * 2 ** (self.alike - 2), LONGEST_WAIT_SECONDS) if repeated else 0.0
        number = self.next_id(first_joined)
        if number is None or worker.state is WorkerState.FINISHED:
            return None
        if worker.exit_code in (REFUSED, *RUN_VERDICTS, EXIT_FENCED) or worker.worker_id in self.evict:
            return None
        if repeated and self._started == spec.max_restarts - 1:
            self.kept = True
            return None
        successor = _worker(spec, number, worker.local_rank, worker.rank)
        successor.replaces = worker.worker_id
        self._started += 1
        return successor

    def next_id(self, first_joined: int) -> int | None:
        """Return the id of the next replacement; None if --max-restarts is used up; ``first_joined``: see ``of``."""
        spec = self._spec
        if self._started >= spec.max_restarts:
            return None
        if spec.coordinators:
            return first_joined + spec.nproc_per_node + self._started
        return spec.world_size + spec.spares + self._started * spec.nnodes + spec.node_rank


def _worker(spec: LaunchSpec, worker_id: int, local_rank: int, rank: int | None) -> WorkerProcess:
    log = str(path) if (path := spec.log_file(worker_id)) else None
    return WorkerProcess(
        WorkerId(worker_id), None, spec.host, WorkerState.STARTING, spec.node_rank, local_rank, log=log, rank=rank
    )


@dataclass(eq=False)
class Successors:
    """Starts the replacement workers of this launcher, after their devices have passed the test."""

    _spec: LaunchSpec
    _loop: EventLoop
    _table: WorkerTable
    _say: Callable[[str], None]
    _launch: Callable[[WorkerProcess], None]
    """Callback that starts the process of a worker; raises OSError."""
    _left_out: Callable[[], None]
    """Callback without arguments, called after a replacement was given up before its start."""
    _environment: Callable[[WorkerProcess], Mapping[str, str]]
    """Function that returns the environment of a worker."""

    def __post_init__(self) -> None:
        self.prepared = Prepared(self._loop, self._table, self._say, self._environment)
        self.fork_server = ForkServer(self._loop, self._table, self._say)
        self._replacements = Replacements(self._spec)
        self._stopped = False
        self._waiting: list[WorkerProcess] = []
        self._tests = DeviceTests(self._loop, self._spec.device_test_argv, self._spec.device_test_timeout)

    def begin(self, environment: Mapping[str, str], settled: Callable[[], None]) -> None:
        """Start the fork server, with --fork-workers; ``settled`` is called when workers need not wait for it any more.

        ``environment``: variables that are the same for all workers of this node.
        """
        spec = self._spec
        if spec.fork_workers:
            server = WorkerProcess(FORK_SERVER, None, spec.host, WorkerState.STARTING, spec.node_rank, 0)
            self.fork_server.begin(server, environment, settled)

    def take(self, worker: WorkerProcess, environment: Mapping[str, str]) -> bool:
        """Make a process that has imported the program the process of ``worker``.  Return False if there is none."""
        source = self.fork_server if self.fork_server.alive else self.prepared
        return source.take(worker, environment)

    def end_waiting(self) -> None:
        """End the processes that wait to become workers, or to fork them: no further worker will start."""
        self.prepared.end()
        self.fork_server.end()

    def evict(self, worker_id: int) -> None:
        """Record that the coordinator has evicted ``worker_id``, so that it is not replaced."""
        self._replacements.evict.add(worker_id)

    def stop(self, stopped: bool = True) -> bool:
        """Start no replacement from now on, not even one whose device is being tested.

        If ``stopped`` is False, allow replacements again.  Return whether the state has changed.
        """
        before, self._stopped = self._stopped, stopped
        if stopped:
            self.prepared.end()
        return before is not stopped

    def prepare(self, planned: Container[int]) -> None:
        """Start a process in advance for the next replacement, unless it is not wanted, or a worker still starts here.

        ``planned``: workers that were in any plan of the run.  Called after each plan.
        """
        if self.fork_server.alive:
            if not self._spec.max_restarts:
                self.fork_server.end()
            return
        spec, starting = self._spec, [worker for worker in self._table.live if worker.worker_id not in planned]
        if not spec.coordinators:
            starting = [worker for worker in starting if worker.rank is not None]  # a spare waits for a place
        number = self._replacements.next_id(self._table.first_id)
        if spec.prepares and number is not None and not (self._stopped or starting):
            self.prepared.begin(_worker(spec, number, 0, None))

    def of(self, worker: WorkerProcess, *, had_place: bool = True) -> WorkerProcess | None:
        """Add the replacement of ``worker``, which has ended, to the table, and return it; None if it is not replaced.

        ``had_place``: True if ``worker`` was in a plan of the run.
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

    def start(self, worker: WorkerProcess) -> None:
        """Start ``worker``, which ``of`` has just returned, after the pause, if any, and the test of its device."""
        if wait := self._replacements.wait:
            self._waiting.append(worker)
            self._loop.call_later(wait, self._begin, worker)
        else:
            self._begin(worker)

    def run_over(self) -> None:
        """Give up the replacements that still wait for their start, because the run has ended."""
        self.prepared.end()
        if waiting := [worker for worker in self._waiting if worker.live and worker.pid is None]:
            self._table.abandon(waiting)
            self._left_out()

    def _begin(self, worker: WorkerProcess) -> None:
        if worker in self._waiting:
            self._waiting.remove(worker)
        if not worker.live:
            return
        try:
            if self._spec.device_test_argv:
                self._tests.begin(self._environment(worker), partial(self._tested, worker))
            else:
                self._tested(worker, "")
        except OSError as error:
            self._leave_out(worker, f"worker {worker.worker_id} cannot be started: {error}")

    def _tested(self, worker: WorkerProcess, failed: str) -> None:
        if not worker.live:
            return  # the worker was given up, because the launch is ending
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
        self.prepared.end()  # it was prepared for this worker's id
        self._table.abandon([worker])
        self._left_out()


@dataclass(eq=False)
class LateNewcomers:
    """Kills newcomers without a place when the run ends: no message reaches them, so they would wait for ever.

    In a run with --elastic, this object also logs each newcomer that has not joined the run JOIN_SECONDS after its
    start.
    """

    _spec: LaunchSpec
    _loop: EventLoop
    _table: WorkerTable
    _control: ControlPlane
    _say: Callable[[str], None]
    _run_is_over: bool = False
    _killed: set[int] = field(default_factory=set)

    def run_over(self) -> None:
        """Kill the newcomers that have no place, now and whenever another newcomer is started."""
        self._run_is_over = True
        self.look()

    def already_logged(self, worker: WorkerProcess) -> bool:
        """Return whether this object has killed ``worker``, and has therefore logged the worker's end already."""
        return worker.worker_id in self._killed

    def started(self, worker: WorkerProcess) -> None:
        """Kill ``worker``, which was just started, if the run has ended; with --elastic, check it again later."""
        self.look()
        if self._spec.elastic and worker.worker_id >= self._spec.world_size:
            self._loop.call_later(JOIN_SECONDS, partial(self._look_for, worker))

    def _look_for(self, worker: WorkerProcess) -> None:
        if worker.state is WorkerState.RUNNING and worker.worker_id not in self._control.agent.planned:
            self._say(messages.not_joined(worker, JOIN_SECONDS))
            self._table.note(worker.worker_id, f"this worker had not joined the run {JOIN_SECONDS:g} s after its start")

    def look(self) -> None:
        """If the run has ended, kill the running newcomers that have no place in it."""
        if not self._run_is_over:
            return
        for worker in self._table.running:
            if worker.worker_id >= self._spec.world_size and worker.worker_id not in self._control.agent.planned:
                self._killed.add(worker.worker_id)
                self._say(messages.late(worker))
                self._table.note(worker.worker_id, messages.TOO_LATE)
                self._table.signal([worker], signal.SIGKILL)
