"""``situations.py OUT STRIKES``: an elastic training with what users' loops have in them, on whole numbers.

Random numbers in microbatches, in ``before_update`` and in the loop; a layer that is frozen after step 4, one that is
unfrozen after step 6, one that only even steps use; an order of samples that is drawn anew after every third step; a
checkpoint every sixth step, which is loaded by worker 0 alone.  Gradients are whole numbers over 4, so sums are exact
in any order and two runs are equal bit for bit.

STRIKES: "WORKER@STEP,...": this worker kills itself when it has to save after that step.  A worker writes one line for
each step: what it has and what it draws.  After step HELD nobody goes on before OUT/go is there.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recover_megatron import ElasticDataParallel, run

STEPS, HELD, M = 12, 9, 4
Line = list[Any]
"""[step, or "end"; parameters and order, bit for bit; what is drawn then; loss]."""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early, self.late, self.even, self.always = (torch.nn.Parameter(torch.ones(8).double()) for _ in range(4))
        self.late.requires_grad_(False)


class Loop:
    """The training, but for who runs which microbatch."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.125, weight_decay=0.5)
        self.order = torch.randperm(3 * M)

    def state_dict(self) -> dict[str, Any]:
        """The order of the samples, a state that each worker changes alike."""
        return {"order": self.order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.order = state_dict["order"]

    def microbatch(self, step: int, j: int) -> torch.Tensor:
        sample = int(self.order[(M * (step - 1) + j) % len(self.order)])
        x = torch.nn.functional.dropout(torch.arange(8).double() + sample)  # twice the number, or zero
        x = x + random.randrange(5) + np.random.randint(5)
        used = self.net.early + self.net.late + self.net.always
        return ((used if step % 2 else used + self.net.even) * x).sum()

    def noise(self) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad += torch.randn(8).double()

    def between(self, step: int, loss: float, lead: Callable[[], Any]) -> Line:
        """The body of the loop after ``step``."""
        if step == 4:
            self.net.early.requires_grad_(False)
        if step == 6:
            self.net.late.requires_grad_(True)
        if step % 3 == 0:
            self.order = torch.randperm(3 * M)
        if step % 6 == 0:
            lead()
        return [step, self.bits(), [random.random(), float(np.random.rand()), torch.rand(1).item()], f"{loss:.10e}"]

    def bits(self) -> list[str]:
        tensors = [*self.net.parameters(), self.order]
        return [tensor.detach().double().numpy().tobytes().hex() for tensor in tensors]


def main(out: Path, strikes: str) -> None:
    loop, checkpoint = Loop(), out / "checkpoint.pt"
    elastic = ElasticDataParallel(
        loop.net, loop.optimizer, microbatches=M, state={"loop": loop}, before_update=loop.noise, verify_interval=1
    )
    if checkpoint.exists() and os.environ["RANK"] == "0":
        elastic.load_state_dict(torch.load(checkpoint))

    def save() -> None:
        if f"{elastic.worker}@{elastic.completed}" in strikes.split(","):
            os.kill(os.getpid(), signal.SIGKILL)
        new = out / f"new-{elastic.worker}.pt"
        torch.save(elastic.state_dict(), new)
        elastic.check()
        new.rename(checkpoint)

    for done in run(elastic, loop.microbatch, STEPS):
        line = loop.between(done.step, done.loss, lambda: elastic.lead(save))
        print(json.dumps(line), flush=True)
        while done.step >= HELD and not (out / "go").exists():
            time.sleep(0.01)
    print(json.dumps(["end", loop.bits(), [], ""]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
