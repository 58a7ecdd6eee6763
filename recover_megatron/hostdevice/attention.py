"""Attention on torch's ``scaled_dot_product_attention``, for configurations that Megatron's local attention refuses.

    --context-parallel-size   the sequence is cut into 2 * (group size) chunks, and each worker has the queries of an
                              early and a late chunk, as in Megatron; keys and values are gathered over the group
    --multi-latent-attention  keys and values differ in width
    packed sequences          a token sees only tokens of its own sequence

With --qk-clip or --log-max-attention-logit the largest logit of each head is saved in ``current_max_attn_logits``, as
in Transformer Engine.  Other configurations use Megatron's own ``DotProductAttention``.  Parameters and checkpoints are
the same as Megatron's.  This module does not import Megatron: ``for_class`` gets Megatron's module as an argument.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention


def dealt_positions(length: int, size: int) -> list[torch.Tensor]:
    """Return, for each of ``size`` context-parallel ranks, the positions of its tokens: [length / size], int64.

    The sequence is cut into 2 * size chunks.  Rank r has the chunks r and 2 * size - 1 - r, so that with a causal mask
    all ranks have the same amount of work.
    ``length`` must be a multiple of 2 * size.

    >>> [part.tolist() for part in dealt_positions(8, 2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if size == 1:
        return [torch.arange(length)]
    chunks = torch.arange(length).chunk(2 * size)
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(size)]


def sequences_of(boundaries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return, for each position in a row of packed sequences, the number of its sequence (int64).

    ``boundaries``: [sequences + 1], start of the first sequence (0) and end of each sequence.

    >>> sequences_of(torch.tensor([0, 3, 4]), torch.arange(6)).tolist()
    [0, 0, 0, 1, 2, 2]
    """
    return torch.searchsorted(boundaries[1:].contiguous(), positions, right=True)


def visible(
    queries: torch.Tensor,
    keys: int,
    *,
    causal: bool,
    window: Sequence[int] | None = None,
    boundaries: torch.Tensor | None = None,
    of_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a mask, True where a query sees a key: [queries, keys], bool.

    Args:
        queries: [queries], position of each query.
        keys: number of keys; their positions are 0 .. keys - 1.
        causal: True if a query sees no keys at later positions.
        window: (before, after), numbers of earlier and later positions that a query sees, -1 for all.  It is used
            in place of ``causal``; None: ``causal`` is used.
        boundaries: boundaries of the queries' packed sequences (see ``sequences_of``); None if there is one sequence.
        of_keys: boundaries of the keys' packed sequences; None if equal to ``boundaries``.
    """
    rows, columns = queries[:, None], torch.arange(keys)[None, :]
    if window is not None:
        before, after = (keys if far < 0 else far for far in window)
        seen = (columns >= rows - before) & (columns <= rows + after)
    else:
        seen = columns <= rows if causal else torch.ones(len(queries), keys, dtype=torch.bool)
    if boundaries is not None:
        seen &= sequences_of(boundaries, rows) == sequences_of(boundaries if of_keys is None else of_keys, columns)
    return seen


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of all queries on the keys that the queries see.

    Args:
        query: [queries, batch, heads, width].
        key: [keys, batch, groups, width]; ``heads`` is a multiple of ``groups``.
        value: [keys, batch, groups, value width]; the value width may differ from ``width``.
        seen: mask, True where a query sees a key; bool, broadcast to [batch, heads, queries, keys].  The result is zero
            for a query that sees no key.
        scale: factor of the products of queries and keys.
        dropout: probability that an attention weight is dropped; uses torch's default generator.
        sink: [heads], logit of an additional key that every query sees and whose value is zero.

    Returns:
        [queries, batch, heads * value width], in the dtype of ``query``.
    """
    heads, groups = query.shape[2], key.shape[2]
    if groups != heads:
        key, value = (tensor.repeat_interleave(heads // groups, dim=2) for tensor in (key, value))
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    mask = seen
    if sink is not None:
        hidden = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, -torch.inf)
        hidden = hidden.expand(*torch.broadcast_shapes(seen.shape, (1, heads, 1, 1)))
        column = sink.to(query.dtype).view(1, heads, 1, 1).expand(*hidden.shape[:-1], 1)
        mask = torch.cat([hidden, column], dim=-1)
        key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
    weighted = scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=scale)
    return weighted.permute(2, 0, 1, 3).flatten(2)


@torch.no_grad()
def largest_logits(query: torch.Tensor, key: torch.Tensor, seen: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Return the largest logit of each head, float32 [heads], over all queries and the keys that they see.

    Arguments are as in ``attend``.
    """
    heads, groups = query.shape[2], key.shape[2]
    key = key.repeat_interleave(heads // groups, dim=2)
    logits = torch.einsum("qbhw,kbhw->bhqk", query.float(), key.float()) * scale
    return logits.masked_fill(~seen, -torch.inf).amax(dim=(0, 2, 3))


def in_order(gathered: torch.Tensor, size: int) -> torch.Tensor:
    """Sort a tensor [length, ...] that was gathered from ``size`` context-parallel ranks into the sequence's order."""
    if size == 1:
        return gathered
    return gathered[torch.cat(dealt_positions(gathered.shape[0], size)).argsort()]


def _first_of(padded: torch.Tensor | None, others: torch.Tensor | None) -> torch.Tensor | None:
    return others if padded is None else padded


def for_class(original: Any, module: ModuleType) -> type:
    """Return a subclass of Megatron's ``DotProductAttention`` that computes attention with this module.

    ``original``: Megatron's class; ``module``: the Megatron module that defines it.
    """

    class DotProductAttention(original):
        """Megatron's attention, or this module's attention for configurations that Megatron's attention refuses."""

        def __init__(
            self, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
        ) -> None:
            adapted = copy.copy(config)
            adapted.context_parallel_size = 1  # Megatron uses this value only to assert that it is 1
            super().__init__(adapted, *args, **kwargs)
            self.config = config
            self._splits = config.context_parallel_size > 1
            self._own_widths = k_channels is not None or v_channels is not None
            self._context = getattr(self.pg_collection, "cp", None) if self._splits else None
            if self._splits and self._context is None:
                self._context = module.parallel_state.get_context_parallel_group()
            self._keeps_logits = bool(
                getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False)
            )
            if self._keeps_logits:
                self.current_max_attn_logits: torch.Tensor | None = None

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            attn_mask_type: Any = None,
            attention_bias: torch.Tensor | None = None,
            packed_seq_params: Any = None,
        ) -> torch.Tensor:
            """Return the attention; shapes are as in Megatron, [tokens, heads, width] for packed sequences."""
            if not (self._splits or self._own_widths or packed_seq_params is not None):
                if self._keeps_logits:
                    positions = torch.arange(query.shape[0])
                    seen = self._seen(positions, key.shape[0], attention_mask, attn_mask_type, None)
                    self._keep_largest(query, key, seen)
                return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
            if attention_bias is not None:
                raise NotImplementedError("the host device's attention does not support an attention bias")
            flat = query.dim() == 3
            if flat:
                query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            size, rank = 1, 0
            if self._context is not None:
                size, rank = self._context.size(), self._context.rank()
                key, value = self._gathered(key, size), self._gathered(value, size)
            own = dealt_positions(query.shape[0] * size, size)[rank]
            seen = self._seen(own, key.shape[0], attention_mask, attn_mask_type, packed_seq_params)
            if self._keeps_logits:
                self._keep_largest(query, key, seen)
            dropout = self.attention_dropout.p if self.training else 0.0
            forks = dropout and not self.config.sequence_parallel
            with module.tensor_parallel.get_cuda_rng_tracker().fork() if forks else nullcontext():
                weighted = attend(query, key, value, seen, scale=self._scale, dropout=dropout, sink=self.softmax_offset)
            return weighted.squeeze(1) if flat else weighted

        @property
        def _scale(self) -> float:
            return float(self.softmax_scale * (self.scale_mask_softmax.scale or 1))

        def _keep_largest(self, query: torch.Tensor, key: torch.Tensor, seen: torch.Tensor) -> None:
            largest, before = largest_logits(query, key, seen, scale=self._scale), self.current_max_attn_logits
            self.current_max_attn_logits = largest if before is None else torch.maximum(before, largest)

        def _gathered(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
            gather = module.tensor_parallel.gather_from_sequence_parallel_region
            return in_order(gather(tensor.contiguous(), tensor_parallel_output_grad=True, group=self._context), size)

        def _seen(
            self, own: torch.Tensor, keys: int, mask: torch.Tensor | None, kind: Any, packed: Any
        ) -> torch.Tensor:
            softmax = self.scale_mask_softmax
            causal = "causal" in (softmax.attn_mask_type if kind is None else kind).name
            boundaries = of_keys = None
            if packed is not None:
                boundaries = _first_of(packed.cu_seqlens_q_padded, packed.cu_seqlens_q)
                of_keys = _first_of(packed.cu_seqlens_kv_padded, packed.cu_seqlens_kv)
            if mask is not None and softmax.window_size is None and packed is None:
                return ~mask
            window = softmax.window_size
            seen = visible(own, keys, causal=causal, window=window, boundaries=boundaries, of_keys=of_keys)
            return seen.view(1, 1, *seen.shape)

    DotProductAttention.__module__ = original.__module__
    DotProductAttention.__qualname__ = DotProductAttention.__name__
    return DotProductAttention
