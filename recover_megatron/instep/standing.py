"""Where a worker stands in the present epoch, and what follows from that: its groups, its mates, its share of a step.

slot       a place of the launch grid: (replica, position); workers come and go, slots stay
decision   what the epoch's plan says of all slots; the same on all of its members
"""

from __future__ import annotations

from recover_megatron.instep.generation import Generation
from recover_megatron.instep.grid import LaunchGrid
from recover_megatron.instep.hooks import Hooks
from recover_megatron.instep.marks import Marks
from recover_megatron.instep.plan import Decision
from recover_megatron.instep.shares import Shares
from recover_megatron.membership.session import Session


class Standing(Marks):
    """See the module's text."""

    def __init__(self, session: Session, hooks: Hooks, me: int, grid: LaunchGrid, shares: Shares) -> None:
        super().__init__(session, hooks)
        self.me = me
        self.grid = grid
        self.shares = shares
        self.slot, self.replica, self.lane = -1, -1, 0
        self.position: int | None = None
        """What this worker's model is built for."""
        self._generation: Generation | None = None
        self._decision: Decision | None = None
        self._live: tuple[Decision, dict[int, int], frozenset[int]] | None = None
        self._shown = (0, False, 0)
        self._committed = 0
        """The last decision that was over when the last epoch was made."""

    @property
    def generation(self) -> Generation:
        """The groups of the present epoch."""
        assert self._generation is not None, "start() was not called"
        return self._generation

    @property
    def decision(self) -> Decision:
        """What the present epoch decided."""
        assert self._decision is not None, "start() was not called"
        return self._decision

    @property
    def started(self) -> bool:
        """Whether the first epoch was joined: before it a death ends the run."""
        return self._decision is not None

    @property
    def live(self) -> frozenset[int]:
        """The slots in which somebody stands; the same object as long as the decision is."""
        return self._slots()[2]

    @property
    def standing(self) -> dict[int, int]:
        """Slot -> worker that stands there; the same object as long as the decision is."""
        return self._slots()[1]

    def _slots(self) -> tuple[Decision, dict[int, int], frozenset[int]]:
        decision = self.decision
        if self._live is None or self._live[0] is not decision:
            slots = decision.slots(self.grid)
            self._live = decision, slots, frozenset(slots)
        return self._live

    @property
    def placed(self) -> bool:
        """Whether this worker has a place in the present epoch."""
        return self._decision is not None and self._decision.place(self.me) is not None

    def committed(self, number: int) -> bool:
        """Whether a decision was over when the present epoch was made: all of the epoch say the same.

        The session may have heard more since, and others not yet: they would begin again without those who have.
        """
        return self._committed >= number

    def share(self, total: int) -> list[list[int]]:
        """The microbatches of my replica, by lane, of a step of ``total``, by the present plan."""
        return self.shares.of(self.decision, self.replica, total)

    def show(self, total: int) -> None:
        """Tell people where this worker stands, and how much of a step of ``total`` microbatches its replica runs."""
        shown = self.decision.epoch, self.shares.easing, total
        if self._shown != shown:
            self._shown = shown
            quota = self.shares.counts(self.decision, total).get(self.replica, 0)
            self.session.show((self.replica, self.position or 0, quota))

    def _stand(self, replica: int, position: int) -> None:
        self.replica, self.position = replica, position
        self.slot = self.grid.replicas[replica][position]
        self.lane = self.grid.lane_of[position]
