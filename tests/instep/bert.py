"""A BERT pre-training script on Megatron's interface, run as a patched Megatron runs it: bert.py flags...

With both of its heads, and with both of their losses averaged over the ranks in the step, microbatch by microbatch, as
NVIDIA's script has it; samples of two halves, of different lengths, drawn by their number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import average_losses_across_data_parallel_group

from recover_megatron.errors import end_process
from tests.instep.own_script import train

FIELDS = ["text", "types", "labels", "swapped", "loss_mask", "padding_mask"]


def draw(index: int, source: torch.Generator) -> dict[str, torch.Tensor]:
    args = get_args()
    length = args.max_position_embeddings
    real, place = length - index % 5, torch.arange(length)
    text = torch.randint(1, args.vocab_size, (length,), generator=source)
    masked = (torch.rand(length, generator=source) < 0.3) & (place < real)
    masked[0] = True
    half = int(torch.randint(1, real, (), generator=source))
    return {
        "text": torch.where(masked, torch.zeros_like(text), text) * (place < real),
        "types": ((place >= half) & (place < real)).long(),
        "labels": torch.where(masked, text, -torch.ones_like(text)),
        "swapped": torch.randint(2, (), generator=source),
        "loss_mask": masked.long(),
        "padding_mask": (place < real).long(),
    }


def model_provider(
    pre_process: bool = True, post_process: bool = True, config: Any = None, pg_collection: Any = None, **others: Any
) -> BertModel:
    args = get_args()
    return BertModel(
        config=config or core_transformer_config_from_args(args),
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        pg_collection=pg_collection,
        **others,
    )


def loss_func(mask: torch.Tensor, swapped: torch.Tensor, outputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
    tokens, order = outputs
    masked = (tokens.float() * mask).sum() / mask.sum()
    ordered = torch.nn.functional.cross_entropy(order.view(-1, 2).float(), swapped.view(-1))
    averaged = average_losses_across_data_parallel_group([masked, ordered])
    return masked + ordered, {"lm loss": averaged[0], "order loss": averaged[1]}


def forward_step(iterator: Any, model: Any) -> Any:
    read = next(iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    batch = tensor_parallel.broadcast_data(FIELDS, read, torch.int64)
    output = model(batch["text"], batch["padding_mask"], tokentype_ids=batch["types"], lm_labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"].float(), batch["swapped"])


if __name__ == "__main__":
    train(draw, model_provider, forward_step)
    end_process()
