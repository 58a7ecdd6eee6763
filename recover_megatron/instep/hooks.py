"""What in-step recovery asks of the training framework at turning points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recover_megatron.instep.generation import Generation
from recover_megatron.instep.plan import Decision


def nothing(*unused: Any) -> None:
    pass


@dataclass
class Hooks:
    """What the training framework does at turning points.  All but ``planned`` may be called from another thread."""

    abort_replica: Callable[[], None] = nothing
    """End all communication inside this worker's replica."""
    planned: Callable[[Decision], None] = nothing
    """A new epoch: ranks and roles may have moved.  In the main thread."""
    last_checkpoint: Callable[[], str] = lambda: "none was written"
    strike: Callable[[str, int | None], None] = nothing
    """Fault injection: a phase was reached, of an iteration; None: of that under way."""
    describe: Callable[[Decision], dict[str, Any]] = lambda decision: {}
    """What else the event of a new plan should say."""
    log: Callable[..., None] = nothing
    """``log(event, **fields)``: into events.jsonl."""
    version: Callable[[], int | None] = lambda: None
    """How many iterations the parameters and the optimizer's state have seen; None: in the middle of one."""
    digest: Callable[[], str] = lambda: ""
    """Of that state, in the main thread."""
    mirror: Callable[[Decision, Generation], dict[str, Any]] = lambda decision, generation: {}
    """A spare keeps another's state until the epoch ends; what of its status has changed.  In the main thread."""
    iteration: Callable[[], int] = lambda: 0
    """The training iteration under way, from 1."""
