"""Shards of the optimizer state: which worker of a column holds which shard, and transfers between workers.

    launch --adopt--> every worker has its shard; no shard has a second copy
                         |
                         '--boundary: stale()--> exchange() --all have agreed--> take_up()     shards and shadows
                                 ^                                                  |
                                 '---- a worker is lost, has come, or will leave ---'

`workload.shards` decides the layout.  Between a loss and the next boundary the layout does not change: the first live
holder of a unit (the shard of one owner) is the primary.  A layout names workers instead of slots, since a worker that
takes the slot of a lost worker has none of the lost worker's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.collectives.ledger import Span
from recover_megatron.collectives.state.holder import Offer
from recover_megatron.collectives.state.trees import Place, flatten
from recover_megatron.instep.groups.epoch_groups import EpochGroups
from recover_megatron.instep.meeting.assignment import Assignment
from recover_megatron.workload import shards as parts
from recover_megatron.workload.domains import stride_of
from recover_megatron.workload.grid import Column, Slot
from recover_megatron.workload.shards import AnyLayout, ElementRange, Instances, Layout, Move


@dataclass(eq=False)
class Shards:
    """Layouts of this worker's columns, and the primary of each shard in the present epoch.

    ``_columns``: column in the ring's order -> its slots in Megatron's order of shards, instance by instance.
    ``_assignment``: names the present worker of each slot.  ``_instances``: number of Megatron's optimizer instances;
    with several instances, these are the copies of the state, and there are no shadows.
    """

    _columns: Mapping[Column, Sequence[Slot]]
    _shadows: int
    _assignment: Assignment
    _instances: int = 1
    _layouts: dict[Column, AnyLayout] = field(default_factory=dict, init=False)
    _cuts: dict[tuple[Column, int], tuple[list[list[Span]], frozenset[int]]] = field(default_factory=dict, init=False)
    _strides_for: Mapping[int, frozenset[str]] | None = field(default=None, init=False)
    _strides: dict[tuple[Column, int], int] = field(default_factory=dict, init=False)
    _gone: set[int] = field(default_factory=set, init=False)
    """Workers that are in the layouts, but have lost their place since: their shards may be out of date."""

    @property
    def columns(self) -> list[Column]:
        return list(self._columns)

    # ---- layouts

    def adopt(self) -> None:
        """Set the layouts at launch: every worker has the shard that Megatron assigned to it, and no shadow."""
        occupants = self._assignment.occupants
        self.take_up({column: self._layout_with(column, 0, occupants) for column in self._columns})

    def take_up(self, layouts: Mapping[Column, AnyLayout]) -> None:
        """Replace the present layouts by ``layouts``, which may contain lost workers."""
        self._layouts = dict(layouts)
        self._gone.clear()
        self.planned()

    def forget(self) -> None:
        """Drop the layouts: this worker has lost its place, so its shards will be out of date."""
        self._layouts.clear()
        self._gone.clear()
        self._cuts.clear()

    @property
    def known(self) -> bool:
        """True if this worker has layouts; False until it has taken a place."""
        return bool(self._layouts)

    def planned(self) -> None:
        """Record a new epoch, in which slots may have other workers, and some workers may have lost their place."""
        occupants = set(self._assignment.occupants.values())
        self._gone |= {worker for layout in self._layouts.values() for worker in layout.workers} - occupants
        self._cuts.clear()

    def stale(self) -> bool:
        """Return whether the layouts must change, because they do not fit the present workers any more."""
        return bool(self._gone) or any(self._layouts[column] != self.wanted(column) for column in self._columns)

    def layout(self, column: Column) -> AnyLayout:
        return self._layouts[column]

    def wanted(self, column: Column) -> AnyLayout:
        """Return the layout of ``column`` for all workers that have a place and do not leave at the next boundary."""
        return self._layout_with(column, self._shadows, self._assignment.staying)

    def distrust_shadows(self) -> None:
        """Treat all shadows as invalid: until the next ``exchange`` every shard has a single holder."""
        layouts = {column: layout.without_copies() for column, layout in self._layouts.items()}
        self.take_up(layouts)

    def to_json(self) -> Any:
        """Return the layouts as JSON, for a worker that takes a place in these columns (``from_json``)."""
        return {"layouts": [_to_json(self.layout(column)) for column in self._columns], "gone": sorted(self._gone)}

    def from_json(self, value: Any) -> None:
        """Use the layouts that another member of these columns sent; this worker has no shard yet."""
        layouts, gone = self.read(value)
        self.take_up(layouts)
        self._gone |= {*gone, self._assignment.me}

    def read(self, value: Any) -> tuple[dict[Column, AnyLayout], frozenset[int]]:
        """Parse the layouts that ``to_json`` returned; also return the workers of these layouts whose shards are out of
        date."""
        found = map(_from_json, value["layouts"])
        return dict(zip(self._columns, found, strict=True)), frozenset(value["gone"])

    def _layout_with(self, column: Column, shadows: int, occupants: Mapping[Slot, int]) -> AnyLayout:
        if self._instances > 1:
            slots = self._columns[column]
            shards = len(slots) // self._instances
            return Instances(tuple(tuple(map(occupants.get, slots[shard::shards])) for shard in range(shards)))
        order = [occupants[slot] for slot in column if slot in occupants]
        stride = self._stride(column, order) if shadows else 1
        return parts.layout_of([occupants.get(slot) for slot in self._columns[column]], order, shadows, stride)

    def _stride(self, column: Column, order: Sequence[int]) -> int:
        """Return the distance, in members of the ring ``order``, between copies of a shard; cached for later steps."""
        touched, present = self._assignment.decision.touched, self._layouts.get(column)
        if self._strides_for is not touched:
            self._strides_for, self._strides = touched, {}
        key = column, present.stride if isinstance(present, Layout) else 1
        if key not in self._strides:
            self._strides[key] = stride_of(order, touched, self._shadows + 1, key[1])
        return self._strides[key]

    # ---- in an iteration

    @property
    def live(self) -> frozenset[int]:
        """Workers that have kept their place since the layouts were created, so that their shards are up to date."""
        return frozenset(self._assignment.occupants.values()) - self._gone

    def lost(self) -> list[int]:
        """Return the units (named by owner) whose state no live worker has."""
        return sorted({unit for layout in self._layouts.values() for unit in parts.lost(layout, self.live)})

    def held(self, column: Column) -> tuple[int, ...]:
        """Return the units of ``column`` whose state this worker has, its own unit first; empty if it has none yet."""
        return () if self._assignment.me in self._gone else self._layouts[column].held(self._assignment.me)

    def speaks_for(self, column: Column, unit: int) -> bool:
        """Return whether this worker is the primary of ``unit``: the first live holder."""
        return parts.primary(self._layouts[column], unit, self.live) == self._assignment.me

    def cut(self, column: Column, numel: int) -> tuple[list[list[Span]], frozenset[int]]:
        """Return the spans of a bucket that each member of a column's ring updates, and the distances to shadows.

        ``numel``: number of elements of the bucket.  A distance is the number of ring members from a primary to a
        shadow.  The sums are sent to these shadows, too.
        """
        if (column, numel) not in self._cuts:
            occupants, live, layout = self._assignment.occupants, self.live, self._layouts[column]
            members = [occupants[slot] for slot in column if slot in occupants]
            spans = [[Span(*part) for part in owned] for owned in parts.chunks(layout, members, live, numel)]
            self._cuts[column, numel] = spans, parts.hops(layout, members, live)
        return self._cuts[column, numel]

    # ---- transfers of shards

    def moves(self, column: Column, new: AnyLayout, numel: int) -> list[Move]:
        """Return the transfers from or to this worker that are needed for layout ``new``, in a bucket of ``numel``
        elements."""
        every = parts.moves(self._layouts[column], new, self.live, numel)
        return [move for move in every if self._assignment.me in (move.source, move.target)]

    def exchange(
        self,
        epoch_groups: EpochGroups,
        element_ranges: Mapping[tuple[int, int], Sequence[ElementRange]],
        give: Callable[[Sequence[ElementRange]], Any],
        receive: Callable[[Sequence[ElementRange]], tuple[Place, Callable[[Any], None]]],
        progress: Callable[[], None],
    ) -> int:
        """Send and receive optimizer state; return the number of bytes received.

        ``element_ranges``: (source worker, target worker) -> ranges.  ``give`` returns a tree with the state of ranges
        (``trees.flatten``).  ``receive`` returns the memory for such a tree, and a function to call with the received
        tree.  Every worker offers all its data before it fetches any, so workers cannot wait for each other in a cycle.
        If this raises ``EpochRevoked``, the received data is incomplete.
        """
        slots = {worker: slot for slot, worker in self._assignment.occupants.items()}
        me, came, offers = self._assignment.me, 0, dict[int, Offer]()
        other = me
        try:
            for other in sorted(target for source, target in element_ranges if source == me):
                tree = give(element_ranges[me, other])
                offers[other] = epoch_groups.offer(f"shards/{slots[me]}/{slots[other]}", tree, len(flatten(tree)[1]))
            for other in sorted(source for source, target in element_ranges if target == me):
                name = f"shards/{slots[other]}/{slots[me]}"
                place, take = receive(element_ranges[other, me])
                tree, size = epoch_groups.fetch(
                    name, [slots[other]], lambda tree: len(flatten(tree)[1]), place=place, progress=progress
                )
                take(tree)
                came += size
            for other in offers:
                offers[other].wait(epoch_groups.check)
        except PeerLost as error:
            epoch_groups.end(f"the exchange of optimizer state with worker {other} failed: {error}")
            raise EpochRevoked(epoch_groups.number, str(error)) from error
        finally:
            for offer in offers.values():
                offer.withdraw()
        epoch_groups.check()
        return came


def _to_json(layout: AnyLayout) -> Any:
    if isinstance(layout, Instances):
        return {"homes": [list(home) for home in layout.homes]}
    return {
        "homes": list(layout.homes), "ring": list(layout.ring), "shadows": layout.shadows, "stride": layout.stride
    }  # fmt: skip


def _from_json(value: Any) -> AnyLayout:
    if "ring" not in value:
        return Instances(tuple(map(tuple, value["homes"])))
    return Layout(tuple(value["homes"]), tuple(value["ring"]), value["shadows"], value["stride"])
