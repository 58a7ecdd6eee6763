import os

import torch
from megatron.bridge.training.config import runtime_config_update
from megatron.bridge.training.setup import setup
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.train import finish, train


def pretrain(config, forward_step_func, callbacks=None):
    runtime_config_update(config)
    state = GlobalState(config)
    try:
        made = setup(state)
        train(
            forward_step_func, made.model, made.optimizer, made.scheduler, made.train_data_iterator,
            made.valid_data_iterator, state, made.checkpoint_manager, made.pg_collection, callback_manager=None,
        )  # fmt: skip
        if folder := os.environ.get("PARAMETERS"):
            torch.save(dict(made.model[0].named_parameters()), f"{folder}/{os.environ['RANK']}.pt")
        finish(state)
    except BaseException:
        _cleanup_after_pretrain_failure(state, True)
        raise
    _maybe_destroy_process_group(True)


def _cleanup_after_pretrain_failure(state, should_destroy_process_group):
    _maybe_destroy_process_group(should_destroy_process_group, synchronize=False, abort=True)


def _maybe_destroy_process_group(should_destroy, *, synchronize=True, abort=False):
    if should_destroy and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
