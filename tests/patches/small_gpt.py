"""A pretrain_gpt.py as small as can be, for Megatron 0.18, whose wheel brings none.

Beside the tree of such a wheel it makes a checkout: pretrain_gpt_recover.py takes its parts from it, and a patched
Megatron runs it as a script.  It shares no code with recover_megatron.
"""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import is_first_or_last_pipeline_stage


def gpt_builder(args, pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def model_provider(builder, pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    return builder(get_args(), pre_process, post_process, vp_stage, config=config, pg_collection=pg_collection)


def train_valid_test_datasets_provider(num_samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=True,
    )
    reads = partial(is_first_or_last_pipeline_stage, vp_stage)
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, reads, config).build()


train_valid_test_datasets_provider.is_distributed = True


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


def get_embedding_ranks(pp_ranks):
    return [pp_ranks[0], pp_ranks[-1]] if len(pp_ranks) > 1 else list(pp_ranks)


if __name__ == "__main__":
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    pretrain(
        pretrain_cfg_container_from_args(parse_and_validate_args()),
        train_valid_test_datasets_provider,
        partial(model_provider, gpt_builder),
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )
