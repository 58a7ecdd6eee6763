"""Megatron built by one worker alone, while the others train: a spare that is wanted in a position it has no model for.

pretrain() runs as at launch, with the rank of that position, up to train(): its groups hold nobody else (see `groups`),
so nothing is sent and nothing is waited for.  What it would learn from others there comes with the state later.

    load_checkpoint                      nothing is read: the state comes from a peer
    build_train_valid_test_data_loaders  whether there is data is what rank 0 says at launch: there is, they train
    append_to_progress_log               no job begins
    forget_megatron()                    before it is built once more in one process
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.training import get_args, training
from torch.distributed import distributed_c10d as c10d

from recover_megatron.instep.traffic import Mode
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.groups import Groups


def install(groups: Groups) -> None:
    """Wrap the seams; ``groups`` know whether this worker is building without the others."""

    def no_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            return (0, 0) if groups.alone else original(*args, **kwargs)

        return load_checkpoint

    def data_is_there(original: Callable[..., Any]) -> Callable[..., Any]:
        def build_train_valid_test_data_loaders(*args: Any, **kwargs: Any) -> Any:
            if groups.alone:
                get_args().do_train = True
            return original(*args, **kwargs)

        return build_train_valid_test_data_loaders

    def no_job_begins(original: Callable[..., Any]) -> Callable[..., Any]:
        def append_to_progress_log(*args: Any, **kwargs: Any) -> Any:
            # Not for good: with a place it waits for all others where they write of a checkpoint, as they do for it.
            return None if groups.traffic.mode is Mode.ALONE else original(*args, **kwargs)

        return append_to_progress_log

    monkeypatch.wrap(training, "append_to_progress_log", (), no_job_begins)
    monkeypatch.wrap(training, "load_checkpoint", ("ddp_model", "optimizer", "opt_param_scheduler"), no_checkpoint)
    providers = ("build_train_valid_test_datasets_provider",)
    monkeypatch.wrap(training, "build_train_valid_test_data_loaders", providers, data_is_there)


def forget_megatron() -> None:
    """Drop Megatron's globals and torch's groups; the model goes with whoever held it."""
    training.destroy_global_state()
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    world = c10d._world
    for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        known.clear()
    world.tags_to_pg.clear()
    c10d._update_default_pg(None)
    gc.collect()
    torch.cuda.empty_cache()
