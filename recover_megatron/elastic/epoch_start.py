"""Start of an epoch: the statuses of all workers determine the holders of the state and each worker's microbatches.

The plan of the epoch contains the statuses, so all members compute equal results.

    joined with   completed=7  holds  ran=(0, 3)     a worker died in step 8: its microbatches 1 and 4 are lost
                  completed=7  holds  ran=(2, 5)
                  completed=0  -      ran=()         a newcomer: fetches the state, and runs nothing in this step
    shares        step 8: {0: [1], 1: [4], 2: []}    from step 9 on all three workers run microbatches
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
    """Last step that the worker's state contains."""
    holds: bool = False
    """True if the worker has the run's state; False for a worker that has joined a running job and must fetch it."""
    digest: str = ""
    """Digest of the worker's state; "" after a step of this run, since all workers then have equal states."""
    ran: tuple[int, ...] = ()
    """Numbers of the microbatches of step ``completed + 1`` whose gradients the worker has."""
    address: str = ""
    """Address of the worker's peer store, from which other workers fetch its state."""
    flags: str = ""
    """Digest of the worker's settings, which must equal the run's (`collectives.comparison`)."""
    code: str = ""
    """Digest of the worker's program, which must equal the run's (`collectives.comparison`)."""
    covered: str = ""
    """Parameters whose gradients the worker sums, as a hexadecimal number (`Gradients.covered`)."""
    todo: int = 0
    """Number of functions passed to ``lead`` after step ``completed`` that the worker must call if it leads."""
    leaving: bool = False
    """True if the worker has called ``leave``: it runs no further step, and leaves when no worker needs it."""

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, json: Json) -> Status:
        """Read a status; ignore fields that another version of this package has added.

        A worker of another version is refused, but its status must not crash the worker that reads it.
        """
        known = {field.name: json[field.name] for field in fields(cls) if field.name in json}
        return cls(**{**known, "ran": tuple(json.get("ran", ()))})

    @staticmethod
    def settings(
        model: torch.nn.Module, microbatches: int, seed: int | None, verify_interval: int, state: Mapping[str, Stateful]
    ) -> dict[str, str]:
        """Return the settings that must be equal on all workers, name -> text; ``Status.flags`` is their digest."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        orders = {name: "" if p.is_contiguous() else f", strides {list(p.stride())}" for name, p in trained.items()}
        parameters = {f"parameter {name}": f"{p.dtype} {list(p.shape)}{orders[name]}" for name, p in trained.items()}
        others = {"microbatches": str(microbatches), "seed": str(seed), "verify_interval": str(verify_interval)}
        others["state"] = ", ".join(sorted(state))
        order = hashlib.blake2b("\n".join(trained).encode(), digest_size=8).hexdigest()
        return {"recover_megatron": program.VERSION, "the order of the parameters": order, **others, **parameters}

    def after(self, committed: int) -> Status:
        """Return the worker's status after step ``committed``, the only step that it may not have applied yet."""
        if self.completed >= committed:
            return self
        return replace(self, completed=committed, digest="", ran=())


@dataclass(frozen=True)
class LatestState:
    """Last finished step of the run at the start of an epoch, and the workers that have the state after this step."""

    completed: int
    """Last finished step of the run."""
    holders: tuple[int, ...]
    """Ids of the workers that have the state after this step, ascending; the other workers fetch it from them."""


def latest_state(statuses: Mapping[int, Status], committed: int) -> LatestState | None:
    """Return the last step of the run and the holders of its state; None if no worker has a state.

    At the start of a run, states may differ (different seeds, or only some workers have loaded a checkpoint).  Then the
    run continues from the state of one worker: among the workers with the most completed steps, the worker with the
    lowest id.  The holders are the workers whose state equals this worker's state.
    """
    now = {worker: status.after(committed) for worker, status in sorted(statuses.items()) if status.holds}
    if not now:
        return None
    completed = max(status.completed for status in now.values())
    newest = {worker: status for worker, status in now.items() if status.completed == completed}
    lead = next(iter(newest.values()))
    return LatestState(completed, tuple(worker for worker, status in newest.items() if status.digest == lead.digest))


def odd_cover(statuses: Mapping[int, Status], at: LatestState) -> int | None:
    """Return the first holder whose buckets have other parameters than the lowest holder's; None if there is none.

    Holders that joined before they applied the last step are ignored, since they may unfreeze layers after that step.
    """
    newest = {worker: statuses[worker].covered for worker in at.holders if statuses[worker].completed == at.completed}
    return next((worker for worker, covered in newest.items() if covered != next(iter(newest.values()))), None)


def shares(
    statuses: Mapping[int, Status], at: LatestState, members: Sequence[int], step: int, microbatches: int
) -> dict[int, list[int]]:
    """Return worker -> numbers of the microbatches of ``step`` that the worker must run.

    The epoch's first step runs only the microbatches whose gradients no holder has, and only on holders, since the
    other workers fetch the state.
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
    """Return the shares of the second and later steps of an epoch; cached: takes up to 1 ms with many workers."""
    dealt = reassign(list(range(microbatches)), 1, workers, load=dict.fromkeys(workers, 0))
    return {worker: dealt[worker][0] for worker in workers}
