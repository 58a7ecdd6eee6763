"""``struck_hsdp.py STRIKES FOLDER SHARDS ITERATIONS``: examples/hsdp_pytorch.py with workers that kill themselves.

STRIKES: ``WORKER@ITERATION:PHASE,...``.  Whoever gets to the end leaves its shard in FOLDER/shard-WORKER.pt.

forward, backward   in the second microbatch of the iteration, in the middle of the model
rerun               in the first microbatch after the loss of a worker
reduce              when the sum over the shard groups has begun
reduced             when it has been made, and the coordinator has not been told
agree               when it has been told, and has not answered
step                when the iteration is committed
"""

import os
import signal
import sys
from typing import Any

import torch

from examples import hsdp_pytorch as example
from tests.examples.striking import strike_in_sums, strikes_of


class Struck(example.Trainer):
    def __init__(self, column: Any) -> None:
        super().__init__(column)
        self.rerun, self.members = False, list[int]()
        self.model[1].register_forward_hook(self._in_the_model)
        strike_in_sums(self.at)

    def at(self, phase: str) -> None:
        if (self.iteration, phase) in STRIKES:
            os.kill(os.getpid(), signal.SIGKILL)

    def _in_the_model(self, module: Any, given: Any, output: torch.Tensor) -> None:
        if self.rerun:
            self.at("rerun")
        if len(self.ran) == 1:
            self.at("forward")
            output.register_hook(lambda gradient: self.at("backward"))

    def finish_iteration(self) -> None:
        # Perhaps this worker has not begun the iteration in which the other one was lost.
        self.rerun, self.members = self.column.members != self.members, self.column.members
        super().finish_iteration()

    def step(self) -> None:
        self.at("step")
        super().step()

    def train(self, iterations: int) -> None:
        super().train(iterations)
        shards = [parameter.to_local().detach() for parameter in self.model.parameters()]
        torch.save(shards, os.path.join(FOLDER, f"shard-{self.column.me}.pt"))


if __name__ == "__main__":
    STRIKES, FOLDER = strikes_of(int(os.environ["RANK"]), sys.argv[1]), sys.argv[2]
    example.Trainer = Struck  # type: ignore[misc]
    example.main(int(sys.argv[3]), int(sys.argv[4]))
