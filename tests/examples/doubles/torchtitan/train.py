"""A trainer of one process with torchtitan's methods, attributes and order of calls."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

ACCUMULATION = 8
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Optimizers:
    """Several in one, as torchtitan's container: no torch.optim.Optimizer for its caller."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.inner = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class Metrics:
    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, mean: float, most: float, grad_norm: float) -> None:
        print(f"iteration {step} loss {mean!r}", flush=True)


class Trainer:
    def __init__(self, job_config: SimpleNamespace) -> None:
        self.job_config = job_config
        dist.init_process_group("gloo")  # its variables: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
        assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 1
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
        self.model_parts = [model]
        self.gradient_accumulation_steps = ACCUMULATION
        self.optimizers = Optimizers(model)
        self.lr_schedulers = torch.optim.lr_scheduler.LambdaLR(self.optimizers.inner, lambda step: 1 / (1 + 0.1 * step))
        self.metrics_processor = Metrics()
        self.dataloader = batches()
        self.step = 0

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        yield from data_iterable

    def forward_backward_step(self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        loss = (self.model_parts[0](input_dict["input"]) - labels).square().mean() / self.gradient_accumulation_steps
        loss.backward()
        return loss

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        self.optimizers.zero_grad()
        losses = [self.forward_backward_step(*next(data_iterator)).detach() for _ in range(ACCUMULATION)]
        norm = torch.nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), self.job_config.training.max_norm)
        self.optimizers.step()
        self.lr_schedulers.step()
        loss = float(torch.stack(losses).sum())
        self.metrics_processor.log(self.step, loss, loss, float(norm))

    def train(self) -> None:
        data_iterator = self.batch_generator(self.dataloader)
        while self.step < self.job_config.training.steps:
            self.step += 1
            self.train_step(data_iterator)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    def close(self) -> None:
        dist.destroy_process_group()


def batches() -> Iterator[Batch]:
    drawn = torch.Generator().manual_seed(3)
    while True:
        x = torch.randn(8, 16, dtype=torch.float64, generator=drawn)
        yield {"input": x}, x.sum(1, keepdim=True)
