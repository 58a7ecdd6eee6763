"""pretrain_gpt_recover.py, loading a checkpoint: what stock Megatron's distributed optimizer then holds, and no step.

``loaded_state.py OUT ...``: rank 0 writes OUT, {"step": the iteration, "state": {"parameter name tensor": values}}.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.training import get_args, training

import pretrain_gpt_recover

OUT = Path(sys.argv.pop(1))


def train(forward_step_func: Any, model: Any, optimizer: Any, *unused: Any, **named: Any) -> Any:
    whole = model[0].sharded_state_dict()
    names = {id(value.data): value.key for value in whole.values() if isinstance(value, ShardedTensor)}
    state: dict[str, list[float]] = {}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        everything = one.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
        for number, buffer in enumerate(one.buffers):
            (tensors,) = everything[number].values()
            starts, offset = {}, 0
            for bucket in buffer.buckets:
                starts[bucket.bucket_id], offset = offset - bucket.offset, offset + bucket.numel_unpadded
            for parameter, (start, stop, bucket) in buffer.param_index_map.items():
                at = starts[bucket]
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    name = f"{names[id(parameter)]} {key}"
                    state[name] = tensors[key][at + start : at + stop].tolist()
    if dist.get_rank() == 0:
        OUT.write_text(json.dumps({"step": get_args().iteration, "state": state}))
    dist.barrier()
    sys.exit(0)


training.train = train
pretrain_gpt_recover.main()
