"""``situations.py OUT STEPS HELD STRIKES``: an elastic training with what users' loops have in them, on whole numbers.

Random numbers in microbatches, in ``before_update`` and in the loop; a layer that is frozen after step 4, one that is
unfrozen after step 6, one that only even steps use; an order of samples that is drawn anew after every third step; a
checkpoint every sixth step, which is loaded by worker 0 alone.  Gradients are whole numbers over 4, so sums are exact
in any order and two runs are equal bit for bit.

HELD: the step after which nobody goes on before OUT/go is there.  STRIKES: "WORKER@STEP,...": this worker kills itself
when it has to save after that step.  A worker writes one line for each step: what it has and what it draws.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recover_megatron import ElasticDataParallel, run

out, steps, held = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
strikes = {tuple(map(int, strike.split("@"))) for strike in sys.argv[4].split(",") if strike}
M = 4


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early, self.late, self.even, self.always = (torch.nn.Parameter(torch.ones(8).double()) for _ in range(4))
        self.late.requires_grad_(False)


class Order:
    """The order of the samples: a state that each worker changes alike."""

    samples = torch.empty(0)

    def draw(self) -> None:
        self.samples = torch.randperm(3 * M)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]


torch.manual_seed(1)
net, order = Net(), Order()
order.draw()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.125, weight_decay=0.5)


def microbatch(step: int, j: int) -> torch.Tensor:
    sample = int(order.samples[(M * (step - 1) + j) % len(order.samples)])
    x = torch.nn.functional.dropout(torch.arange(8).double() + sample)  # twice the number, or zero
    x = x + random.randrange(5) + np.random.randint(5)
    used = net.early + net.late + net.always
    return ((used if step % 2 else used + net.even) * x).sum()


def noise() -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad += torch.randn(8).double()


def bits(*tensors: torch.Tensor) -> list[str]:
    return [tensor.detach().double().numpy().tobytes().hex() for tensor in tensors]


elastic = ElasticDataParallel(
    net, optimizer, microbatches=M, state={"order": order}, before_update=noise, verify_interval=1
)
checkpoint = out / "checkpoint.pt"
if checkpoint.exists() and os.environ["RANK"] == "0":
    elastic.load_state_dict(torch.load(checkpoint))


def save() -> None:
    if (elastic.worker, elastic.completed) in strikes:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.save(elastic.state_dict(), out / "new.pt")
    elastic.check()
    (out / "new.pt").rename(checkpoint)


for done in run(elastic, microbatch, steps):
    if done.step == 4:
        net.early.requires_grad_(False)
    if done.step == 6:
        net.late.requires_grad_(True)
    if done.step % 3 == 0:
        order.draw()
    if done.step % 6 == 0:
        elastic.lead(save)
    drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]
    print(json.dumps([done.step, done.loss, bits(*net.parameters(), order.samples), drawn]), flush=True)
    while elastic.completed >= held and not (out / "go").exists():
        time.sleep(0.01)
print(json.dumps(["end", elastic.completed, bits(*net.parameters(), order.samples), []]), flush=True)
