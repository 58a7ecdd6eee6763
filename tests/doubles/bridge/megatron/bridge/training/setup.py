from types import SimpleNamespace

from megatron.bridge.data.loaders import datasets, setup_data_iterators
from megatron.bridge.training.checkpointing import DefaultCheckpointManager
from megatron.bridge.training.initialize import initialize_megatron
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def append_to_progress_log(save_dir, string, barrier=True):
    pass


def setup(
    state,
    train_valid_test_datasets_provider=datasets,
    get_embedding_ranks=None,
    get_position_embedding_ranks=None,
    restart_store=None,
    callback_manager=None,
):
    cfg = state.cfg
    groups = initialize_megatron(cfg)
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    bare = GPTModel(cfg.model, spec, cfg.model.vocab_size, cfg.model.seq_length)
    model = [DistributedDataParallel(cfg.model, cfg.ddp, bare)]
    cfg.model.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(cfg.optimizer, model)
    cfg.model.grad_scale_func = optimizer.scale_loss
    rate, decay = cfg.optimizer.lr, 0.01
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, rate, rate, 0, 1000, "constant", decay, decay, 1000, "constant",
        use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
    )  # fmt: skip
    manager = DefaultCheckpointManager()
    train, valid = setup_data_iterators(cfg, state.train_state, train_valid_test_datasets_provider, groups.dp)
    return SimpleNamespace(
        state=state, model=model, optimizer=optimizer, scheduler=scheduler, train_data_iterator=train,
        valid_data_iterator=valid, checkpoint_manager=manager, pg_collection=groups,
    )  # fmt: skip
