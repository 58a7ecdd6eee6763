"""pretrain_gpt_recover.py with a worker whose memory is bad: corrupt.py WHAT WORKER ITERATION flags...

parameter        after that iteration one of its parameters is another one
shadow           ... a moment in the copy that it keeps of somebody else's part of the state
snapshot-PART    before that iteration a byte changes in that part of the newest snapshot that it holds
"""

import gc
import os
import sys
from typing import Any

import torch
from megatron.training import get_args, training

import pretrain_gpt_recover
from recover_megatron.instep.snapshots import SnapshotStore
from recover_megatron.instep.state_holder import flatten
from tests.harness.patience import patient

what, worker, iteration = sys.argv.pop(1), sys.argv.pop(1), int(sys.argv.pop(1))
train_step = training.train_step


def corrupt_snapshot(part: int) -> None:
    (store,) = (one for one in gc.get_objects() if isinstance(one, SnapshotStore))
    assert store._job.over.wait(patient(60))
    newest = max(one.iteration for one in store._held)
    (held,) = (one for one in store._held if (one.part, one.iteration) == (part, newest))
    next(tensor for tensor in flatten(held.tree["state"])[1] if tensor.dim()).view(torch.uint8).view(-1)[0] ^= 1


def corrupt_shadow(optimizer: Any) -> None:
    one = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    fragments = one._copy_main_params_to_model_params.__self__
    _, shadowed = fragments.held
    fragments.held[shadowed][0].state["exp_avg"].view(-1)[0] += 1.0


def corrupting_train_step(
    forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    now = get_args().curr_iteration + 1 == iteration
    with torch.no_grad():
        if now and what.startswith("snapshot"):
            corrupt_snapshot(int(what.partition("-")[2]))
    result = train_step(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
    with torch.no_grad():
        if now and what == "shadow":
            corrupt_shadow(optimizer)
        if now and what == "parameter":
            next(model[0].parameters()).view(-1)[0] += 1.0
    return result


if os.environ["RANK"] == worker and "RECOVER_JOIN" not in os.environ:
    # What --recover wraps is checked by its parameters: keep those of the original.
    corrupting_train_step.__wrapped__ = train_step  # type: ignore[attr-defined]
    training.train_step = corrupting_train_step
pretrain_gpt_recover.main()
