"""Statuses with which workers join an epoch, and decisions that follow from them: holders of the state, shares of work.

Each member computes these decisions from the same statuses, which the plan of the epoch contains.

    joined with   completed=7  holds  ran=(0, 3)     a worker died in step 8: its microbatches 1 and 4 are lost
                  completed=7  holds  ran=(2, 5)
                  completed=0  -      ran=()         a newcomer: fetches the state, and runs nothing in this step
    shares        8: {0: [1], 1: [4], 2: []}         from step 9 on all three workers run microbatches
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache

import torch

from recover_megatron import program
from recover_megatron.elastic.run_state import Stateful
from recover_megatron.membership.records import Json
from recover_megatron.workload import reassign


@dataclass(frozen=True)
class Status:
    """Status with which a worker joins an epoch."""

    completed: int = 0
    """Last step that its state contains."""
    holds: bool = False
    """True if it has a state to continue from; a worker that joins a running job has none."""
    digest: str = ""
    """Digest of a state that no step of this run has changed yet; empty afterwards: then all holders have the same."""
    ran: tuple[int, ...] = ()
    """Microbatches of step ``completed + 1`` whose gradients it holds."""
    address: str = ""
    """Address of its peer store, from which its state is fetched."""
    flags: str = ""
    code: str = ""
    """Digests of its settings and of its program, which must equal the run's (`collectives.comparison`)."""
    covered: str = ""
    """Parameters that have a part of its buckets (`Gradients.covered`)."""
    todo: int = 0
    """Number of functions that it must call if it leads: calls of `lead` since step ``completed``."""
    leaving: bool = False
    """True if it has no further step: it leaves when no worker needs it."""

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, json: Json) -> Status:
        """Read a status; ignore fields that another version of this package has added.

        A worker of another version is refused; its status must not crash the worker that reads it.
        """
        known = {field.name: json[field.name] for field in fields(cls) if field.name in json}
        return cls(**{**known, "ran": tuple(json.get("ran", ()))})

    @staticmethod
    def settings(
        model: torch.nn.Module, microbatches: int, seed: int | None, verify_interval: int, state: Mapping[str, Stateful]
    ) -> dict[str, str]:
        """Return the settings whose digest is ``flags``: name -> text."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        orders = {name: "" if p.is_contiguous() else f", strides {list(p.stride())}" for name, p in trained.items()}
        parameters = {f"parameter {name}": f"{p.dtype} {list(p.shape)}{orders[name]}" for name, p in trained.items()}
        others = {"microbatches": str(microbatches), "seed": str(seed), "verify_interval": str(verify_interval)}
        others["state"] = ", ".join(sorted(state))
        order = hashlib.blake2b("\n".join(trained).encode(), digest_size=8).hexdigest()
        return {"recover_megatron": program.VERSION, "the order of the parameters": order, **others, **parameters}

    def after(self, committed: int) -> Status:
        """Return the status after applying the commits up to ``committed``: at most one step."""
        if self.completed >= committed:
            return self
        return replace(self, completed=committed, digest="", ran=())


@dataclass(frozen=True)
class Standing:
    """State of the run at the start of an epoch."""

    completed: int
    """Last step that the state of the run contains."""
    holders: tuple[int, ...]
    """Workers that have that state, ascending; the other members fetch it from them."""


def standing(statuses: Mapping[int, Status], committed: int) -> Standing | None:
    """Return the state of the run and its holders; None if no worker holds a state.

    At the start workers may differ (another seed, a checkpoint that only some have).  The holders are the workers with
    the most completed steps whose state equals that of the lowest of them.
    """
    now = {worker: status.after(committed) for worker, status in sorted(statuses.items()) if status.holds}
    if not now:
        return None
    completed = max(status.completed for status in now.values())
    newest = {worker: status for worker, status in now.items() if status.completed == completed}
    lead = next(iter(newest.values()))
    return Standing(completed, tuple(worker for worker, status in newest.items() if status.digest == lead.digest))


def odd_cover(statuses: Mapping[int, Status], at: Standing) -> int | None:
    """Return the first holder of the state that covers other parameters than the lowest holder; None if none does.

    Workers that joined before the last step was finished do not count: they may not have unfrozen a layer yet.
    """
    newest = {worker: statuses[worker].covered for worker in at.holders if statuses[worker].completed == at.completed}
    return next((worker for worker, covered in newest.items() if covered != next(iter(newest.values()))), None)


def shares(
    statuses: Mapping[int, Status], at: Standing, members: Sequence[int], step: int, microbatches: int
) -> dict[int, list[int]]:
    """Return worker -> microbatch ids of ``step`` that it must run: those that no worker had when the epoch began.

    In the epoch's first step only holders get microbatches: the others are fetching the state.
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
    """Return the shares of every step of an epoch except the first; cached: with many workers it takes up to 1 ms."""
    dealt = reassign(list(range(microbatches)), 1, workers, load=dict.fromkeys(workers, 0))
    return {worker: dealt[worker][0] for worker in workers}
