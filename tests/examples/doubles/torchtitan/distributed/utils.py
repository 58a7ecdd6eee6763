"""Clipping, as torchtitan does it where there is no pipeline."""

from __future__ import annotations

import torch


def clip_grad_norm_(parameters: list[torch.Tensor], max_norm: float, foreach: bool | None = None) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=foreach)
