"""The largest logits of attention in a step, by which Megatron clips weights or which it logs.

    --qk-clip                   after the update the weights of queries and keys of a head are scaled down, where its
                                largest logit of the step is above the threshold
    --log-max-attention-logit   the largest one of all is logged

Megatron keeps a maximum per head over the microbatches that a worker has run, and takes that over all workers when the
update is made (``clip_qk``).  Then it is too late here: of what a lost replica ran, and a committed step has counted,
nobody would know it.  So they travel in the step's tail, where every microbatch is counted once (``read``).  The tail
is a sum, of which parts may be final before others are summed again, by other workers; so each microbatch has numbers
of its own: each is added by whoever ran it, and is the same whoever that was.  When the step is committed each
attention is given the maximum over all of the batch (``write``), and what Megatron then asks of other replicas is known
already (``known``).

What else passes through the layers counts for nothing: an evaluation (which in Megatron counts for the next step), a
layer that is computed again in the backward pass, an attempt that was given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state

FLAGS = ("qk_clip", "log_max_attention_logit")
"""Attributes of Megatron's arguments: each has it keep these maxima."""


class AttentionLogits:
    """Those of one worker's layers.  ``args``: Megatron's; without one of ``FLAGS`` there are none."""

    def __init__(self, args: Any, model: Iterable[torch.nn.Module]) -> None:
        self._chunks: list[list[tuple[Any, slice]]] = []
        self._heads = 0
        self._total = 0
        self._rows: dict[int, torch.Tensor] = {}
        wanted = any(getattr(args, name, False) for name in FLAGS)
        for chunk in model:
            self._chunks.append([])
            for module in chunk.modules() if wanted else ():
                attention = getattr(module, "core_attention", None)
                if hasattr(module, "clip_qk") and hasattr(attention, "current_max_attn_logits"):
                    at, self._heads = self._heads, self._heads + module.num_attention_heads_per_partition
                    self._chunks[-1].append((attention, slice(at, self._heads)))

    @property
    def size(self) -> int:
        """How many numbers ``read`` gives in this step: the same for all of a column."""
        return self._total * self._heads

    def begin(self, total: int) -> None:
        """A step of ``total`` microbatches, over all replicas, begins: what was left of another one is dropped."""
        self._total = total
        self._rows = {}

    @contextmanager
    def microbatch(self, chunk: int, j: int) -> Iterator[None]:
        """Chunk ``chunk`` of the model runs its forward pass of microbatch ``j`` meanwhile."""
        for attention, _ in self._chunks[chunk]:
            attention.current_max_attn_logits = None
        yield
        for attention, heads in self._chunks[chunk]:
            largest = attention.current_max_attn_logits
            if largest is not None:
                if j not in self._rows:
                    self._rows[j] = largest.new_full((self._heads,), -torch.inf, dtype=torch.float32)
                self._rows[j][heads] = largest.detach().float()

    def ran(self, ids: Sequence[int]) -> None:
        """These microbatches were run.  Context-parallel ranks, each of which has seen a part of them, have the first
        one tell what all have seen; they call it together.
        """
        if not self._rows or parallel_state.get_context_parallel_world_size() == 1:
            return
        whole = torch.stack([self._rows.pop(j) for j in ids])
        torch.distributed.all_reduce(
            whole, op=torch.distributed.ReduceOp.MAX, group=parallel_state.get_context_parallel_group()
        )
        if parallel_state.get_context_parallel_rank() == 0:
            self._rows.update(zip(ids, whole, strict=True))

    def read(self) -> torch.Tensor:
        """[microbatch * heads + head], of all microbatches that this worker tells of, zero for the others; float64,
        flat, on the host.
        """
        flat = torch.zeros(self._total, self._heads, dtype=torch.float64)
        if self._rows:
            flat[list(self._rows)] = torch.stack(list(self._rows.values())).double().cpu()
        return flat.flatten()

    def write(self, whole: torch.Tensor) -> None:
        """``whole``: the sum of what a column has read."""
        if not self._heads:
            return
        largest = whole.view(self._total, self._heads).amax(dim=0).float()
        for attention, heads in (its for chunk in self._chunks for its in chunk):
            its = largest[heads]
            # A layer that has told of none is passed over by Megatron, too.
            attention.current_max_attn_logits = None if bool((its == -torch.inf).all()) else its.to("cuda")
