"""pretrain_gpt_recover.py whose users reach over replicas: reaching.py WHERE flags...

loss        the loss function averages what it logs over the data-parallel group, in the step
optimizer   from the third iteration on the last stage takes a maximum over replicas before the optimizer's step
log         the last stage sums two things after each step, in place, and the stages meet in between; it prints them,
            and worker 3 kills itself before the second sum of the third iteration
"""

import os
import signal
import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.training import get_args, training

import pretrain_gpt_recover
from recover_megatron.megatron_hooks.entry import gpt_script

where = sys.argv.pop(1)


def data_parallel() -> Any:
    return parallel_state.get_data_parallel_group()


if where == "loss":
    loss_func = gpt_script.loss_func

    def averaging(*args: Any, **kwargs: Any) -> Any:
        loss, tokens, logged = loss_func(*args, **kwargs)
        torch.distributed.all_reduce(loss.detach().clone(), group=data_parallel())
        return loss, tokens, logged

    gpt_script.loss_func = averaging

if where == "optimizer":
    step = megatron_optimizer.FP32Optimizer.step_with_ready_grads

    def stepping(self: Any) -> Any:
        if get_args().curr_iteration >= 2 and parallel_state.is_pipeline_last_stage():
            torch.distributed.all_reduce(torch.ones(1), op=torch.distributed.ReduceOp.MAX, group=data_parallel())
        return step(self)

    megatron_optimizer.FP32Optimizer.step_with_ready_grads = stepping

if where == "log":
    training_log = training.training_log

    def logging(*args: Any, **kwargs: Any) -> Any:
        result = training_log(*args, **kwargs)
        for name in ("first", "second"):
            value = torch.ones(1)
            if (os.environ["RANK"], name, get_args().curr_iteration) == ("3", "second", 2):
                os.kill(os.getpid(), signal.SIGKILL)
            if parallel_state.is_pipeline_last_stage():
                torch.distributed.all_reduce(value, group=data_parallel())
            torch.distributed.all_reduce(value, group=parallel_state.get_pipeline_model_parallel_group())
            print(f"summed {name} in {get_args().curr_iteration + 1}: {value.item():g}", flush=True)
        return result

    logging.__wrapped__ = training_log  # type: ignore[attr-defined]
    training.training_log = logging

pretrain_gpt_recover.main()
