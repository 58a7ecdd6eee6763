"""Which workers a launcher starts that were not launched with the run, and under which ids.

::

    launch         0 .. W-1                   the ranks
    spares         W .. W+S-1                 started with the launch by its last node (--recover-spares S)
    replacements   W+S + k*nodes + node       the k-th of that node, k = 0, 1, ..; at most --max-restarts of them
    joined         JOINED_FROM and above      a block at a random place, by a launcher with --join

No id is used twice, so that no process is ever taken for one that has died. All of these are newcomers to the
coordinator: they are admitted while the run goes on, when they are ready.

Replacements that fail one after the other in the same words (a folder that cannot be written) would use up all that may
be started within a minute: from the second on the next one waits, each time twice as long, and the last one is kept for
another cause.
"""

from __future__ import annotations

from collections.abc import Callable

from recover_megatron.launch.exit_codes import REFUSED, RUN_VERDICTS
from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.launch.states import WorkerProcess, WorkerState
from recover_megatron.membership.errors import EXIT_FENCED
from recover_megatron.membership.exception_reports import alike
from recover_megatron.membership.records import JOINED_FROM, MAX_WORKERS, WorkerId

WAIT_SECONDS, LONGEST_WAIT_SECONDS = 30.0, 600.0
"""How long the next replacement waits after two in a row have failed alike, and at most."""


def launched(plan: LaunchPlan) -> list[WorkerProcess]:
    """The workers of this node that the launch has from the beginning; of one that joins: none yet."""
    if plan.joins:
        return []
    workers = [_worker(plan, plan.worker_id(n), n, plan.worker_id(n)) for n in range(plan.nproc_per_node)]
    if plan.node_rank == plan.nnodes - 1:
        first = plan.nproc_per_node
        workers += [_worker(plan, plan.world_size + n, first + n, None) for n in range(plan.spares)]
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

    def of(self, worker: WorkerProcess, first_joined: int, words: str = "") -> WorkerProcess | None:
        """The one that takes the place of ``worker``, which has ended while the run goes on; None: nobody does.

        ``words``: its last ones.
        ``first_joined``: the lowest id of a launcher that joins. A worker that finished, or ended by what is decided
        about the run or about itself, or was refused, would end so again; one that was put out for a hang is left to
        people.
        """
        plan = self._plan
        self.kept, repeated = False, False
        if worker.replaces is not None and worker.state is WorkerState.FAILED:
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
