"""pretrain_gpt_recover.py with a worker whose host memory is bad: corrupt_snapshot.py WORKER ITERATION PART flags...

Before that iteration a byte changes in that part of the newest snapshot that the worker holds.
"""

import gc
import os
import sys
from typing import Any

import torch
from megatron.training import get_args, training

import pretrain_gpt_recover
from recover_megatron.instep.snapshots import SnapshotStore
from recover_megatron.instep.transfer import flatten
from tests.harness.patience import patient

worker, iteration, part = sys.argv.pop(1), int(sys.argv.pop(1)), int(sys.argv.pop(1))
train_step = training.train_step


def corrupting_train_step(*args: Any, **kwargs: Any) -> Any:
    if get_args().curr_iteration + 1 == iteration:
        (store,) = (one for one in gc.get_objects() if isinstance(one, SnapshotStore))
        assert store._job.over.wait(patient(60))
        newest = max(one.iteration for one in store._held)
        (held,) = (one for one in store._held if (one.part, one.iteration) == (part, newest))
        with torch.no_grad():
            next(tensor for tensor in flatten(held.tree["state"])[1] if tensor.dim()).view(torch.uint8).view(-1)[0] ^= 1
    return train_step(*args, **kwargs)


if os.environ["RANK"] == worker and "RECOVER_JOIN" not in os.environ:
    # What --recover wraps is checked by its parameters: keep those of the original.
    corrupting_train_step.__wrapped__ = train_step  # type: ignore[attr-defined]
    training.train_step = corrupting_train_step
pretrain_gpt_recover.main()
