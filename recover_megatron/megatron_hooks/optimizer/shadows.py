"""The copies of the optimizer's state: how it changes hands, and how shadows are compared and, on the host, updated.

Before a step whose members are not those of the layout that the state is held by (``change_hands``)::

    section    the layout for who is there now; pieces for what this worker is to hold by it (``make``); what
       |       these lack is fetched from the workers that hold it (``instep.state.shards``).  A worker is lost: again,
       v       with those who are left
    the new pieces are those of the optimizer, and the layout is what is held

With --recover-shadow-device cpu, while the next step computes (``HostShadows``)::

    begin    the finished sums are copied to the host, and the settings of the update that is about to be made
    run      a thread clips them by the same norm and makes the same update, with the inner optimizer's own step()
    join     before anybody reads a shadow, or updates it again

A shadow is needed when its owner has died, when state changes hands, and when states are compared; not before.  So the
training waits for the host only if the host takes longer for its shadows than the device for a step.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from recover_megatron.collectives.state.trees import Path, Place, in_place
from recover_megatron.instep.manager import Manager, Shards
from recover_megatron.instep.trainer import alive
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.fsdp.buckets import FsdpBuckets
from recover_megatron.megatron_hooks.gradients.buckets import Buckets
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragment, ShardFragments, in_order
from recover_megatron.workload.grid import Column
from recover_megatron.workload.shards import ElementRange

log = get_logger(__name__)

Layouts = Mapping[Column, Any]
"""By column: which worker holds which units (``Shards.wanted``)."""

Held = dict[int, list[ShardFragment]]
"""The pieces of one of Megatron's optimizers, by unit."""

REPARTITION_SECONDS = 600.0
"""How long the state may take to change hands, beyond the hang timeout, before a worker counts as hung."""


@dataclass(eq=False)
class LayoutPieces:
    """The pieces of the optimizer's state that one worker holds, and is to hold by a layout."""

    fragments: Sequence[ShardFragments]
    """Those of each of Megatron's optimizers."""
    buckets: Buckets | FsdpBuckets
    shards: Shards
    manager: Manager

    def wanted(self) -> dict[Column, Any]:
        """The layouts for who is there now."""
        return {column: self.shards.wanted(column) for column in self.shards.columns}

    def column(self, fragments: ShardFragments) -> Column:
        """In a stage without experts that of theirs has no buckets; their column is the last one."""
        first = next(iter(fragments.buckets), None)
        return self.shards.columns[-1] if first is None else self.buckets.part(first)[0]

    def make(self, fragments: ShardFragments, layouts: Layouts) -> Held:
        """New pieces of all that this worker is to hold, without a state."""
        held = layouts[self.column(fragments)].held(self.manager.view.worker)
        return {
            unit: fragments.make(self.parts(fragments, unit, layouts), shadow=place > 0)
            for place, unit in enumerate(held)
        }

    def parts(self, fragments: ShardFragments, unit: int, layouts: Layouts) -> dict[int, Sequence[tuple[int, int]]]:
        """What a unit owns of each bucket that these pieces are of; where ``layouts`` has none, by what is held now."""
        found = {}
        for number in fragments.buckets:
            column, numel = self.buckets.part(number)
            layout = layouts[column] if column in layouts else self.shards.layout(column)
            found[number] = layout.parts(unit, numel)
        return found

    def change_hands(self) -> None:
        """Have the state change hands, for who is there now; a section: all or nobody."""
        manager = self.manager
        layouts: dict[Column, Any] = {}
        held: list[Held] = []
        began, came = time.monotonic(), 0

        def mark() -> None:
            manager.mark("repartition", waiting=True, allow=REPARTITION_SECONDS)

        def run() -> None:
            nonlocal came
            manager.inject("repartition")
            mark()
            layouts.clear()
            layouts.update(self.wanted())
            held[:] = [self.make(fragments, layouts) for fragments in self.fragments]
            came = self.shards.exchange(
                manager.view.groups,
                self._element_ranges(layouts),
                self._give,
                partial(self._receive, held=held),
                mark,
            )
            manager.inject("repartition")

        manager.section("repartition", run)
        for fragments, its in zip(self.fragments, held, strict=True):
            fragments.install(its)
        self.shards.take_up(layouts)
        seconds, epoch = round(time.monotonic() - began, 6), manager.view.epoch
        manager.log("repartition", epoch=epoch, seconds=seconds, bytes=came)

    def _element_ranges(self, layouts: Layouts) -> dict[tuple[int, int], list[ElementRange]]:
        """(who gives, who gets) -> what."""
        element_ranges: dict[tuple[int, int], list[ElementRange]] = {}
        for fragments in self.fragments:
            for number in fragments.buckets:
                column, numel = self.buckets.part(number)
                for move in self.shards.moves(column, layouts[column], numel):
                    element_range = ElementRange(number, move.start, move.stop)
                    element_ranges.setdefault((move.source, move.target), []).append(element_range)
        return element_ranges

    def _give(self, element_ranges: Sequence[ElementRange]) -> list[Any]:
        return [self._fragments_of(element_range).give(element_range) for element_range in element_ranges]

    def _receive(
        self, element_ranges: Sequence[ElementRange], held: Sequence[Held]
    ) -> tuple[Place, Callable[[list[Any]], None]]:
        """The pieces of ``held`` take what ``_give`` of another worker gave for the same elements.

        It is received into their own memory: a copy of it would double what a newcomer needs, and the C library would
        keep that memory.
        """
        pieces = in_order(fragment for units in held for its in units.values() for fragment in its)
        parts = [self._fragments_of(element_range).parts(element_range, pieces) for element_range in element_ranges]

        def place(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            number, part, _, *name = path
            fragment, start, stop = parts[int(number)][int(part)]
            own = fragment.room(start, stop, dtype, *map(str, name)) if shape else None
            return in_place(own, path, shape, dtype)

        def take(tree: list[Any]) -> None:
            for its, given in zip(parts, tree, strict=True):
                for (fragment, start, stop), state in zip(its, given, strict=True):
                    fragment.take(start, stop, state)

        return place, take

    def _fragments_of(self, element_range: ElementRange) -> ShardFragments:
        return next(fragments for fragments in self.fragments if element_range.bucket in fragments.buckets)

    def compare(self) -> None:
        """Compare the shadows with what they are shadows of, by the digests of all holders; in a section.

        Where one differs, all are made anew with the next repartition, by all workers.
        """
        manager = self.manager
        held = self._digests()

        def run() -> tuple[list[int], bool]:
            manager.mark("verify", waiting=True)
            view = manager.view
            ring = view.groups.ring(alive(self.buckets.tail, view.live))
            found = differing_units(ring.exchange(held))
            return found, view.groups.any(bool(found), tuple(sorted(view.live)))

        different, anywhere = manager.section("verify shadows", run)
        if different:
            manager.log("shadows differ", units=different)
            log.info(f"the shadows of workers {different} differ from what they are copies of: all are made anew")
        if anywhere:
            self.shards.distrust_shadows()

    def _digests(self) -> list[int]:
        """What this worker holds: a row for ``differing_units``."""
        row = []
        for optimizer, fragments in enumerate(self.fragments):
            column = self.column(fragments)
            for unit in self.shards.held(column):
                row += [optimizer, min(column), unit, fragments.digest(unit).value]
        return row


@dataclass(eq=False)
class HostShadows:
    """Updates the shadows in host memory."""

    _fragments: Sequence[ShardFragments]
    """Of each distributed optimizer of Megatron's."""
    _clip: float
    """Its --clip-grad."""
    _thread: threading.Thread | None = field(default=None, init=False)
    _failed: list[BaseException] = field(default_factory=list, init=False)

    def begin(self, norm: float, scales: Sequence[float]) -> None:
        """An update with the gradients as they are now; before the device's own one.

        ``scales``: how many times too large they are, of each of ``fragments``.  ``norm``: as if they were not.
        """
        self.join()
        work = [
            (fragments, shadows, _settings(fragments), 1.0 / scale)
            for fragments, scale in zip(self._fragments, scales, strict=True)
            if (shadows := list(fragments.aside))
        ]
        if not work:
            return
        for _, shadows, _, _ in work:
            for fragment in shadows:
                # A copy in any case: the buffer is cleared when the next iteration begins.
                fragment.tensor.grad = fragment.gradient.to(fragment.tensor.device, torch.float32, copy=True)
        # As Megatron clips: by float32 numbers, and only what is too long.
        factor = self._clip / (norm + 1.0e-6) if self._clip > 0 else 1.0

        def run() -> None:
            try:
                for fragments, shadows, settings, by_scale in work:
                    _update(fragments.inner, shadows, settings, by_scale, factor)
            except BaseException as error:  # noqa: BLE001  the thread's boundary: this worker's own fault, raised by join
                self._failed.append(error)

        self._thread = threading.Thread(target=run, name="recover-host-shadows", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Return when the shadows are those of the last update.  Raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed:
            raise self._failed.pop()


def _settings(fragments: ShardFragments) -> list[dict[str, Any]]:
    """Of each group, as they are before this update: learning rate, decay, steps made so far where a group has them."""
    return [{key: value for key, value in group.items() if key != "params"} for group in fragments.inner.param_groups]


def _update(
    inner: Any,
    shadows: Sequence[ShardFragment],
    settings: Sequence[dict[str, Any]],
    by_scale: float,
    factor: float,
) -> None:
    """What the device's ``inner`` optimizer does to its own pieces, by another one of its kind, with these alone."""
    for its in (by_scale, min(factor, 1.0)):  # in the device's order, which rounds
        for fragment in shadows if its != 1.0 else ():
            assert fragment.tensor.grad is not None
            fragment.tensor.grad.mul_(its)
    twin = object.__new__(type(inner))
    twin.__dict__.update(inner.__dict__)
    twin.param_groups = [
        {**group, "params": [fragment.tensor for fragment in shadows if fragment.group == number]}
        for number, group in enumerate(settings)
    ]
    twin.state = defaultdict(dict, {fragment.tensor: fragment.state for fragment in shadows})
    type(inner).step(twin)  # not what somebody may have put in its place on ``inner`` alone
    for fragment in shadows:
        fragment.tensor.grad = None
        fragment.state = twin.state[fragment.tensor]


def differing_units(rows: Sequence[Sequence[int]]) -> list[int]:
    """The units of which two holders tell different digests.

    A row is what one worker holds, four numbers each: the optimizer, its column's first slot, the unit, the digest.  (A
    worker need not be in the column of another one's experts.)
    """
    told: dict[tuple[int, int, int], set[int]] = {}
    for row in rows:
        for optimizer, column, unit, digest in zip(*(row[at::4] for at in range(4)), strict=True):
            told.setdefault((optimizer, column, unit), set()).add(digest)
    return sorted({unit for (_, _, unit), digests in told.items() if len(digests) > 1})
