import os

import torch
from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine


def initialize_megatron(cfg):
    num_microbatches_calculator.init_num_microbatches_calculator(
        int(os.environ["RANK"]), None, cfg.train.global_batch_size, cfg.train.micro_batch_size, cfg.data_parallel_size
    )
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    groups = _initialize_distributed(
        model_config=cfg.model,
        dist_config=cfg.dist,
        num_distributed_optimizer_instances=1,
        get_embedding_ranks=None,
        get_position_embedding_ranks=None,
    )
    torch.manual_seed(cfg.rng.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(cfg.rng.seed)
    return groups


def _initialize_distributed(
    model_config,
    dist_config,
    num_distributed_optimizer_instances,
    get_embedding_ranks,
    get_position_embedding_ranks,
    restart_store=None,
    use_inprocess_restart=False,
):
    torch.distributed.init_process_group(
        backend=dist_config.distributed_backend,
        world_size=int(os.environ["WORLD_SIZE"]),
        rank=int(os.environ["RANK"]),
    )
    parallel_state.initialize_model_parallel()
    return ProcessGroupCollection.use_mpu_process_groups()


def destroy_global_state():
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
