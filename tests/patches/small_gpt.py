"""A pretrain_gpt.py as small as can be, for Megatron 0.18, whose wheel brings none.

Beside the tree of such a wheel, and with reference_gpt.py, it makes a checkout: pretrain_gpt_recover.py takes its parts
from it, and a patched Megatron runs it as a script.  It shares no code with recover_megatron.
"""

from functools import partial

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from reference_gpt import datasets as train_valid_test_datasets_provider
from reference_gpt import forward_step


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


def get_embedding_ranks(pp_ranks):
    return [pp_ranks[0], pp_ranks[-1]] if len(pp_ranks) > 1 else list(pp_ranks)


if __name__ == "__main__":
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    pretrain(
        pretrain_cfg_container_from_args(parse_and_validate_args()),
        train_valid_test_datasets_provider,
        partial(model_provider, gpt_builder),
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )
