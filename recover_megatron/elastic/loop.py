"""All steps of a training, and how a worker's part in it ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from recover_megatron.elastic.data_parallel import ElasticDataParallel, Microbatch, StepResult
from recover_megatron.logger import get_logger
from recover_megatron.membership.errors import EXIT_FENCED, CoordinatorLost, Fenced

log = get_logger(__name__)


def run(elastic: ElasticDataParallel, microbatch: Microbatch, steps: int) -> Iterator[StepResult]:
    """Train until step ``steps`` is finished, and yield each step when it is finished and applied here.

    What stands in the body of the ``for`` loop is done by every worker between two steps (a scheduler's step, a line in
    a log, an evaluation); what only one is to do is for whom ``elastic.leads``.  A worker that comes into the running
    job gets the state of the others and begins with the step in which they are: it yields no step from before.

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
