"""pretrain_gpt_recover.py where every orphan finds its device broken when it comes out of the training."""

from __future__ import annotations

import torch

import pretrain_gpt_recover
from recover_megatron.megatron_hooks import rejoin


def check_device(device: torch.device) -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


rejoin.check_device = check_device
pretrain_gpt_recover.main()
