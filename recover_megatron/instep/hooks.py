"""What in-step recovery asks of the training framework at turning points."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from recover_megatron.instep.decision import Checkpoint, Decision
from recover_megatron.instep.epoch_groups import EpochGroups


class Hooks(Protocol):
    """What the training framework does at turning points.

    Called in the main thread where that is said, else in the session's or the spare's thread, too: then quick, and
    without waiting for other workers.
    """

    def abort_replica(self) -> None:
        """End all communication inside this worker's replica: whoever waits in it, here, gets an error."""

    def planned(self, decision: Decision) -> None:
        """A new epoch, in which this worker has a place: ranks and roles may have moved.  In the main thread."""

    def last_checkpoint(self) -> str:
        """The last checkpoint that this worker knows of, in words for people."""

    def inject(self, phase: str, iteration: int | None) -> None:
        """Inject a fault if one is due: a phase was reached, of ``iteration``; None: of that under way."""

    def describe(self, decision: Decision) -> dict[str, Any]:
        """What else the event of a new plan should say, by name; JSON values."""

    def log(self, event: str, **fields: Any) -> None:
        """Write a line of events.jsonl, if this worker is the one that does; ``fields``: JSON values."""

    def version(self) -> int | None:
        """How many iterations the parameters and the optimizer's state have seen; None: they are of no use."""

    def state_of(self) -> int:
        """The epoch of the timeline that this is the state of (``decision.Timeline``)."""

    def last_step(self) -> tuple[int, int]:
        """Of the last training step that this worker has begun since it has its state: the iteration, and the number of
        its decision; (0, 0): none."""

    def checkpoints(self) -> tuple[Sequence[Checkpoint], Collection[int]]:
        """The complete checkpoints that the run could go back to, as far as this worker knows, and the iterations of
        those that it has failed to load."""

    def digest(self) -> str:
        """A digest of that state: equal strings in a column mean equal states; empty: there is none.

        In the main thread.
        """

    def mirror(self, decision: Decision, epoch_groups: EpochGroups) -> dict[str, Any]:
        """This worker, a spare, keeps the state of the one that ``decision`` names until the epoch ends.

        Returns what of its ``Status`` has changed by it.  In the main thread.
        """

    def iteration(self) -> int:
        """The training iteration under way, from 1; 0: the training has not begun."""
