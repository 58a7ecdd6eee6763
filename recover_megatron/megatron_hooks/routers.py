"""What the routers of experts add up over microbatches, by which Megatron moves their biases once a step.

    --moe-router-enable-expert-bias                        tokens per expert
    --moe-router-load-balancing-type quantile_balancing    quantiles, and of how many microbatches

Megatron sums these over all workers in finalize_model_grads.  Here they travel in the step's tail, where every
microbatch is counted once (``read``), and before finalize_model_grads runs each router is given the sum of all of the
batch (``write``): what Megatron then asks of other replicas is known already (``known``).  The biases go with the
parameters: an orphan that has made no step takes back what they were (``state``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from megatron.core import parallel_state

SUMS = ("local_tokens_per_expert", "qb_beta_accum", "qb_beta_count")
BIASES = ("expert_bias", "qb_beta")


def biases(model: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The living biases of all routers, in one order."""
    return [tensor.data for tensor in _buffers(model, BIASES)]


class RouterSums:
    """The sums of the routers of one worker's layers."""

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
