"""Record of the workers that a run has lost: their hosts, devices, and last reported phases."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from recover_megatron.instep.decision import Decision, Failure, JoinStatus, LostWorker
from recover_megatron.workload.grid import LaunchGrid

READY = "is a spare, and ready"
"""Reason why a spare asks for an epoch; follows "worker N"."""


class Failures:
    """Losses of a run, as far as one worker knows them.  ``grid``: the grid of the launch."""

    def __init__(self, grid: LaunchGrid) -> None:
        self._every: list[Failure] = []
        launched = enumerate(grid.replicas[: grid.launched])
        self._places: dict[int, int] = {worker: number for number, workers in launched for worker in workers}
        self._known = set(self._places)
        self.whereabouts: dict[int, LostWorker] = {}
        """Worker -> its host and device, for the members of the last epoch passed to ``note``."""

    def note(
        self,
        decision: Decision,
        before: Decision | None,
        statuses: Mapping[int, JoinStatus] | None = None,
        seen: Mapping[str, Mapping[str, object]] | None = None,
        left: Collection[int] = (),
    ) -> Failure | None:
        """Record and return the workers that are missing in ``decision`` for the first time; None: no worker is
        missing.

        ``before``: the last plan with a place for this worker.  ``statuses``: statuses of the present members.
        ``seen``: lost worker -> ``phase`` and ``iteration`` of its last heartbeat, as the coordinator reports them.
        ``left``: workers that left the run normally.
        """
        present = {*decision.workers, *decision.spares}
        aside = {int(worker) for worker, last in (seen or {}).items() if last.get("aside")}  # alive, and may come back
        missing = sorted(self._known - present - set(left) - aside)
        self._known = present
        before_now = self.whereabouts
        self.whereabouts = {
            worker: LostWorker(worker, status.node, status.device) for worker, status in (statuses or {}).items()
        }
        if not missing:
            return None
        places = self._places
        if before is not None:
            places = {worker: replica for replica, workers in before.grid.items() for worker in workers}
        iteration = decision.rollback.under_way if decision.rollback else decision.iteration
        replicas = sorted({places[worker] for worker in missing if worker in places})
        lost = []
        for worker in missing:
            last = (seen or {}).get(str(worker), {})
            phase = str(last.get("phase", "")) if last.get("iteration") == iteration else ""
            known = before_now.get(worker, LostWorker(worker))
            lost.append(LostWorker(worker, known.node, known.device, phase))
        self._every.append(Failure(iteration, tuple(lost), tuple(replicas)))
        return self._every[-1]

    def why_it_ends(self, decision: Decision, wanted: int) -> str:
        """Return the reason why the run ends: the state is lost, or fewer than ``wanted`` replicas are left.

        The text also names the lost workers, the number of spares, and the last checkpoint.
        """
        lost = "; ".join(map(str, self._every))
        need = f"{wanted} are required (--recover-min-replicas)" if wanted > 1 else "one is required"
        what = f"{len(decision.replicas)} complete replicas are left, {need}."
        if decision.state_lost:
            what = f"Enough workers are alive for a replica, but {decision.state_lost}."
        return (
            f"{what} Workers lost: {lost or 'none'}; alive without a place: {len(decision.spares)}. "
            f"Last checkpoint: {decision.checkpoint}"
        )
