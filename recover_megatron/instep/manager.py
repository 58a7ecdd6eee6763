"""The interface of in-step recovery: one ``Manager`` for each worker, and the ``View`` of the run that it gives.

What you get: every iteration sums the gradients of the same M microbatches, each exactly once, whichever workers die,
and whenever.  An iteration that ``step`` has returned from is committed.  Where it raises, the others may commit the
iteration, with or without what this replica ran, and this worker does not apply it.  What workers do together besides
(an evaluation, a checkpoint) is a section: it is run to its end by whoever is left, from the beginning where a worker
is lost in the middle.

You have a few responsibilities.  First, give a ``Hooks`` (`hooks`): methods of it that do not say "in the main thread"
are called in other threads, too, whatever your own does then, and must be quick and wait for nobody.  Then, in the
thread that trains (the main thread; only what says otherwise may be called by others)::

    start                          once: all workers of the launch join the first epoch.  Before it a death ends the run
                                   (a worker without a slot at launch begins with ``wait_for_place`` instead)
    for each iteration:
        at_boundary                new workers come in here
        step                       give it your microbatches' gradients; update the parameters only when it has returned
        section                    whatever else needs workers of other replicas: the same ones in the same order on all
    finish                         once: the training is over for this worker

Look at ``view`` after each of these anew: it may have met the others, which closes the groups of the epoch.

Tell where you are (``mark``), so that a worker that hangs is known: without a mark within the hang timeout this worker
is put out.  Say which waiting is for others or for storage (``waiting``).

Where an exception comes out of your own code or of a method here, those of the list below end the process, but for
``Orphaned``.  Of any other ask ``is_of_mates`` (for an orphan it is True whatever the error is).  If it is, this worker
is an orphan: its replica is broken, and the others go on.  Call ``leave``, drop what holds tensors of the training,
call ``release``, then ``wait_for_place``; with its decision enter ``take_place``, in which you make your groups anew
and load your state, and go on with ``at_boundary``.  If it is not, it is an error of this worker: end the process.

Raised by ``start``, ``at_boundary``, ``step``, ``section`` and ``finish``, which meet other workers:

    Orphaned           this worker has no place any more: as above
    Drained            its node is to be switched off: end with exit code 0
    NoReplica          nobody has a complete replica: the run ends for all, exit code 10
    StateLost          nobody has a part of the training's state any more: the run ends for all, exit code 12
    Fenced             this worker was put out, and the run goes on without it: end with 13
    CoordinatorLost    the run has ended, or its majority is lost: end with the error's code
    EpochRevoked       only from ``View.groups`` and ``be_in_touch``: let it out of the section, which begins again by
                       itself (what a step calls uses neither)

The idea of a manager that hides a quorum behind step, boundary and commit is torchft's; there a failed step is
dropped, here it is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch

from recover_megatron.collectives.state.holder import Offer
from recover_megatron.instep.decision import Decision, Rules
from recover_megatron.instep.faults import Orphaned, OtherPosition
from recover_megatron.instep.groups.epoch_groups import CommunicationConfig, EpochGroups
from recover_megatron.instep.groups.traffic import Traffic
from recover_megatron.instep.hooks import Hooks
from recover_megatron.instep.recovery import Blame, Recovery, Worker
from recover_megatron.instep.state.overlap import Overlap
from recover_megatron.instep.state.shards import Shards
from recover_megatron.instep.step import Step
from recover_megatron.instep.trainer import Outcome, Tail, Trainer
from recover_megatron.instep.view import View
from recover_megatron.membership.io.session import Session
from recover_megatron.workload.grid import Column, LaunchGrid

__all__ = ["CommunicationConfig", "EpochGroups", "Hooks", "Manager", "Offer", "Overlap", "Shards", "View", "Worker"]
"""The manager, and types of what it takes and gives; ``recover_megatron.instep`` names the rest of the interface."""

Agree = Callable[[list[int]], list[int]]
"""Gives all workers of a model-parallel group the numbers of its first rank."""


class Manager:
    """A worker's part in the run; the module's docstring says who calls what when."""

    def __init__(
        self,
        session: Session,
        worker: Worker,
        grid: LaunchGrid,
        communication: CommunicationConfig,
        hooks: Hooks,
        rules: Rules | None = None,
        verify_interval: int = 0,
    ) -> None:
        """Open the part of ``worker``, which has attached by ``session``; nobody is waited for.

        :param grid: the slots of the launch
        :param verify_interval: iterations between comparisons of states; 0: none
        """
        self._parts = Recovery(session, worker, grid, communication, hooks, rules or Rules(), verify_interval)
        self._blame = Blame()

    @property
    def view(self) -> View:
        """The run as this worker knows it now; a later plan makes another view.  From any thread."""
        return self._parts.view()

    # ---- the training

    def start(self, traffic: Traffic) -> None:
        """Join the first epoch, with all workers of the launch.  ``traffic`` carries their groups from then on."""
        self._parts.rendezvous.start()
        traffic.recovery = self._parts

    def at_boundary(self, prepare: Callable[[], Any]) -> None:
        """Meet the others before a step if a plan has called for it: workers come in or leave, states are compared.

        ``prepare`` is called before each such meeting, and must be made of sections: what must not wait until then.
        """
        self._parts.boundary.meet_if_wanted(prepare)

    def step(self, trainer: Trainer, total: int, tail: Tail, share: float, balance: Agree | None = None) -> Outcome:
        """Run one iteration of ``total`` microbatches (over all replicas) until it is committed.

        :param tail: the bucket that is summed last, with the losses and the counts of microbatches
        :param share: 1 / number of workers of the tail's column in one replica
        :param balance: give slow replicas fewer microbatches from the next step on
        :raises Disagreement: what this worker ran cannot be right: end the process.  Where it may be in a sum, the run
            ends for all and nobody commits the step; else the others run its microbatches
        """
        self._parts.show(total)
        outcome = Step(self._parts, trainer, total, tail, share).run()
        if balance is not None and not outcome.by_plan:  # nor do those change anything whom the plan found further on
            self._parts.rebalance(outcome.speeds, total, balance)
        return outcome

    def section(
        self,
        kind: str,
        run: Callable[[], Any],
        *,
        reset: Callable[[], None] = lambda: None,
        together: bool = False,
        phase: str = "",
        moved: Callable[[], int] | None = None,
    ) -> Any:
        """Have all workers run ``run`` to its end, again from the start where one is lost; what it returned.

        :param run: raises ``EpochRevoked``, or has no effect that a second run would double
        :param reset: undoes the rest before a second run; inputs that collectives wrote over are restored without it
        :param together: in ``run`` the workers of a replica wait for each other, so they begin it together
        :param moved: bytes that this worker has read and written by now: for as long as they grow, ``run`` is no hang.
            It is then in ``phase``, by default ``kind``
        """
        if moved is not None:
            run = self._parts.progress.moving(phase or kind, run, moved)
        return self._parts.sections.run(kind, run, reset=reset, together=together)

    def finish(self) -> None:
        """Leave the run in order, when all have come to the end of the training."""
        self._parts.finish()

    # ---- what this worker says

    def mark(self, phase: str, *, microbatch: int | None = None, waiting: bool = False, allow: float = 0.0) -> None:
        """Report progress.

        :param waiting: it waits for others, who are to blame for a hang
        :param allow: seconds beyond the hang timeout until the next mark
        """
        self._parts.progress.mark(phase, microbatch=microbatch, waiting=waiting, allow=allow)

    def waiting(self, what: str, *, storage: bool = False) -> AbstractContextManager[None]:
        """While it is entered this worker waits for others, or with ``storage`` for data: its own hang timeout rests.

        Storage has the stall timeout on top of it.
        """
        progress = self._parts.progress
        return progress.storage(what) if storage else progress.waiting(what)

    def inject(self, phase: str, iteration: int | None = None) -> None:
        """Inject a fault if one is due in ``phase`` of ``iteration``; None: of that under way.  From any thread."""
        self._parts.progress.inject(phase, iteration)

    def log(self, event: str, *, note: str = "", **fields: Any) -> None:
        """Write a line of events.jsonl, if this worker is the one that does; ``fields`` are JSON values.

        ``note``: what recover-status shows of this worker from now on.
        """
        self._parts.hooks.log(event, **fields)
        if note:
            self._parts.session.note(note)

    # ---- what goes wrong

    def check(self) -> None:
        """Raise ``Orphaned`` if this worker's replica is broken, ``Fenced`` or ``CoordinatorLost`` if it is out."""
        self._parts.orphan.stay()

    def be_in_touch(self, *, in_epoch: bool = True) -> None:
        """Return when the coordinator has answered just now, mostly at once.  From any thread.

        To be called before what a worker must not do that was stopped, and put out without knowing yet.  Raises
        ``Fenced`` or ``CoordinatorLost``, ``EpochRevoked`` unless ``in_epoch`` is False, and after ``finish`` a
        ``MembershipError`` that is none of these.
        """
        self._parts.session.be_in_touch(in_epoch=in_epoch)

    def is_of_mates(self, error: BaseException) -> bool:
        """Tell if ``error`` comes from the loss of a worker of this replica, or this one is an orphan already.

        May wait for the news of a loss.  Raises ``Fenced`` or ``CoordinatorLost`` if this worker is out.
        """
        return self._blame.of_mates(error, self._parts)

    def lose_state(self, what: str) -> NoReturn:
        """Nobody has a part of the training's state any more; ``what`` says which, for people.

        Raises ``Orphaned`` where there is a checkpoint or a snapshot to go back to, else ``StateLost``, for all.
        """
        if self._parts.planner.can_go_back:
            self._parts.orphan.leave(what)
            raise Orphaned(what)
        self._parts.planner.lose_state(what)

    # ---- out of the training, and back

    def leave(self, why: BaseException | str, *, note: str = "") -> None:
        """Leave the training, for an error that ``is_of_mates``, or for a reason in words.  The others are told.

        ``note``: what recover-status shows of this worker from now on.
        """
        if note:
            self._parts.session.note(note)
        if isinstance(why, str):
            self._parts.orphan.leave(why)
        elif not isinstance(why, Orphaned):
            self._parts.orphan.replica_failed(why)
            self._blame.left(self._parts)

    def release(self) -> None:
        """Close the groups of the epoch: nothing of it touches a tensor any more.  May wait for the device."""
        self._parts.assignment.close()

    def wait_for_place(self, **offer: Any) -> Decision:
        """Wait as a spare; the decision that gives this worker a place.

        :param offer: fields of ``JoinStatus``: ``version`` and ``digest`` of its state; ``position`` None: it can take
            no place
        :raises OtherPosition: it is to build the model of another position, which is its own from now on, and to wait
            again
        :raises RunOver: there will be no place
        """
        try:
            return self._parts.orphan.wait(**offer)
        except OtherPosition as other:
            self._parts.assignment.position = other.position
            raise

    @contextmanager
    def take_place(self, decision: Decision, traffic: Traffic) -> Iterator[None]:
        """Take the place that ``decision`` has for this worker; in the block it makes its groups and has its state.

        ``traffic`` carries its groups over replicas from then on.  Where the block raises it is to ``leave`` again.
        """
        self._parts.orphan.come_back(decision)
        self.mark("regroup", waiting=True)
        traffic.recovery = self._parts
        yield
        self._parts.hooks.planned(decision)
        # Where a replica goes on, that one tells of the plan; this one only where all are new.
        self._parts.planner.log(decision, None, 0.0)

    # ---- the optimizer's state, where it is spread over the replicas

    def shards(self, columns: Mapping[Column, Column], shadows: int, instances: int = 1) -> Shards:
        """Say who holds which shard of the optimizer's state; see ``Shards`` for the parameters."""
        return Shards(dict(columns), shadows, self._parts.assignment, instances)

    def overlap(
        self, parts: Sequence[tuple[Column, torch.Tensor]], shards: Shards, lose: Callable[[int], None]
    ) -> Overlap:
        """Gather updated parameters while the next forward pass runs; see ``Overlap`` for the parameters."""
        return Overlap(parts, shards, self._parts, lose)
