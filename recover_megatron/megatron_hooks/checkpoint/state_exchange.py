"""States change hands at the boundary before a step: to fresh replicas, to who holds another one, to mirrors.

boundary   a plan has put a new replica together, or found a state that differs from its column's:
               holders      offer theirs: it is fetched while their replica computes, until the optimizer's step
               the differing   take one over, on the spot (mend)
               the last replica's workers have spares fetch theirs, before every step (mirror)
spare      its plan has a place for it: it gets a state (fetch_state), or goes on with its own (`rejoin`)
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
from recover_megatron.megatron_hooks.checkpoint.state import TrainingState, shared_tensors
from recover_megatron.workload.grid import Slot

log = get_logger(__name__)

INTERRUPTED = (EpochRevoked, PeerLost, TimeoutError)
"""What ends the transfer of a state and the taking of a place: an epoch that is over, or somebody who is gone."""


class StateExchange:
    """The state of one worker, ``state``, given and got.  Called by its main thread."""

    def __init__(self, manager: Manager, state: TrainingState) -> None:
        self._manager = manager
        self._state = state
        self._served = 0
        self._offer: Offer | None = None

    def at_boundary(self) -> None:
        """Do what the present plan asks of this worker before the next step.

        Raises ``Orphaned`` if its state should have been replaced and was not: it must not compute with it.
        """
        view = self._manager.view
        decision = view.decision
        if decision.mirrors and not decision.holders:
            self._feed_mirrors(decision)
        if decision.epoch == self._served or not decision.holders:
            return
        self._served = decision.epoch
        me = view.worker
        if me in decision.mended:
            log.warning(
                f"the state of worker {me} differs from that of its column: it takes over one that does not. A "
                "checkpoint that was saved since states were compared last may hold a part of the wrong one"
            )
            try:
                self._receive(decision)
            except INTERRUPTED as error:
                self._manager.leave(f"its state differs from that of its column, and no other came: {error}")
                raise Orphaned(f"worker {me} holds a state that is not to be computed with") from error
        if any(me in holders for holders in decision.holders.values()):
            tree = self._state.tree()
            self._manager.inject("transfer", first_iteration(decision))
            self.withdraw()
            groups = self._manager.view.groups
            self._offer = groups.offer("state", tree, shared_tensors(tree))

    def withdraw(self) -> None:
        """The state is about to change: what is still fetched of it, by nobody who is counted on, is not believed."""
        if self._offer is not None:
            self._offer.withdraw()
            self._offer = None

    def fetch_state(self, decision: Decision) -> int:
        """Have the state that ``decision`` begins with: from a donor, or this worker's own; the bytes that came.

        Raises what is in ``INTERRUPTED``: the state is then the one that it was.  Raises ``Disagreement`` for a state
        that cannot be right.
        """
        size = 0
        if self._manager.view.worker in decision.holders:
            size = self._receive(decision)
        elif self._state.version is not None:
            self._state.resume()
        version = self._state.version
        if version is None or version != decision.version:
            raise Disagreement(f"a state of iteration {version} came, not of {decision.version}")
        self._served, self._state.timeline = decision.epoch, decision.timeline[0]
        return size

    def _feed_mirrors(self, decision: Decision) -> None:
        """Not beside the step: a worker that dies in it must have left its state behind."""
        view = self._manager.view
        mine = [spare for spare, donor in decision.mirrors.items() if donor == view.worker]
        groups, offers = view.groups, dict[int, Offer]()
        spare = -1
        try:
            with self._manager.waiting("mirror"):
                tree = self._state.tree() if mine else {}
                for spare in mine:
                    offers[spare] = groups.offer(f"mirror/{spare}", tree, shared_tensors(tree))
                for spare in mine:
                    offers[spare].wait(groups.check)
        except EpochRevoked:
            return  # told again where the step reduces
        except PeerLost as error:
            groups.end(f"worker {spare} could not be given a state: {error}")
        finally:
            for offer in offers.values():
                offer.withdraw()

    def mirror(self, decision: Decision, epoch_groups: EpochGroups) -> dict[str, Any]:
        """Keep another worker's state until the epoch ends; what this spare can offer then."""
        me, slots = self._manager.view.worker, self._slots(decision)
        tree: Any = None
        with suppress(*INTERRUPTED):
            while True:  # what is interrupted here has changed nothing
                room = self._state.room_aside(tree)
                holder = slots[decision.mirrors[me]]
                tree, _ = epoch_groups.fetch(f"mirror/{me}", [holder], shared_tensors, place=room)
                self._state.load(tree)
                self._state.timeline = decision.timeline[0]
        version = self._state.version
        return {"version": version, "digest": "" if version is None else self._state.digest()}

    def _receive(self, decision: Decision) -> int:
        self.withdraw()  # the tensors that are written to
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
        """Whether to go on with a state that is on its way: also beyond the epoch's end, as long as there is a place.

        All who live wait then for this worker, and nobody changes the state: whoever is lost, the rest can give it.
        """
        try:
            self._manager.check()
        except Orphaned as error:
            raise EpochRevoked(self._manager.view.epoch, str(error)) from error

    def _lost(self, holders: Sequence[int]) -> set[int]:
        """Return the holders that have died or were put out; a worker that was set aside still gives its state."""
        view = self._manager.view
        return {*holders} - view.counted_on - view.set_aside

    def _slots(self, decision: Decision) -> dict[int, Slot]:
        return {worker: slot for slot, worker in decision.slots(self._manager.view.grid).items()}


def first_iteration(decision: Decision) -> int:
    """The iteration that the fresh replicas begin with."""
    return (decision.version or 0) + 1
