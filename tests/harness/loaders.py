"""A process of a DataLoader that is killed in the middle of an optimizer's update."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch


def kill(process: Any) -> None:
    """SIGKILL it; its SIGCHLD has come when this returns, and torch's handler of it runs next."""
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # join() would hide it from torch


def strike_in_update(monkeypatch: pytest.MonkeyPatch, process: Callable[[], Any]) -> None:
    """Have ``process`` killed in each ``step`` of a torch.optim.SGD, after it has updated a group of parameters."""
    module = importlib.import_module("torch.optim.sgd")
    update = module.sgd

    def sgd(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        kill(process())

    monkeypatch.setattr(module, "sgd", sgd)


def groups(*parameters: torch.Tensor) -> list[dict[str, Any]]:
    """A group for each, for an optimizer."""
    return [{"params": [parameter]} for parameter in parameters]
