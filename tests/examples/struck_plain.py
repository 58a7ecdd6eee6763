"""``struck_plain.py STRIKES FOLDER STEPS``: examples/plain_pytorch.py with workers that kill themselves.

STRIKES: ``WORKER@STEP:PHASE,...``.  STEPS: a number; or ``WORKER+N``, N steps more than when that worker
(``joined``: the last of a launcher that joined in place of a lost one) came.
Whoever gets to the end leaves its state in FOLDER/worker-ID.pt.  Each worker of the launch begins with
other parameters.

microbatch   in the second microbatch of the step
rerun        in the first microbatch after the loss of a worker
reduce       when the sum has begun
reduced      when it has been made, and the coordinator has not been told
agree        when it has been told, and has not answered
update       when the step is committed
state        a newcomer, when it has been told who has the state (STEP: 1)
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch

from examples import plain_pytorch as example
from recover_megatron import ElasticDataParallel, run
from recover_megatron.elastic.run_state import Exchange
from recover_megatron.launch.workers.successors import JOINED_FROM
from tests.examples.striking import strike_in_sums, strikes_of

ME, STRIKES, FOLDER, STEPS = int(os.environ["RECOVER_WORKER_ID"]), *sys.argv[1:4]


class Strikes:
    """Those for this worker."""

    def __init__(self, elastic: ElasticDataParallel) -> None:
        self._mine = strikes_of(ME, STRIKES)
        self._elastic = elastic
        self._begun: tuple[int, int] = (0, 0)
        self._ran = 0
        strike_in_sums(self.at)
        fetch, update = Exchange.fetch, example.optimizer.step

        def fetched(*given: Any, **named: Any) -> Any:
            self.at("state")
            return fetch(*given, **named)

        def updated() -> None:
            self.at("update")
            update()

        Exchange.fetch, example.optimizer.step = fetched, updated  # type: ignore[method-assign, assignment]

    def at(self, phase: str) -> None:
        if (self._elastic.completed + 1, phase) in self._mine:
            os.kill(os.getpid(), signal.SIGKILL)

    def microbatch(self, step: int, j: int) -> torch.Tensor:
        now = step, self._elastic._session.epoch
        if now != self._begun:
            self._ran, before, self._begun = 0, self._begun, now
            if before[1] != now[1]:  # perhaps this worker has not begun the step in which the other one was lost
                self.at("rerun")
        self._ran += 1
        if self._ran == 2:
            self.at("microbatch")
        return example.microbatch(step, j)


def came(awaited: str, workers: Sequence[int]) -> bool:
    """Whether they are there: a question to which all workers have the same answer after the same step."""
    if awaited == "joined":
        return workers[-1] >= JOINED_FROM and len(workers) == int(os.environ["WORLD_SIZE"])
    return int(awaited) in workers


def main() -> None:
    with torch.no_grad():
        for parameter in example.model.parameters():
            parameter.add_(ME)  # worker 0's stay as they are, and count
    elastic = ElasticDataParallel(example.model, example.optimizer, microbatches=16)
    strikes = Strikes(elastic)
    awaited, _, more = STEPS.rpartition("+")
    last = 0 if awaited else int(more)
    for done in run(elastic, strikes.microbatch, last or 1 << 30):
        print(f"iteration {done.step} loss {done.loss!r}", flush=True)
        if awaited and not last and came(awaited, done.workers):
            last = done.step + int(more)
        if awaited and done.step == last:
            break
    torch.save(elastic.state_dict() | {"workers": elastic.workers}, os.path.join(FOLDER, f"worker-{ME}.pt"))
    if awaited:
        elastic.leave()


if __name__ == "__main__":
    main()
