"""One training iteration, to its end, whoever dies: the state machine of layer 2.

    COMPUTE ----> REDUCE ----> AGREE ----> COMMITTED
       |            |            |             ^
       |            '--revoked---+             | it was decided before the epoch ended, or the plan says so
       |                         v             |
       |                    RENDEZVOUS --------'
       |                         |  plan of the next epoch
       |                         v
       '----> REDUCE <------- RERUN: pull what is finished anywhere, run the lost microbatches into what is not

COMPUTE and RERUN are never interrupted: they use only what lies inside a replica, and its workers run them in lock-step
(one that left in the middle would leave the others waiting for it, and them the whole rendezvous).  A revocation is
looked at where replicas meet: in REDUCE and AGREE.  A worker whose own replica broke leaves by ``Orphaned``, or by the
error of its replica's communication, from wherever it is.

Nothing before COMMITTED changes a parameter, and after it no worker of another replica is needed for this step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch

from recover_megatron.collectives.errors import EpochRevoked
from recover_megatron.instep.gradients import Gradients, Tail, alive
from recover_megatron.instep.recovery import Recovery


class State(Enum):
    """See the drawing above."""

    COMPUTE = "compute"
    REDUCE = "reduce"
    AGREE = "agree"
    RENDEZVOUS = "rendezvous"
    RERUN = "rerun"
    COMMITTED = "committed"


class Trainer(Protocol):
    """What a step needs of the training framework."""

    @property
    def gradients(self) -> Gradients:
        """The buckets."""

    def compute(self, ids: Sequence[int], *, again: bool) -> None:
        """Run these microbatches forward and backward and add their gradients to the buckets, summing nothing.

        ``ids`` are those of this worker's lane.  ``again``: on top of what earlier calls of this step added.
        """

    def settle(self) -> None:
        """After ``compute``: the buckets hold the gradients (extra main gradients were copied into them)."""

    def extras(self) -> torch.Tensor:
        """Losses and counts over all ``compute`` calls of this step, to be summed over the column; float64, flat."""


@dataclass
class Outcome:
    """What a committed step was."""

    counted: dict[int, list[int]]
    """Replica -> microbatch ids, from the sum itself."""
    extras: torch.Tensor
    reran: dict[int, list[int]] = field(default_factory=dict)
    """Replica -> ids that it ran in place of lost ones."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the recovery, by phase (rendezvous, regroup, pull, rerun, reduce, agree), since this worker took part in it;
    empty if there was none."""
    aside_bytes: int = 0
    """The most that finished sums took which were set aside during a re-run."""
    speeds: dict[int, float] = field(default_factory=dict)
    """Replica -> seconds per microbatch of its main pass, the same on all workers of a column."""
    by_plan: bool = False
    """Whether the commit was learnt from the plan of a later epoch."""


class Step:
    """One iteration of one worker.  ``column``: that of the dense parameters; ``share``: see ``Tail.fill``."""

    def __init__(self, recovery: Recovery, trainer: Trainer, total: int, tail: Tail, share: float) -> None:
        self._recovery = recovery
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
        """Return when the step is committed.

        Raises ``Orphaned`` and ``NoReplica`` (see ``Recovery``), ``Disagreement``, and what ``Trainer.compute`` raises.
        """
        recovery = self._recovery
        self._number = recovery.begin()
        self._trainer.gradients.begin()
        self._open()
        state, recovering = State.COMPUTE, False
        decision = recovery.pending(self._number)
        if decision is None:
            self._todo = recovery.share(self._total)
        else:  # others have begun this step already, in an epoch that this worker joined before it began
            self._todo = decision.rerun.get(recovery.replica, [])
            state, recovering = State.RERUN, True
        while state is not State.COMMITTED:
            started = time.perf_counter()
            try:
                following = self._advance(state)
            except EpochRevoked:
                following = State.RENDEZVOUS
            if recovering and state is not State.RERUN:  # which tells its parts
                self._took(state.value, time.perf_counter() - started)
            recovering = recovering or following is State.RENDEZVOUS
            state = following
        recovery.tried.clear()  # what ends this worker from here on is no fault of a microbatch
        self._outcome.counted = self._tail.verify()
        self._outcome.extras = self._tail.extras
        self._outcome.speeds = self._tail.seconds
        return self._outcome

    def _advance(self, state: State) -> State:
        recovery = self._recovery
        match state:
            case State.COMPUTE:
                recovery.mark("forward")
                if not recovery.generation.over:
                    self._trainer.gradients.stream(recovery.generation, recovery.live)
                self._compute()
                return State.REDUCE
            case State.REDUCE:
                recovery.mark("reduce-scatter", waiting=True)
                recovery.check()
                self._tail.fill(recovery.replica, self._ran, self._trainer.extras(), self._share, self._pace)
                self._trainer.gradients.reduce(recovery.generation, recovery.live, self._tail)
                self._tail.verify()
                return State.AGREE
            case State.AGREE:
                recovery.agree(self._number)
                return State.COMMITTED
            case State.RENDEZVOUS:
                return self._rendezvous()
            case State.RERUN:
                self._rerun()
                return State.REDUCE
        raise AssertionError(state)

    def _compute(self) -> None:
        mine = self._todo[self._recovery.lane] if self._todo else []
        self._recovery.tried.update(j for lane in self._todo if lane is not mine for j in lane)
        if mine:
            started = time.perf_counter()
            self._trainer.compute(mine, again=self._again)
            if not self._again:
                self._pace = (time.perf_counter() - started) / len(mine)
            self._again = True
        self._ran += [j for lane in self._todo for j in lane]
        self._todo = []
        self._trainer.settle()

    def _rendezvous(self) -> State:
        recovery = self._recovery
        if recovery.committed_before_the_end(self._number):
            return State.COMMITTED
        recovery.rendezvous_in_step(self._number, self._total, self._ran)
        if recovery.committed(self._number):
            self._outcome.by_plan = True
            return State.COMMITTED
        decision = recovery.decision
        for replica, lanes in decision.rerun.items():
            if lost := [j for lane in lanes for j in lane]:
                self._outcome.reran.setdefault(replica, []).extend(lost)
        self._todo = decision.rerun.get(recovery.replica, [])
        return State.RERUN

    def _rerun(self) -> None:
        recovery, gradients = self._recovery, self._trainer.gradients
        with self._phase("regroup"):
            gradients.hold()
            self._open()
        # If it is revoked: other columns may have finished and be running already, so this one runs, and tells later.
        with self._phase("pull"), suppress(EpochRevoked):
            gradients.pull(recovery.generation, recovery.live, self._tail)
        recovery.strike("recovery")
        with self._phase("rerun"):
            kept = gradients.set_aside()
            self._outcome.aside_bytes = max(self._outcome.aside_bytes, sum(aside.nbytes for aside in kept))
            self._compute()
            for aside in kept:
                aside.put_back()

    def _open(self) -> None:
        """Open the rings of this epoch before anything depends on them."""
        recovery = self._recovery
        with suppress(EpochRevoked):  # told again where the step reduces
            for column in dict.fromkeys([*self._trainer.gradients.columns, self._tail.column]):
                recovery.generation.ring(alive(column, recovery.live))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._took(name, time.perf_counter() - started)

    def _took(self, phase: str, seconds: float) -> None:
        self._outcome.seconds[phase] = self._outcome.seconds.get(phase, 0.0) + seconds
