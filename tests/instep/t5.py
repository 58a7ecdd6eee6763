"""A T5 pre-training script on Megatron's interface, run as a patched Megatron runs it: t5.py flags...

An encoder of --num-layers, a decoder of as many; samples of --seq-length and --decoder-seq-length tokens, of which each
has some padding, drawn by its number.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args

from recover_megatron.errors import end_process
from tests.instep.own_script import loss_func, train

FIELDS = ["text_enc", "text_dec", "labels", "loss_mask"]


def draw(index: int, source: torch.Generator) -> dict[str, torch.Tensor]:
    args = get_args()

    def tokens(length: int, real: int) -> torch.Tensor:
        drawn = torch.randint(1, args.vocab_size, (length,), generator=source)
        return drawn * (torch.arange(length) < real)  # 0 is padding

    least = args.decoder_seq_length // 2
    real = least + int(torch.randint(args.decoder_seq_length - least + 1, (), generator=source))
    target = tokens(args.decoder_seq_length, real)
    given = torch.cat([torch.ones(1, dtype=target.dtype), target[:-1]]) * (target > 0)
    return {
        "text_enc": tokens(args.encoder_seq_length, args.encoder_seq_length - index % 5),
        "text_dec": given,
        "labels": target,
        "loss_mask": (target > 0).long(),
    }


def model_provider(
    pre_process: bool = True, post_process: bool = True, config: Any = None, pg_collection: Any = None, **_: Any
) -> T5Model:
    args = get_args()
    decoder = config or core_transformer_config_from_args(args)
    encoder = copy.deepcopy(decoder)
    return T5Model(
        config=decoder,
        encoder_config=encoder,
        transformer_encoder_layer_spec=get_t5_encoder_with_local_block_spec(encoder.num_layers),
        transformer_decoder_layer_spec=get_t5_decoder_with_local_block_spec(decoder.num_layers),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
    )


def forward_step(iterator: Any, model: Any) -> Any:
    read = next(iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    batch = tensor_parallel.broadcast_data(FIELDS, read, torch.int64)
    encoded, decoded = batch["text_enc"], batch["text_dec"]
    masks = T5MaskedWordPieceDataset.config_attention_mask(encoded, decoded, encoded > 0, decoded > 0, use_local=True)
    output = model(encoded, decoded, *masks, lm_labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"].float())


if __name__ == "__main__":
    train(draw, model_provider, forward_step)
    end_process()
