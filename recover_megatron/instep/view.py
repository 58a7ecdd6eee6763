"""The run as one worker knows it at one moment: the plan in force, the worker's place, and its progress."""

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
    """A worker's view of the run.  Each ``Manager.view`` makes another: look again after a method that meets others.

    ``groups``, ``quotas`` and ``snapshots`` are handles of things that go on changing; all else stays as it is.
    """

    worker: int
    grid: LaunchGrid
    communication: CommunicationConfig

    plan: Decision | None
    """The last plan that had a place for this worker; None: the first epoch was not joined yet."""
    replica: int
    inner_rank: int
    position: int | None
    """The position that this worker's model is built for; None: it has no model yet."""
    live: frozenset[Slot]
    """The slots in which somebody stands by ``plan``; the same object for as long as the plan is."""
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
    """Whether the step that follows is one that others have begun, or some begin without a state."""
    verifying: bool
    """Whether states are compared before the step of this iteration."""
    in_section_of_others: bool
    """Whether the epoch was made while others were in a section that comes before the next step."""

    orphaned: bool
    """Whether this worker's replica is known to be broken."""
    spare_seconds: float
    """How long this worker has been without a place."""
    counted_on: frozenset[int]
    """The workers that the run counts on."""
    set_aside: frozenset[int]
    """Live workers that the run goes on without, since they were late: they can still be asked for their state."""
    lost: Failure | None
    """The loss that the last epoch found and that this worker has met the others for."""
    whereabouts: Mapping[int, LostWorker]
    """The hosts and devices of the workers that were there when the last epoch was made."""
    term: int
    """The term of the coordinator that formed the epoch: the same on all of its members."""

    @property
    def started(self) -> bool:
        """Whether the first epoch was joined: before it a death ends the run."""
        return self.plan is not None

    @property
    def decision(self) -> Decision:
        """The plan, of a worker that has joined an epoch."""
        assert self.plan is not None, "no epoch was joined yet"
        return self.plan

    @property
    def epoch(self) -> int:
        return self.decision.epoch

    @property
    def groups(self) -> EpochGroups:
        """Groups of the epoch, of a worker that has joined one."""
        assert self.epoch_groups is not None, "no epoch was joined yet"
        return self.epoch_groups

    def share(self, total: int) -> list[list[int]]:
        """The microbatches of this worker's replica in a step of ``total``, by inner rank."""
        return self.quotas.of(self.decision, self.replica, total)
