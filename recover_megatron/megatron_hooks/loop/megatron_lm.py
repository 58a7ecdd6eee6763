"""Seams and services of Megatron-LM's training loop, ``megatron.training``, for ``recover_megatron.integrate``."""

from __future__ import annotations

import time

from recover_megatron.integrate import Loop, Seam
from recover_megatron.megatron_hooks.monkeypatch import SUPPORTED

TRAINING = "megatron.training.training"
CHECKPOINTING = "megatron.training.checkpointing"


class Services:
    """Megatron-LM's ``integrate.Services``.  Megatron is imported lazily, because a script reads only ``SEAMS``."""

    def operations(self, samples: int) -> float:
        from megatron.training import get_args, training

        return float(training.num_floating_point_operations(get_args(), samples))

    def running(self, seconds: float) -> float:
        from megatron.training import training

        now = time.time()
        training._TRAIN_START_TIME = min(training._TRAIN_START_TIME, now - seconds)
        return now - training._TRAIN_START_TIME

    def finish_saves(self) -> None:
        from megatron.training import training

        training.maybe_finalize_async_save(blocking=True)

    def forget(self) -> None:
        from megatron.training import training

        training.destroy_global_state()


LOOP_PARAMETERS = ("forward_step_func", "model", "optimizer", "opt_param_scheduler", "train_data_iterator")
RESULTS_PARAMETERS = ("prefix", "forward_step_func", "data_iterator", "model", "iteration")
SAVED_PARAMETERS = ("checkpoint_path", "tracker_filename", "save_dir", "iteration")
PROGRESS_PARAMETERS = ("save_dir", "string", "barrier")
STEP_PARAMETERS = ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config")

SEAMS = {
    "initialize": [Seam("megatron.training.initialize", "_initialize_distributed", ("get_embedding_ranks",))],
    "loader": [Seam(TRAINING, "build_pretraining_data_loader", ("dataset", "consumed_samples"))],
    "endless": [Seam(TRAINING, "cyclic_iter")],
    "train": [Seam(TRAINING, "train", (*LOOP_PARAMETERS, "valid_data_iterator"))],
    "train_step": [Seam(TRAINING, "train_step", STEP_PARAMETERS)],
    "schedule": [Seam(TRAINING, "get_forward_backward_func")],
    "log": [Seam(TRAINING, "training_log", ("loss_dict", "total_loss_dict", "learning_rate", "iteration"))],
    "skipped_step": [Seam(TRAINING, "dummy_train_step", ("data_iterator",))],
    "evaluate": [Seam(TRAINING, "evaluate", ("forward_step_func", "data_iterator", "model"))],
    "evaluations": [Seam(TRAINING, "evaluate_and_print_results", RESULTS_PARAMETERS)],
    "save": [Seam(TRAINING, "save_checkpoint", ("iteration", "model", "optimizer"))],
    "finalize_saves": [Seam(TRAINING, "maybe_finalize_async_save", ("blocking", "terminate"))],
    "checkpoint_folder": [Seam(CHECKPOINTING, "get_checkpoint_name", ("checkpoints_path", "iteration", "release"))],
    "written": [Seam(CHECKPOINTING, "get_checkpoint_tracker_filename", ("checkpoints_path",))],
    "schedule_save": [Seam(CHECKPOINTING, "schedule_async_save", ("async_request",))],
    "saved": [Seam("megatron.training.wandb_utils", "on_save_checkpoint_success", SAVED_PARAMETERS)],
    "random_states": [Seam(CHECKPOINTING, "get_rng_state", ("ckpt_format", "tp_group", "pp_group"))],
    "load": [Seam(TRAINING, "load_checkpoint", ("ddp_model", "optimizer", "opt_param_scheduler"))],
    "loaders": [Seam(TRAINING, "build_train_valid_test_data_loaders", ("build_train_valid_test_datasets_provider",))],
    "progress_log": [
        Seam(module, "append_to_progress_log", PROGRESS_PARAMETERS) for module in (TRAINING, CHECKPOINTING)
    ],
    "throughputs": [Seam(TRAINING, "compute_throughputs_and_append_to_progress_log")],
    "world_size": [Seam("megatron.training.utils.log_utils", "safe_get_world_size")],
    "weight_hashes": [Seam(TRAINING, "check_param_hashes_across_dp_replicas", ("model", "cross_check"))],
    "parameters_norm": [Seam(TRAINING, "calc_params_l2_norm", ("model", "force_create_fp32_copy"))],
    "sequence_lengths": [Seam(TRAINING, "consume_seqlen_stats_in_iteration")],
}

MEGATRON_LM = Loop("Megatron-LM", SUPPORTED, SEAMS, Services())
