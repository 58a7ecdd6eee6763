"""Creates and connects the parts of one worker's recovery (rendezvous, orphan, planner, snapshots and others).

Only modules of this package use these parts; a training loop uses a ``Manager`` (`manager`).  A training step (`step`)
receives the ``Recovery`` and uses the parts that it needs.  ``Blame`` decides whether an error of this worker was
caused by one of its model-parallel peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from recover_megatron.collectives.comparison import OwnDescription
from recover_megatron.instep.decision import Rules
from recover_megatron.instep.faults import Orphaned, is_communication, is_in_a_group, is_of_device, is_own
from recover_megatron.instep.groups.epoch_groups import CommunicationConfig
from recover_megatron.instep.groups.exchange import Exchange
from recover_megatron.instep.hooks import Announcements, Hooks, ProgressReports
from recover_megatron.instep.meeting.assignment import Assignment
from recover_megatron.instep.meeting.edges import Edges
from recover_megatron.instep.meeting.orphan import BLAME_SECONDS, Orphan
from recover_megatron.instep.meeting.planner import Planner
from recover_megatron.instep.meeting.rendezvous import Boundary, Rendezvous, Sections
from recover_megatron.instep.state.snapshots import SnapshotStore
from recover_megatron.instep.view import View
from recover_megatron.membership.io.session import Session
from recover_megatron.workload.grid import LaunchGrid, Slot


@dataclass(frozen=True)
class Worker:
    """Facts about a worker when it enters the run, except its model and state."""

    id: int
    slot: Slot | None
    """Slot of the worker at launch; None: the worker was started later, so it has no place yet."""
    node: str = ""
    """Name of the worker's host."""
    domains: Sequence[str] = ()
    """Names of the worker's failure domains (``workload.domains``)."""
    device: int | None = None
    """Number of the worker's device on its host; None: not known."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Name -> value of the command-line flags that must be the same on all workers (`script_flags`)."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Description of the worker's program (`program`); empty: not compared."""


class Recovery:
    """Parts of one worker's recovery.  The main thread calls them; the session's thread calls ``Orphan.revoked``."""

    def __init__(
        self,
        session: Session,
        worker: Worker,
        grid: LaunchGrid,
        comm_config: CommunicationConfig,
        hooks: Hooks,
        rules: Rules,
        verify_interval: int,
    ) -> None:
        self.session = session
        self.comm_config = comm_config
        self.hooks = hooks
        self.progress = ProgressReports(session, hooks)
        place = self.assignment = Assignment(session, worker.id, grid, comm_config, rules.least)
        if worker.slot is not None:
            place.stand(*grid.place(worker.slot))
        self.edges = Edges(worker.id)
        self.snapshots = SnapshotStore(comm_config, self.progress.inject)
        self.planner = Planner(
            session,
            hooks,
            place,
            self.edges,
            rules,
            node=worker.node,
            domains=tuple(worker.domains),
            device=worker.device,
            peer_store=comm_config.peer_store.address,
            snapshots=self.snapshots,
            own=OwnDescription(worker.flags, worker.code, comm_config.peer_store, comm_config.secret),
        )
        announcements = Announcements(place, comm_config.peer_store)
        self.orphan = Orphan(
            session,
            hooks,
            self.progress,
            place,
            self.planner,
            self.edges,
            announcements,
            at_launch=worker.slot is not None,
        )
        self.rendezvous = Rendezvous(session, hooks, self.progress, place, self.planner, self.orphan, announcements)
        self.sections = Sections(hooks, self.progress, place, self.orphan, self.rendezvous)
        self.boundary = Boundary(hooks, self.progress, place, self.rendezvous, verify_interval)
        self.exchange = Exchange(
            hooks, comm_config, self.progress, place, self.planner, self.edges, self.orphan, announcements
        )
        session.on_revoke(self.orphan.revoked)

    def view(self) -> View:
        """Return a new view of the run as this worker knows it now."""
        place, progress, session, planner = self.assignment, self.progress, self.session, self.planner
        decision, epoch_groups, replica, inner_rank, position = place.at_once()
        started = decision is not None
        return View(
            worker=place.me,
            grid=place.grid,
            communication=self.comm_config,
            plan=decision,
            replica=replica,
            inner_rank=inner_rank,
            position=position,
            live=frozenset() if decision is None else place.slots_of(decision)[1],
            epoch_groups=epoch_groups,
            quotas=place.shares,
            snapshots=self.snapshots,
            number=progress.at,
            iteration=self.hooks.iteration(),
            phase=progress.phase,
            microbatch=progress.microbatch,
            tried=frozenset(progress.tried),
            section=self.sections.kind,
            joining_next=started and self.boundary.joining_next,
            verifying=self.boundary.verifying,
            in_section_of_others=started and self.boundary.in_section_of_others,
            orphaned=self.orphan.orphaned,
            spare_seconds=self.orphan.spare_seconds,
            counted_on=session.opened_members,
            set_aside=session.aside,
            lost=planner.lost,
            whereabouts=planner.losses.whereabouts,
            term=session.term,
        )

    def show(self, total: int) -> None:
        """Report to the coordinator this worker's place, and its replica's quota in a step of ``total``
        microbatches."""
        self.assignment.show(total, self.planner.can_go_back)

    def rebalance(self, speeds: Mapping[int, float], total: int, agree: Callable[[list[int]], list[int]]) -> None:
        """Set the next step's quotas from the paces of the committed step; all workers must call it.

        ``speeds``: replica -> seconds per microbatch.  All workers of a column have equal numbers, since these were
        summed with the gradients (``Tail``).  Columns measure different times, because pipeline stages wait for each
        other differently.  So ``agree`` returns the numbers of one rank on all workers of a model-parallel group.  If
        fresh replicas began the step late, the quotas do not change, since these replicas ran few microbatches.
        """
        decision, shares = self.assignment.decision, self.assignment.shares
        if shares.easing:
            return
        current = shares.counts(decision, total)
        paces = {replica: speeds[replica] for replica in decision.replicas if replica in speeds}
        if len(paces) == len(decision.replicas):
            shares.balance.measured(paces)
        wanted = shares.balance.counts(current, total, multiple_of=shares.granularity, least=shares.least)
        agreed = agree([wanted[replica] for replica in decision.replicas])
        wanted = dict(zip(decision.replicas, agreed, strict=True))
        if wanted != current:
            shares.rebalance(wanted)
            self.hooks.log(
                "quotas",
                quotas={str(replica): count for replica, count in wanted.items()},
                seconds_per_microbatch={str(replica): round(pace, 6) for replica, pace in paces.items()},
            )

    def finish(self) -> None:
        """Leave the run normally, after all workers have reached the end of the training."""
        self.sections.run("end", lambda: None)
        self.orphan.finished = True
        self.assignment.epoch_groups.close()
        self.session.leave()


UNEXPLAINED = 2
"""Greatest number of communication failures in one iteration that are attributed to a model-parallel peer although all
peers live.  After one more such failure the training code is to blame."""


@dataclass(eq=False)
class Blame:
    """Decides which errors of one worker were caused by model-parallel peers; counts unexplained errors per iteration.

    If an operation on a group fails and a model-parallel peer is lost, the loss is the cause, whatever the error's
    text.  An error about a lost connection is attributed to a dead peer even before the death is reported; the worker
    then leaves the replica and waits for a place.  If more than ``UNEXPLAINED`` such errors occur in one iteration
    while all peers live, the training code is at fault (for example, two workers disagree on a shape).
    """

    _iteration: int = 0
    _unexplained: int = 0
    _judged: tuple[BaseException | None, bool] = (None, False)

    def of_mates(self, error: BaseException, recovery: Recovery) -> bool:
        """Return whether another worker of this replica caused ``error``; if so, this worker must leave the replica.

        May wait once per error for the report of a death.  Raises as ``Session.wait_lost`` does.
        """
        if self._judged[0] is not error:
            self._judged = error, self._is_of_mates(error, recovery)
        return self._judged[1]

    def _is_of_mates(self, error: BaseException, recovery: Recovery) -> bool:
        if isinstance(error, Orphaned):
            return True
        if is_of_device(error):  # also for an orphan, which could not take a place with a broken device
            return False
        if recovery.orphan.orphaned:
            return True
        if len(recovery.assignment.grid.replicas[0]) == 1:
            return False
        if is_communication(error):
            if self._iteration != recovery.hooks.iteration() or self._unexplained < UNEXPLAINED:
                return True
        elif is_own(error) or not is_in_a_group(error):
            return False
        # Do not wait for a revoke, which a loss in another replica may cause before the death of a peer is reported.
        return recovery.session.wait_lost(recovery.assignment.mates, BLAME_SECONDS)

    def left(self, recovery: Recovery) -> None:
        """Count the error for which this worker left the training as unexplained, unless a model-parallel peer is lost.

        Call it after ``Orphan.replica_failed``, which waits for the report of a death.
        """
        iteration = recovery.hooks.iteration()
        if self._iteration != iteration:
            self._iteration, self._unexplained = iteration, 0
        if not recovery.assignment.lost_mates:
            self._unexplained += 1
