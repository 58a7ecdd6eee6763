"""Lines in the training log about lost workers, returned replicas, rollbacks and degraded operation.

``Console`` decides when a line is logged, and by which worker.  Pure functions build the lines, for example:

iteration 103: worker 5 (node b-1, GPU 5) lost in forward/backward; 2 microbatches run again by replicas 0, 3;
    0.11 s; 7 of 8 replicas
iteration 140: replica 5 is back with worker 12 (node b-1, GPU 5), 37 iterations after its loss; 8 of 8 replicas
iteration 160: replica 8 is new, with worker 14 (node b-2, GPU 6); 9 replicas (8 at the launch)
rolled back to iteration 100 (from disk, /save): the live workers did not hold the complete state; 40 iterations are
    run again; 3.20 s; 8 of 8 replicas
iteration 150: spare worker 9 (node c-2, GPU 1) lost; 1 spare is left
iteration 200: degraded for 10 min: 7 of 8 replicas since iteration 103; no spare is left
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from megatron.training.utils import is_last_rank

from recover_megatron.instep.decision import HELD, Decision, Failure, LostWorker, Rollback
from recover_megatron.instep.manager import Manager
from recover_megatron.instep.trainer import Outcome
from recover_megatron.logger import get_logger
from recover_megatron.membership.records import ranges

log = get_logger(__name__)

REMIND_SECONDS = 600.0
"""Seconds between two log lines that remind of missing replicas."""


class Console:
    """Logs lost workers, returned replicas and degraded operation, on the worker that prints Megatron's training log.

        planned, for a new plan      logs a returned replica, lost spares, and a replica's loss outside of a step; saves
                                     a replica's loss that happened in a step
        step, after each step        logs the saved losses, with the time that they cost; every ten minutes logs that
                                     replicas are missing

    Every worker with a place saves the losses, since the worker that prints may be lost.  Used by the main thread.
    """

    def __init__(self) -> None:
        self._kept: list[Failure] = []
        """Failures in the current step that ``step`` has not logged yet."""
        self._gone: dict[int, int] = {}
        """Missing replica -> iteration in which the replica was lost."""
        self._degraded: tuple[int, float] | None = None
        """(iteration, ``time.monotonic()``) since which at least one replica of the launch has been missing, as far as
        this worker knows; None if none is missing."""
        self._reminded = 0.0
        self._epoch = 0

    def planned(self, manager: Manager, iteration: int) -> None:
        view = manager.view
        decision, failure = view.decision, view.lost
        if decision.epoch == self._epoch:
            return
        self._epoch = decision.epoch
        of = view.grid.launched
        if failure is not None and failure.replicas:
            iteration = failure.iteration
            self._gone |= dict.fromkeys(failure.replicas, iteration)
            if decision.step:
                self._kept.append(failure)
            else:
                _say(recovery_line(iteration, [failure], {}, 0.0, of_all(decision, of)))
        elif failure is not None:
            _say(spares_line(iteration, failure, len(decision.spares)))
        if decision.fresh and decision.rollback is None:
            _say(return_line(iteration, decision, view.whereabouts, self._gone, of))
        self._gone = {replica: at for replica, at in self._gone.items() if replica not in decision.replicas}
        if len(decision.replicas) >= of:
            self._degraded = None
        elif self._degraded is None:
            self._degraded, self._reminded = (iteration, time.monotonic()), time.monotonic()

    def rolled_back(self, manager: Manager, target: Rollback, folder: str, seconds: float) -> None:
        """Log a rollback to a checkpoint in ``folder``; an empty ``folder`` means a state in memory."""
        replicas = of_all(manager.view.decision, manager.view.grid.launched)
        source = f"from disk, {folder}" if folder else "from memory"
        if target.source == HELD:
            source = "from workers that were set aside"
        _say(rollback_line(target, source, seconds, replicas))

    def step(self, manager: Manager, outcome: Outcome, iteration: int) -> None:
        decision, of = manager.view.decision, manager.view.grid.launched
        if self._kept:
            seconds = sum(outcome.seconds.values())
            line = recovery_line(iteration, self._kept, outcome.reran, seconds, of_all(decision, of))
            self._kept.clear()
            _say(line)
        if self._degraded is not None and (now := time.monotonic()) - self._reminded >= REMIND_SECONDS:
            self._reminded = now
            since, begun = self._degraded
            _say(degraded_line(iteration, now - begun, since, decision, of))


def _say(text: str) -> None:
    if is_last_rank():
        log.info(text)


NAMED = 3
"""Largest number of workers that a line lists one by one; also the largest number of nodes that it lists."""
PHASES = {"forward": "forward/backward", "reduce-scatter": "the gradient sums", "agree": "the agreement"}
"""Phase -> name of the phase in the log, if it differs.  "forward" includes the backward pass of a microbatch."""


def recovery_line(
    iteration: int, failures: Sequence[Failure], reran: Mapping[int, Sequence[int]], seconds: float, replicas: str
) -> str:
    """Return the line for ``failures`` that happened in one finished step, or outside of a step.

    ``reran``: replica -> microbatches that it ran again.  ``seconds``: cost of the recovery; 0 if unknown.
    ``replicas``: result of ``of_all``.
    """
    lost = [lost for failure in failures for lost in failure.lost]
    parts = [f"{_who(lost)} lost{_where(lost)}" if lost else "new rendezvous after an interruption, no worker was lost"]
    if count := sum(map(len, reran.values())):
        by = "replica" if len(reran) == 1 else "replicas"
        parts.append(f"{count} microbatch{'es' * (count > 1)} run again by {by} {', '.join(map(str, sorted(reran)))}")
    elif any(failure.replicas for failure in failures):
        parts.append("no microbatch had to be run again")
    parts += [f"{seconds:.2f} s"] * (seconds > 0)
    return f"iteration {iteration}: {'; '.join([*parts, replicas])}"


def spares_line(iteration: int, failure: Failure, spares: int) -> str:
    """Return the line for lost spares.  ``spares``: number of spares that are left."""
    return f"iteration {iteration}: {_who(failure.lost, 'spare worker')} lost; {_left(spares)}"


def return_line(
    iteration: int, decision: Decision, places: Mapping[int, LostWorker], gone: Mapping[int, int], of: int
) -> str:
    """Return the line for the replicas that ``decision`` has formed.

    ``places``: worker -> node and GPU.  ``gone``: missing replica -> iteration in which it was lost.  ``of``: number of
    replicas at launch.
    """
    parts = []
    for replica in decision.fresh:
        workers = [places.get(worker, LostWorker(worker)) for worker in decision.grid[replica]]
        if replica >= of and replica not in gone:
            parts.append(f"replica {replica} is new, with {_who(workers)}")
            continue
        since = f", {iteration - gone[replica]} iterations after its loss" if replica in gone else ""
        parts.append(f"replica {replica} is back with {_who(workers)}{since}")
    return f"iteration {iteration}: {'; '.join([*parts, of_all(decision, of)])}"


def rollback_line(target: Rollback, source: str, seconds: float, replicas: str) -> str:
    """Return the line for a rollback.  ``source``: where the state was read, such as "from memory"."""
    lost = f"{target.lost} iterations are" if target.lost != 1 else "1 iteration is"
    return (
        f"rolled back to iteration {target.iteration} ({source}): the live workers did not hold the complete state; "
        f"{lost} run again; {seconds:.2f} s; {replicas}"
    )


def degraded_line(iteration: int, seconds: float, since: int, decision: Decision, of: int) -> str:
    """Return the line that reminds of missing replicas.

    At least one replica has been missing for ``seconds``, since iteration ``since``.  ``of``: as in ``of_all``.
    """
    return (
        f"iteration {iteration}: degraded for {seconds / 60:.0f} min: {of_all(decision, of)} since iteration {since}; "
        f"{_left(len(decision.spares))}"
    )


def of_all(decision: Decision, of: int) -> str:
    """Return "7 of 8 replicas" or, if the run has grown, "9 replicas (8 at the launch)".

    ``of``: number of replicas at launch.
    """
    count = len(decision.replicas)
    return f"{count} of {of} replicas" if count <= of else f"{count} replicas ({of} at the launch)"


def _left(spares: int) -> str:
    return f"{spares or 'no'} spare{'s' * (spares > 1)} {'are' if spares > 1 else 'is'} left"


def _who(workers: Sequence[LostWorker], noun: str = "worker") -> str:
    """List ``workers`` with their nodes and GPUs; more than ``NAMED`` workers are grouped by node."""
    if len(workers) <= NAMED:
        return ", ".join(str(worker).replace("worker", noun, 1) for worker in workers)
    nodes: dict[str, list[int]] = {}
    for worker in workers:
        nodes.setdefault(worker.node, []).append(worker.worker)
    groups = [f"{ranges(ids)}" + (f" (node {node})" if node else "") for node, ids in sorted(nodes.items())]
    more = [f"and workers of {len(groups) - NAMED} more nodes"] * (len(groups) > NAMED)
    return f"{len(workers)} workers, " + ", ".join([*groups[:NAMED], *more]) + ","


def _where(lost: Sequence[LostWorker]) -> str:
    phases = dict.fromkeys(PHASES.get(worker.phase, worker.phase) for worker in lost if worker.phase)
    return f" in {' and '.join(phases)}" if phases else ""
