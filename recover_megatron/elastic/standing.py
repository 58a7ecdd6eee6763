"""What workers join an epoch with, and what follows from it on all of them alike: whose state it is, who runs what.

Which workers hold the state, and which worker runs which microbatch, each member works out by itself, from the statuses
with which all have joined: the plan of the epoch has them.

    joined with   completed=7  holds  ran=(0, 3)     died in step 8: its 1 and 4 are lost
                  completed=7  holds  ran=(2, 5)
                  completed=0  -      ran=()         a newcomer: takes the state, and runs nothing in this step
    shares        8: {0: [1], 1: [4], 2: []}         from step 9 on all three
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache

import torch

from recover_megatron import program
from recover_megatron.elastic.state import Stateful
from recover_megatron.membership.records import Json
from recover_megatron.workload import reassign


@dataclass(frozen=True)
class Status:
    """What a worker joins an epoch with."""

    completed: int = 0
    """The last step that its state has."""
    holds: bool = False
    """Whether it has a state to go on from; a worker that comes into a running job has none."""
    digest: str = ""
    """Of a state that no step of this run has changed yet; empty afterwards: then all holders have the same."""
    ran: tuple[int, ...] = ()
    """The microbatches of step ``completed + 1`` whose gradients it holds."""
    address: str = ""
    """Of its peer store: where its state is fetched."""
    flags: str = ""
    code: str = ""
    """Digests of what it was given and of its program, which must be the run's (`collectives.comparison`)."""
    covered: str = ""
    """The parameters that have a part of its buckets (`Gradients.covered`)."""
    todo: int = 0
    """How many calls it would have to make for all if it led: those of `lead` since step ``completed``."""
    leaving: bool = False
    """Whether it has no further step: it waits until nothing is left for it to do, and leaves."""

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, told: Json) -> Status:
        """Read a status, without fields that another version of this package has added.

        A worker of another version is refused; it must not end the worker that reads its status.
        """
        known = {field.name: told[field.name] for field in fields(cls) if field.name in told}
        return cls(**{**known, "ran": tuple(told.get("ran", ()))})

    @staticmethod
    def settings(
        model: torch.nn.Module, microbatches: int, seed: int | None, verify_interval: int, state: Mapping[str, Stateful]
    ) -> dict[str, str]:
        """The settings whose digest is ``flags``: name -> text."""
        trained = {name: its for name, its in model.named_parameters() if its.requires_grad}
        orders = {
            name: "" if its.is_contiguous() else f", strides {list(its.stride())}" for name, its in trained.items()
        }
        parameters = {
            f"parameter {name}": f"{its.dtype} {list(its.shape)}{orders[name]}" for name, its in trained.items()
        }
        others = {"microbatches": str(microbatches), "seed": str(seed), "verify_interval": str(verify_interval)}
        others["state"] = ", ".join(sorted(state))
        order = hashlib.blake2b("\n".join(trained).encode(), digest_size=8).hexdigest()
        return {"recover_megatron": program.VERSION, "the order of the parameters": order, **others, **parameters}

    def after(self, committed: int) -> Status:
        """As it is when what the rendezvous has found committed is applied: at most the step it was in."""
        if self.completed >= committed:
            return self
        return replace(self, completed=committed, digest="", ran=())


@dataclass(frozen=True)
class Standing:
    """How an epoch begins."""

    completed: int
    """The last step that the state of the run has."""
    holders: tuple[int, ...]
    """The workers that have that state, ascending; the other members fetch it from them."""


def standing(statuses: Mapping[int, Status], committed: int) -> Standing | None:
    """The state of the run and who holds it; None: nobody does.

    At the start workers may differ (another seed, a checkpoint that only some have): the holders are those that have
    completed most steps and, of these, have just the same state as the one with the lowest id.
    """
    now = {worker: status.after(committed) for worker, status in sorted(statuses.items()) if status.holds}
    if not now:
        return None
    completed = max(status.completed for status in now.values())
    newest = {worker: status for worker, status in now.items() if status.completed == completed}
    lead = next(iter(newest.values()))
    return Standing(completed, tuple(worker for worker, status in newest.items() if status.digest == lead.digest))


def odd_cover(statuses: Mapping[int, Status], at: Standing) -> int | None:
    """The first of those that hold the state which covers other parameters than the lowest; None: none does.

    Those that joined before the last step was finished do not count: they may not have unfrozen a layer yet.
    """
    told = {worker: statuses[worker].covered for worker in at.holders if statuses[worker].completed == at.completed}
    return next((worker for worker, covered in told.items() if covered != next(iter(told.values()))), None)


def shares(
    statuses: Mapping[int, Status], at: Standing, members: Sequence[int], step: int, microbatches: int
) -> dict[int, list[int]]:
    """Worker -> ids that it runs, of the ``microbatches`` of ``step`` that nobody had when the epoch began.

    In the epoch's first step only holders have a part: the others are getting the state.
    """
    if step != at.completed + 1:
        return _everybodys(tuple(sorted(members)), microbatches)
    workers = at.holders
    had = {w: statuses[w].ran if statuses[w].completed == at.completed else () for w in workers}
    lost = sorted(set(range(microbatches)).difference(*had.values()))
    dealt = reassign(lost, 1, workers, load={worker: len(ran) for worker, ran in had.items()})
    return {worker: dealt[worker][0] for worker in workers}


@lru_cache(maxsize=1)
def _everybodys(workers: tuple[int, ...], microbatches: int) -> dict[int, list[int]]:
    """The same in each step of an epoch but the first: with many workers it takes a part of a millisecond."""
    dealt = reassign(list(range(microbatches)), 1, workers, load=dict.fromkeys(workers, 0))
    return {worker: dealt[worker][0] for worker in workers}
