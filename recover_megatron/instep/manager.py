"""Interface of in-step recovery: one ``Manager`` per worker, and the ``View`` of the run that it returns.

Guarantee: every iteration sums the gradients of the same M microbatches, each exactly once, whichever workers die, and
whenever they die.  When ``step`` returns, its iteration is committed.  If ``step`` raises on this worker, the other
workers may still commit the iteration, with or without the microbatches of this replica, but this worker does not
update its parameters.  Everything else that workers do together (an evaluation, a checkpoint) is a section.  If a
worker is lost during a section, the remaining workers run the section again from the beginning.

The caller has a few duties.  First, pass a ``Hooks`` object (`hooks`).  Unless its docstring says "in the main
thread", a method of this object may also be called in other threads, at any time, so it must be quick and must wait for
no worker.  Then call, in the thread that trains (the main thread; other threads may call only the methods that say
so)::

    start                          once: all workers of the launch join the first epoch; a death before that ends the
                                   run.  (A worker without a slot at launch calls ``wait_for_place`` instead.)
    for each iteration:
        at_boundary                new workers join here
        step                       pass your microbatches' gradients; update the parameters only after ``step`` has
                                   returned
        section                    run any other work that needs workers of other replicas; all workers must run the
                                   same sections in the same order
    finish                         once: the training is over for this worker

Get a new ``view`` after each of these calls: if the call met other workers, the groups of the old epoch are closed.

Report progress (``mark``), so that a worker that hangs is found: a worker that makes no mark within the hang timeout is
evicted.  Announce every wait for other workers or for storage (``waiting``).

If your code or a method of the manager raises an exception of the list below other than ``Orphaned`` and
``EpochRevoked``, terminate the process.  For ``Orphaned``, and for every exception that is not in the list, call
``is_of_mates``.  If it returns True, this worker is an orphan: its replica is broken, and the other replicas continue.
Call ``leave``, drop everything that holds tensors of the training, call ``release``, then ``wait_for_place``.  Pass the
decision that it returns to ``take_place``; inside this ``with`` block create your groups again and load your state;
then continue with ``at_boundary``.  If ``is_of_mates`` returns False, this worker is at fault: terminate its process.

``start``, ``at_boundary``, ``step``, ``section`` and ``finish``, which meet other workers, raise:

    Orphaned           this worker has no place any more: proceed as above
    Drained            this worker's node is drained: exit with code 0
    NoReplica          no complete replica is left: the run ends for all, exit code 10
    StateLost          a part of the training's state is lost: the run ends for all, exit code 12
    Fenced             this worker was evicted, and the run continues without it: exit with code 13
    CoordinatorLost    the run has ended, or no coordinator may continue it: exit with the error's code
    EpochRevoked       raised only by operations of ``View.groups`` and by ``wait_in_touch``: let it propagate out of
                       the section, which then runs again (a step uses neither)

The interface follows torchft's manager, which also hides a quorum behind step, boundary and commit.  But torchft
discards a failed step, whereas this manager finishes it.
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
"""The manager, and the types of its arguments and results."""

Agree = Callable[[list[int]], list[int]]
"""Broadcast inside a model-parallel group: returns on every worker the numbers that the group's first rank passed."""


class Manager:
    """Interface of one worker to in-step recovery; the module's docstring defines the order of the calls."""

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
        """Create the manager of ``worker``, which is connected to the coordinator through ``session``.

        Does not wait for other workers.

        :param grid: the slots of the launch
        :param verify_interval: iterations between comparisons of states; 0: no comparisons
        """
        self._parts = Recovery(session, worker, grid, communication, hooks, rules or Rules(), verify_interval)
        self._blame = Blame()

    @property
    def view(self) -> View:
        """A new ``View`` of the run as this worker knows it now.  May be read in any thread."""
        return self._parts.view()

    # ---- the training

    def start(self, traffic: Traffic) -> None:
        """Join the first epoch, with all workers of the launch; from then on ``traffic`` uses the epoch's groups."""
        self._parts.rendezvous.start()
        traffic.recovery = self._parts

    def at_boundary(self, prepare: Callable[[], Any]) -> None:
        """Meet all other workers before a step if a plan or the verify interval requires it.

        In this meeting workers join or leave, and states are compared.  ``prepare`` is called before each such meeting,
        for work that must be done without the joining workers; it may run sections.
        """
        self._parts.boundary.meet_if_wanted(prepare)

    def step(self, trainer: Trainer, total: int, tail: Tail, share: float, balance: Agree | None = None) -> Outcome:
        """Run one iteration of ``total`` microbatches (over all replicas) until it is committed.

        :param tail: the bucket that is summed last, with the losses and the counts of microbatches
        :param share: 1 / (number of workers that the tail's column has in each replica)
        :param balance: if passed, slow replicas get fewer microbatches from the next step on
        :raises Disagreement: if this worker's microbatches or gradients are wrong; terminate the process.  If wrong
            gradients may be in a sum, the run ends for all workers, and no worker commits the step; otherwise the other
            replicas run this replica's microbatches
        """
        self._parts.show(total)
        outcome = Step(self._parts, trainer, total, tail, share).run()
        if balance is not None and not outcome.by_plan:  # otherwise the new plan has reset the quotas
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
        """Run a section: call ``run`` on all workers; call it again if a worker is lost; return the result.

        :param run: function that is called again after an interruption; a call after ``reset`` must not double effects
            of an interrupted call
        :param reset: function that undoes effects of an interrupted ``run`` before the next call.  Tensors that
            collectives overwrote are restored in any case
        :param together: True if the workers of a replica wait for each other in ``run``, and so must all call it
        :param phase: phase that this worker reports during ``run`` if ``moved`` is passed; default: ``kind``
        :param moved: function that returns the number of bytes read and written so far; while this number grows, the
            worker needs no mark
        """
        if moved is not None:
            run = self._parts.progress.moving(phase or kind, run, moved)
        return self._parts.sections.run(kind, run, reset=reset, together=together)

    def finish(self) -> None:
        """Leave the run normally, after all workers have reached the end of the training."""
        self._parts.finish()

    # ---- reports of this worker

    def mark(self, phase: str, *, microbatch: int | None = None, waiting: bool = False, allow: float = 0.0) -> None:
        """Report progress.

        :param waiting: True if this worker waits for other workers, which are then blamed for a hang
        :param allow: seconds that may pass until the next mark, in addition to the hang timeout
        """
        self._parts.progress.mark(phase, microbatch=microbatch, waiting=waiting, allow=allow)

    def waiting(self, what: str, *, storage: bool = False) -> AbstractContextManager[None]:
        """Return a context in which this worker waits for other workers or, if ``storage`` is True, for data.

        If a wait for other workers hangs, the other workers are blamed.  A wait for data may last for the hang timeout
        and the stall timeout together.
        """
        progress = self._parts.progress
        return progress.storage(what) if storage else progress.waiting(what)

    def inject(self, phase: str, iteration: int | None = None) -> None:
        """Inject a fault if one is due in ``phase`` of ``iteration`` (None: the iteration under way).

        May be called from any thread.
        """
        self._parts.progress.inject(phase, iteration)

    def log(self, event: str, *, note: str = "", **fields: Any) -> None:
        """Write a line of events.jsonl, if this worker writes this file; ``fields`` are JSON values.

        ``note``: text that recover-status shows for this worker from now on.
        """
        self._parts.hooks.log(event, **fields)
        if note:
            self._parts.session.note(note)

    # ---- errors

    def check(self) -> None:
        """Raise ``Orphaned`` if the replica is broken, ``Fenced`` or ``CoordinatorLost`` if this worker is out of the
        run."""
        self._parts.orphan.stay()

    def wait_in_touch(self, *, in_epoch: bool = True) -> None:
        """Wait until the coordinator has answered a message that is less than a heartbeat timeout old.

        Usually returns at once; may be called from any thread.  Call it before an action that an evicted worker must
        not perform: a worker does not notice its eviction while its process is suspended.  Raises ``Fenced`` or
        ``CoordinatorLost`` if this worker is out of the run, ``EpochRevoked`` if the epoch is over and ``in_epoch`` is
        True, and another ``MembershipError`` after ``finish``.
        """
        self._parts.session.wait_in_touch(in_epoch=in_epoch)

    def is_of_mates(self, error: BaseException) -> bool:
        """Return True if a loss in this replica caused ``error``, or if this worker is already an orphan.

        Returns False for a failure of CUDA.  May wait for the report of a loss.  Raises ``Fenced`` or
        ``CoordinatorLost`` if this worker is out of the run.
        """
        return self._blame.of_mates(error, self._parts)

    def lose_state(self, what: str) -> NoReturn:
        """Report that no worker holds a part of the training's state any more; ``what`` names the part in messages.

        If the run can go back to a checkpoint or a snapshot, raises ``Orphaned``.  Otherwise ends the run for all
        workers, and raises ``StateLost``.
        """
        if self._parts.planner.can_go_back:
            self._parts.orphan.leave(what)
            raise Orphaned(what)
        self._parts.planner.lose_state(what)

    # ---- leaving the training, and returning to it

    def leave(self, why: BaseException | str, *, note: str = "") -> None:
        """Leave the training, and notify the other workers.

        ``why``: an error for which ``is_of_mates`` returned True, or a reason as text.  ``note``: text that
        recover-status shows for this worker from now on.
        """
        if note:
            self._parts.session.note(note)
        if isinstance(why, str):
            self._parts.orphan.leave(why)
        elif not isinstance(why, Orphaned):
            self._parts.orphan.replica_failed(why)
            self._blame.left(self._parts)

    def release(self) -> None:
        """Close the groups of the epoch; afterwards no operation touches a tensor.  May wait for the device."""
        self._parts.assignment.close()

    def wait_for_place(self, **offer: Any) -> Decision:
        """Wait as a spare; return the decision that gives this worker a place.

        :param offer: fields of ``JoinStatus``: ``version`` and ``digest`` of this worker's state; ``position=None`` if
            this worker can take no place
        :raises OtherPosition: if the plan needs this worker in another position; build the model of this position, then
            call this method again
        :raises RunOver: if this worker must exit, because it will get no place
        """
        try:
            return self._parts.orphan.wait(**offer)
        except OtherPosition as other:
            self._parts.assignment.position = other.position
            raise

    @contextmanager
    def take_place(self, decision: Decision, traffic: Traffic) -> Iterator[None]:
        """Take this worker's place in ``decision``; the ``with`` block creates the worker's groups and loads its state.

        From then on ``traffic`` uses the groups of the present epoch.  If the block raises, call ``leave`` again.
        """
        self._parts.orphan.come_back(decision)
        self.mark("regroup", waiting=True)
        traffic.recovery = self._parts
        yield
        self._parts.hooks.planned(decision)
        # This writes an event only if all replicas are new; otherwise a worker of an older replica has written it.
        self._parts.planner.log(decision, None, 0.0)

    # ---- the optimizer's state, if it is spread over the replicas

    def shards(self, columns: Mapping[Column, Column], shadows: int, instances: int = 1) -> Shards:
        """Return a ``Shards`` object, which knows the holder of each optimizer shard.

        The parameters are those of ``Shards``.
        """
        return Shards(dict(columns), shadows, self._parts.assignment, instances)

    def overlap(
        self, parts: Sequence[tuple[Column, torch.Tensor]], shards: Shards, lose: Callable[[int], None]
    ) -> Overlap:
        """Return the ``Overlap`` object, which gathers updated parameters while the next forward pass runs."""
        return Overlap(parts, shards, self._parts, lose)
