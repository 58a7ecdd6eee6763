"""Run pretrain_gpt_recover.py with a stand-in for W&B, which writes what it is told to a file of its own."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pretrain_gpt_recover


def init(**settings: Any) -> None:
    folder = Path(settings["dir"])
    path = folder / f"{os.getpid()}.jsonl"

    def log(values: dict[str, Any], step: int) -> None:
        row = {name: float(value) for name, value in values.items()}
        with path.open("a") as file:
            file.write(json.dumps([step, row]) + "\n")

    wandb.log = log  # type: ignore[attr-defined]


wandb = ModuleType("wandb")
wandb.init = init  # type: ignore[attr-defined]
wandb.finish = lambda *unused: None  # type: ignore[attr-defined]
wandb.config = {}  # type: ignore[attr-defined]
sys.modules["wandb"] = wandb
pretrain_gpt_recover.main()
