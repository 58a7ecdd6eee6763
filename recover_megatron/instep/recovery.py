"""A worker's part in the run, put together: each part knows its own matter, and those above it in this list.

    progress       the number of its decision, and what it does in it
    assignment     what the present epoch decided, and this worker's place in it: groups, mates, microbatches
    edges          the workers that this one cannot reach
    snapshots      what this worker keeps in memory of the run's state, for a rollback
    planner        joins an epoch, and works out what it decides
    announcements  what others are told of operations between decisions
    orphan         leaving the training when the own replica is broken, waiting as a spare, coming back
    rendezvous     meeting the others, and taking up the plan of the next epoch
    sections       decisions other than steps: run again from the start after a loss
    boundary       before a step: where new replicas come in
    exchange       operations of some workers between decisions

All that takes part in a run is given this object and uses the part that it needs; a training step (`step`) does, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recover_megatron.instep.announcements import Announcements
from recover_megatron.instep.assignment import Assignment
from recover_megatron.instep.decision import Rules
from recover_megatron.instep.edges import Edges
from recover_megatron.instep.epoch_groups import CommunicationConfig
from recover_megatron.instep.exchange import Exchange
from recover_megatron.instep.grid import LaunchGrid
from recover_megatron.instep.hooks import Hooks, ProgressReports
from recover_megatron.instep.no_place import OwnFlags
from recover_megatron.instep.orphan import Orphan
from recover_megatron.instep.planner import Planner
from recover_megatron.instep.rendezvous import Boundary, Rendezvous, Sections
from recover_megatron.instep.snapshots import SnapshotStore
from recover_megatron.membership.session import Session


class Recovery:
    """The parts of worker ``me``.  Its main thread calls them, the session's thread ``Orphan.revoked``."""

    def __init__(
        self,
        session: Session,
        me: int,
        grid: LaunchGrid,
        comm_config: CommunicationConfig,
        hooks: Hooks,
        *,
        slot: int | None,
        node: str = "",
        domains: Sequence[str] = (),
        device: int | None = None,
        rules: Rules | None = None,
        min_replicas: int = 1,
        verify_interval: int = 0,
        flags: Mapping[str, str] | None = None,
    ) -> None:
        """``slot``: where this worker stands at launch; None: nowhere yet.  ``node``: the name of its host;
        ``domains``: what it may be lost with (``workload.domains``); ``device``: the number of its device there.

        ``min_replicas``: with fewer the run ends.  ``verify_interval``: iterations between comparisons of states.
        ``flags``: what this worker was started with, which must be the same for all (`script_flags`); None: no matter.
        """
        rules = rules or Rules()
        self.session = session
        self.comm_config = comm_config
        self.hooks = hooks
        self.progress = ProgressReports(session, hooks)
        mine = self.assignment = Assignment(session, me, grid, comm_config, rules.least)
        if slot is not None:
            mine.stand(*grid.place(slot))
        self.edges = Edges(me)
        self.snapshots = SnapshotStore(comm_config, self.progress.inject)
        self.planner = Planner(
            session,
            hooks,
            mine,
            self.edges,
            rules,
            node=node,
            domains=tuple(domains),
            device=device,
            peer_store=comm_config.peer_store.address,
            snapshots=self.snapshots,
            min_replicas=min_replicas,
            flags=OwnFlags(flags or {}, comm_config.peer_store, comm_config.secret),
        )
        announcements = Announcements(mine, comm_config.peer_store)
        self.orphan = Orphan(
            session, hooks, self.progress, mine, self.planner, self.edges, announcements, at_launch=slot is not None
        )
        self.rendezvous = Rendezvous(session, hooks, self.progress, mine, self.planner, self.orphan, announcements)
        self.sections = Sections(hooks, self.progress, mine, self.orphan, self.rendezvous)
        self.boundary = Boundary(hooks, self.progress, mine, self.rendezvous, verify_interval)
        self.exchange = Exchange(
            hooks, comm_config, self.progress, mine, self.planner, self.edges, self.orphan, announcements
        )
        session.on_revoke(self.orphan.revoked)

    def finish(self) -> None:
        """The training is over for this worker: leave in order, when all have come this far."""
        self.sections.run("end", lambda: None)
        self.orphan.finished = True
        self.assignment.epoch_groups.close()
        self.session.leave()
