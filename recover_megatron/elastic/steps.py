"""The steps of a training: the function that a step calls, what a finished step gives, and ``run``: all of them."""

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
"""``microbatch(step, j)``: the loss of microbatch ``j`` (from 0) of ``step`` (from 1), a scalar with a gradient.

It must be a function of the two numbers alone: whichever worker calls it, it feeds the same samples.
"""


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


class Elastic(Protocol):
    """What ``run`` needs of an `ElasticDataParallel`."""

    completed: int

    @property
    def worker(self) -> int: ...
    def begin(self) -> int: ...
    def step(self, microbatch: Microbatch) -> StepResult: ...
    def leave(self) -> None: ...


def run(elastic: Elastic, microbatch: Microbatch, steps: int) -> Iterator[StepResult]:
    """Train until step ``steps`` is finished, and yield each step when it is finished and applied here.

    What stands in the body of the ``for`` loop is done by every worker between two steps (a scheduler's step, a line in
    a log); what one worker is to do for all (a checkpoint, an evaluation) is for ``elastic.lead``.  A worker that comes
    into the running job gets the state of the others and begins with the step in which they are: it yields no step from
    before.  Where a worker has completed all ``steps`` at the start there is nothing to train: all get its state.

    After the last step the worker leaves the run.  A script that breaks off calls ``elastic.leave()``.  A worker that
    has no part in the run any more ends here, with the exit code that says so (SystemExit): 13, it was put out; 0, the
    others had finished; else the run's.
    """
    with ends_in_order(elastic.worker):
        if elastic.begin() >= steps:
            log.info(f"worker {elastic.worker}: all {steps} steps were completed before; nothing is left to train")
        while elastic.completed < steps:
            yield elastic.step(microbatch)
        elastic.leave()


@contextmanager
def ends_in_order(worker: int) -> Iterator[None]:
    """End the process with the exit code that says why, where ``worker`` has no part in the run any more."""
    try:
        yield
    except Fenced as error:
        log.info(f"worker {worker} was put out of the run, which goes on without it: {error}")
        sys.exit(EXIT_FENCED)
    except CoordinatorLost as error:
        log.info(f"the run ends for worker {worker}: {error}")
        sys.exit(error.code)


type Method[**P, T] = Callable[Concatenate[Any, P], T]
"""A method of an `ElasticDataParallel`."""


def takes_part[**P, T](method: Method[P, T]) -> Method[P, T]:
    """Decorator: once an exception has left ``step``, the method ends the process instead.

    Gradients, sum or update may be half done then, on this worker alone.
    """

    @wraps(method)
    def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._failed is not None:
            _end(self, method.__name__)
        return method(self, *args, **kwargs)

    return called


def gives_state[**P, T](method: Method[P, T]) -> Method[P, T]:
    """Decorator: once an exception has left ``step`` after the sum, the method ends the process instead.

    Inside the optimizer's step, in the handler of a signal say, the method raises RuntimeError.
    """

    @wraps(method)
    def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._updating and self._failed is None:
            raise RuntimeError(
                f"{method.__name__}() in the middle of the update of step {self.completed + 1}, which is half done: "
                "have a signal's handler set a flag, and save in the loop's body"
            )
        if _half_updated(self):
            _end(self, method.__name__)
        return method(self, *args, **kwargs)

    return called


def _half_updated(elastic: Any) -> bool:
    """Tell if the step is final in the run, and its update was left by an exception here."""
    return elastic._failed is not None and elastic._column.committed > elastic.completed


def one_step[**P, T](step: Method[P, T]) -> Method[P, T]:
    """Decorator of ``step``: keep the first exception that leaves it, and tell the coordinator."""

    @takes_part
    @wraps(step)
    def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return step(self, *args, **kwargs)
        except (Fenced, CoordinatorLost):  # each later call raises them again
            raise
        except BaseException as error:
            self._failed = error
            if isinstance(error, Exception):
                self._report("update" if _half_updated(self) else "step", None, error)
            raise
        finally:  # a script that catches it may change the state, which others may be getting
            self._exchange.withdraw()

    return called


def _end(elastic: Any, method: str) -> NoReturn:
    """End the process of a worker whose script calls ``method`` after an exception has left ``step``."""
    error, step = elastic._failed, elastic.completed + 1
    what = "its parameters and optimizer may be half updated" if _half_updated(elastic) else "what it sums is half done"
    log.error(
        f"worker {elastic.worker} ends, and the other workers go on without it: the script has called {method}() after "
        f"{type(error).__name__} has left step {step}, and {what}.  Let the error end the process: --max-restarts "
        "starts another worker, which gets the state of the others.  Catch what can be tried again in the microbatch",
        exc_info=error,
    )
    raise error if isinstance(error, SystemExit) else SystemExit(EXIT_OWN_FAULT)
