"""Transfer of states at the boundary before a step: to new replicas, to workers with a wrong state, to mirrors.

new replica   workers of the same column with the state (holders) offer it until the optimizer's step; a spare that gets
              a place fetches it while the holders compute (``fetch_state``), or continues with its own state (`rejoin`)
repair        a worker whose state differs from its column's state fetches a holder's state before the step
mirror        the workers of the last replica send their state to spares before every step
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.errors import Disagreement
from recover_megatron.instep.decision import Decision
from recover_megatron.instep.faults import Orphaned
from recover_megatron.instep.manager import EpochGroups, Manager, Offer
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.checkpoint.training_state import TrainingState, shared_tensors
from recover_megatron.workload.grid import Slot

log = get_logger(__name__)

INTERRUPTED = (EpochRevoked, PeerLost, TimeoutError)
"""Errors that interrupt a transfer of state or the taking of a place: end of the epoch, lost peer, timeout."""


class StateExchange:
    """Sends and receives ``state``, the training state of one worker.  Called by the worker's main thread."""

    def __init__(self, manager: Manager, state: TrainingState) -> None:
        self._manager = manager
        self._state = state
        self._served = 0
        self._offer: Offer | None = None

    def at_boundary(self) -> None:
        """Make the transfers that the present plan requires of this worker before the next step.

        Raises ``Orphaned`` if this worker's state is wrong and could not be replaced: it must not be used.
        """
        view = self._manager.view
        decision = view.decision
        if decision.mirrors and not decision.holders:
            self._feed_mirrors(decision)
        if decision.epoch == self._served or not decision.holders:
            return
        self._served = decision.epoch
        me = view.worker
        if me in decision.repaired:
            log.warning(
                f"the state of worker {me} differs from its column's state: another worker's state replaces it. "
                "A checkpoint saved since the last comparison of states may contain parts of the wrong state"
            )
            try:
                self._receive(decision)
            except INTERRUPTED as error:
                self._manager.leave(f"its state differs from its column's state and could not be replaced: {error}")
                raise Orphaned(f"worker {me} holds a wrong state, which must not be used") from error
        if any(me in holders for holders in decision.holders.values()):
            tree = self._state.tree()
            self._manager.inject("transfer", first_iteration(decision))
            self.withdraw()
            groups = self._manager.view.groups
            self._offer = groups.offer("state", tree, shared_tensors(tree))

    def withdraw(self) -> None:
        """Withdraw the offered state before it changes.

        A transfer that still runs then reads wrong data, but only to a worker on which the epoch no longer counts.
        """
        if self._offer is not None:
            self._offer.withdraw()
            self._offer = None

    def fetch_state(self, decision: Decision) -> int:
        """Load the state with which ``decision`` begins: a holder's state, or this worker's own state.

        Return the number of bytes received.  Raises one of ``INTERRUPTED`` if the transfer is interrupted; this
        worker's own state is then unchanged if it has the right version, and otherwise invalid
        (``TrainingState.room``).  Raises ``Disagreement`` for a state of the wrong version.
        """
        size = 0
        if self._manager.view.worker in decision.holders:
            size = self._receive(decision)
        elif self._state.version is not None:
            self._state.resume()
        version = self._state.version
        if version is None or version != decision.version:
            raise Disagreement(f"received a state of iteration {version}, expected {decision.version}")
        self._served, self._state.timeline = decision.epoch, decision.timeline[0]
        return size

    def _feed_mirrors(self, decision: Decision) -> None:
        """Send the state to this worker's mirrors before the step, so that it survives a death during the step."""
        view = self._manager.view
        targets = [spare for spare, donor in decision.mirrors.items() if donor == view.worker]
        groups, offers = view.groups, dict[int, Offer]()
        spare = -1
        try:
            with self._manager.waiting("mirror"):
                tree = self._state.tree() if targets else {}
                for spare in targets:
                    offers[spare] = groups.offer(f"mirror/{spare}", tree, shared_tensors(tree))
                for spare in targets:
                    offers[spare].wait(groups.check)
        except EpochRevoked:
            return  # the step's reduction raises the error again
        except PeerLost as error:
            groups.end(f"the state could not be sent to worker {spare}: {error}")
        finally:
            for offer in offers.values():
                offer.withdraw()

    def mirror(self, decision: Decision, epoch_groups: EpochGroups) -> dict[str, Any]:
        """Receive another worker's state before each step until the epoch ends; called on a spare.

        Return the version and the digest of the last complete state, which this spare offers in the next rendezvous.
        """
        me, slots = self._manager.view.worker, self._slots(decision)
        tree: Any = None
        with suppress(*INTERRUPTED):
            while True:  # an interrupted transfer changes no loaded tensor
                room = self._state.spare_room(tree)
                holder = slots[decision.mirrors[me]]
                tree, _ = epoch_groups.fetch(f"mirror/{me}", [holder], shared_tensors, place=room)
                self._state.load(tree)
                self._state.timeline = decision.timeline[0]
        version = self._state.version
        return {"version": version, "digest": "" if version is None else self._state.digest()}

    def _receive(self, decision: Decision) -> int:
        self.withdraw()  # the transfer overwrites the offered tensors
        slots = self._slots(decision)
        view = self._manager.view
        holders = decision.holders[view.worker]
        tree, size = view.groups.fetch(
            "state",
            [slots[holder] for holder in holders],
            shared_tensors,
            place=self._state.room(decision.version),
            by_devices=True,
            stay=self._stay,
            progress=lambda: self._manager.mark("state"),
            lost=lambda: {slots[holder] for holder in self._lost(holders)},
        )
        self._state.load(tree)
        return size

    def _stay(self) -> None:
        """Raise EpochRevoked if this worker has lost its place; otherwise its transfer continues after the epoch's end.

        In the rendezvous the other workers wait for this worker and do not change the state, so any holder can send it.
        """
        try:
            self._manager.check()
        except Orphaned as error:
            raise EpochRevoked(self._manager.view.epoch, str(error)) from error

    def _lost(self, holders: Sequence[int]) -> set[int]:
        """Return the workers of ``holders`` that are dead or evicted; a worker that was set aside still sends."""
        view = self._manager.view
        return {*holders} - view.counted_on - view.set_aside

    def _slots(self, decision: Decision) -> dict[int, Slot]:
        return {worker: slot for slot, worker in decision.slots(self._manager.view.grid).items()}


def first_iteration(decision: Decision) -> int:
    """Return the iteration with which new replicas of ``decision`` begin."""
    return (decision.version or 0) + 1
