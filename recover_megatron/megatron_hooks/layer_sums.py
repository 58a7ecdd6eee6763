"""What layers add up over microbatches and Megatron sums over all workers: routers' counts, attention's largest logits.

    ``RouterSums``        --moe-router-enable-expert-bias                        tokens per expert
                          --moe-router-load-balancing-type quantile_balancing    quantiles, and of how many microbatches
    ``AttentionLogits``   --qk-clip, --log-max-attention-logit                   the largest logit per head

Here they travel in the step's tail, where every microbatch is counted once (``read``); then each layer is given what it
is of all of the batch (``write``), and what Megatron asks of other replicas is known already (``groups.KNOWN``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state

SUMS = ("local_tokens_per_expert", "qb_beta_accum", "qb_beta_count")
BIASES = ("expert_bias", "qb_beta")


def biases(model: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The living biases of all routers, in one order."""
    return [tensor.data for tensor in _buffers(model, BIASES)]


class RouterSums:
    """The sums of the routers of one worker's layers, by which Megatron moves their biases once a step.

    Megatron sums these over all workers in finalize_model_grads: before it runs each router is given the sum.  The
    biases go with the parameters: an orphan that has made no step takes back what they were (`state`).
    """

    def __init__(self, model: Iterable[torch.nn.Module]) -> None:
        for module in (module for chunk in model for module in chunk.modules()):
            if (maintain := getattr(module, "_maintain_float32_expert_bias", None)) is not None:
                maintain()  # as each forward pass does: a state that arrives before the first one would be rounded
        self._every = list(_buffers(model, SUMS))
        self._types = [tensor.dtype for tensor in self._every]

    @property
    def size(self) -> int:
        """How many numbers ``read`` gives: the same for all of a column."""
        return sum(tensor.numel() for tensor in self._every)

    def begin(self) -> None:
        """A step begins: what was left of one that this worker did not finish is dropped."""
        for tensor in self._every:
            # Float16Module makes them 16-bit, in which a count is rounded by how many one replica has added up.
            tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data
            tensor.zero_()

    def read(self) -> torch.Tensor:
        """What this worker's microbatches of the step have added up; float64, flat, on the host."""
        parts = [tensor.detach().double().flatten() for tensor in self._every]
        return torch.cat(parts).cpu() if parts else torch.zeros(0, dtype=torch.float64)

    def write(self, whole: torch.Tensor) -> None:
        """``whole``: the sum of what a column has read.  Tensor ranks may have other tokens: theirs are added here."""
        if not self._every:
            return
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            whole = whole.to(self._every[0].device)
            torch.distributed.all_reduce(whole, group=parallel_state.get_tensor_model_parallel_group())
        at = 0
        for tensor, dtype in zip(self._every, self._types, strict=True):
            # By a 16-bit sum Megatron moves a bias by a step that is rounded to 16 bits, too.
            tensor.data = whole[at : at + tensor.numel()].view_as(tensor).to(device=tensor.device, dtype=dtype)
            at += tensor.numel()


def _buffers(model: Iterable[torch.nn.Module], names: Iterable[str]) -> Iterator[torch.Tensor]:
    for chunk in model:
        for module in chunk.modules():
            found = (getattr(module, name, None) for name in names)
            yield from (tensor for tensor in found if isinstance(tensor, torch.Tensor))


FLAGS = ("qk_clip", "log_max_attention_logit")
"""Attributes of Megatron's arguments: each has it keep these maxima."""


class AttentionLogits:
    """The largest logits of one worker's layers.  ``args``: Megatron's; without one of ``FLAGS`` there are none.

    By them Megatron scales down, after the update, the weights of queries and keys of a head whose largest logit is
    above a threshold, or logs the largest one of all.  It keeps a maximum per head over the microbatches that a worker
    has run, and takes that over all workers when the update is made (``clip_qk``).  Then it is too late here: of what a
    lost replica ran, and a committed step has counted, nobody would know it.

    The tail is a sum, of which parts may be final before others are summed again, by other workers; so each microbatch
    has numbers of its own: each is added by the worker that ran it, and is the same on all.  When the step is committed
    each attention is given the maximum over all of the batch.

    What else passes through the layers counts for nothing: an evaluation (which in Megatron counts for the next step),
    a layer that is computed again in the backward pass, an attempt that was given up.
    """

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
        """The microbatches ``ids`` were run.  All context-parallel ranks call it together.

        Each has seen a part of a sequence; the first one tells what all have seen.
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
        """The largest logits by microbatch and head, zero for microbatches of which this worker does not tell.

        float64, flat (microbatch * heads + head), on the host.
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
