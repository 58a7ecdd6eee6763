"""What of the configuration the trainer reads."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

TORCH_DTYPE_MAP = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ConfigManager:
    """``parse_args`` takes the number of steps."""

    def parse_args(self) -> SimpleNamespace:
        training = SimpleNamespace(steps=int(sys.argv[1]), max_norm=1.0, mixed_precision_param="float32")
        return SimpleNamespace(training=training)
