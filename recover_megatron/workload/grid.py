"""The grid: which replicas are whole, and which live workers have no place.

The launch grid names the workers of each replica by position.  A replica can compute only with all of them, so one
death makes orphans of the others.  Those of several replicas can be put together again: `placement`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Who computes in an epoch."""

    replicas: Mapping[int, tuple[int, ...]]
    """The whole replicas: id -> its workers by position, in the order of the ids."""
    broken: tuple[int, ...]
    """The ids of all others, in order."""
    lost: tuple[int, ...]
    """Workers of the grid that are not live, in order."""
    orphans: Mapping[int, int]
    """Live workers of broken replicas -> the position they hold, in the order of the workers."""
    spares: tuple[int, ...]
    """Live workers that the launch grid gave no place, in order."""

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers of the whole replicas, in the order of their ids."""
        return tuple(sorted(worker for workers in self.replicas.values() for worker in workers))


def assemble(live: Collection[int], grid: Sequence[Sequence[int]], *, broken: Collection[int] = ()) -> Grid:
    """The grid of the ``live`` workers: a replica is whole if all its workers are live and it is not in ``broken``.

    ``grid``: the launch grid, ``grid[replica][position]`` a worker id.  ``broken``: replicas that can't go on although
    their workers live (one was broken in an earlier epoch, so its gradients or its parameters are behind).

    Raises ValueError if a worker has two places, the replicas differ in size, or a broken one is not in the grid.
    """
    placed = [worker for workers in grid for worker in workers]
    if len(set(placed)) != len(placed):
        raise ValueError("a worker has two places in the grid")
    if len({len(workers) for workers in grid}) > 1 or not all(grid):
        raise ValueError("the replicas of the grid differ in size, or are empty")
    if foreign := sorted(set(broken) - set(range(len(grid)))):
        raise ValueError(f"there are no replicas {foreign} in the grid")
    alive = set(live)
    whole = {r: tuple(workers) for r, workers in enumerate(grid) if r not in broken and alive.issuperset(workers)}
    rest = [r for r in range(len(grid)) if r not in whole]
    orphans = {worker: position for r in rest for position, worker in enumerate(grid[r]) if worker in alive}
    return Grid(
        replicas=whole,
        broken=tuple(rest),
        lost=tuple(sorted(set(placed) - alive)),
        orphans=dict(sorted(orphans.items())),
        spares=tuple(sorted(alive - set(placed))),
    )
