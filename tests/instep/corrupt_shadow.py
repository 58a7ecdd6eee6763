"""pretrain_gpt_recover.py with a worker whose memory is bad: corrupt_shadow.py WORKER ITERATION flags...

After that iteration a moment is another one in the copy that it keeps of somebody else's part of the state.
"""

import os
import sys
from typing import Any

import torch
from megatron.training import get_args, training

import pretrain_gpt_recover

worker, iteration = sys.argv.pop(1), int(sys.argv.pop(1))
train_step = training.train_step


def corrupting_train_step(
    forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    result = train_step(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
    if get_args().curr_iteration + 1 == iteration:
        one = getattr(optimizer, "chained_optimizers", [optimizer])[0]
        fragments = one._copy_main_params_to_model_params.__self__
        _, shadowed = fragments.held
        with torch.no_grad():
            fragments.held[shadowed][0].state["exp_avg"].view(-1)[0] += 1.0
    return result


if os.environ["RANK"] == worker:
    # What --recover wraps is checked by its parameters: keep those of the original.
    corrupting_train_step.__wrapped__ = train_step  # type: ignore[attr-defined]
    training.train_step = corrupting_train_step
pretrain_gpt_recover.main()
