"""The parts of a state that is spread over the workers of a column: the shards of ZeRO-1, and their shadows.

Megatron cuts every bucket into as many equal *shards* as a column has workers at launch; shard i is updated by worker i
alone.  Here a shard has a home as long as somebody stands in its place; what has none is shared out:

    at launch, 4 workers      0: shard 0      1: shard 1      2: shard 2      3: shard 3
    worker 1 is gone          0: shard 0 +    -               2: shard 2 +    3: shard 3 +
                                 1/3 of 1                        1/3 of 1        1/3 of 1

so a loss moves one shard, not all of them, and whoever takes the empty place gathers its shard again.  Where somebody
stands in a place that was not there at launch (the run has grown) every bucket is cut anew, in as many equal parts as
there are workers, in the order of the ring.

All that a worker *owns* is one unit, named by the worker.  Its *shadows*, the next ones in the ring, keep a second copy
up to date by making the same update.  When a worker is lost, the first live shadow is the unit's *primary*: it is the
one that speaks for it, until the boundary before the next step, where the layout is made anew for who is there.

    Layout(e) --somebody is lost--> the same units, other primaries --moves()--> Layout(e')
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
    """Which worker owns which shard of an optimizer's state, and which workers hold its shadows.

    ``homes``: for each shard, in Megatron's order, the worker that stands in its place; None: nobody.  ``ring``: all of
    these workers, and those in places that were not there at launch, in the order of the ring: who is ``stride`` places
    further is the shadow (``domains.stride_of``).
    """

    homes: tuple[int | None, ...]
    ring: tuple[int, ...]
    shadows: int
    stride: int = 1

    def __post_init__(self) -> None:
        if len(set(self.ring)) < len(self.ring) or not self._housed <= set(self.ring):
            raise ValueError(f"the ring {self.ring} is not made of those who have a home, and others: {self.homes}")

    @property
    def units(self) -> tuple[int, ...]:
        return self.ring

    @property
    def workers(self) -> tuple[int, ...]:
        return self.ring

    def without_copies(self) -> Layout:
        """The same, as if there were no shadows."""
        return replace(self, shadows=0)

    def holders(self, unit: int) -> tuple[int, ...]:
        """The workers that have the state of what ``unit`` owns: itself, then its shadows."""
        at, size = self._at[unit], len(self.ring)
        return tuple(self.ring[(at + hop * self.stride) % size] for hop in range(min(self.shadows, size - 1) + 1))

    def held(self, worker: int) -> tuple[int, ...]:
        """The units of which ``worker`` has the state: its own, then those that it is a shadow of."""
        if worker not in self._at:
            return ()
        at, size = self._at[worker], len(self.ring)
        return tuple(self.ring[(at - hop * self.stride) % size] for hop in range(min(self.shadows, size - 1) + 1))

    def parts(self, unit: int, numel: int) -> list[Part]:
        """What ``unit`` owns of a bucket of ``numel`` elements, ascending: its own shard, its share of the others.

        Shards are equal, or differ by an element where a bucket is not padded; equal parts where not all have a home.
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
        """Unit -> the shards whose place it stands in; None: those whose place is empty."""
        found: dict[int | None, list[int]] = {}
        for shard, home in enumerate(self.homes):
            found.setdefault(home, []).append(shard)
        return found

    @cached_property
    def _at(self) -> dict[int, int]:
        return {worker: at for at, worker in enumerate(self.ring)}


@dataclass(frozen=True)
class Instances:
    """The same for several optimizer instances: Megatron itself has each shard in every instance.

    ``homes``: for each shard, in Megatron's order, who stands in its place in each instance; None: nobody.  A unit is
    a shard, by its number; those that hold it are alike, and the first one speaks for it.
    """

    homes: tuple[tuple[int | None, ...], ...]

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(range(len(self.homes)))

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(worker for its in self.homes for worker in its if worker is not None)

    def without_copies(self) -> Instances:
        """The same, as if each shard had its first holder alone."""
        return Instances(tuple(self.holders(unit)[:1] for unit in self.units))

    def holders(self, unit: int) -> tuple[int, ...]:
        return tuple(worker for worker in self.homes[unit] if worker is not None)

    def held(self, worker: int) -> tuple[int, ...]:
        return tuple(unit for unit, its in enumerate(self.homes) if worker in its)

    def parts(self, unit: int, numel: int) -> list[Part]:
        """A shard of a bucket of ``numel`` elements; see ``Layout.parts``."""
        if numel % len(self.homes):
            raise ValueError(f"a bucket of {numel} elements cannot be cut into {len(self.homes)} equal shards")
        width = numel // len(self.homes)
        return [(unit * width, (unit + 1) * width)] if width else []


AnyLayout = Layout | Instances


def layout_of(places: Sequence[int | None], order: Sequence[int], shadows: int, stride: int = 1) -> Layout:
    """The layout of ``order``, all who are there as in the ring; ``places``: for each shard who stands in its place."""
    return Layout(tuple(places), tuple(order), shadows, stride)


def primary(layout: AnyLayout, unit: int, live: frozenset[int]) -> int | None:
    """The worker that speaks for ``unit`` among ``live``; None: nobody has its state."""
    return next((worker for worker in layout.holders(unit) if worker in live), None)


def lost(layout: AnyLayout, live: frozenset[int]) -> list[int]:
    """The units whose state nobody among ``live`` has."""
    return [unit for unit in layout.units if primary(layout, unit, live) is None]


def chunks(layout: AnyLayout, members: Sequence[int], live: frozenset[int], numel: int) -> list[list[Part]]:
    """What each of ``members`` (of the ring, in its order) speaks for in a bucket, ascending and disjoint.

    ``live``: those of them that have been there since the layout was made; the others hold nothing.  ValueError if
    something was lost.
    """
    found: dict[int, list[Part]] = {worker: [] for worker in members}
    for unit in layout.units:
        speaker = primary(layout, unit, live)
        if speaker is None:
            raise ValueError(f"nobody has the state of unit {unit}")
        found[speaker] += layout.parts(unit, numel)
    return [_joined(sorted(parts)) for parts in found.values()]


def owned(layout: AnyLayout, parts: Sequence[Part], numel: int) -> dict[int, list[Part]]:
    """Unit -> what it owns of ``parts`` (ascending, disjoint) of a bucket, ascending; in one pass over both."""
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
    """How many places further in the ring of ``members`` live holders of a unit are than who speaks for it.

    Mostly the multiples of the layout's stride; but for members in between that hold nothing yet.  ``live``: as for
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
    """All that must change hands in a bucket for ``new`` to hold, ordered by (source, target).

    ``live``: who has been there since ``old`` was made.  A holder that has something already, as owner or shadow, gets
    nothing; the rest comes from the primary.  ValueError if something was lost.
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
                    raise ValueError(f"nobody has the state of unit {owner}")
                have = live.intersection(old.holders(owner))
                found += [Move(source, target, unit, a, b) for target in new.holders(unit) if target not in have]
    return sorted(found, key=lambda move: (move.source, move.target, move.unit, move.start))


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbours that touch become one."""
    found: list[Part] = []
    for start, stop in parts:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


@dataclass(frozen=True)
class ElementRange:
    """Part of a bucket that changes hands."""

    bucket: int
    start: int
    stop: int
