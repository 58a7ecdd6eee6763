"""Nobody is told of checkpoints."""


def on_save_checkpoint_success(checkpoint_path, save_dir, iteration, comet_logger=None):
    pass
