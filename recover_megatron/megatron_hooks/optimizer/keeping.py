"""Where Megatron keeps a spread optimizer's state, and what it calls to update and to save it.

``Keeping``     what `sharded_optimizer` asks; ``InBuckets`` answers for the distributed optimizer, whose buckets lie in
                Megatron's DDP, and `fsdp.outer` for Megatron-FSDP, whose shard groups share their shards' state
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from megatron.core import parallel_state

from recover_megatron.instep.shards import Column
from recover_megatron.megatron_hooks.buckets import Buckets
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragment, ShardFragments
from recover_megatron.megatron_hooks.optimizer.sharded_checkpoint import (
    Parts,
    Primaries,
    ShardedCheckpoint,
    loading_into,
)


class Keeping(Protocol):
    """Where the state of a spread optimizer lies, and how Megatron updates, saves and loads it.

    In all methods ``one`` is one of Megatron's optimizers, and ``fragments`` what this worker holds of its state.
    """

    has_all: bool
    """Whether at launch, and for a checkpoint, each worker has the state of all that its column shares."""

    @property
    def tells_norms(self) -> Column:
        """The column whose members tell each other the norms of their units: each unit is held by some of them."""

    def norm_group(self) -> Any:
        """Megatron's group over which a unit's norm is added up: all of one replica that hold a part of it."""

    def fragments(self, one: Any, groups: dict[Any, int], shadow_device: torch.device | None) -> ShardFragments:
        """What is held of ``one``: nothing yet.  ``groups``: its parameters -> number of their group."""

    def connect(self, one: Any, fragments: ShardFragments, primaries: Primaries, parts: Parts) -> None:
        """Have Megatron update the pieces, and save them.  ``primaries``, ``parts``: what this worker speaks for."""

    def adopt(self, fragments: ShardFragments, unit: int, parts: dict[int, Sequence[tuple[int, int]]]) -> None:
        """At launch: take over what Megatron has made, or read."""

    def adopted(self) -> None:
        """The pieces have memory of their own, or are of no use: what Megatron has made is not needed any more."""

    def updating(self) -> AbstractContextManager[None]:
        """While Megatron's step makes the update, before the parameters are gathered."""

    def gathered(self) -> None:
        """The model's parameters are those of the update."""

    def loading(
        self, one: Any, fragments: ShardFragments, held: dict[int, list[ShardFragment]]
    ) -> AbstractContextManager[None]:
        """While Megatron loads a checkpoint in place: into the pieces of ``held``.  Raises ValueError if it cannot."""

    def lend(self, fragments: ShardFragments) -> list[tuple[Column, torch.Tensor]]:
        """Room for all the state that the column shares, with what is held here in its place: (column, flat tensor).

        In one order at all members.  Empty where Megatron saves the pieces as they are.
        """

    def show(self, fragments: ShardFragments) -> AbstractContextManager[None]:
        """While a checkpoint is written: Megatron finds what was lent, which is complete, where it looks for it."""


class InBuckets:
    """Of the distributed optimizer."""

    has_all = False

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._saved: dict[int, ShardedCheckpoint] = {}
        """Of each of Megatron's optimizers, by its ``id``."""

    @property
    def tells_norms(self) -> Column:
        return self._buckets.tail

    def norm_group(self) -> Any:
        return parallel_state.get_model_parallel_group()

    def fragments(self, one: Any, groups: dict[Any, int], shadow_device: torch.device | None) -> ShardFragments:
        buckets = {self._buckets.number(bucket): bucket for buffer in one.buffers for bucket in buffer.buckets}
        return ShardFragments(one, buckets, groups, shadow_device)

    def connect(self, one: Any, fragments: ShardFragments, primaries: Primaries, parts: Parts) -> None:
        one._copy_model_grads_to_main_grads = fragments.begin_update
        one._copy_main_params_to_model_params = fragments.end_update
        # Those who are left write; which instance a worker was in does not matter.
        one.data_parallel_group, one.distributed_optimizer_instance_id = self._buckets.whole(one), 0
        saved = self._saved[id(one)] = ShardedCheckpoint(one, fragments, primaries, parts)
        one.get_parameter_state_dp_zero = saved.whole
        one.sharded_param_state_fully_reshardable = saved.in_model_space(one.sharded_param_state_fully_reshardable)
        one.sharded_param_state_dp_reshardable = saved.by_bucket(one.sharded_param_state_dp_reshardable)

    def adopt(self, fragments: ShardFragments, unit: int, parts: dict[int, Sequence[tuple[int, int]]]) -> None:
        fragments.adopt(unit, parts)

    def adopted(self) -> None:
        pass

    def updating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gathered(self) -> None:
        pass

    def loading(
        self, one: Any, fragments: ShardFragments, held: dict[int, list[ShardFragment]]
    ) -> AbstractContextManager[None]:
        return loading_into(one, fragments, self._saved[id(one)], held)

    def lend(self, fragments: ShardFragments) -> list[tuple[Column, torch.Tensor]]:
        return []

    def show(self, fragments: ShardFragments) -> AbstractContextManager[None]:
        return nullcontext()
