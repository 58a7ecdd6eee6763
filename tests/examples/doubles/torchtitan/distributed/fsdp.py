"""Sharding, which the trainer always asks for: with one process, too."""

from __future__ import annotations

from typing import Any

import torch


def fully_shard(module: torch.nn.Module, **how: Any) -> torch.nn.Module:
    raise AssertionError("the model is to be whole")


def apply_fsdp(module: torch.nn.Module) -> None:
    fully_shard(module, mesh=None)
