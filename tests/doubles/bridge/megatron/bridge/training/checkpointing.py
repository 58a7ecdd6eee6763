import os

import torch


class DefaultCheckpointManager:
    """Calls the functions of this module."""

    def save(self, ctx):
        save_checkpoint(**ctx)


def get_checkpoint_name(checkpoints_path, iteration, release=False):
    return os.path.join(checkpoints_path, f"iter_{iteration:07d}")


def get_checkpoint_train_state_filename(checkpoints_path, prefix=None):
    return os.path.join(checkpoints_path, "train_state.pt" if prefix is None else f"{prefix}_train_state.pt")


def get_checkpoint_run_config_filename(checkpoints_path):
    return os.path.join(checkpoints_path, "run_config.yaml")


def save_tokenizer_assets(tokenizer, tokenizer_config, checkpoint_path):
    os.makedirs(os.path.join(checkpoint_path, "tokenizer"), exist_ok=True)


def load_checkpoint(state, model, optimizer, opt_param_scheduler):
    return 0, 0


def save_checkpoint(state, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far):
    """The parameters, by rank 0; the shards of others are no matter here."""
    save_dir, step = state.cfg.checkpoint.save, state.train_state.step
    name, rank = get_checkpoint_name(save_dir, step), torch.distributed.get_rank()
    if rank == 0:
        os.makedirs(name, exist_ok=True)
        torch.save({"model": model[0].state_dict()}, os.path.join(name, "model.pt"))
    torch.distributed.barrier()
    if rank == 0:
        local = get_checkpoint_train_state_filename(name)
        latest, config = (
            get_checkpoint_train_state_filename(save_dir, "latest"),
            get_checkpoint_run_config_filename(name),
        )
        for file in (local, latest, config):
            torch.save({"step": step}, file)
        save_tokenizer_assets(None, None, name)
    torch.distributed.barrier()
