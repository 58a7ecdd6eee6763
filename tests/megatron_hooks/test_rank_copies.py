"""Modules that keep the global ranks of their context-parallel group get the present ones."""

from __future__ import annotations

import torch

from recover_megatron.megatron_hooks.groups import renew_rank_copies


class Attention(torch.nn.Module):
    """As Transformer Engine's: with the ranks that it was made with; None: without context parallelism."""

    def __init__(self, ranks: list[int] | None) -> None:
        super().__init__()
        self.cp_global_ranks = ranks


def test_every_attention_with_context_parallelism_gets_the_present_ranks_and_no_other_module() -> None:
    layers = [Attention([4, 5]), Attention([4, 5]), Attention(None)]
    chunks = [torch.nn.Sequential(layers[0], torch.nn.Sequential(layers[1])), torch.nn.Sequential(layers[2])]
    assert renew_rank_copies(chunks, (2, 3)) == 2
    assert [layer.cp_global_ranks for layer in layers] == [[2, 3], [2, 3], None]
    assert not hasattr(chunks[0], "cp_global_ranks")
    layers[0].cp_global_ranks.append(9)  # type: ignore[union-attr]
    assert layers[1].cp_global_ranks == [2, 3], "each has a list of its own"
