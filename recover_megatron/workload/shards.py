"""Shards of a state that is spread over the workers of a column (ZeRO-1), and their shadows.

Megatron cuts every bucket into as many equal *shards* as a column has workers at launch; only worker i updates shard i.
The *home* of shard i is the worker that now has worker i's place; if the place is empty, the shard has no home and is
divided among all workers:
    at launch, 4 workers      0: shard 0      1: shard 1      2: shard 2      3: shard 3
    worker 1 is lost          0: shard 0 +    -               2: shard 2 +    3: shard 3 +
                                 1/3 of 1                        1/3 of 1        1/3 of 1

So a loss moves only one shard, and a worker that takes the empty place gathers this shard again.  If the run has grown
so that a worker is in a place that did not exist at launch, every bucket is cut again, into as many equal parts as
there are workers, in the order of the ring.

All elements that a worker *owns* are one *unit*, named by the worker's id.  The next workers in the ring hold *shadows*
of the unit, and apply the same updates to them.  When the owner is lost, the first live worker with a shadow becomes
the unit's *primary* and acts as the owner.  At the boundary before the next step the live workers get a new layout.

    Layout(e) --a worker is lost---> the same units, other primaries --moves()--> Layout(e')
                                         |
                                         '--no live holder: lost()--> the state is lost
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

Part = tuple[int, int]
"""Elements start (included) to stop (excluded) of a bucket."""


@dataclass(frozen=True)
class Move:
    """Transfer of state from ``source`` to ``target``: elements start:stop of a bucket, which belong to ``unit``."""

    source: int
    target: int
    unit: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Layout of an optimizer state: the worker that owns each shard, and the workers that hold its shadows.

    ``homes``: for each shard, in Megatron's order, the worker in the shard's place, or None.  ``ring``: all
    workers in ring order, including workers in places that did not exist at launch.  ``shadows``: number of shadows of
    each unit; the first is on the worker ``stride`` places after the owner (``domains.stride_of``).
    """

    homes: tuple[int | None, ...]
    ring: tuple[int, ...]
    shadows: int
    stride: int = 1

    def __post_init__(self) -> None:
        if len(set(self.ring)) < len(self.ring) or not self._housed <= set(self.ring):
            raise ValueError(f"the ring {self.ring} repeats a worker, or lacks a worker of the homes {self.homes}")

    @property
    def units(self) -> tuple[int, ...]:
        return self.ring

    @property
    def workers(self) -> tuple[int, ...]:
        return self.ring

    def without_copies(self) -> Layout:
        """Return this layout without shadows."""
        return replace(self, shadows=0)

    def holders(self, unit: int) -> tuple[int, ...]:
        """Return the workers that have the state of ``unit``: the owner, then the workers with a shadow."""
        at, size = self._at[unit], len(self.ring)
        return tuple(self.ring[(at + hop * self.stride) % size] for hop in range(min(self.shadows, size - 1) + 1))

    def held(self, worker: int) -> tuple[int, ...]:
        """Return the units whose state ``worker`` has: its own unit, then the units that it shadows."""
        if worker not in self._at:
            return ()
        at, size = self._at[worker], len(self.ring)
        return tuple(self.ring[(at - hop * self.stride) % size] for hop in range(min(self.shadows, size - 1) + 1))

    def parts(self, unit: int, numel: int) -> list[Part]:
        """Return the ranges of elements, ascending, that ``unit`` owns in a bucket of ``numel`` elements.

        These are the unit's shard and its share of the shards without a home.  Shards are equal, or differ by one
        element if the bucket is not padded.  If some worker of the ring is the home of no shard, each unit owns an
        equal part of the bucket instead.
        """
        at, count = self._at[unit], len(self.ring)
        if len(self._housed) < count:
            part = at * numel // count, (at + 1) * numel // count
            return [part] if part[0] < part[1] else []
        found = [self._shard(shard, numel) for shard in self._shards_of[unit]]
        for shard in self._shards_of.get(None, ()):
            start, stop = self._shard(shard, numel)
            found.append((start + at * (stop - start) // count, start + (at + 1) * (stop - start) // count))
        return sorted(part for part in found if part[0] < part[1])

    def _shard(self, shard: int, numel: int) -> Part:
        return shard * numel // len(self.homes), (shard + 1) * numel // len(self.homes)

    @cached_property
    def _housed(self) -> set[int]:
        return {worker for worker in self.homes if worker is not None}

    @cached_property
    def _shards_of(self) -> dict[int | None, list[int]]:
        """Worker -> the numbers of the shards whose home it is; None -> the shards without a home."""
        found: dict[int | None, list[int]] = {}
        for shard, home in enumerate(self.homes):
            found.setdefault(home, []).append(shard)
        return found

    @cached_property
    def _at(self) -> dict[int, int]:
        return {worker: at for at, worker in enumerate(self.ring)}


@dataclass(frozen=True)
class Instances:
    """Layout with several optimizer instances: every instance has all shards, so no shadows are needed.

    ``homes``: for each shard, in Megatron's order, the worker that has the shard's place in each instance, or
    None.  A unit is the number of a shard.  The first live holder of a unit is its primary.
    """

    homes: tuple[tuple[int | None, ...], ...]

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(range(len(self.homes)))

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(worker for home in self.homes for worker in home if worker is not None)

    def without_copies(self) -> Instances:
        """Return this layout with only the first holder of each shard."""
        return Instances(tuple(self.holders(unit)[:1] for unit in self.units))

    def holders(self, unit: int) -> tuple[int, ...]:
        return tuple(worker for worker in self.homes[unit] if worker is not None)

    def held(self, worker: int) -> tuple[int, ...]:
        return tuple(unit for unit, home in enumerate(self.homes) if worker in home)

    def parts(self, unit: int, numel: int) -> list[Part]:
        """Return the range of elements of shard ``unit`` in a bucket of ``numel`` elements, as ``Layout.parts`` does.

        Raises ValueError if the bucket cannot be cut into equal shards.
        """
        if numel % len(self.homes):
            raise ValueError(f"a bucket of {numel} elements cannot be cut into {len(self.homes)} equal shards")
        width = numel // len(self.homes)
        return [(unit * width, (unit + 1) * width)] if width else []


AnyLayout = Layout | Instances


def layout_of(places: Sequence[int | None], order: Sequence[int], shadows: int, stride: int = 1) -> Layout:
    """Return the layout for the workers that are live now.

    ``places``: the worker in the place of each shard, or None.  ``order``: the live workers in ring order.
    """
    return Layout(tuple(places), tuple(order), shadows, stride)


def primary(layout: AnyLayout, unit: int, live: frozenset[int]) -> int | None:
    """Return the primary of ``unit``: its first holder that is in ``live``; None if no live worker has the unit."""
    return next((worker for worker in layout.holders(unit) if worker in live), None)


def lost(layout: AnyLayout, live: frozenset[int]) -> list[int]:
    """Return the units whose state no worker in ``live`` has."""
    return [unit for unit in layout.units if primary(layout, unit, live) is None]


def chunks(layout: AnyLayout, members: Sequence[int], live: frozenset[int], numel: int) -> list[list[Part]]:
    """Return, for each of ``members`` (in ring order), the parts of a bucket for which it is the primary.

    Parts are ascending and disjoint.  ``live``: the members that were live when the layout was made; members that have
    joined since then hold no state.  Raises ValueError if no live worker holds one of the units.
    """
    found: dict[int, list[Part]] = {worker: [] for worker in members}
    for unit in layout.units:
        speaker = primary(layout, unit, live)
        if speaker is None:
            raise ValueError(f"no live worker has the state of unit {unit}")
        found[speaker] += layout.parts(unit, numel)
    return [_joined(sorted(parts)) for parts in found.values()]


def owned(layout: AnyLayout, parts: Sequence[Part], numel: int) -> dict[int, list[Part]]:
    """Return unit -> the elements that it owns among ``parts`` of a bucket; ``parts`` are ascending and disjoint."""
    owners = sorted((start, stop, unit) for unit in layout.units for start, stop in layout.parts(unit, numel))
    found: dict[int, list[Part]] = {}
    at = 0
    for start, stop in parts:
        while start < stop:
            while owners[at][1] <= start:
                at += 1
            _, end, unit = owners[at]
            found.setdefault(unit, []).append((start, min(stop, end)))
            start = min(stop, end)
    return found


def hops(layout: AnyLayout, members: Sequence[int], live: frozenset[int]) -> frozenset[int]:
    """Return all distances, in the ring of ``members``, from a unit's primary to another live holder of the unit.

    ``live``: the members that were live when the layout was made.  The distances are multiples of the layout's stride,
    unless members have joined or left since then.
    """
    at = {worker: number for number, worker in enumerate(members)}
    found: set[int] = set()
    for unit in layout.units:
        speaker = primary(layout, unit, live)
        if speaker is not None:
            found |= {(at[worker] - at[speaker]) % len(members) for worker in layout.holders(unit) if worker in live}
    return frozenset(found - {0})


def moves(old: AnyLayout, new: AnyLayout, live: frozenset[int], numel: int) -> list[Move]:
    """Return the transfers that change a bucket's state from layout ``old`` to ``new``, ordered by (source, target).

    ``live``: workers that were live when ``old`` was made.  A worker does not receive elements that it already has, as
    owner or in a shadow; it receives other elements from their primary.  Raises ValueError if no live worker has some
    unit.
    """
    found = []
    before = sorted((start, stop, unit) for unit in old.units for start, stop in old.parts(unit, numel))
    for unit in new.units:
        for start, stop in new.parts(unit, numel):
            for low, high, owner in before[max(0, bisect_right(before, (start, numel + 1, 0)) - 1) :]:
                a, b = max(start, low), min(stop, high)
                if a >= b:
                    break
                source = primary(old, owner, live)
                if source is None:
                    raise ValueError(f"no live worker has the state of unit {owner}")
                have = live.intersection(old.holders(owner))
                found += [Move(source, target, unit, a, b) for target in new.holders(unit) if target not in have]
    return sorted(found, key=lambda move: (move.source, move.target, move.unit, move.start))


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join adjacent parts: (0, 2), (2, 5) becomes (0, 5)."""
    found: list[Part] = []
    for start, stop in parts:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


@dataclass(frozen=True)
class ElementRange:
    """Elements of a bucket that are sent to another worker."""

    bucket: int
    start: int
    stop: int
