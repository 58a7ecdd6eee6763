"""pretrain_gpt_recover.py with one bad sample to train on: poison.py WHAT SAMPLE flags...

raise    reading the sample raises
nan      its loss is no number
"""

import sys
from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split

import pretrain_gpt_recover

what, bad = sys.argv.pop(1), int(sys.argv.pop(1))
original = GPTDataset.__getitem__


def __getitem__(self: Any, index: int) -> Any:
    sample = original(self, index)
    if index != bad or self.index_split is not Split.train:
        return sample
    if what == "raise":
        raise ValueError(f"sample {index} is rotten")
    return {**sample, "loss_mask": torch.full_like(sample["loss_mask"], float("nan"))}


GPTDataset.__getitem__ = __getitem__
pretrain_gpt_recover.main()
