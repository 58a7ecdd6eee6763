"""The optimizer's state changes hands: before a step whose members are not those of the layout that it is held by.

section    the layout for who is there now; pieces for what this worker is to hold by it (``LayoutPieces``); what these
   |       lack is fetched from the workers that hold it (``instep.shards``).  A worker is lost: again, with who is left
   v
the new pieces are those of the optimizer, and the layout is what is held
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from recover_megatron.instep.assignment import Assignment
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.shards import Column, ElementRange, Shards
from recover_megatron.megatron_hooks.buckets import Buckets
from recover_megatron.megatron_hooks.fsdp.buckets import FsdpBuckets
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragment, ShardFragments

Layouts = Mapping[Column, Any]
"""By column: which worker holds which units (``Shards.wanted``)."""

Held = dict[int, list[ShardFragment]]
"""The pieces of one of Megatron's optimizers, by unit."""

REPARTITION_SECONDS = 600.0
"""How long the state may take to change hands, beyond the hang timeout, before a worker without a mark counts as hung.
"""


@dataclass(eq=False)
class LayoutPieces:
    """Which pieces of the optimizer's state one worker is to hold by a layout of it, with the model that it has."""

    _buckets: Buckets | FsdpBuckets
    _shards: Shards
    _assignment: Assignment

    def wanted(self) -> dict[Column, Any]:
        """The layouts for who is there now."""
        return {column: self._shards.wanted(column) for column in self._shards.columns}

    def column(self, fragments: ShardFragments) -> Column:
        """The column that shares ``fragments``."""
        return self._buckets.part(next(iter(fragments.buckets)))[0]

    def make(self, fragments: ShardFragments, layouts: Layouts) -> Held:
        """New pieces of all that this worker is to hold, without a state."""
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


@dataclass(eq=False)
class Repartition:
    """Has the state of one worker change hands."""

    _fragments: Sequence[ShardFragments]
    """Those of each of Megatron's optimizers."""
    _pieces: LayoutPieces
    _buckets: Buckets | FsdpBuckets
    _shards: Shards
    _recovery: Recovery

    def run(self) -> None:
        """Have it change hands, for who is there now; a section: all or nobody."""
        recovery, progress = self._recovery, self._recovery.progress
        layouts: dict[Column, Any] = {}
        held: list[Held] = []
        began, came = time.monotonic(), 0

        def mark() -> None:
            progress.mark("repartition", waiting=True, allow=REPARTITION_SECONDS)

        def run() -> None:
            nonlocal came
            progress.inject("repartition")
            mark()
            layouts.clear()
            layouts.update(self._pieces.wanted())
            held[:] = [self._pieces.make(fragments, layouts) for fragments in self._fragments]
            came = self._shards.exchange(
                recovery.assignment.epoch_groups,
                self._element_ranges(layouts),
                self._give,
                partial(self._take, held=held),
                mark,
            )
            progress.inject("repartition")

        recovery.sections.run("repartition", run)
        for fragments, its in zip(self._fragments, held, strict=True):
            fragments.install(its)
        self._shards.take_up(layouts)
        seconds, epoch = round(time.monotonic() - began, 6), recovery.assignment.decision.epoch
        recovery.hooks.log("repartition", epoch=epoch, seconds=seconds, bytes=came)

    def _element_ranges(self, layouts: Layouts) -> dict[tuple[int, int], list[ElementRange]]:
        """(who gives, who gets) -> what."""
        element_ranges: dict[tuple[int, int], list[ElementRange]] = {}
        for fragments in self._fragments:
            for number in fragments.buckets:
                column, numel = self._buckets.part(number)
                for move in self._shards.moves(column, layouts[column], numel):
                    element_range = ElementRange(number, move.start, move.stop)
                    element_ranges.setdefault((move.source, move.target), []).append(element_range)
        return element_ranges

    def _give(self, element_ranges: Sequence[ElementRange]) -> list[Any]:
        return [self._fragments_of(element_range).give([element_range]) for element_range in element_ranges]

    def _take(self, element_ranges: Sequence[ElementRange], tree: list[Any], held: list[Held]) -> None:
        for element_range, its in zip(element_ranges, tree, strict=True):
            for fragments, units in zip(self._fragments, held, strict=True):
                if element_range.bucket in fragments.buckets:
                    fragments.take([element_range], its, [fragment for unit in units.values() for fragment in unit])

    def _fragments_of(self, element_range: ElementRange) -> ShardFragments:
        return next(fragments for fragments in self._fragments if element_range.bucket in fragments.buckets)
