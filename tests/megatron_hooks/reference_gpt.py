"""A GPT training script written straight on Megatron's public interface: the yardstick of the parity tests.

It shares no code with recover_megatron and is as plain as can be: every worker that needs a batch reads it itself.
Where a Megatron-LM checkout is at hand (MEGATRON_LM_CHECKOUT) the tests use that one's pretrain_gpt.py instead.
"""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage


def datasets(num_samples, vp_stage=None):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        tokenizer=build_tokenizer(args),
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=True,
        path_to_cache=args.data_cache_path,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        kind, num_samples, partial(is_first_or_last_pipeline_stage, vp_stage), config
    ).build()


datasets.is_distributed = True


def loss_func(mask, output):
    loss = (output.float().flatten() * mask).sum()
    tokens = mask.sum().int()
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(iterator, model):
    if iterator is None or not is_first_or_last_pipeline_stage(getattr(model.module, "vp_stage", None)):
        return model(None, None, None, labels=None), partial(loss_func, None)
    batch = next(iterator)
    labels = batch["labels"] if mpu.is_pipeline_last_stage(ignore_virtual=True) else None
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=labels)
    return output, partial(loss_func, batch["loss_mask"].float().flatten())


if __name__ == "__main__":
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
