"""Copies of global ranks that Megatron hands to Transformer Engine when the model is built.

Global ranks change: they count the workers that have a place, without gaps (`groups`).  torch's own map from them to
group ranks is kept up to date, and Megatron asks it; but attention with context parallelism keeps a list, by which it
sends keys and values round.  With an old list it would send to nobody, or to the worker of another replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def renew_rank_copies(model: Iterable[torch.nn.Module], context_ranks: Sequence[int]) -> int:
    """Give every module that keeps the global ranks of its context-parallel group the present ones, ``context_ranks``.

    Returns how many there are.
    """
    found = 0
    for chunk in model:
        for module in chunk.modules():
            if getattr(module, "cp_global_ranks", None):
                module.cp_global_ranks = list(context_ranks)
                found += 1
    return found
