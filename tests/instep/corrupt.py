"""pretrain_gpt_recover.py with a worker whose memory is bad: corrupt.py WORKER ITERATION flags...

After that iteration one of its parameters is another one.
"""

import os
import sys
from typing import Any

import torch
from megatron.training import get_args, training

import pretrain_gpt_recover

worker, iteration = sys.argv.pop(1), int(sys.argv.pop(1))
train_step = training.train_step


def corrupting_train_step(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    result = train_step(forward_step_func, data_iterator, model, *args, **kwargs)
    if get_args().curr_iteration + 1 == iteration:
        with torch.no_grad():
            next(model[0].parameters()).view(-1)[0] += 1.0
    return result


if os.environ["RANK"] == worker:
    # What --recover wraps is checked by its parameters: keep those of the original.
    corrupting_train_step.__wrapped__ = train_step  # type: ignore[attr-defined]
    training.train_step = corrupting_train_step
pretrain_gpt_recover.main()
