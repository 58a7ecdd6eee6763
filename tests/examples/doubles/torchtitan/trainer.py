"""A trainer of one process with torchtitan's methods, attributes and order of calls."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import fsdp

ACCUMULATION, WORDS = 8, 12
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Optimizers(torch.optim.Optimizer):
    """Several in one, as torchtitan's container, whose state is there from the first step on, or when it is loaded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        super().__init__(list(model.parameters()), {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Flat: ``number.moment``, and the rate."""
        state = self.inner.state_dict()["state"]
        moments = {f"{number}.{name}": value for number, its in state.items() for name, value in its.items()}
        return {"lr": self.inner.param_groups[0]["lr"], **moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Only into state that is there: where there is none a step without a rate makes it, if no gradient is set."""
        whole = self.inner.state_dict()
        if not whole["state"] and all(parameter.grad is None for parameter in self.inner.param_groups[0]["params"]):
            for group in self.inner.param_groups:
                rate, group["lr"] = group["lr"], 0.0
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
                self.inner.step()
                group["lr"] = rate
            self.inner.zero_grad()
            whole = self.inner.state_dict()
        for number, its in whole["state"].items():
            its.update({name: state_dict[f"{number}.{name}"] for name in its})
        whole["param_groups"][0]["lr"] = state_dict["lr"]
        self.inner.load_state_dict(whole)


class Rates(torch.optim.lr_scheduler.LambdaLR):
    def get_metrics(self) -> dict[str, float]:
        return {"lr": self.get_last_lr()[0]}


class Metrics:
    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, mean: float, most: float, grad_norm: float, extra_metrics: dict[str, Any]) -> None:
        assert extra_metrics["n_tokens_seen"] == step * ACCUMULATION * WORDS
        print(f"iteration {step} loss {mean!r}", flush=True)


class Checkpointer:
    def save(self, step: int, last_step: bool = False) -> bool:
        return False

    def maybe_wait_for_staging(self) -> None:
        pass


class Trainer:
    def __init__(self, config: SimpleNamespace) -> None:
        self.config = config
        dist.init_process_group("gloo")  # its variables: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
        assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 1
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 6)).double()
        fsdp.apply_fsdp(model)
        self.device = torch.device("cpu")
        self.model_parts = [model]
        self.gradient_accumulation_steps = ACCUMULATION
        self.optimizers = Optimizers(model)
        self.lr_schedulers = Rates(self.optimizers.inner, lambda step: 1 / (1 + 0.1 * step))
        self.metrics_processor = Metrics()
        self.checkpointer = Checkpointer()
        self.dataloader = batches()
        self.step, self.ntokens_seen = 0, 0

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        yield from data_iterable

    def forward_backward_step(
        self, *, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        self.ntokens_seen += labels.numel()
        told = self.model_parts[0](input_dict["input"])
        loss = torch.nn.functional.cross_entropy(told, labels, reduction="sum", ignore_index=IGNORE_INDEX)
        loss = loss / global_valid_tokens
        loss.backward()
        return loss

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        raise NotImplementedError("the adapter's")

    def train(self) -> None:
        data_iterator = self.batch_generator(self.dataloader)
        while self.step < self.config.training.steps:
            self.step += 1
            self.train_step(data_iterator)
            self.checkpointer.save(self.step, last_step=self.step == self.config.training.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]

    def close(self) -> None:
        dist.destroy_process_group()


def batches() -> Iterator[Batch]:
    """Some of whose labels do not count, so that microbatches have other numbers of those that do."""
    drawn = torch.Generator().manual_seed(3)
    while True:
        labels = torch.randint(0, 6, (WORDS,), generator=drawn)
        labels[torch.rand(WORDS, generator=drawn) < 0.3] = IGNORE_INDEX
        yield {"input": torch.randn(WORDS, 16, dtype=torch.float64, generator=drawn)}, labels
