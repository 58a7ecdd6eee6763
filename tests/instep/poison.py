"""pretrain_gpt_recover.py with one bad sample to train on: poison.py WHAT SAMPLE flags...

raise        reading the sample raises
words        reading it raises, in words of each worker's own
exit         reading it ends the process, as if all were well
connection   reading it raises the error of a connection: that to where samples come from
nan          its loss is no number
glitch       its loss is no number on worker 1, as where a device computes wrongly
gradient     its gradient is no number, its loss is one
transport    the forward pass raises an error of the replica's transport
"""

import os
import random
import string
import sys
from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split
from megatron.core.models.gpt import GPTModel

import pretrain_gpt_recover

what, bad = sys.argv.pop(1), int(sys.argv.pop(1))
read = GPTDataset.__getitem__
forward = GPTModel.forward
rotten: list[torch.Tensor] = []


def __getitem__(self: Any, index: int) -> Any:
    sample = read(self, index)
    if index != bad or self.index_split is not Split.train:
        return sample
    if what == "raise":
        raise ValueError(f"sample {index} is rotten")
    if what == "words":
        raise ValueError("".join(random.SystemRandom().choices(string.ascii_lowercase, k=12)))
    if what == "exit":
        sys.exit()
    if what == "connection":
        raise ConnectionResetError(104, "Connection reset by peer")
    if what == "nan" or (what == "glitch" and os.environ["RANK"] == "1"):
        return {**sample, "loss_mask": torch.full_like(sample["loss_mask"], float("nan"))}
    if what != "glitch":
        rotten.append(sample["tokens"])
    return sample


def model_forward(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    output = forward(self, input_ids, *args, **kwargs)
    if rotten and torch.equal(input_ids[0], rotten[0]):
        if what == "transport":
            raise RuntimeError("[.../gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4")
        output.register_hook(lambda gradient: gradient * float("nan"))
    return output


GPTDataset.__getitem__ = __getitem__
GPTModel.forward = model_forward
pretrain_gpt_recover.main()
