"""The holders of the run's state, and who runs which microbatch: pure functions of what the members joined with.

    joined with   completed=7  holds  ran=(0, 3)     died in step 8: its 1 and 4 are lost
                  completed=7  holds  ran=(2, 5)
                  completed=0  -      ran=()         a newcomer: takes the state, and runs nothing in this step
    shares        8: {0: [1], 1: [4], 2: []}         from step 9 on all three

Every member works them out by itself, from the same statuses: the plan of the epoch has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from recover_megatron.membership.records import Json
from recover_megatron.workload import reassign


@dataclass(frozen=True)
class Status:
    """What a worker joins an epoch with."""

    completed: int
    """The last step that its state has."""
    holds: bool
    """Whether it has a state to go on from; who comes into a running job has none."""
    digest: str
    """Of a state that no step of this run has changed yet; empty afterwards: then all holders have the same."""
    ran: tuple[int, ...]
    """The microbatches of step ``completed + 1`` whose gradients it holds."""
    address: str
    """Of its peer store: where its state is fetched."""

    def to_json(self) -> Json:
        """For the wire."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Json) -> Status:
        """The inverse of ``to_json``."""
        return cls(**{**told, "ran": tuple(told["ran"])})

    def after(self, committed: int) -> Status:
        """As it is when what the rendezvous has found committed is applied: at most the step it was in."""
        if self.completed >= committed:
            return self
        return Status(committed, self.holds, "", (), self.address)


@dataclass(frozen=True)
class Standing:
    """How an epoch begins."""

    completed: int
    """The last step that the state of the run has."""
    holders: tuple[int, ...]
    """The workers that have that state, ascending; the other members fetch it from them."""


def standing(statuses: Mapping[int, Status], committed: int) -> Standing | None:
    """The state of the run and who holds it; None: nobody does.

    At the start workers may differ (another seed, a checkpoint that only some have): who has completed most counts, of
    these the lowest id, and who has just the same.
    """
    now = {worker: status.after(committed) for worker, status in sorted(statuses.items()) if status.holds}
    if not now:
        return None
    completed = max(status.completed for status in now.values())
    newest = {worker: status for worker, status in now.items() if status.completed == completed}
    lead = next(iter(newest.values()))
    return Standing(completed, tuple(worker for worker, status in newest.items() if status.digest == lead.digest))


def shares(
    statuses: Mapping[int, Status], at: Standing, members: Sequence[int], step: int, microbatches: int
) -> dict[int, list[int]]:
    """Worker -> ids that it runs, of the ``microbatches`` of ``step`` that nobody had when the epoch began.

    In the epoch's first step only holders have a part: the others are getting the state.
    """
    first = step == at.completed + 1
    workers = at.holders if first else tuple(sorted(members))
    had = {w: statuses[w].ran if first and statuses[w].completed == at.completed else () for w in workers}
    lost = sorted(set(range(microbatches)).difference(*had.values()))
    dealt = reassign(lost, 1, workers, load={worker: len(ran) for worker, ran in had.items()})
    return {worker: dealt[worker][0] for worker in workers}
