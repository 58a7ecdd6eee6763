"""Who was lost when: what the events say, and the last words of a run that cannot go on."""

from __future__ import annotations

from dataclasses import dataclass, field

from recover_megatron.instep.decision import Decision
from recover_megatron.instep.grid import LaunchGrid


@dataclass
class Loss:
    """Workers that an epoch found missing."""

    iteration: int
    workers: list[int]
    replicas: list[int] = field(default_factory=list)
    """Those that they had a place in."""

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {', '.join(map(str, self.workers))}"


class Losses:
    """All losses of a run, as one worker has met them.  ``grid``: where everybody stands before the first decision."""

    def __init__(self, grid: LaunchGrid) -> None:
        self._every: list[Loss] = []
        self._places = {slot: number for number, slots in enumerate(grid.replicas) for slot in slots}
        self._known = set(self._places)

    def note(self, decision: Decision, before: Decision | None) -> Loss | None:
        """Who is missing in ``decision`` and was not before; ``before``: the last one that this worker took up."""
        present = {*decision.workers, *decision.spares}
        missing = sorted(self._known - present)
        self._known = present
        if not missing:
            return None
        places = self._places
        if before is not None:
            places = {worker: replica for replica, workers in before.grid.items() for worker in workers}
        replicas = sorted({places[worker] for worker in missing if worker in places})
        self._every.append(Loss(decision.iteration, missing, replicas))
        return self._every[-1]

    def last_words(self, decision: Decision, wanted: int) -> str:
        """Why a run ends that ``decision`` leaves fewer replicas than ``wanted``: who was lost, what is left."""
        lost = "; ".join(map(str, self._every))
        need = f"{wanted} are wanted" if wanted > 1 else "one is needed"
        what = f"{len(decision.replicas)} complete replicas are left, {need}."
        if decision.state_lost:
            what = f"Workers enough for a replica live, but {decision.state_lost}."
        return (
            f"{what} Workers lost: {lost or 'none'}; alive without a place: {len(decision.spares)}. "
            f"Last checkpoint: {decision.checkpoint}"
        )
