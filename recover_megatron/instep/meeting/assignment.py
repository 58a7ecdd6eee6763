"""A worker's place in the present epoch: its slot, groups, model-parallel peers, and microbatches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

from recover_megatron.instep.decision import Decision
from recover_megatron.instep.groups.epoch_groups import CommunicationConfig, EpochGroups
from recover_megatron.membership.io.session import Session
from recover_megatron.workload import Balance, assign, quotas
from recover_megatron.workload.grid import LaunchGrid, Slot

NEARLY_STILL = 1e-9
"""Relative speed (1: average) given to a replica that should run as few microbatches as possible."""


class Quotas:
    """Microbatches that each replica runs in a step of the present plan; equal on all workers."""

    def __init__(self, grid: LaunchGrid, least: int) -> None:
        self._grid = grid
        self.granularity = grid.inner_ranks
        """Divisor of every quota, since the inner ranks of a replica run in lock-step."""
        self.least = least * grid.inner_ranks
        """Least quota of a replica that runs any microbatches."""
        self.easing = False
        """True if fresh replicas begin the next step late, because they receive their state first.  They then get as
        few microbatches of this step as possible."""
        self.balance = Balance()
        self._balanced: dict[int, int] | None = None
        self._kept: dict[tuple[int, int, bool], list[list[int]]] = {}

    def begin(self, decision: Decision) -> None:
        """Reset the quotas for a new plan: equal quotas, except for replicas whose pace is in the plan."""
        self._balanced = None
        self.balance.begin(decision.paces)

    def counts(self, decision: Decision, total: int) -> dict[int, int]:
        """Return replica -> number of microbatches in a step of ``total`` microbatches."""
        if self._balanced is not None and sum(self._balanced.values()) == total:
            return self._balanced
        speeds = dict.fromkeys(decision.replicas, 1.0)
        speeds |= {replica: 1 / pace for replica, pace in decision.paces.items()}
        if self.easing:
            speeds |= dict.fromkeys(decision.fresh, NEARLY_STILL)
        return quotas(total, decision.replicas, speeds=speeds, multiple_of=self.granularity, least=self.least)

    def rebalance(self, counts: dict[int, int]) -> None:
        """Use ``counts`` from the next step until the next plan.  All workers must pass the same counts."""
        self._balanced = counts
        self._kept.clear()

    def of(self, decision: Decision, replica: int, total: int) -> list[list[int]]:
        """Return the ids of the microbatches of ``replica``: one list for each inner rank."""
        key = (decision.epoch, total, self.easing)
        if key not in self._kept:
            counts = self.counts(decision, total)
            every = assign(total, self._grid.inner_ranks, decision.replicas, counts, self._grid.launched)
            self._kept = {key: every[replica]}
        return self._kept[key]


class Assignment:
    """Place of worker ``me`` in the run.  Changed by the main thread; also read by the session's and the spare's
    thread."""

    def __init__(
        self, session: Session, me: int, grid: LaunchGrid, comm_config: CommunicationConfig, least: int = 1
    ) -> None:
        """Create the assignment of a worker that has no place yet.  ``least``: see ``Rules.least``."""
        self._session = session
        self.me = me
        self.grid = grid
        self._comm_config = comm_config
        self.shares = Quotas(grid, least)
        self.lock = threading.Lock()
        """Lock for changes of this assignment, and of this worker's role as a spare (`orphan`)."""
        self.slot, self.replica, self.inner_rank = Slot(-1), -1, 0
        self.position: int | None = None
        """The position for which this worker's model is built; None: no model yet."""
        self.taken_up: Decision | None = None
        """The last plan with a place for this worker; None: the worker has had no place yet."""
        self.committed_by_plan = 0
        """Number of the last decision that was committed when this worker's last epoch was formed."""
        self._epoch_groups: EpochGroups | None = None
        self._pending: Decision | None = None
        self._live: tuple[Decision, dict[Slot, int], frozenset[Slot]] | None = None
        self._shown = (0, False, 0, False)

    # ---- the present epoch

    @property
    def epoch_groups(self) -> EpochGroups:
        assert self._epoch_groups is not None, "start() was not called"
        return self._epoch_groups

    @property
    def decision(self) -> Decision:
        assert self.taken_up is not None, "start() was not called"
        return self.taken_up

    @property
    def started(self) -> bool:
        """True after this worker has taken its first place.  A death before the first epoch ends the run."""
        return self.taken_up is not None

    def present(self) -> tuple[EpochGroups | None, bool]:
        """Return the groups of the present epoch, if any, and whether this worker has taken its first place; both
        are read under one lock."""
        with self.lock:
            return self._epoch_groups, self.started

    def at_once(self) -> tuple[Decision | None, EpochGroups | None, int, int, int | None]:
        """Return ``taken_up``, the present groups, and this worker's replica, inner rank and position.

        All are read under one lock.
        """
        with self.lock:
            return self.taken_up, self._epoch_groups, self.replica, self.inner_rank, self.position

    def end(self, reason: str) -> None:
        """Make every operation of the present groups, if any, fail; may be called from any thread."""
        if self._epoch_groups is not None:
            self._epoch_groups.end(reason)

    def close(self) -> None:
        """Close the present groups, if any, and all NCCL communicators; called by the main thread, outside the
        training.

        Returns when no operation of the epoch touches a tensor any more; may wait for the device.
        """
        self._close_groups()
        self._comm_config.communicators.close()

    def _close_groups(self) -> None:
        if self._epoch_groups is not None:
            self._epoch_groups.close()

    def committed(self, number: int) -> bool:
        """Return whether decision ``number`` was committed when the present epoch was formed; equal on all members.

        Later commits do not count, even if the session knows them; otherwise members that do not know them would repeat
        the decision without this worker.
        """
        return self.committed_by_plan >= number

    def pending(self, number: int) -> Decision | None:
        """Return the plan of step ``number`` if only other workers had begun this step when the present epoch was
        formed.

        Otherwise, and after the first call, returns None.
        """
        pending, self._pending = self._pending, None
        return pending if pending is not None and pending.at == number else None

    def begun_by_others(self, number: int) -> bool:
        """Return whether only other workers had begun step ``number`` when the epoch was formed.

        Returns False after a call of ``pending``.
        """
        return self._pending is not None and self._pending.at == number

    # ---- workers by slot

    @property
    def live(self) -> frozenset[Slot]:
        """Slots that have a worker; the same object until the decision changes."""
        return self.slots_of(self.decision)[1]

    @property
    def occupants(self) -> dict[Slot, int]:
        """Slot -> worker in this slot; the same object until the decision changes."""
        return self.slots_of(self.decision)[0]

    def slots_of(self, decision: Decision) -> tuple[dict[Slot, int], frozenset[Slot]]:
        """Return ``occupants`` and ``live`` of ``decision``; repeated calls for a decision return the same objects."""
        last = self._live
        if last is None or last[0] is not decision:
            slots = decision.slots(self.grid)
            last = self._live = decision, slots, frozenset(slots)
        return last[1:]

    @property
    def staying(self) -> Mapping[Slot, int]:
        """``occupants`` without the replicas that leave at the next boundary."""
        gone = {worker for replica in self.decision.leaving for worker in self.decision.grid[replica]}
        return {slot: worker for slot, worker in self.occupants.items() if worker not in gone}

    @property
    def placed(self) -> bool:
        """True if this worker has a place in the present epoch."""
        return self.taken_up is not None and self.taken_up.place(self.me) is not None

    @property
    def mates(self) -> frozenset[int]:
        """All workers of this worker's replica, including this worker; empty if this worker has no place."""
        return frozenset(self.decision.grid[self.replica]) if self.placed else frozenset()

    @property
    def with_newcomers(self) -> bool:
        """True if this worker's replica has a worker that was not launched with the run."""
        return any(worker >= self.grid.world for worker in self.mates)

    @property
    def lost_mates(self) -> list[int]:
        """Workers of this worker's replica that are missing in the open rendezvous or, if none is open, in the last
        epoch; ascending."""
        return sorted(self.mates - self._session.opened_members)

    # ---- the microbatches

    def share(self, total: int) -> list[list[int]]:
        """Return the ids of the microbatches that this worker's replica runs in a step of ``total`` microbatches.

        The result has one list for each inner rank.
        """
        return self.shares.of(self.decision, self.replica, total)

    def show(self, total: int, goes_back: bool) -> None:
        """Report to the coordinator this worker's place, and its replica's quota in a step of ``total`` microbatches.

        ``goes_back``: see ``Session.show``.
        """
        shown = self.decision.epoch, self.shares.easing, total, goes_back
        if self._shown != shown:
            self._shown = shown
            quota = self.shares.counts(self.decision, total).get(self.replica, 0)
            self._session.show((self.replica, self.position or 0, quota), goes_back)

    # ---- a new epoch

    def stand(self, replica: int, position: int) -> None:
        self.replica, self.position = replica, position
        self.slot = self.grid.replicas[replica][position]
        self.inner_rank = self.grid.inner_rank_of[position]

    def take_up(self, decision: Decision) -> None:
        """Take this worker's place in ``decision``, and create the groups of the decision's epoch."""
        place = decision.place(self.me)
        assert place is not None
        self.shares.begin(decision)
        before = self.occupants if self.started else None
        self._close_groups()
        with self.lock:
            self.stand(*place)
            self.taken_up = decision
            self._epoch_groups = self._groups_of(decision, self.slot)
        if self.occupants != before:  # the columns have other members, so no communicator can be kept
            self._comm_config.communicators.close()
        self._end_if_over(decision)

    def wait_for_step(self, decision: Decision | None) -> None:
        """Set the plan that ``pending`` returns; None if other workers have begun no step without this worker."""
        self._pending = decision

    def open_mirror_groups(self, decision: Decision) -> EpochGroups:
        """Create and return the groups in which this spare mirrors a state during an epoch.

        In these groups the spare has a slot outside the grid.
        """
        self._close_groups()
        with self.lock:
            self._epoch_groups = self._groups_of(decision, Slot(-1 - self.me))
        self._end_if_over(decision)
        return self._epoch_groups

    def all_heard_of(self, epoch: int) -> Callable[[], None]:
        """Return a function that waits until all workers know that ``epoch`` is over (``CancelToken``).

        Without NCCL the function does not wait, because a broken connection makes the operation fail at both ends.
        """
        over_nccl = self._comm_config.over_nccl
        return partial(self._session.wait_all_heard, epoch) if over_nccl else lambda: None

    def _groups_of(self, decision: Decision, slot: Slot) -> EpochGroups:
        peer_stores = decision.peer_stores_by_slot(self.grid)
        all_heard = self.all_heard_of(decision.epoch)
        return EpochGroups(decision.epoch, slot, self._comm_config, peer_stores, all_heard, self._session.wait_in_touch)

    def _end_if_over(self, decision: Decision) -> None:
        if self._session.revoked or self._session.epoch != decision.epoch:
            self.epoch_groups.end("the epoch ended before its groups were opened")
