"""Trains as a script of Megatron-Bridge does, on the double of it: bridge_script.py [--spread] [--save DIR] flags...

With ``--patient`` no iteration from the fifth on begins before there are two replicas (``tests/instep/pacing.py``).
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles" / "bridge"))

from megatron.bridge.training.config import tiny

from recover_megatron.megatron_hooks.loop import bridge
from tests.instep.pacing import hold


def loss_of(losses):
    total, tokens = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    places = torch.arange(batch["tokens"].shape[1])[None]
    mask = torch.ones(1, 1, places.numel(), places.numel(), dtype=torch.bool).triu(1)
    return model(batch["tokens"], places, mask, labels=batch["labels"]), partial(loss_of)


parser = argparse.ArgumentParser()
parser.add_argument("--spread", action="store_true")
parser.add_argument("--save")
parser.add_argument("--async-save", action="store_true")
parser.add_argument("--log-logits", action="store_true")
parser.add_argument("--patient", action="store_true")
given = parser.parse_known_args()[0]
config = tiny(spread=given.spread, save=given.save, iterations=12 if given.patient else 6)
config.checkpoint.async_save = given.async_save
config.model.log_max_attention_logit = given.log_logits
if given.patient:
    hold(lambda decision, iteration: iteration >= 5 and len(decision.replicas) < 2)
bridge.pretrain(config, forward_step)
