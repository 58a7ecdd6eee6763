"""An interleaved pipeline runs whatever number of microbatches a replica has: its groups get a size that allows it.

The schedules read the size from the model's configuration when a pass begins, and nothing else does (CUDA graphs, which
were captured for one size, are off with --recover).  Microbatches go through a chunk of layers in the same order
whatever the size, so the gradients are the same to the last bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core.utils import get_model_config

from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.workload.interleaved import group_size


def grouped(model: Any, count: int) -> AbstractContextManager[None]:
    """Let Megatron's schedule run ``count`` microbatches through ``model`` (chunks, or one model) while it is entered.

    Raises ValueError for fewer than an interleaved pipeline of so many stages can run.
    """
    if not isinstance(model, list) or len(model) < 2:
        return nullcontext()
    config, name = get_model_config(model[0]), "microbatch_group_size_per_vp_stage"
    stages, usual = config.pipeline_model_parallel_size, getattr(config, name)
    return monkeypatch.replaced(config, name, group_size(count, stages, usual or stages))
