"""States change hands at the boundary before a step: to fresh replicas, to who holds another one, to mirrors.

boundary   a plan has put a new replica together, or found a state that differs from its column's:
               donors       send theirs from a thread, while their replica computes (give)
               the differing   take one over, on the spot (mend)
               the last replica's workers send theirs to spares, before every step (mirror)
spare      its plan has a place for it: it gets a state (fetch_state), or goes on with its own (`rejoin`)
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.instep.decision import Decision
from recover_megatron.instep.epoch_groups import EpochGroups
from recover_megatron.instep.errors import Disagreement, Orphaned
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.transfer import receive, send
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.state import TrainingState

log = get_logger(__name__)

INTERRUPTED = (EpochRevoked, PeerLost, TimeoutError)
"""What ends the transfer of a state and the taking of a place: an epoch that is over, or somebody who is gone."""


class StateExchange:
    """The state of one worker, ``state``, given and got.  Called by its main thread."""

    def __init__(self, recovery: Recovery, state: TrainingState) -> None:
        self._progress, self._assignment, self._orphan = recovery.progress, recovery.assignment, recovery.orphan
        self._state = state
        self._served = 0

    def at_boundary(self) -> None:
        """Do what the present plan asks of this worker before the next step.

        Raises ``Orphaned`` if its state should have been replaced and was not: it must not compute with it.
        """
        decision = self._assignment.decision
        if decision.mirrors and not decision.transfers:
            self._feed_mirrors(decision)
        if decision.epoch == self._served or not decision.transfers:
            return
        self._served = decision.epoch
        me = self._assignment.me
        if me in decision.mended:
            log.info(f"the state of worker {me} differs from that of its column: it takes over one that does not")
            try:
                self._receive(decision)
            except INTERRUPTED as error:
                self._orphan.leave(f"its state differs from that of its column, and no other came: {error}")
                raise Orphaned(f"worker {me} holds a state that is not to be computed with") from error
        mine = [receiver for receiver, donor in decision.transfers.items() if donor == me]
        if mine:
            tree = self._state.tree()
            self._progress.inject("transfer", first_iteration(decision))
            for receiver in mine:
                self._give(decision, receiver, tree)

    def fetch_state(self, decision: Decision) -> int:
        """Have the state that ``decision`` begins with: from a donor, or this worker's own; the bytes that came.

        Raises what is in ``INTERRUPTED``: the state is then the one that it was.  Raises ``Disagreement`` for a state
        that cannot be right.
        """
        size = 0
        if self._assignment.me in decision.transfers:
            size = self._receive(decision)
        elif self._state.version is not None:
            self._state.resume()
        version = self._state.version
        if version is None or version != decision.version:
            raise Disagreement(f"a state of iteration {version} came, not of {decision.version}")
        self._served = decision.epoch
        return size

    def _feed_mirrors(self, decision: Decision) -> None:
        """Not from a thread: a worker that dies in the step must have left its state behind."""
        for spare in [spare for spare, donor in decision.mirrors.items() if donor == self._assignment.me]:
            try:
                with self._progress.waiting("mirror"):
                    send(self._state.tree(), self._mirror_pair(decision, spare, self._assignment.epoch_groups), 1)
            except EpochRevoked:
                return  # told again where the step reduces
            except (PeerLost, TimeoutError) as error:
                self._assignment.epoch_groups.end(f"worker {spare} could not be given a state: {error}")

    def mirror(self, decision: Decision, epoch_groups: EpochGroups) -> dict[str, Any]:
        """Keep another worker's state until the epoch ends; what this spare can offer then."""
        with suppress(*INTERRUPTED):
            pair = self._mirror_pair(decision, self._assignment.me, epoch_groups)
            while True:
                tree, _ = receive(pair, 0)  # what is interrupted here has changed nothing
                self._state.load(tree)
        version = self._state.version
        return {"version": version, "digest": "" if version is None else self._state.digest()}

    def _mirror_pair(self, decision: Decision, spare: int, epoch_groups: EpochGroups) -> Any:
        slots = {worker: slot for slot, worker in decision.slots(self._assignment.grid).items()}
        return epoch_groups.control("mirror", (slots[decision.mirrors[spare]], -1 - spare))

    def _receive(self, decision: Decision) -> int:
        pair = self._pair(decision, self._assignment.me)
        tree, size = receive(pair, 0, lambda: self._progress.mark("state"))
        self._state.load(tree)
        return size

    def _give(self, decision: Decision, receiver: int, tree: dict[str, Any]) -> None:
        epoch_groups = self._assignment.epoch_groups

        def give() -> None:
            try:
                send(tree, self._pair(decision, receiver), 1)
            except EpochRevoked:
                return  # the next plan says who gets what
            except (PeerLost, TimeoutError) as error:
                epoch_groups.end(f"worker {receiver} could not be given a state: {error}")

        threading.Thread(target=give, name=f"giving a state to worker {receiver}", daemon=True).start()

    def _pair(self, decision: Decision, receiver: int) -> Any:
        """The group of a donor (rank 0) and a receiver (rank 1) in this epoch."""
        slots = {worker: slot for slot, worker in decision.slots(self._assignment.grid).items()}
        members = slots[decision.transfers[receiver]], slots[receiver]
        return self._assignment.epoch_groups.control("state", members)


def first_iteration(decision: Decision) -> int:
    """The iteration that the fresh replicas begin with."""
    return (decision.version or 0) + 1
