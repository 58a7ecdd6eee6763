"""The launch grid: which worker stands where.  Fixed for the life of a run; what changes is who of them is alive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchGrid:
    """Replicas of a launch, each with its workers by position.

    ``lanes``: how many data-parallel ranks one replica holds (1; more where experts are spread over them).
    ``lane_of[p]``: the lane of position p.
    """

    replicas: tuple[tuple[int, ...], ...]
    lanes: int
    lane_of: tuple[int, ...]

    @property
    def world(self) -> int:
        """Number of workers at launch."""
        return sum(len(replica) for replica in self.replicas)

    def place(self, worker: int) -> tuple[int, int]:
        """(replica, position) of a worker at launch."""
        for number, replica in enumerate(self.replicas):
            if worker in replica:
                return number, replica.index(worker)
        raise ValueError(f"worker {worker} is in no replica")

    def lane(self, worker: int) -> int:
        """The lane of a worker in its replica."""
        return self.lane_of[self.place(worker)[1]]


def launch_grid(
    world: int, *, tensor: int, context: int, pipeline: int, lanes: int, pipeline_before_data: bool = False
) -> LaunchGrid:
    """The grid of Megatron's rank order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp with ``pipeline_before_data``.

    Positions are in the order (lane, pp, cp, tp), tensor fastest.  ValueError if the sizes do not fill the world.

    >>> launch_grid(8, tensor=2, context=1, pipeline=2, lanes=1).replicas
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    inner = tensor * context
    ranks, rest = divmod(world, inner * pipeline)
    if rest or ranks % lanes:
        raise ValueError(f"{world} workers cannot hold replicas of {inner} x {pipeline} x {lanes}")

    def worker(data: int, stage: int, at: int) -> int:
        if pipeline_before_data:
            return at + inner * (stage + pipeline * data)
        return at + inner * (data + ranks * stage)

    replicas = tuple(
        tuple(
            worker(replica * lanes + lane, stage, at)
            for lane in range(lanes)
            for stage in range(pipeline)
            for at in range(inner)
        )
        for replica in range(ranks // lanes)
    )
    lane_of = tuple(lane for lane in range(lanes) for _ in range(pipeline * inner))
    return LaunchGrid(replicas, lanes, lane_of)
