"""Repartition of the optimizer's state, comparison of shadows with their originals, and update of shadows on the host.

If the workers of the next step are not the workers of the current layout, the state is repartitioned before that step
(``change_hands``)::

    section    compute the layout for the current workers; create the pieces that this worker will hold (``make``);
       |       fetch missing elements from the workers that hold them (``instep.state.shards``).  If a worker is lost,
       v       the survivors repeat the section
    afterwards the optimizer updates the new pieces, and the new layout is the current layout

With --recover-shadow-device cpu, a thread updates the shadows while the next step computes (``HostShadows``)::

    begin    copies the finished gradient sums and the optimizer's settings to the host
    run      clips these sums by the norm that the device also uses, and updates the shadows with the inner optimizer's
             own step()
    join     waits for the thread, before a shadow is read or updated again

A shadow is read only if the owner of its unit has died, in a repartition, or to compare states.  So the training waits
for the host only if the host needs more time to update the shadows than the device needs for a step.
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
from recover_megatron.megatron_hooks.fsdp.fsdp_buckets import FsdpBuckets
from recover_megatron.megatron_hooks.gradients.buckets import Buckets
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragment, ShardFragments, in_order
from recover_megatron.workload.grid import Column
from recover_megatron.workload.shards import ElementRange

log = get_logger(__name__)

Layouts = Mapping[Column, Any]
"""Column -> layout, which says which worker holds which units, the shares of the state (``Shards.wanted``)."""

Held = dict[int, list[ShardFragment]]
"""Unit -> pieces of the state of one of Megatron's optimizers."""

REPARTITION_SECONDS = 600.0
"""Seconds that a repartition may take, in addition to the hang timeout, before a worker counts as hung."""


@dataclass(eq=False)
class LayoutPieces:
    """The pieces of the optimizer's state that one worker holds now, or will hold in a new layout."""

    fragments: Sequence[ShardFragments]
    """The pieces of each of Megatron's optimizers."""
    buckets: Buckets | FsdpBuckets
    shards: Shards
    manager: Manager

    def wanted(self) -> dict[Column, Any]:
        """Return the layouts for the current workers."""
        return {column: self.shards.wanted(column) for column in self.shards.columns}

    def column(self, fragments: ShardFragments) -> Column:
        """Return the column of ``fragments``; the last column if they have no buckets (a stage without experts)."""
        first = next(iter(fragments.buckets), None)
        return self.shards.columns[-1] if first is None else self.buckets.part(first)[0]

    def make(self, fragments: ShardFragments, layouts: Layouts) -> Held:
        """Create the pieces of all units that this worker will hold (``ShardFragments.make``)."""
        held = layouts[self.column(fragments)].held(self.manager.view.worker)
        return {
            unit: fragments.make(self.parts(fragments, unit, layouts), shadow=place > 0)
            for place, unit in enumerate(held)
        }

    def parts(self, fragments: ShardFragments, unit: int, layouts: Layouts) -> dict[int, Sequence[tuple[int, int]]]:
        """Return a map: bucket -> ranges of ``unit``, in the layout of the bucket's column.

        For a column that is not in ``layouts``, the current layout is used.
        """
        found = {}
        for number in fragments.buckets:
            column, numel = self.buckets.part(number)
            layout = layouts[column] if column in layouts else self.shards.layout(column)
            found[number] = layout.parts(unit, numel)
        return found

    def change_hands(self) -> None:
        """Repartition the state over the current workers, in a section, so that all workers do it or none does."""
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
        for fragments, units in zip(self.fragments, held, strict=True):
            fragments.install(units)
        self.shards.take_up(layouts)
        seconds, epoch = round(time.monotonic() - began, 6), manager.view.epoch
        manager.log("repartition", epoch=epoch, seconds=seconds, bytes=came)

    def _element_ranges(self, layouts: Layouts) -> dict[tuple[int, int], list[ElementRange]]:
        """Return a map: (sender, receiver) -> the elements that the sender sends."""
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
        """Return functions (place, take) that store the data of another worker's ``_give`` in the pieces of ``held``.

        ``place`` makes the data arrive directly in the memory of the pieces.  A separate copy would double the memory
        that a newcomer needs, and the C library would not return that memory to the system.
        """
        pieces = in_order(fragment for units in held for unit in units.values() for fragment in unit)
        parts = [self._fragments_of(element_range).parts(element_range, pieces) for element_range in element_ranges]

        def place(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            number, part, _, *name = path
            fragment, start, stop = parts[int(number)][int(part)]
            own = fragment.room(start, stop, dtype, *map(str, name)) if shape else None
            return in_place(own, path, shape, dtype)

        def take(tree: list[Any]) -> None:
            for places, given in zip(parts, tree, strict=True):
                for (fragment, start, stop), state in zip(places, given, strict=True):
                    fragment.take(start, stop, state)

        return place, take

    def _fragments_of(self, element_range: ElementRange) -> ShardFragments:
        return next(fragments for fragments in self.fragments if element_range.bucket in fragments.buckets)

    def compare(self) -> None:
        """Compare the shadows with their originals, by digests that all holders exchange in a section.

        If a shadow differs, all workers rebuild all shadows in the next repartition.
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
            log.info(f"the shadows of workers {different} differ from their originals; all shadows will be rebuilt")
        if anywhere:
            self.shards.distrust_shadows()

    def _digests(self) -> list[int]:
        """Return this worker's row for ``differing_units``, with the digests of its units."""
        row = []
        for optimizer, fragments in enumerate(self.fragments):
            column = self.column(fragments)
            for unit in self.shards.held(column):
                row += [optimizer, min(column), unit, fragments.digest(unit).value]
        return row


@dataclass(eq=False)
class HostShadows:
    """Updater of the shadows in host memory, which works in a separate thread."""

    _fragments: Sequence[ShardFragments]
    """The pieces of each of Megatron's distributed optimizers."""
    _clip: float
    """Megatron's --clip-grad."""
    _thread: threading.Thread | None = field(default=None, init=False)
    _failed: list[BaseException] = field(default_factory=list, init=False)

    def begin(self, norm: float, scales: Sequence[float]) -> None:
        """Start the update of the shadows with the current gradients; called before the device updates its pieces.

        ``norm``: the norm of the unscaled gradients.  ``scales``: the loss scale of each of Megatron's optimizers.
        """
        self.join()
        work = [
            (fragments, shadows, _settings(fragments), 1.0 / scale)
            for fragments, scale in zip(self._fragments, scales, strict=True)
            if (shadows := list(fragments.on_shadow_device))
        ]
        if not work:
            return
        for _, shadows, _, _ in work:
            for fragment in shadows:
                # Copied always, because the next iteration clears the gradient buffer.
                fragment.tensor.grad = fragment.gradient.to(fragment.tensor.device, torch.float32, copy=True)
        # As in Megatron, clip in float32, and only if the norm is above the limit.
        factor = self._clip / (norm + 1.0e-6) if self._clip > 0 else 1.0

        def run() -> None:
            try:
                for fragments, shadows, settings, by_scale in work:
                    _update(fragments.inner, shadows, settings, by_scale, factor)
            except BaseException as error:  # noqa: BLE001  the thread's boundary: join raises it in the main thread
                self._failed.append(error)

        self._thread = threading.Thread(target=run, name="recover-host-shadows", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the last started update of the shadows is done.  Raises the update's exception if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed:
            raise self._failed.pop()


def _settings(fragments: ShardFragments) -> list[dict[str, Any]]:
    """Return each group's settings before the coming update, such as learning rate, weight decay and step count."""
    return [{key: value for key, value in group.items() if key != "params"} for group in fragments.inner.param_groups]


def _update(
    inner: Any,
    shadows: Sequence[ShardFragment],
    settings: Sequence[dict[str, Any]],
    by_scale: float,
    factor: float,
) -> None:
    """Update ``shadows`` by a copy of the device's ``inner`` optimizer that has only shadows as parameters."""
    for by in (by_scale, min(factor, 1.0)):  # in the device's order, so with the device's rounding
        for fragment in shadows if by != 1.0 else ():
            assert fragment.tensor.grad is not None
            fragment.tensor.grad.mul_(by)
    twin = object.__new__(type(inner))
    twin.__dict__.update(inner.__dict__)
    twin.param_groups = [
        {**group, "params": [fragment.tensor for fragment in shadows if fragment.group == number]}
        for number, group in enumerate(settings)
    ]
    twin.state = defaultdict(dict, {fragment.tensor: fragment.state for fragment in shadows})
    type(inner).step(twin)  # the class's method, because the instance's method may be wrapped
    for fragment in shadows:
        fragment.tensor.grad = None
        fragment.state = twin.state[fragment.tensor]


def differing_units(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the units whose holders report different digests.

    A row has four numbers for each unit of one worker: the optimizer, the first slot of the optimizer's column, the
    unit, and the digest.  The slot is needed because two workers may have different columns of experts.
    """
    reported: dict[tuple[int, int, int], set[int]] = {}
    for row in rows:
        for optimizer, column, unit, digest in zip(*(row[at::4] for at in range(4)), strict=True):
            reported.setdefault((optimizer, column, unit), set()).add(digest)
    return sorted({unit for (_, _, unit), digests in reported.items() if len(digests) > 1})
