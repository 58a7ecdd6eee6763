"""Knowledge of one worker about the run at one moment: the plan in force, the worker's place, and its progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recover_megatron.instep.decision import Decision, Failure, LostWorker
from recover_megatron.instep.groups.epoch_groups import CommunicationConfig, EpochGroups
from recover_megatron.instep.meeting.assignment import Quotas
from recover_megatron.instep.state.snapshots import SnapshotStore
from recover_megatron.workload.grid import LaunchGrid, Slot


@dataclass(frozen=True, slots=True)
class View:
    """A worker's view of the run at one moment.  Get a new one from ``Manager.view`` after each meeting.

    ``groups``, ``quotas`` and ``snapshots`` refer to objects that keep changing; all other attributes are constant.
    """

    worker: int
    grid: LaunchGrid
    communication: CommunicationConfig

    plan: Decision | None
    """The last plan with a place for this worker; None: the worker has not joined the first epoch yet."""
    replica: int
    inner_rank: int
    position: int | None
    """The position for which this worker's model is built; None: the worker has no model yet."""
    live: frozenset[Slot]
    """Slots that have a worker in ``plan``; the same object until the plan changes."""
    epoch_groups: EpochGroups | None
    quotas: Quotas
    snapshots: SnapshotStore

    number: int
    """The number of the decision (step or section) under way, or of the last one; 0: there was none."""
    iteration: int
    """The training iteration under way, from 1; 0: the training has not begun."""
    phase: str
    microbatch: int | None
    tried: frozenset[int]
    """Microbatches of the step under way that this replica has begun."""
    section: str
    """The kind of the section under way, or of the last one; empty: there was none."""
    joining_next: bool
    """True if other workers have begun the next step, or if fresh replicas begin with it (they may have no state
    yet)."""
    verifying: bool
    """True if states are compared before the step of this iteration."""
    in_section_of_others: bool
    """True if the epoch was formed while other workers were in a section that comes before the next step."""

    orphaned: bool
    """True if this worker's replica is known to be broken."""
    spare_seconds: float
    """Seconds for which this worker has had no place; 0: it has a place."""
    counted_on: frozenset[int]
    """Members of the open rendezvous or, if none is open, of the last epoch."""
    set_aside: frozenset[int]
    """Live workers that were set aside as late; their state can still be requested."""
    lost: Failure | None
    """The workers found missing at the last rendezvous in which this worker took part; None: no worker was missing."""
    whereabouts: Mapping[int, LostWorker]
    """Worker -> its host and device, for all members of the last epoch."""
    term: int
    """Term of the coordinator that formed the epoch; equal on all members of the epoch."""

    @property
    def started(self) -> bool:
        """True after this worker has taken its first place.  A death before the first epoch ends the run."""
        return self.plan is not None

    @property
    def decision(self) -> Decision:
        """The plan; only for a worker that has joined an epoch."""
        assert self.plan is not None, "this worker has not joined an epoch yet"
        return self.plan

    @property
    def epoch(self) -> int:
        return self.decision.epoch

    @property
    def groups(self) -> EpochGroups:
        """The epoch's groups over replicas; only for a worker that has joined an epoch."""
        assert self.epoch_groups is not None, "this worker has not joined an epoch yet"
        return self.epoch_groups

    def share(self, total: int) -> list[list[int]]:
        """Return the ids of the microbatches that this worker's replica runs in a step of ``total`` microbatches.

        The result has one list for each inner rank.
        """
        return self.quotas.of(self.decision, self.replica, total)
