"""A GPT small enough for a test, trained by Megatron's own ``pretrain()`` on its mock data set.

Run by ``python -m recover_megatron.hostdevice tiny_pretrain.py FLAGS``, or by ``warm.py`` in forked workers.
"""

from functools import partial

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def datasets(samples, vp_stage=None):
    """The train, validation and test sets, with the given numbers of samples."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()


datasets.is_distributed = True  # every rank reads its own samples, also those of tensor-parallel ranks above 0


def loss_of(mask, losses):
    """The sum of the losses, the number of tokens, and what Megatron logs."""
    mask = mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    print("microbatch loss", total.item().hex())  # Megatron's log rounds
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(data, model):
    """One microbatch."""
    batch = {name: value.cuda(non_blocking=True) for name, value in next(data).items()}
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_of, batch["loss_mask"])


def main():
    """Train as the command line says."""
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
