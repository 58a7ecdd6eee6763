"""The configuration, in the sections that Bridge has."""

import os
from types import SimpleNamespace
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig


def tiny(**changes: Any) -> SimpleNamespace:
    """A small run; ``changes``: spread (the distributed optimizer), iterations, batch, save."""
    spread = changes.get("spread", False)
    model = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, hidden_dropout=0.1, attention_dropout=0.1,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, attention_softmax_in_fp32=True,
        calculate_per_token_loss=False,
    )  # fmt: skip
    model.seq_length, model.vocab_size = 16, 64
    # Adam, which the distributed optimizer needs, divides by the size of a gradient: a large epsilon keeps a rounding
    # difference one.
    kind: dict[str, Any] = {"optimizer": "sgd", "lr": 0.3}
    if spread:
        kind = {"optimizer": "adam", "lr": 1e-2, "adam_eps": 1e-2}
    optimizer = OptimizerConfig(**kind, min_lr=0.0, use_distributed_optimizer=spread, clip_grad=1.0)
    namespace = SimpleNamespace
    return namespace(
        model=model,
        train=namespace(
            micro_batch_size=1, global_batch_size=changes.get("batch", 8), train_iters=changes.get("iterations", 6),
            iterations_to_skip=[], rampup_batch_size=None, decrease_batch_size_if_needed=False, num_epochs=None,
        ),
        validation=namespace(
            eval_interval=3, eval_iters=1, eval_global_batch_size=changes.get("batch", 8), eval_micro_batch_size=1
        ),
        optimizer=optimizer,
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=spread, grad_reduce_in_fp32=True),
        dist=namespace(distributed_backend="gloo", use_megatron_fsdp=False, use_torch_fsdp2=False),
        rng=namespace(seed=1234),
        rerun_state_machine=namespace(rerun_mode="disabled"),
        checkpoint=namespace(
            save=changes.get("save"), load=None, load_optim=True, save_rng=True, finetune=False, async_save=False,
            ckpt_format="torch_dist", save_interval=3, ckpt_assume_constant_structure=False,
        ),
        dataset=namespace(dataloader_type="single", data_sharding=False, random_seed=1234),
        scheduler=namespace(),
        logger=namespace(tensorboard_dir=None),
        tokenizer=namespace(),
        inprocess_restart=None,
        ft=None,
    )  # fmt: skip


def runtime_config_update(cfg):
    cfg.data_parallel_size = int(os.environ["WORLD_SIZE"])
