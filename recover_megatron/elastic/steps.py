"""Loop over the steps of a training (``run``), the result of a step, and errors in a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, NoReturn, Protocol

import torch

from recover_megatron.errors import EXIT_OWN_FAULT
from recover_megatron.logger import get_logger
from recover_megatron.membership.records import EXIT_FENCED, CoordinatorLost, Fenced

log = get_logger(__name__)

Microbatch = Callable[[int, int], torch.Tensor]
"""Function ``microbatch(step, j)``: returns the loss (a scalar) of microbatch ``j`` (from 0) of ``step`` (from 1).

The loss must depend only on ``step``, ``j`` and the model, so that all workers compute the same loss.
"""


@dataclass(frozen=True)
class StepResult:
    """Result of a finished step.  A step is finished on all workers or on none."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean loss over all microbatches of the step, equal on all workers."""
    ran: tuple[int, ...]
    """Numbers of the microbatches of the step that this worker ran."""
    workers: tuple[int, ...]
    """Ids of the workers that finished the step, ascending."""
    recovered: bool
    """True if workers were lost, or joined, during the step."""
    seconds: float
    """Seconds from the start of the step on this worker to the end of the optimizer's step."""


class Elastic(Protocol):
    """Methods and attributes of `ElasticDataParallel` that ``run`` uses."""

    completed: int

    @property
    def worker(self) -> int: ...
    def begin(self) -> int: ...
    def step(self, microbatch: Microbatch) -> StepResult: ...
    def leave(self) -> None: ...


def run(elastic: Elastic, microbatch: Microbatch, steps: int) -> Iterator[StepResult]:
    """Train until step ``steps`` is finished; yield the result of each step after its update on this worker.

    Every worker runs the body of the ``for`` loop between two steps (a scheduler's step, a line in a log).  Use
    ``elastic.lead`` for an action that only one worker must take (a checkpoint, an evaluation).  A worker that joins a
    running job gets the others' state and begins with their current step, so it yields no earlier step.  If a worker
    starts from a checkpoint of step ``steps`` or later, all workers get this state, and nothing is left to train.

    After the last step the worker leaves the run.  If a script breaks out of the loop, it must call
    ``elastic.leave()``.  A worker that is no longer part of the run exits here (SystemExit): with code 13 if it was
    evicted, 0 if the others have finished the run, else with the run's exit code.
    """
    with ends_in_order(elastic.worker):
        if elastic.begin() >= steps:
            log.info(f"worker {elastic.worker}: all {steps} steps are completed already; nothing is left to train")
        while elastic.completed < steps:
            yield elastic.step(microbatch)
        elastic.leave()


@contextmanager
def ends_in_order(worker: int) -> Iterator[None]:
    """Exit the process, with an exit code for the reason, if this context raises ``Fenced`` or ``CoordinatorLost``."""
    try:
        yield
    except Fenced as error:
        log.info(f"worker {worker} was evicted and exits; the run continues without it: {error}")
        sys.exit(EXIT_FENCED)
    except CoordinatorLost as error:
        log.info(f"the run ends for worker {worker}: {error}")
        sys.exit(error.code)


type Method[**P, T] = Callable[Concatenate[Any, P], T]
"""Method of an `ElasticDataParallel`."""


def takes_part[**P, T](method: Method[P, T]) -> Method[P, T]:
    """Decorate a method so that it exits the process if ``step`` has raised an exception before.

    After an exception in ``step``, this worker's gradients, sums or parameters may be incomplete.
    """

    @wraps(method)
    def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._failed is not None:
            _end(self, method.__name__)
        return method(self, *args, **kwargs)

    return called


def gives_state[**P, T](method: Method[P, T]) -> Method[P, T]:
    """Decorate a method that returns the state, so that it never returns a half-updated state.

    If an exception has interrupted an update, a call exits the process.  A call during the optimizer's step (for
    example by a signal handler) raises RuntimeError.
    """

    @wraps(method)
    def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._updating and self._failed is None:
            raise RuntimeError(
                f"{method.__name__}() was called during the update of step {self.completed + 1}, so the state is "
                "inconsistent: set a flag in the signal handler, and save in the loop's body"
            )
        if _half_updated(self):
            _end(self, method.__name__)
        return method(self, *args, **kwargs)

    return called


def _half_updated(elastic: Any) -> bool:
    """Return whether an exception stopped this worker after the commit of a step and before its update was complete."""
    return elastic._failed is not None and elastic._column.committed > elastic.completed


def one_step[**P, T](step: Method[P, T]) -> Method[P, T]:
    """Decorate ``step``: save the first exception in ``_failed``, report it to the coordinator and raise it again."""

    @takes_part
    @wraps(step)
    def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return step(self, *args, **kwargs)
        except (Fenced, CoordinatorLost):  # not saved, since each later call raises them again
            raise
        except BaseException as error:
            self._failed = error
            if isinstance(error, Exception):
                self._report("update" if _half_updated(self) else "step", None, error)
            raise
        finally:  # after an exception the script may change the state, so other workers must not fetch it
            self._exchange.withdraw()

    return called


def _end(elastic: Any, method: str) -> NoReturn:
    """Log that the script called ``method`` after an exception in ``step``, and exit this worker's process."""
    error, step = elastic._failed, elastic.completed + 1
    what = "parameters and optimizer may be half updated" if _half_updated(elastic) else "the gradients are incomplete"
    log.error(
        f"worker {elastic.worker} exits, and the other workers continue without it: the script called {method}() after "
        f"step {step} raised {type(error).__name__}, and {what}.  Let the error end the process: --max-restarts starts "
        "another worker, which gets the state of the others.  If an error can be retried, catch it in the microbatch",
        exc_info=error,
    )
    raise error if isinstance(error, SystemExit) else SystemExit(EXIT_OWN_FAULT)
