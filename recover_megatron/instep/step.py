"""State machine of one training iteration, which finishes whichever workers die.

    COMPUTE ----> REDUCE ----> AGREE ----> COMMITTED
       |            |            |             ^
       |            '--revoked---+             | committed before the epoch ended, or by the plan
       |                         v             |
       |                    RENDEZVOUS --------'
       |                         |  plan of the next epoch
       |                         v
       '----> REDUCE <------- RERUN: pull all finished sums, add the lost microbatches to all other sums

The end of an epoch never interrupts COMPUTE and RERUN, in which workers communicate only inside their replica.  (If one
worker left in the middle, its model-parallel peers would wait for it, and all other replicas would wait for these peers
at the rendezvous.)  Only in REDUCE and AGREE, which need all replicas, does a worker check whether the epoch is over.
A worker whose replica is broken leaves the step in any state, with ``Orphaned`` or an error of its replica's groups.

No parameter changes before COMMITTED, and after COMMITTED this step needs no worker of another replica.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum

import torch

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.errors import Disagreement
from recover_megatron.instep.faults import WrongGradients
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.trainer import Outcome, Tail, Trainer, alive

REGROUP_SECONDS = 120.0
"""Seconds, in addition to the hang timeout, that opening all rings of an epoch may take.  The pull may take as
long again."""


class State(Enum):
    """States of the diagram above; the values name the phases of ``Outcome.seconds``."""

    COMPUTE = "compute"
    REDUCE = "reduce"
    AGREE = "agree"
    RENDEZVOUS = "rendezvous"
    RERUN = "rerun"
    COMMITTED = "committed"


class Step:
    """State machine of one iteration of one worker.

    ``total``: number of microbatches of the step, over all replicas.  ``tail``: bucket with losses and counts, which is
    summed last (`trainer`).  ``share``: 1 / (number of workers that the tail's column has in each replica).
    """

    def __init__(self, recovery: Recovery, trainer: Trainer, total: int, tail: Tail, share: float) -> None:
        self._progress = recovery.progress
        self._assignment = recovery.assignment
        self._orphan = recovery.orphan
        self._rendezvous = recovery.rendezvous
        self._trainer = trainer
        self._total = total
        self._tail = tail
        self._share = share
        self._ran: list[int] = []
        self._todo: list[list[int]] = []
        self._again = False
        self._pace = 0.0
        self._outcome = Outcome({}, torch.empty(0))
        self._number = 0

    def run(self) -> Outcome:
        """Run the iteration until it is committed; return its outcome.

        Raises as ``Rendezvous.meet`` and ``Trainer.compute`` do, and ``Disagreement`` if gradients are wrong.  If wrong
        gradients may be in a sum of another replica, the run ends for all workers.
        """
        parts = {
            State.COMPUTE: self._compute,
            State.REDUCE: self._reduce,
            State.AGREE: self._agree,
            State.RENDEZVOUS: self._meet,
            State.RERUN: self._rerun,
        }
        state = self._begin()
        recovering = state is State.RERUN
        while state is not State.COMMITTED:
            started = time.perf_counter()
            try:
                following = parts[state]()
            except EpochRevoked:
                following = State.RENDEZVOUS
            except Disagreement as error:
                if state is State.REDUCE or self._may_be_summed(error):
                    self._progress.end_run(f"worker {self._assignment.me} has found wrong gradients", error)
                raise
            if recovering and state is not State.RERUN:  # ``_rerun`` records the time of each of its parts
                self._took(state.value, time.perf_counter() - started)
            recovering, state = recovering or following is State.RENDEZVOUS, following
        self._progress.tried.clear()  # an error from here on is not caused by a microbatch
        self._outcome.counted = self._tail.verify()
        self._outcome.extras = self._tail.extras
        self._outcome.speeds = self._tail.seconds
        return self._outcome

    # ---- without a death

    def _begin(self) -> State:
        self._number = self._progress.begin()
        self._trainer.gradients.begin()
        self._open_rings()
        decision = self._assignment.pending(self._number)
        if decision is None:
            self._todo = self._assignment.share(self._total)
            return State.COMPUTE
        # Other replicas had begun this step when the present epoch was formed, so the plan assigns the microbatches.
        self._todo = decision.rerun.get(self._assignment.replica, [])
        return State.RERUN

    def _compute(self) -> State:
        """Run this replica's microbatches; buckets that are complete are summed during the backward passes."""
        assignment = self._assignment
        self._progress.mark("forward")
        if not assignment.epoch_groups.over:
            self._trainer.gradients.stream(assignment.epoch_groups, assignment.live)
        self._run_microbatches()
        return State.REDUCE

    def _reduce(self) -> State:
        """Sum the gradients over the column, and the counts that show which replica ran which microbatches."""
        assignment = self._assignment
        self._progress.mark("reduce-scatter", waiting=True)
        self._orphan.check()
        self._tail.fill(assignment.replica, self._ran, self._trainer.extras(), self._share, self._pace)
        self._trainer.gradients.reduce(assignment.epoch_groups, assignment.live, self._tail)
        self._tail.verify()
        return State.AGREE

    def _agree(self) -> State:
        """Wait until all workers have all sums; after that no worker needs another replica for this step."""
        self._progress.agree(self._number)
        return State.COMMITTED

    # ---- after a death

    def _meet(self) -> State:
        """Meet the remaining workers, and take the lost microbatches that the plan gives to this replica."""
        assignment = self._assignment
        if self._rendezvous.committed_before_the_end(self._number):
            return State.COMMITTED
        self._rendezvous.meet(self._number, step=True, total=self._total, ran=tuple(self._ran))
        if assignment.committed(self._number):
            self._outcome.by_plan = True
            return State.COMMITTED
        for replica, inner_ranks in assignment.decision.rerun.items():
            if lost := [j for inner_rank in inner_ranks for j in inner_rank]:
                self._outcome.reran.setdefault(replica, []).extend(lost)
        self._todo = assignment.decision.rerun.get(assignment.replica, [])
        return State.RERUN

    def _rerun(self) -> State:
        """Pull finished sums, then add the gradients of the lost microbatches to the unfinished sums."""
        assignment, gradients = self._assignment, self._trainer.gradients
        # All workers wait for each other while the rings open, and make no mark until then.
        self._progress.mark("reduce-scatter", waiting=True, allow=REGROUP_SECONDS)
        with self._phase("regroup"):
            gradients.hold()
            self._open_rings()
        self._progress.mark("reduce-scatter", waiting=True, allow=REGROUP_SECONDS)
        # If the epoch is revoked during the pull, continue: model-parallel peers may have finished the pull in their
        # columns, and begun to run the microbatches, for which they need this worker.  REDUCE raises the error again.
        with self._phase("pull"), suppress(EpochRevoked):
            gradients.pull(assignment.epoch_groups, assignment.live, self._tail)
        self._progress.mark("forward")
        self._progress.inject("recovery")
        with self._phase("rerun"):
            kept = gradients.save_sums()
            self._outcome.saved_bytes = max(self._outcome.saved_bytes, sum(saved.nbytes for saved in kept))
            self._run_microbatches()
            for saved in kept:
                saved.restore()
        return State.REDUCE

    # ---- helpers of the states

    def _may_be_summed(self, error: Disagreement) -> bool:
        """Return whether wrong values of this worker may be in a sum that other workers can commit without this worker.

        After a forward and backward pass the model-parallel peers may have submitted gradients that depend on this
        worker's values.  During a pass they cannot have done so, since they cannot finish the pass without this worker.
        """
        after_pass = isinstance(error, WrongGradients)
        return self._trainer.gradients.submitted or (after_pass and len(self._assignment.mates) > 1)

    def _open_rings(self) -> None:
        """Open the rings of this epoch, and wait until they are open; does not raise ``EpochRevoked``."""
        assignment = self._assignment
        columns = dict.fromkeys([*self._trainer.gradients.columns, self._tail.column])
        rings = [alive(column, assignment.live) for column in columns]
        assignment.epoch_groups.open_rings(rings)
        with suppress(EpochRevoked):  # REDUCE raises the error again
            for ring in rings:
                assignment.epoch_groups.ring(ring)

    def _run_microbatches(self) -> None:
        own = self._todo[self._assignment.inner_rank] if self._todo else []
        self._progress.tried.update(j for inner_rank in self._todo if inner_rank is not own for j in inner_rank)
        if own:
            started = time.perf_counter()
            self._trainer.compute(own, again=self._again)
            if not self._again:
                self._pace = (time.perf_counter() - started) / len(own)
            self._again = True
        self._ran += [j for inner_rank in self._todo for j in inner_rank]
        self._todo = []
        self._trainer.finish_pass()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._took(name, time.perf_counter() - started)

    def _took(self, phase: str, seconds: float) -> None:
        self._outcome.seconds[phase] = self._outcome.seconds.get(phase, 0.0) + seconds
