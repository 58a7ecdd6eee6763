"""Which pieces of the optimizer's state this worker is to hold by a layout of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recover_megatron.instep.assignment import Assignment
from recover_megatron.instep.shards import Column, Shards
from recover_megatron.megatron_hooks.buckets import Buckets
from recover_megatron.megatron_hooks.fsdp.buckets import FsdpBuckets
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragment, ShardFragments

Layouts = Mapping[Column, Any]
"""By column: which worker holds which units (``Shards.wanted``)."""


@dataclass(eq=False)
class LayoutPieces:
    """Of one worker, with the model that it has."""

    _buckets: Buckets | FsdpBuckets
    _shards: Shards
    _assignment: Assignment

    def wanted(self) -> dict[Column, Any]:
        """The layouts for who is there now."""
        return {column: self._shards.wanted(column) for column in self._shards.columns}

    def column(self, fragments: ShardFragments) -> Column:
        """The column that shares these."""
        return self._buckets.part(next(iter(fragments.buckets)))[0]

    def make(self, fragments: ShardFragments, layouts: Layouts) -> dict[int, list[ShardFragment]]:
        """By unit: new pieces of all that this worker is to hold, without a state."""
        held = layouts[self.column(fragments)].held(self._assignment.me)
        return {
            unit: fragments.make(self.parts(fragments, unit, layouts), shadow=place > 0)
            for place, unit in enumerate(held)
        }

    def parts(self, fragments: ShardFragments, unit: int, layouts: Layouts) -> dict[int, Sequence[tuple[int, int]]]:
        """What a unit owns of each bucket that these pieces are of; where ``layouts`` has none, by what is held now."""
        found = {}
        for number in fragments.buckets:
            column, numel = self._buckets.part(number)
            layout = layouts[column] if column in layouts else self._shards.layout(column)
            found[number] = layout.parts(unit, numel)
        return found
