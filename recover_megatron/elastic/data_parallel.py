"""A model and an optimizer whose steps are finished when workers die in them, and ``run``: all steps of a training.

    step(s)   JOIN --plan--> GROUP --> (fetch the state) --> run my share --> sum --> agree --> optimizer's step
                ^                                                    |
                '---- somebody died, or came: all join again --------'     what is finished stays, what is lost is run

The words are those of docs/ring.md: an epoch is a membership of the run, a bucket the memory of the gradients.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from recover_megatron import program
from recover_megatron.collectives.column import LOOPBACK, Column
from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.elastic.checks import check, strange_parameters
from recover_megatron.elastic.gradients import Gradients
from recover_megatron.elastic.state import Exchange, Standing, State, Stateful, Status, shares, standing
from recover_megatron.errors import EXIT_USAGE
from recover_megatron.instep.comparison import OwnDescription, Told, odd_ones
from recover_megatron.logger import get_logger
from recover_megatron.membership.records import EXIT_FENCED, EXIT_STATE_LOST, CoordinatorLost, Fenced
from recover_megatron.membership.session import is_newcomer
from recover_megatron.membership.wire import find_secret
from recover_megatron.variables import HOST_VARIABLE

log = get_logger(__name__)

_AT_IMPORT = program.describe()
"""The program as it was loaded by then: its files may be edited before the model is built."""

OPENING_SECONDS = 600.0
"""How long workers wait for each other at the beginning of an epoch: some may be between two steps."""

Microbatch = Callable[[int, int], torch.Tensor]
"""``microbatch(step, j)``: the loss of microbatch ``j`` (from 0) of ``step`` (from 1), a scalar with a gradient.

It must be a function of the two numbers alone: whichever worker calls it, it feeds the same samples.
"""


def _program() -> dict[str, str]:
    """Describe the program of this process, with the text that each module had when this package was imported."""
    return {**program.describe(), **_AT_IMPORT}


@dataclass(frozen=True)
class StepResult:
    """A step that is finished: on all workers, or on none."""

    step: int
    """Its number, from 1."""
    loss: float
    """The mean over all microbatches of the step: the same on all workers."""
    ran: tuple[int, ...]
    """The microbatches that this worker ran."""
    workers: tuple[int, ...]
    """The ids of the workers that finished it, ascending."""
    recovered: bool
    """Whether workers were lost, or came, while this worker was in it."""
    seconds: float
    """From its begin on this worker to the end of the optimizer's step."""


class ElasticDataParallel:
    """Trains ``model`` with ``optimizer`` on all workers of the run, each of which holds the whole model.

    Each step sums the gradients of the same ``microbatches`` microbatches, each exactly once, whichever workers die and
    whenever: the parameters are those of a run without failures, but for the order of additions.

    ``state``: what else changes from step to step (a scheduler): it is sent to workers that come, and saved.
    ``before_update``: called when the gradients of the step are summed, before the optimizer's step, on all workers
    with the same gradients: to clip them.  ``backward``: what is called with each loss, divided by ``microbatches``
    (accelerate: ``accelerator.backward``).  ``seed``: torch's random numbers are seeded before each microbatch by it,
    the step and the microbatch, so that dropout is the same whoever runs it; None: they are left alone.
    ``allow_seconds``: so long beyond the hang timeout (60 s) may a microbatch take before its worker counts as hung.
    ``compare_code``: whether a worker is refused whose script, or a module of it, is not that of the run (`program`).

    Workers need not begin with equal parameters: of those that have completed most steps the lowest gives its state to
    all others.  A process that comes into the running job gets the state of those that train; it is refused, exit code
    2, where it differs from the run in its program, ``microbatches``, ``seed``, the parameters that it trains, the
    names in ``state``, or the version of this package.

    Raises ``UserError`` where ``recover-run`` did not start this process.  Of a model or an optimizer that cannot be
    trained so it tells all reasons, and ends the process with exit code 2: parameters on several devices, or on none
    (meta); running statistics (BatchNorm), which a sum of gradients leaves out; an optimizer with parameters that are
    not the model's, or one that wants a closure (LBFGS).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        microbatches: int,
        state: Mapping[str, Stateful] | None = None,
        before_update: Callable[[], Any] | None = None,
        backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
        seed: int | None = 0,
        allow_seconds: float = 240.0,
        compare_code: bool = True,
    ) -> None:
        code = _program() if compare_code else {}
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._known = set(map(id, parameters))
        check(model, optimizer, parameters, microbatches, state or {})
        self.microbatches = microbatches
        self.completed = 0
        """The last step that is finished."""
        self._optimizer = optimizer
        self._before_update, self._backward = before_update, backward
        self._seed, self._allow = seed, allow_seconds
        self._state = State({"model": model, "optimizer": optimizer, **(state or {})})
        self._gradients = Gradients(parameters, microbatches)
        self._column = Column.from_environment(device=parameters[0].device, timeout=OPENING_SECONDS)
        self._session = self._column.session
        secret = find_secret(os.environ).key("elastic state")
        self._exchange = Exchange(os.environ.get(HOST_VARIABLE, LOOPBACK), secret)
        settings = Status.settings(model, microbatches, seed, state or {})
        self._own = OwnDescription(
            settings, code, self._exchange.store, secret, called="settings", lets_in="compare_code=False"
        )
        self._holds = not is_newcomer()
        self._changed = False
        """Whether a step of this run has changed the state, or it was taken from another worker."""
        self._standing: Standing | None = None
        self._statuses: dict[int, Status] = {}
        self._ran: list[int] = []
        self._summed: frozenset[int] = frozenset()
        """The workers that made the last sum with this one."""
        self._uncaught = sys.excepthook
        sys.excepthook = self._ended_by

    @property
    def worker(self) -> int:
        """This worker's id: at launch the rank; that of a process that takes the place of another is a new one."""
        return self._column.me

    @property
    def workers(self) -> list[int]:
        """The ids of the workers of the run, ascending, as of the last step; empty before the first."""
        return self._column.members

    @property
    def leads(self) -> bool:
        """Whether this is the lowest of them: it writes checkpoints and logs.  False before the first step."""
        return self.workers[:1] == [self.worker]

    def step(self, microbatch: Microbatch) -> StepResult:
        """Finish the next step: returns when it is finished on all live workers, and applied on this one.

        Raises what ``microbatch`` raises (the others go on, or end, too, if it is raised there for the same microbatch
        or by the same error), ``Fenced`` where this worker was put out of the run, and ``CoordinatorLost`` where the
        run ends, with the exit code in ``code``; 0: the others had finished it.
        """
        began, epochs = time.perf_counter(), self._session.epoch
        if more := strange_parameters(self._optimizer, self._known):
            error = RuntimeError(
                f"the optimizer has {more} parameter(s) now whose gradients are not summed: what is trained must be in "
                "the model, and not frozen, when it is given to ElasticDataParallel"
            )
            self._report("begin", None, error)
            raise error
        self._gradients.clear()
        self._ran = []
        while not self._holds or self._column.committed <= self.completed:
            with contextlib.suppress(EpochRevoked):  # somebody died, or came: join those that are there
                if self._column.over:
                    self._join()
                else:
                    self._finish(microbatch)
        self._exchange.withdraw()
        self._mark("update")
        loss = self._gradients.loss()
        try:
            if self._before_update is not None:
                self._before_update()
            self._optimizer.step()
        except Exception as error:
            self._report("update", None, error)
            raise
        self.completed += 1
        self._changed = True
        result = StepResult(
            self.completed, loss, tuple(self._ran), tuple(worker for worker in self.workers if worker in self._summed),
            self._session.epoch != epochs and epochs > 0,
            time.perf_counter() - began,
        )  # fmt: skip
        self._session.show_loss(self.completed, loss)
        self._session.mark(self.completed, "between steps", allow=self._session.settings.stall_timeout)
        return result

    def leave(self) -> None:
        """The training is finished for this worker: the others do not wait for it any more.  ``run`` does it."""
        self._column.leave()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the steps that are completed, and the state of model, optimizer and ``state``."""
        return {"completed": self.completed, "state": self._state.tree()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; before the first step.  Only one worker needs to have it."""
        if self._column.members:
            raise RuntimeError("load_state_dict is for before the first step: the other workers would not know of it")
        with self._gradients.away():
            self._state.load(state_dict["state"])
        self.completed = int(state_dict["completed"])

    # ---- one step

    def _join(self) -> None:
        """Join the next epoch, and find out which of its workers have the state."""
        self._mark("rendezvous", waiting=True)
        digest = "" if self._changed or not self._holds else self._state.digest()
        own, address = self._own, self._exchange.address
        status = Status(self.completed, self._holds, digest, tuple(self._ran), address, own.given, own.code)
        self._column.join(status.to_json())
        if self._some_differ():
            self._session.wait_revoked()  # those end, or all do
            return
        self._statuses = {worker: Status.from_json(told) for worker, told in self._column.statuses.items()}
        self._standing = standing(self._statuses, self._column.begins_after)
        if self._standing is None:
            raise self._nobody_holds()
        if self._holds and self.worker not in self._standing.holders:
            lead = self._standing.holders[0]
            log.info(f"worker {self.worker} began with another state than worker {lead}, and takes that one")
            self._holds = False
        if not self._holds:
            self._gradients.clear()

    def _some_differ(self) -> bool:
        """Tell if a worker is known to differ from the run: then this epoch is not begun.

        Ends the process where that is this worker, and the run where it has a state: then both are of the launch.
        """
        told = {
            worker: Told.of(status, "holds", "holds", "address") for worker, status in self._column.statuses.items()
        }
        odd = odd_ones(told)
        different = self._own.different(self.worker, told, odd)
        if different and not self._holds:
            log.info(f"worker {self.worker} ends, and the run goes on without it: it {different}")
            sys.exit(EXIT_USAGE)
        if different:
            self._session.give_up(EXIT_USAGE, f"worker {self.worker} {different}")
        return bool(different or odd.workers)

    def _nobody_holds(self) -> CoordinatorLost:
        """All that had the state have finished, or have died: the end of the run, for this worker or for all."""
        if self._session.left:
            return CoordinatorLost("the others have finished the run", 0)
        why = "the workers that had the state of the run are lost"
        self._session.give_up(EXIT_STATE_LOST, why)
        return CoordinatorLost(why, EXIT_STATE_LOST)

    def _finish(self, microbatch: Microbatch) -> None:
        """This epoch's part of the step.  Raises EpochRevoked; returns, too, where the next epoch must be joined."""
        at = self._standing
        assert at is not None, "joined"
        self._mark("rendezvous", waiting=True)
        if self._holds and self.completed == at.completed and len(at.holders) < len(self._statuses):
            self._exchange.put(self._session.epoch, self.completed, self._state)
        # What is summed anywhere is final: here, too, from now on.
        group = self._column.group(self._gradients.buckets)
        if not self._holds and not self._fetch(at):
            return
        step = self.completed + 1
        share = shares(self._statuses, at, self._column.members, step, self.microbatches)
        if not self._run(microbatch, step, share.get(self.worker, [])):
            return
        self._mark("all-reduce", waiting=True)
        for handle in [group.all_reduce(bucket) for bucket in self._gradients.buckets]:
            handle.wait()
        self._summed = frozenset(self._column.members)
        self._mark("agree", waiting=True)
        self._column.agree(step)

    def _fetch(self, at: Standing) -> bool:
        """Take the state from its holders; False: none of them could be reached, and a new epoch must be joined."""
        self._mark("state", allow=self._allow)
        holders = {worker: self._statuses[worker].address for worker in at.holders}
        try:
            with self._gradients.away():
                self.completed = self._exchange.fetch(
                    self._session.epoch, holders, self._state,
                    stay=self._session.check, progress=lambda: self._mark("state", allow=self._allow),
                )  # fmt: skip
        except PeerLost as lost:
            self._column.fail(lost)
            return False
        self._holds = self._changed = True
        log.info(f"worker {self.worker} has the state after step {self.completed}, from worker {at.holders[0]}")
        return True

    def _run(self, microbatch: Microbatch, step: int, share: list[int]) -> bool:
        """Add the gradients of these microbatches; False: the epoch has ended meanwhile."""
        with self._gradients.kept():
            for j in share:
                if self._column.over:
                    return False
                self._mark("forward", j, allow=self._allow)
                if self._seed is not None:
                    mixed = hashlib.blake2b(f"{self._seed} {step} {j}".encode(), digest_size=8).digest()
                    torch.manual_seed(int.from_bytes(mixed) >> 1)  # 63 bits
                try:
                    self._gradients.count(j, self._gradient(microbatch, step, j))
                except Exception as error:
                    self._report("forward", j, error)
                    raise
                self._ran.append(j)
        return True

    def _gradient(self, microbatch: Microbatch, step: int, j: int) -> torch.Tensor:
        """Add that of one microbatch; its part of the step's loss.  Raises where it did not add that alone."""
        before, kept = self._gradients.changes(), self._state.versions()
        told = microbatch(step, j)
        if not isinstance(told, torch.Tensor) or told.numel() != 1:
            what = f"a tensor of shape {list(told.shape)}" if isinstance(told, torch.Tensor) else f"{told!r:.100}"
            raise TypeError(f"microbatch({step}, {j}) returned {what}: it must return its loss, a tensor of one number")
        loss, forward = told / self.microbatches, self._gradients.changes()
        self._backward(loss)
        after = self._gradients.changes()
        if before[0] != after[0]:
            raise RuntimeError(
                f"microbatch({step}, {j}) has changed parameters: leave the optimizer's step() to the library"
            )
        if changed := [name for name, version in self._state.versions().items() if version != kept.get(name)]:
            raise RuntimeError(
                f"microbatch({step}, {j}) has changed the model's {', '.join(changed[:5])}, on this worker alone: a "
                "model whose state changes in its forward pass is not trained so"
            )
        if before[1] != forward[1] and forward[1] != after[1]:
            raise RuntimeError(
                f"microbatch({step}, {j}) has changed gradients beside backward: leave zero_grad() and backward() out"
            )
        return loss

    def _report(self, phase: str, j: int | None, error: Exception) -> None:
        """Tell the coordinator why this worker ends: a fault of the work ends the run, before it has ended all."""
        tried = [] if j is None else [*self._ran, j]
        self._session.report_exception(
            self.completed + 1, j, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)),
            self.worker, phase=phase, tried=tried,
        )  # fmt: skip

    def _ended_by(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Of an exception that ends the process, wherever it was raised, the coordinator is told, if it is not yet."""
        if isinstance(error, Exception):
            self._report("between steps", None, error)
        self._uncaught(kind, error, trace)

    def _mark(self, phase: str, j: int | None = None, *, waiting: bool = False, allow: float = 0.0) -> None:
        self._session.mark(self.completed + 1, phase, j, waiting, allow)


def run(elastic: ElasticDataParallel, microbatch: Microbatch, steps: int) -> Iterator[StepResult]:
    """Train until step ``steps`` is finished, and yield each step when it is finished and applied here.

    What stands in the body of the ``for`` loop is done by every worker between two steps (a scheduler's step, a line in
    a log, an evaluation); what only one is to do is for the worker whose ``elastic.leads`` is True.  A worker that
    comes into the running job gets the state of the others and begins with the step in which they are: it yields no
    step from before.

    After the last step the worker leaves the run.  A script that breaks off calls ``elastic.leave()``.  A worker that
    has no part in the run any more ends here, with the exit code that says so (SystemExit): 13, it was put out; 0, the
    others had finished; else the run's.
    """
    try:
        while elastic.completed < steps:
            yield elastic.step(microbatch)
    except Fenced as error:
        log.info(f"worker {elastic.worker} was put out of the run, which goes on without it: {error}")
        sys.exit(EXIT_FENCED)
    except CoordinatorLost as error:
        log.info(f"the run ends for worker {elastic.worker}: {error}")
        sys.exit(error.code)
    elastic.leave()
