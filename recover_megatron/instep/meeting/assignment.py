"""The present epoch's decision, and this worker's place in it: its slot, its groups, its mates, its microbatches."""

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
"""Speed of a replica that should run as few microbatches as possible."""


class Quotas:
    """The microbatches that each replica runs in a step of the present plan: the same on all workers."""

    def __init__(self, grid: LaunchGrid, least: int) -> None:
        self._grid = grid
        self.granularity = grid.inner_ranks
        """Divisor of a replica's number of microbatches: the replica's inner ranks run in lock-step."""
        self.least = least * grid.inner_ranks
        """Least number of microbatches of a replica that runs any."""
        self.easing = False
        """True if fresh replicas begin the next step late, after receiving their state: they then get as few of its
        microbatches as possible."""
        self.balance = Balance()
        self._balanced: dict[int, int] | None = None
        self._kept: dict[tuple[int, int, bool], list[list[int]]] = {}

    def begin(self, decision: Decision) -> None:
        """Take up a new plan: quotas are even again, except for replicas with a pace in the plan."""
        self._balanced = None
        self.balance.begin(decision.paces)

    def counts(self, decision: Decision, total: int) -> dict[int, int]:
        """Return the number of microbatches of a step of ``total`` for each replica."""
        if self._balanced is not None and sum(self._balanced.values()) == total:
            return self._balanced
        speeds = dict.fromkeys(decision.replicas, 1.0)
        speeds |= {replica: 1 / pace for replica, pace in decision.paces.items()}
        if self.easing:
            speeds |= dict.fromkeys(decision.fresh, NEARLY_STILL)
        return quotas(total, decision.replicas, speeds=speeds, multiple_of=self.granularity, least=self.least)

    def rebalance(self, counts: dict[int, int]) -> None:
        """Use these counts from the next step until the next plan.  All workers must pass the same counts."""
        self._balanced = counts
        self._kept.clear()

    def of(self, decision: Decision, replica: int, total: int) -> list[list[int]]:
        """Return the ids of the microbatches of ``replica``, by inner rank."""
        key = (decision.epoch, total, self.easing)
        if key not in self._kept:
            counts = self.counts(decision, total)
            every = assign(total, self._grid.inner_ranks, decision.replicas, counts, self._grid.launched)
            self._kept = {key: every[replica]}
        return self._kept[key]


class Assignment:
    """Place of worker ``me``.  The main thread changes it; the session's and the spare's threads read it, too."""

    def __init__(
        self, session: Session, me: int, grid: LaunchGrid, comm_config: CommunicationConfig, least: int = 1
    ) -> None:
        """``least``: least number of microbatches per inner rank in a pass of a replica that runs any."""
        self._session = session
        self.me = me
        self.grid = grid
        self._comm_config = comm_config
        self.shares = Quotas(grid, least)
        self.lock = threading.Lock()
        """Held while the assignment changes, and while this worker becomes a spare or ceases to be one (`orphan`)."""
        self.slot, self.replica, self.inner_rank = Slot(-1), -1, 0
        self.position: int | None = None
        """The position for which this worker's model is built; None: no model yet."""
        self.taken_up: Decision | None = None
        """The last plan with a place for this worker; None: it has not joined the first epoch yet."""
        self.committed_by_plan = 0
        """The last decision that was committed when the last epoch was formed."""
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
        """True after the first epoch was joined; before that a death ends the run."""
        return self.taken_up is not None

    def present(self) -> tuple[EpochGroups | None, bool]:
        """Return the groups of the present epoch, if any, and whether the first epoch was joined, as of one moment."""
        with self.lock:
            return self._epoch_groups, self.started

    def at_once(self) -> tuple[Decision | None, EpochGroups | None, int, int, int | None]:
        """Return the last plan taken up, its groups, and this worker's replica, inner rank and position, all of one
        moment."""
        with self.lock:
            return self.taken_up, self._epoch_groups, self.replica, self.inner_rank, self.position

    def end(self, reason: str) -> None:
        """Make every operation of the present epoch's groups fail, if there are any; from any thread."""
        if self._epoch_groups is not None:
            self._epoch_groups.end(reason)

    def close(self) -> None:
        """Close the present groups, if any, and all communicators; called by the main thread, outside the training.

        Returns when no operation of the epoch touches a tensor any more, so it may wait for the device.
        """
        self._close_groups()
        self._comm_config.communicators.close()

    def _close_groups(self) -> None:
        if self._epoch_groups is not None:
            self._epoch_groups.close()

    def committed(self, number: int) -> bool:
        """Return whether a decision was committed when the present epoch was formed: the same on all members.

        Later commits, which the session may know already, do not count: members that do not know them would repeat the
        decision, without this worker.
        """
        return self.committed_by_plan >= number

    def pending(self, number: int) -> Decision | None:
        """Return the plan of step ``number`` if only other workers had begun this step when the present epoch was
        formed; else None, also after the first call."""
        pending, self._pending = self._pending, None
        return pending if pending is not None and pending.at == number else None

    def begun_by_others(self, number: int) -> bool:
        """Return whether ``pending`` would return the plan of step ``number``."""
        return self._pending is not None and self._pending.at == number

    # ---- workers by slot

    @property
    def live(self) -> frozenset[Slot]:
        """The slots that have a worker; the same object as long as the decision is the same."""
        return self.slots_of(self.decision)[1]

    @property
    def standing(self) -> dict[Slot, int]:
        """Slot -> worker in it; the same object as long as the decision is the same."""
        return self.slots_of(self.decision)[0]

    def slots_of(self, decision: Decision) -> tuple[dict[Slot, int], frozenset[Slot]]:
        """Return ``standing`` and ``live`` of ``decision``; repeated calls for a decision return the same objects."""
        last = self._live
        if last is None or last[0] is not decision:
            slots = decision.slots(self.grid)
            last = self._live = decision, slots, frozenset(slots)
        return last[1:]

    @property
    def staying(self) -> Mapping[Slot, int]:
        """``standing`` without the replicas that leave at the next boundary."""
        gone = {worker for replica in self.decision.leaving for worker in self.decision.grid[replica]}
        return {slot: worker for slot, worker in self.standing.items() if worker not in gone} if gone else self.standing

    @property
    def placed(self) -> bool:
        """True if this worker has a place in the present epoch."""
        return self.taken_up is not None and self.taken_up.place(self.me) is not None

    @property
    def mates(self) -> frozenset[int]:
        """Workers of this worker's replica, including this worker; empty if it has no place."""
        return frozenset(self.decision.grid[self.replica]) if self.placed else frozenset()

    @property
    def with_newcomers(self) -> bool:
        """True if this worker's replica has a worker that was not launched with the run."""
        return any(worker >= self.grid.world for worker in self.mates)

    @property
    def lost_mates(self) -> list[int]:
        """Workers of ``mates`` that are not in the newest epoch, which may not have begun yet; ascending."""
        return sorted(self.mates - self._session.opened_members)

    # ---- the microbatches

    def share(self, total: int) -> list[list[int]]:
        """Return the microbatches of this worker's replica in a step of ``total``, by inner rank."""
        return self.shares.of(self.decision, self.replica, total)

    def show(self, total: int, goes_back: bool) -> None:
        """Report this worker's place, and how many of the ``total`` microbatches of a step its replica runs.

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
        """Take this worker's place in the decision, with groups that live as long as its epoch."""
        place = decision.place(self.me)
        assert place is not None
        self.shares.begin(decision)
        before = self.standing if self.started else None
        self._close_groups()
        with self.lock:
            self.stand(*place)
            self.taken_up = decision
            self._epoch_groups = self._groups_of(decision, self.slot)
        if self.standing != before:  # every column has other members: no communicator can be kept
            self._comm_config.communicators.close()
        self._end_if_over(decision)

    def wait_for_step(self, decision: Decision | None) -> None:
        """Let ``pending`` return this plan, whose step other workers have begun; None: no worker has begun the step."""
        self._pending = decision

    def open_mirror_groups(self, decision: Decision) -> EpochGroups:
        """Return this spare's groups in an epoch in which it mirrors a worker's state; its slot there is in no grid."""
        self._close_groups()
        with self.lock:
            self._epoch_groups = self._groups_of(decision, Slot(-1 - self.me))
        self._end_if_over(decision)
        return self._epoch_groups

    def all_heard_of(self, epoch: int) -> Callable[[], None]:
        """Return a function that returns when all workers know that ``epoch`` is over (``CancelToken``).

        Without NCCL the function returns at once, because a broken connection fails the operation at both ends."""
        over_nccl = self._comm_config.over_nccl
        return partial(self._session.wait_all_heard, epoch) if over_nccl else lambda: None

    def _groups_of(self, decision: Decision, slot: Slot) -> EpochGroups:
        peer_stores = decision.peer_stores_by_slot(self.grid)
        all_heard = self.all_heard_of(decision.epoch)
        return EpochGroups(decision.epoch, slot, self._comm_config, peer_stores, all_heard, self._session.wait_in_touch)

    def _end_if_over(self, decision: Decision) -> None:
        if self._session.revoked or self._session.epoch != decision.epoch:
            self.epoch_groups.end("the epoch ended before its groups were opened")
