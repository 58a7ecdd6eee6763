"""What the tests' own training scripts have in common: each trains its model as a patched Megatron runs such a script.

What scripts/apply_patches.sh inserts into three files of Megatron is done to the imported modules, so a script calls
Megatron's pretrain() as one of a checkout does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import arguments, training
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from recover_megatron.megatron_hooks import patched
from recover_megatron.megatron_hooks.entry import program

Draw = Callable[[int, torch.Generator], dict[str, torch.Tensor]]
"""A sample, by its number and a generator that was seeded with it."""


class Drawn(torch.utils.data.Dataset):
    """Samples that are a function of their number."""

    def __init__(self, draw: Draw, samples: int, seed: int) -> None:
        self._draw = draw
        self._samples = samples
        self._seed = seed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._draw(int(index), torch.Generator().manual_seed(self._seed + int(index)))


def loss_func(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum over a microbatch's tokens, and their number."""
    loss = (output.float() * mask).sum()
    tokens = mask.sum().int()
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def train(
    draw: Draw,
    model_provider: Callable[..., torch.nn.Module],
    forward_step: Callable[..., Any],
    more_flags: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
) -> None:
    """Call Megatron's ``pretrain()``, with the inserted lines where ``--recover`` is among the flags."""

    def datasets(samples: list[int]) -> list[Drawn | None]:
        return [Drawn(draw, number, 1_000_000 * kind) if number else None for kind, number in enumerate(samples)]

    datasets.is_distributed = True  # type: ignore[attr-defined]
    call_pretrain(datasets, forward_step, model_provider, more_flags=more_flags)


def call_pretrain(
    datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    *model_provider: Callable[..., torch.nn.Module],
    more_flags: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    model_config: Callable[[argparse.Namespace], Any] = lambda args: None,
) -> None:
    """The same of other datasets; ``model_config``: by which Megatron makes the model where there is no provider."""
    pretrain = training.pretrain
    if "--recover" in sys.argv:  # as the inserted lines ask
        program._in_charge = False  # the tests' fork server has loaded Megatron as pretrain_gpt_recover.py does
        arguments.parse_args = patched.parsing(arguments.parse_args)
        pretrain = patched.surviving(training.pretrain)
    args = arguments.parse_and_validate_args(extra_args_provider=more_flags)
    config = pretrain_cfg_container_from_args(args, model_config(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, *model_provider)
