"""pretrain_gpt_recover.py with parameters and gradients in float64, for which Megatron has no flag."""

from typing import Any

import torch
from megatron.core.optimizer import optimizer
from megatron.training import arguments

import pretrain_gpt_recover

original = arguments.validate_args


def validate_args(args: Any, *more: Any, **named: Any) -> Any:
    args = original(args, *more, **named)
    args.params_dtype = torch.float64
    return args


arguments.validate_args = validate_args
optimizer.clip_grad_by_total_norm_fp32 = lambda *unused, **named: None  # it knows float32 alone; no norm is above 1
torch.set_default_dtype(torch.float64)  # the layer norms'
pretrain_gpt_recover.main()
