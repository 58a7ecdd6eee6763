"""Data-parallel trainer of a model and an optimizer; a step is finished even if workers die during the step.

    step(s)   JOIN --plan--> GROUP --> (fetch the state) --> run own share --> sum --> agree --> optimizer's step
                ^                                                    |
                '---- a worker died, or joined: all join again ------'     finished work is kept, lost work is run again

    lead(f)   The leading worker (lowest id) calls f.  The next step's sum needs the leading worker, so when that step
              is finished, f has returned.  If the leading worker dies before that, the next one joins and calls f.
    leave()   JOIN with ``leaving`` set, until all functions have been called, and all workers have the state

docs/ring.md defines the terms, such as epoch (a membership of the run) and bucket (the memory of the gradients).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from recover_megatron.collectives.column import LOOPBACK, Column
from recover_megatron.collectives.comparison import OwnDescription
from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.collectives.group import Group
from recover_megatron.elastic.checks import check, loaded_program, some_differ, strange_parameters
from recover_megatron.elastic.epoch_start import LatestState, Status, latest_state, odd_cover, shares
from recover_megatron.elastic.generators import Generators
from recover_megatron.elastic.gradients import Gradients
from recover_megatron.elastic.leading import Leading, may_leave
from recover_megatron.elastic.passes import Passes
from recover_megatron.elastic.restoring import NotRestored
from recover_megatron.elastic.run_state import Exchange, Optimizers, State, Stateful
from recover_megatron.elastic.steps import Microbatch, StepResult, ends_in_order, gives_state, one_step, takes_part
from recover_megatron.elastic.verification import compare
from recover_megatron.errors import EXIT_USAGE
from recover_megatron.logger import get_logger
from recover_megatron.membership.io.session import is_newcomer
from recover_megatron.membership.records import EXIT_STATE_LOST, CoordinatorLost
from recover_megatron.membership.wire import find_secret
from recover_megatron.variables import HOST_VARIABLE

log = get_logger(__name__)

OPENING_SECONDS = 600.0
"""Seconds that a worker waits until all workers have opened an epoch's group; some may still be between two steps."""


class ElasticDataParallel:
    """Trains ``model`` with ``optimizer`` on all workers of the run.  Each worker holds the complete model.

    Several models or optimizers (a GAN, actor and critic) are given as lists.  In each step all optimizers step, in
    list order.  In the state the models are named as in a ``torch.nn.ModuleList``, and the optimizers are numbered.

    Each step sums the gradients of ``microbatches`` microbatches, each exactly once, whichever workers die and when.
    So the parameters equal the parameters of a run without failures, except for rounding (other order of additions).

    ``state``: other objects that change from step to step (a scheduler); checkpoints and new workers get their states.
    ``before_update``: called on all workers between the sum of the gradients and the optimizer's step, for example to
    clip the gradients.  ``backward``: called with each loss, divided by ``microbatches`` (accelerate:
    ``accelerator.backward``); it must not scale the gradient.  ``seed``: seed of the default generators of Python,
    NumPy and torch; None if they must not be seeded.  With a seed, they are seeded before each update (from ``seed``
    and step), so that all workers draw equal numbers in update and loop.  They are also seeded before each microbatch
    (from ``seed``, step and microbatch), so that dropout does not depend on the worker.  ``verify_interval``: number of
    steps between two comparisons of the workers' states, each before the next step's sum; 0 for none.  If a worker's
    state differs from the majority's, the worker fetches the majority's state; without a majority the run ends with
    exit code 12.  ``allow_seconds``: time that a microbatch may take beyond the hang timeout (60 s) before its worker
    counts as hung.  ``compare_code``: True to refuse a worker if its script or modules differ from the run's (rules:
    ``recover_megatron.program``).

    Workers need not begin with equal parameters: among the workers with the most completed steps, the worker with the
    lowest id sends its state to all others.  A process that joins a running job gets the state of the workers that
    train.  It exits with code 2 if a ``load_state_dict`` does not restore the state, or if the process differs from
    the run in its program, arguments, trainable parameters, names in ``state`` or version of this package.

    Raises ``UserError`` if ``recover-run`` did not start this process.  If the model or the optimizer is not supported,
    or this process has created another instance before, the process prints all reasons and exits with code 2.
    """

    _made = False  # True when this process has created an instance
    _failed: BaseException | None = None  # the exception that was raised by ``step``
    _updating = False  # True while the optimizer steps

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        microbatches: int,
        state: Mapping[str, Stateful] | None = None,
        before_update: Callable[[], Any] | None = None,
        backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
        seed: int | None = 0,
        verify_interval: int = 100,
        allow_seconds: float = 240.0,
        compare_code: bool = True,
    ) -> None:
        code = loaded_program() if compare_code else {}
        module: torch.nn.Module = torch.nn.ModuleList(model) if isinstance(model, Sequence) else model
        self._optimizer: Any = Optimizers(optimizer) if isinstance(optimizer, Sequence) else optimizer
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._known = set(map(id, module.parameters()))
        check(module, self._optimizer, parameters, microbatches, state or {}, again=ElasticDataParallel._made)
        self.microbatches = microbatches
        self.completed = 0
        """Number of the last finished step, 0 before the first."""
        self._before_update = before_update or (lambda: None)
        self._allow, self._verify_interval = allow_seconds, verify_interval
        self._state = State({"model": module, "optimizer": self._optimizer, **(state or {})})
        self._gradients = Gradients(list(module.parameters()), microbatches)
        self._generators = Generators(seed, parameters[0].device)
        self._passes = Passes(self._gradients, self._state, self._generators, backward, microbatches)
        self._column = Column.from_environment(device=parameters[0].device, timeout=OPENING_SECONDS)
        self._session = self._column.session
        ElasticDataParallel._made = True
        secret = find_secret(os.environ).key("elastic state")
        self._exchange = Exchange(os.environ.get(HOST_VARIABLE, LOOPBACK), secret)
        settings = Status.settings(module, microbatches, seed, verify_interval, state or {})
        self._own = OwnDescription(
            settings, code, self._exchange.store, secret, called="settings", lets_in="compare_code=False"
        )
        self._holds = not is_newcomer()
        self._changed = False
        """True if this worker's state includes a step of this run; False for a state from before the first step."""
        self._latest_state: LatestState | None = None
        self._statuses: dict[int, Status] = {}
        self._sent = Status()
        """Status with which this worker joined the present epoch."""
        self._leading = Leading()
        self._summed: frozenset[int] = frozenset()
        """Ids of the workers that took part in the last sum, with or without microbatches of their own."""
        self._uncaught = sys.excepthook
        sys.excepthook = self._ended_by

    @property
    def worker(self) -> int:
        """Id of this worker: its rank at launch; a process that replaces another gets a new id."""
        return self._column.me

    @property
    def workers(self) -> list[int]:
        """Ids of the workers of the run, ascending, as of the last step; empty before the first step."""
        return self._column.members

    @property
    def leads(self) -> bool:
        """True if this worker has the lowest id and calls the functions of ``lead``; False before the first step."""
        return self.workers[:1] == [self.worker]

    @one_step
    def step(self, microbatch: Microbatch) -> StepResult:
        """Run the next step; return when all live workers have finished it, and this worker has applied the update.

        Raises ``Fenced`` if this worker was evicted, ``CoordinatorLost`` if the run ends (``code``: 0 if the others
        have finished), and the errors of ``microbatch``; other workers continue unless the same fails there, too.  A
        call after any other error exits the process.
        """
        began, epochs = time.perf_counter(), self._session.epoch
        if more := strange_parameters(self._optimizer, self._known):
            raise self._begins_with(
                f"the optimizer now has {more} parameter(s) whose gradients are not summed: every trained parameter "
                "must be in the model when it is passed to ElasticDataParallel"
            )
        if self._gradients.grow():
            self._column.renew(f"more parameters are trainable from step {self.completed + 1} on")
        if not self._gradients.clear():
            self._column.renew(f"worker {self.worker} has changed sums of this step that it had received")
        self._passes.ran = []
        while not self._holds or self._column.committed <= self.completed:
            with contextlib.suppress(EpochRevoked):  # a worker died, or joined: the loop joins the next epoch
                if self._column.over:
                    self._join()
                else:
                    self._finish(microbatch)
        self._exchange.withdraw()
        self._leading.forget()
        self._mark("update")
        loss = self._gradients.loss()
        self._gradients.leave_out_unused()
        self._generators.for_update(self.completed + 1)
        self._before_update()
        self._updating = True
        self._optimizer.step()
        if not self._changed:  # the optimizer has just created its state: check that it can be sent
            self._state.check()
        self.completed, self._changed, self._updating = self.completed + 1, True, False
        result = StepResult(
            self.completed, loss, tuple(self._passes.ran),
            tuple(worker for worker in self.workers if worker in self._summed),
            self._session.epoch != epochs and epochs > 0, time.perf_counter() - began,
        )  # fmt: skip
        self._session.show_loss(self.completed, loss)
        self._session.mark(self.completed, "between steps", allow=self._session.settings.stall_timeout)
        return result

    @takes_part
    def begin(self) -> int:
        """Join the run and get the state of the workers with the most completed steps; return ``completed``.

        ``run`` and the first ``step`` call it.  If you write the loop yourself, call it before you read ``completed``.
        Raises ``Fenced`` and ``CoordinatorLost`` as ``step`` does.
        """
        while not self._holds or not self._column.members:
            with contextlib.suppress(EpochRevoked):
                if self._column.over:
                    self._join()
                elif self._enter() is not None:
                    self._gradients.hold()
        return self.completed

    @takes_part
    def lead(self, function: Callable[[], Any], name: str = "") -> None:
        """Make one worker call ``function`` for all workers between two steps: to save a checkpoint, log or evaluate.

        All workers must call ``lead`` after the same step, with the same function.  The leading worker calls the
        function at once; the other workers continue, and wait at their next sum, or in ``leave``.  If the leading
        worker dies before the next step is finished, the next leading worker calls the function, perhaps a second time,
        before any worker's next update.  So it must not depend on later changes in the loop, and must not train.
        ``name``: for logs.  Raises the function's errors; exits as ``run`` does if this worker is out of the run.
        """
        self._leading.add(function, name)
        if self.leads:
            with ends_in_order(self.worker):  # ``run`` cannot catch an exception that is raised in the loop's body
                self._do()
        self._generators.after_lead(self.completed, self._leading.calls)

    @takes_part
    def check(self) -> None:
        """Raise ``Fenced`` or ``CoordinatorLost`` unless this worker is part of the run.

        Call it before an action that an evicted worker must not take: for example, a function of ``lead`` calls it
        before it renames a checkpoint.  A worker that was stopped for a while does not know that it was evicted, and
        that another worker may have written a newer checkpoint.
        """
        self._session.wait_in_touch(in_epoch=False)

    @takes_part
    def leave(self) -> None:
        """Leave the run when the training is finished, so that no worker waits for this one; ``run`` calls it.

        Returns when all functions passed to ``lead`` have been called, and no worker needs this worker's state.
        Raises ``Fenced`` and ``CoordinatorLost`` as ``step`` does.
        """
        while self._holds and self._leading.unfinished:  # a worker without the state leaves without waiting
            with contextlib.suppress(EpochRevoked):
                self._join(leaving=True)
                if self._column.over or self._latest_state is None:
                    continue
                if may_leave(self._statuses, self._latest_state, self.completed):
                    self._leading.unfinished = False
                    if not all(status.leaving for status in self._statuses.values()):  # some workers do not leave yet
                        self._session.ask(f"worker {self.worker} leaves before the others")
                    continue
                if not all(status.holds for status in self._statuses.values()):
                    self._put()
                self._mark("leave", waiting=True)
                self._session.wait_revoked()
        self._column.leave()

    @gives_state
    def state_dict(self) -> dict[str, Any]:
        """Return the number of completed steps and the states of model, optimizer and ``state``, for a checkpoint."""
        return {"completed": self.completed, "state": self._state.tree()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a copy of a checkpoint before the first step.  If only one worker does so, all others get this state."""
        if self._column.members:
            raise RuntimeError("call load_state_dict() before the first step: a later call changes only this worker")
        with self._gradients.away():
            self._state.load(state_dict["state"], copied=True)
        self.completed = int(state_dict["completed"])

    # ---- one step

    def _join(self, *, leaving: bool = False) -> None:
        """Join the next epoch, and determine which of its workers have the state."""
        self._mark("rendezvous", waiting=True)
        digest = "" if self._changed or not self._holds else self._state.digest()
        own, address = self._own, self._exchange.address
        self._sent = Status(
            self.completed, self._holds, digest, tuple(self._passes.ran), address, own.given, own.code,
            self._gradients.covered, self._leading.todo, leaving,
        )  # fmt: skip
        self._column.join(self._sent.to_json())
        if some_differ(self._own, self.worker, self._holds, self._column.statuses, self._session):
            self._session.wait_revoked()  # wait until the workers that differ have exited, or the run has ended
            return
        self._statuses = {worker: Status.from_json(sent) for worker, sent in self._column.statuses.items()}
        self._latest_state = latest_state(self._statuses, self._column.begins_after)
        if self._latest_state is None:
            raise self._nobody_holds()
        if self._holds and self.worker not in self._latest_state.holders:
            lead = self._latest_state.holders[0]
            log.info(f"worker {self.worker} started with another state than worker {lead}, whose state it now fetches")
            self._holds = False
        if not self._holds:
            self._passes.ran = []
            holders = [self._statuses[worker] for worker in self._latest_state.holders]
            # A holder that joined before it applied the last step may have sent an older value of ``covered``.
            newest = [status for status in holders if status.completed == self._latest_state.completed]
            self._gradients.cover((newest or holders)[0].covered)
            self._gradients.clear()
        if odd := odd_cover(self._statuses, self._latest_state):
            raise self._begins_with(
                f"worker {odd} trains other parameters than worker {self._latest_state.holders[0]} from step "
                f"{self._latest_state.completed + 1} on: unfreeze a layer on all workers after the same step"
            )
        if len(self._latest_state.holders) < len(self._statuses):
            self._leading.unfinished = True
        names, lead = self._leading.names, self._latest_state.holders[0]
        if names and lead == self.worker and self.completed == self._latest_state.completed:
            self._do()
            self._generators.after_lead(self.completed, self._leading.calls)  # they may have drawn random numbers
            self._column.renew(f"worker {self.worker} has called {names} in place of a lost worker")

    def _do(self) -> None:
        """Call the functions passed to ``lead`` that have not returned.  Only the leading worker calls this."""
        allow = self._session.settings.stall_timeout
        self._leading.call(
            lambda name: self._session.mark(self.completed, name, allow=allow),
            lambda name, error: self._report(name, None, error),
        )

    def _nobody_holds(self) -> CoordinatorLost:
        """Return the error for an epoch in which no worker has the state; end the run for all if the holders died."""
        if self._session.left:
            return CoordinatorLost("the other workers have finished the run", 0)
        why = "all workers that had the state of the run are lost"
        self._session.give_up(EXIT_STATE_LOST, why)
        return CoordinatorLost(why, EXIT_STATE_LOST)

    def _finish(self, microbatch: Microbatch) -> None:
        """Run microbatches, sum gradients, agree on the step, unless a new epoch is needed.  Raises EpochRevoked."""
        group, at, step = self._enter(), self._latest_state, self.completed + 1
        if group is None or at is None:
            return
        share = shares(self._statuses, at, self._column.members, step, self.microbatches)
        done = self._passes.run(
            microbatch, step, share.get(self.worker, []), over=lambda: self._column.over,
            begin=lambda j: self._mark("forward", j, allow=self._allow),
            failed=lambda j, error: self._report("forward", j, error),
        )  # fmt: skip
        if not done or not self._verified(group):
            return
        self._mark("all-reduce", waiting=True)
        for handle in [group.all_reduce(bucket) for bucket in self._gradients.buckets]:
            handle.wait()
        self._summed = frozenset(self._column.members)
        self._mark("agree", waiting=True)
        self._column.agree(step)

    def _enter(self) -> Group | None:
        """Fetch the state if needed; return the epoch's group, None if a new epoch is needed.  Raises EpochRevoked."""
        at = self._latest_state
        assert at is not None, "joined"
        self._mark("rendezvous", waiting=True)
        if self.completed == at.completed and self.worker in at.holders and len(at.holders) < len(self._statuses):
            self._put()
        leaving = [worker for worker, status in self._statuses.items() if status.leaving]
        group = None if leaving else self._column.group(self._gradients.buckets)  # if workers leave, no step is run
        if not self._holds and not self._fetch(at):
            return None
        if leaving:
            if replace(self._sent, completed=self.completed, holds=self._holds, todo=self._leading.todo) != self._sent:
                self._column.renew(f"workers {leaving} leave, and worker {self.worker} reports a newer status")
            else:
                self._session.wait_revoked()
        return group

    def _put(self) -> None:
        self._exchange.put(self._session.epoch, self.completed, self._gradients.trained, self._state)

    def _verified(self, group: Group) -> bool:
        """Compare all workers' states every ``verify_interval`` steps; return False if a new epoch is needed.

        Ends the run if no state has a majority.
        """
        if not self._verify_interval or not self.completed or self.completed % self._verify_interval:
            return True
        self._mark("verify", allow=self._allow)
        own = self._state.described()
        self._mark("verify", waiting=True)
        verdict = compare(group.exchange, self._column.column, own)
        if verdict is None:
            return True
        if not verdict.most:
            self._session.give_up(EXIT_STATE_LOST, verdict.text(self.completed))
            raise CoordinatorLost(verdict.text(self.completed), EXIT_STATE_LOST)
        log.info(verdict.text(self.completed))
        if self.worker in verdict.odd:
            self._holds = False
            self._column.renew(verdict.text(self.completed))
        else:  # do not end the epoch here: a worker whose state differs may still run ``compare``
            self._session.wait_revoked()
        return False

    def _fetch(self, at: LatestState) -> bool:
        """Fetch the state from the holders; return False if that failed and a new epoch must be joined."""
        self._mark("state", allow=self._allow)
        holders = {worker: self._statuses[worker].address for worker in at.holders}
        try:
            with self._gradients.away():
                self.completed, trained = self._exchange.fetch(
                    self._session.epoch, holders, self._state,
                    stay=self._session.check, progress=lambda: self._mark("state", allow=self._allow),
                )  # fmt: skip
                self._gradients.train(trained)
        except PeerLost as lost:
            self._column.fail(lost)
            return False
        except NotRestored as error:
            if is_newcomer() or self._column.begins_after:
                log.info(f"worker {self.worker} exits, and the run continues without it: {error}")
                sys.exit(EXIT_USAGE)
            self._session.give_up(EXIT_USAGE, f"worker {self.worker}: {error}")
            self._session.wait_revoked()
            return False
        # Until the first step of this run, holders join with a digest, and so must this worker.
        self._holds, self._changed = True, not self._statuses[at.holders[0]].digest
        log.info(f"worker {self.worker} received the state after step {self.completed} from worker {at.holders[0]}")
        return True

    def _report(self, phase: str, j: int | None, error: Exception) -> None:
        """Report ``error`` to the coordinator, which ends the run if the same work fails on other workers, too."""
        tried = [] if j is None else [*self._passes.ran, j]
        self._session.report_exception(
            self.completed + 1, j, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)),
            self.worker, phase=phase, tried=tried,
        )  # fmt: skip

    def _begins_with(self, why: str) -> RuntimeError:
        """Create an error with text ``why``, report it to the coordinator as an error at a step's start, return it."""
        error = RuntimeError(why)
        self._report("begin", None, error)
        return error

    def _ended_by(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report an uncaught exception to the coordinator; call the previous hook.  Installed as ``sys.excepthook``."""
        if isinstance(error, Exception):
            self._report("between steps", None, error)
        self._uncaught(kind, error, trace)

    def _mark(self, phase: str, j: int | None = None, *, waiting: bool = False, allow: float = 0.0) -> None:
        self._session.mark(self.completed + 1, phase, j, waiting, allow)
