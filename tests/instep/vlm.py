"""Trains a vision-language model on Megatron's interface, as a patched Megatron runs such a script: vlm.py flags...

A vision transformer of one layer and a projection in the first stage, a language model of --num-layers over the stages;
samples of an image and --seq-length tokens in all, of which one stands for the image, drawn by their number.

    --freeze-ViT, --freeze-LM     that part is not trained, as with pretrain_vlm.py
    --text-only N                 each N-th sample has no image
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX, LLaVAModel
from megatron.core.models.multimodal.llava_spec import decoder_model_with_local_default_spec
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args

from recover_megatron.errors import end_process
from tests.instep.own_script import loss_func, train

SIDE, PATCH = 8, 4
EMBEDDINGS = (SIDE // PATCH) ** 2 + 1
"""What the vision transformer makes of an image: one for each patch, and the class token's."""


def draw(index: int, source: torch.Generator) -> dict[str, torch.Tensor]:
    args = get_args()
    length = args.max_position_embeddings - EMBEDDINGS + 1
    drawn = torch.randint(args.vocab_size, (length + 1,), generator=source)
    image = torch.randn(3, SIDE, SIDE, generator=source)
    place = int(torch.randint(length, (), generator=source))
    mask = torch.ones(length)
    if not args.text_only or index % args.text_only:
        drawn[place] = DEFAULT_IMAGE_TOKEN_INDEX  # the model leaves it out of the loss
        mask[place] = 0
    tokens, labels = drawn[:-1], drawn[1:]
    return {"tokens": tokens, "labels": labels, "image": image, "loss_mask": mask}


def model_provider(
    pre_process: bool = True, post_process: bool = True, config: Any = None, pg_collection: Any = None, **_: Any
) -> LLaVAModel:
    args = get_args()
    language = config or core_transformer_config_from_args(args)
    vision = copy.deepcopy(language)
    vision.pipeline_model_parallel_size = 1  # all of it is in the first stage
    projection = copy.deepcopy(vision)
    vision.num_layers, vision.vision_model_type = 1, "clip"
    model = LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=decoder_model_with_local_default_spec(),
        language_vocab_size=args.padded_vocab_size,
        language_max_sequence_length=args.max_position_embeddings,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=False,
        vision_projection_config=projection,
        vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        language_position_embedding_type=args.position_embedding_type,
        pre_process=pre_process,
        post_process=post_process,
        add_encoder=pre_process,
        img_h=SIDE,
        img_w=SIDE,
        patch_dim=PATCH,
        pg_collection=pg_collection,
    )
    model.freeze(
        freeze_language_model=args.freeze_LM, freeze_vision_model=args.freeze_ViT, freeze_vision_projection=False
    )
    return model


def forward_step(iterator: Any, model: Any) -> Any:
    read = next(iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    whole = tensor_parallel.broadcast_data(["tokens", "labels"], read, torch.int64)
    real = tensor_parallel.broadcast_data(["image", "loss_mask"], read, torch.float32)
    tokens = whole["tokens"]
    images = real["image"][(tokens == DEFAULT_IMAGE_TOKEN_INDEX).any(dim=1)]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    output, mask = model(images, tokens, positions, None, whole["labels"], real["loss_mask"])
    return output, partial(loss_func, mask)


def more_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    for name in ("--freeze-LM", "--freeze-ViT"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--text-only", type=int, default=0)
    return parser


if __name__ == "__main__":
    train(draw, model_provider, forward_step, more_flags)
    end_process()
