"""A stand-in for accelerate where it is not installed: the seams that examples/accelerate_loop.py uses, and no more."""

from __future__ import annotations

import os
from typing import Any

import torch


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer that is not the one it wraps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class Accelerator:
    """Of one process."""

    def __init__(self, cpu: bool = False, gradient_accumulation_steps: int = 1) -> None:
        assert cpu
        assert "LOCAL_RANK" not in os.environ, "accelerate would make a process group of all workers"
        self.device = torch.device("cpu")
        self.gradient_accumulation_steps = gradient_accumulation_steps

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        return model, AcceleratedOptimizer(optimizer)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.gradient_accumulation_steps).backward()

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
