"""Shards of a state that is spread over the workers of a column (ZeRO-1), and their shadows.

Megatron cuts every bucket into as many equal *shards* as a column has workers at launch; only worker i updates shard i.
Here a shard has a *home* as long as some worker is in its place; shards without a home are divided among all workers:
    at launch, 4 workers      0: shard 0      1: shard 1      2: shard 2      3: shard 3
    worker 1 is lost          0: shard 0 +    -               2: shard 2 +    3: shard 3 +
                                 1/3 of 1                        1/3 of 1        1/3 of 1

so a loss moves one shard, not all shards, and a worker that takes the empty place gathers its shard again.  If a
worker is in a place that did not exist at launch (the run has grown), every bucket is cut again, into as many equal
parts as there are workers, in the order of the ring.

All elements that a worker *owns* are one *unit*, named by the worker.  The unit's *shadows*, on the next workers in the
ring, are kept up to date by the same update.  When the owner is lost, the first live worker with a shadow is the unit's
*primary*, which acts as the owner until the boundary before the next step, where a new layout is made for the present
workers.

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
    """Elements of a bucket whose state ``source`` gives to ``target``, which keeps it in ``unit``."""

    source: int
    target: int
    unit: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Layout of an optimizer state: the worker that owns each shard, and the workers that hold its shadows.

    ``homes``: for each shard, in Megatron's order, the worker in its place; None: no worker.  ``ring``: these workers,
    and those in places that did not exist at launch, in ring order: the worker ``stride`` places after a unit's owner
    holds its shadow (``domains.stride_of``).
    """

    homes: tuple[int | None, ...]
    ring: tuple[int, ...]
    shadows: int
    stride: int = 1

    def __post_init__(self) -> None:
        if len(set(self.ring)) < len(self.ring) or not self._housed <= set(self.ring):
            raise ValueError(f"the ring {self.ring} repeats a worker, or lacks one of the homes {self.homes}")

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
        """Return the elements of a bucket that ``unit`` owns, ascending: its shard, and its share of shards without a
        home.

        ``numel``: number of elements of the bucket.  Shards are equal, or differ by one element if a bucket is not
        padded.  If some worker of the ring has no shard of its own, each unit owns an equal part of the bucket instead.
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
        """Unit -> the shards whose home is this worker; None -> the shards without a home."""
        found: dict[int | None, list[int]] = {}
        for shard, home in enumerate(self.homes):
            found.setdefault(home, []).append(shard)
        return found

    @cached_property
    def _at(self) -> dict[int, int]:
        return {worker: at for at, worker in enumerate(self.ring)}


@dataclass(frozen=True)
class Instances:
    """Layout with several optimizer instances: every instance has all shards, so the instances are the copies.

    ``homes``: for each shard, in Megatron's order, the worker in its place in each instance; None: no worker.  A unit
    is a shard, by its number; its holders are equal, and the first one is the primary.
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
        """Return a shard of a bucket of ``numel`` elements; see ``Layout.parts``."""
        if numel % len(self.homes):
            raise ValueError(f"a bucket of {numel} elements cannot be cut into {len(self.homes)} equal shards")
        width = numel // len(self.homes)
        return [(unit * width, (unit + 1) * width)] if width else []


AnyLayout = Layout | Instances


def layout_of(places: Sequence[int | None], order: Sequence[int], shadows: int, stride: int = 1) -> Layout:
    """Return the layout of the present workers.

    ``places``: worker in the place of each shard; None: no worker.  ``order``: the present workers in ring order.
    """
    return Layout(tuple(places), tuple(order), shadows, stride)


def primary(layout: AnyLayout, unit: int, live: frozenset[int]) -> int | None:
    """Return the worker that acts for ``unit`` among ``live``; None: no worker has its state."""
    return next((worker for worker in layout.holders(unit) if worker in live), None)


def lost(layout: AnyLayout, live: frozenset[int]) -> list[int]:
    """Return the units whose state no worker in ``live`` has."""
    return [unit for unit in layout.units if primary(layout, unit, live) is None]


def chunks(layout: AnyLayout, members: Sequence[int], live: frozenset[int], numel: int) -> list[list[Part]]:
    """Return, for each of ``members`` (in ring order), the parts of a bucket for which it is the primary.

    Parts are ascending and disjoint.  ``live``: the members that have been present since the layout was made; the other
    members hold no state.  Raises ValueError if no live worker has a unit.
    """
    found: dict[int, list[Part]] = {worker: [] for worker in members}
    for unit in layout.units:
        speaker = primary(layout, unit, live)
        if speaker is None:
            raise ValueError(f"no live worker has the state of unit {unit}")
        found[speaker] += layout.parts(unit, numel)
    return [_joined(sorted(parts)) for parts in found.values()]


def owned(layout: AnyLayout, parts: Sequence[Part], numel: int) -> dict[int, list[Part]]:
    """Return unit -> the elements of ``parts`` of a bucket that it owns; ``parts`` are ascending and disjoint."""
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
    """Return all distances, in the ring of ``members``, from the primary of a unit to other live holders of the unit.

    These are multiples of the layout's stride, unless members in between hold no state yet.  ``live``: as for
    ``chunks``.
    """
    at = {worker: number for number, worker in enumerate(members)}
    found: set[int] = set()
    for unit in layout.units:
        speaker = primary(layout, unit, live)
        if speaker is not None:
            found |= {(at[worker] - at[speaker]) % len(members) for worker in layout.holders(unit) if worker in live}
    return frozenset(found - {0})


def moves(old: AnyLayout, new: AnyLayout, live: frozenset[int], numel: int) -> list[Move]:
    """Return the moves of elements of a bucket from layout ``old`` to ``new``, ordered by (source, target).

    ``live``: workers present since ``old`` was made.  Elements that a worker already has, as owner or shadow, are not
    sent to it; other elements come from their primary.  Raises ValueError if no live worker has a unit.
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
    """Join parts that touch."""
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
