"""pretrain_gpt_recover.py that prints, after each update, the largest attention logits by which Megatron is to clip."""

import json
from typing import Any

from megatron.core import parallel_state
from megatron.training import get_args, training

import pretrain_gpt_recover

clip_qk = training.clip_qk


def printing(model: Any, *args: Any, **kwargs: Any) -> Any:
    found = [
        module.current_max_attn_logits.tolist()
        for chunk in model
        for module in chunk.modules()
        if getattr(module, "current_max_attn_logits", None) is not None
    ]
    place = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    print(f"maxima: {json.dumps([get_args().curr_iteration + 1, place, found])}", flush=True)
    return clip_qk(model, *args, **kwargs)


training.clip_qk = printing

pretrain_gpt_recover.main()
