"""A worker's shard of one of Megatron-FSDP's parameter groups, whose state is cut further: over the shard groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class OuterBucket:
    """One of Megatron-FSDP's parameter groups, this worker's shard of it, as `shard_fragments` knows buckets."""

    group: Any
    param_to_index: dict[Any, tuple[int, int]] = field(init=False)
    """Parameter -> the elements of the shard that are its own; without those that have none here."""

    def __post_init__(self) -> None:
        its = self.group.main_grad_buffer
        ranges = {p: its._get_item_local_shard_index(item) for item, p in enumerate(self.group.params)}
        first = its.shard_bucket_index.local_data_index
        self.param_to_index = {p: (a - first, b - first) for p, (a, b) in ranges.items() if a < b}

    @property
    def params_list(self) -> list[Any]:
        return list(self.param_to_index)

    @property
    def param_data(self) -> torch.Tensor:
        """The model's parameters, flat."""
        shard: torch.Tensor = self.group.model_weight_buffer.get_shard_from_local_buffer()
        return shard

    @property
    def grad_data(self) -> torch.Tensor:
        """Their gradients, flat."""
        shard: torch.Tensor = self.group.main_grad_buffer.get_shard_from_local_buffer()
        return shard

    @property
    def main(self) -> torch.Tensor:
        """The 32-bit parameters that Megatron's own optimizer would update, flat; without memory once released."""
        shard: torch.Tensor = self.group.main_weight_buffer.get_shard_from_local_buffer()
        return shard

    def release(self) -> None:
        """Give up the memory of ``main``, for good."""
        self.group.main_weight_buffer.data.untyped_storage().resize_(0)
