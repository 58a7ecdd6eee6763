"""The parts of a worker's recovery, assembled: each part knows its task, and the parts created before it.

Only modules of this package use these parts; a training loop uses a ``Manager`` (`manager`).  A training step (`step`)
and all other code that takes part in a run receives the ``Recovery`` and uses the parts that it needs.  ``Blame``
judges whether a worker's model-parallel peers may be to blame for an error.
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
    """Description of a worker when it enters the run, without its model and state."""

    id: int
    slot: Slot | None
    """Slot of the worker at launch; None: the worker was started later, and has no place yet."""
    node: str = ""
    """Name of its host."""
    domains: Sequence[str] = ()
    """Names of its failure domains (``workload.domains``)."""
    device: int | None = None
    """Number of its device on the host."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Flags of its command line that must be the same on all workers (`script_flags`), by name."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Description of its program (`program`); empty: not compared."""


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
        """Report to the coordinator this worker's place, and its replica's quota of a step's ``total`` microbatches."""
        self.assignment.show(total, self.planner.can_go_back)

    def rebalance(self, speeds: Mapping[int, float], total: int, agree: Callable[[list[int]], list[int]]) -> None:
        """Set the next step's quotas from the paces of the step just committed; every worker of a replica must call it.

        A replica's time per microbatch is summed with the gradients (``Tail``), so every worker of a column knows the
        same numbers when a step is committed.  Columns measure different times (stages wait for each other
        differently), so ``agree`` returns the numbers of one rank on all workers of a replica's model-parallel group.
        No worker changes quotas after a step that fresh replicas began late, since these ran few of its microbatches.
        ``speeds``: replica -> seconds per microbatch.
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
        """Leave in order, once all workers have reached the end of the training."""
        self.sections.run("end", lambda: None)
        self.orphan.finished = True
        self.assignment.epoch_groups.close()
        self.session.leave()


UNEXPLAINED = 2
"""Number of times per iteration that communication inside a replica may fail although all workers of the replica live;
after that the training code is to blame."""


@dataclass(eq=False)
class Blame:
    """Judges the errors of one worker, and counts the unexplained ones in this iteration.

    If an operation on a group fails while a model-parallel peer is being lost, the loss is the cause, whatever the
    error text.  An error about a lost connection is attributed to the death of a peer even before this death is known,
    and the worker waits for a place in another replica.  If all peers live and the iteration fails in this way again
    and again, the training code is at fault (for example, two workers disagree on a shape), and the error is reported
    as the training code's.
    """

    _iteration: int = 0
    _unexplained: int = 0
    _judged: tuple[BaseException | None, bool] = (None, False)

    def of_mates(self, error: BaseException, recovery: Recovery) -> bool:
        """Return whether another worker of this replica caused ``error``: the replica is broken, or seems to be.

        May wait for the report of a death, once per error.  Raises as ``Session.wait_lost`` does.
        """
        if self._judged[0] is not error:
            self._judged = error, self._is_of_mates(error, recovery)
        return self._judged[1]

    def _is_of_mates(self, error: BaseException, recovery: Recovery) -> bool:
        if isinstance(error, Orphaned):
            return True
        if is_of_device(error):  # for an orphan, too: with a broken device it would wait without ever being of use
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
        # Do not wait for a revoke: another replica may have caused it, before the death of a peer is reported.
        return recovery.session.wait_lost(recovery.assignment.mates, BLAME_SECONDS)

    def left(self, recovery: Recovery) -> None:
        """Count the error for which this worker left the training, after waiting for the report of a death."""
        iteration = recovery.hooks.iteration()
        if self._iteration != iteration:
            self._iteration, self._unexplained = iteration, 0
        if not recovery.assignment.lost_mates:
            self._unexplained += 1
