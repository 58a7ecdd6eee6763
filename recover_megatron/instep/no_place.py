"""Workers that get no place: those with other flags than the run, and those that cannot take what they are given.

Every worker tells a digest of its flags when it joins an epoch (``JoinStatus.flags``).  ``odd_ones`` is a pure
function of what all have told, so all come to the same answer, before they decide anything by rules that such a
worker may not share.

    a newcomer is one                it asks a worker of the run for its flags, says where its own differ, and ends
    a worker of the launch is one    the run does not begin: everybody ends, with that line

A worker that could not take a place (``UntakenPlaces``) may offer itself again:

    taken                                  nothing is held against it any more
    the epoch ended first                  it offers itself again: another's affair
    failed, in words that are new          again, at once
    failed in the same words               again, after ``PAUSE_SECONDS``: it may pass
    for the ``MOST``-th time in a row      it is put aside: it waits for the end of the run, and is offered no place

Each try costs all an epoch, and nobody would notice, since the others train on.  Where nobody else has a place the run
itself is at stake: it is tried on, until `edges` ends it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from recover_megatron import script_flags
from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.collectives.peers import PeerStoreClient
from recover_megatron.instep.decision import Decision, JoinStatus
from recover_megatron.membership.ending import alike
from recover_megatron.network.peer_store import PeerStoreServer

KEY = "flags"
ASKED_SECONDS = 5.0
"""How long such a worker waits for the flags of the run, and the others for its word."""


@dataclass(frozen=True)
class OddOnes:
    """``workers``: whose flags are not the run's; ``model``: a worker that has those of the run."""

    workers: frozenset[int] = frozenset()
    model: int = -1


def odd_ones(statuses: Mapping[int, JoinStatus]) -> OddOnes:
    """The workers that were started with other flags than the run.

    Those of the run are what most of those have that stand in a place; of those that hold a state, where nobody has a
    place; else of all. A worker that tells none is none.
    """
    told = {worker: status for worker, status in statuses.items() if status.flags}
    placed = [worker for worker, status in told.items() if status.replica is not None]
    holding = [worker for worker, status in told.items() if status.version is not None]
    asked = sorted(placed or holding or told)
    if not asked:
        return OddOnes()
    counts = Counter(told[worker].flags for worker in asked)
    model = min(asked, key=lambda worker: (-counts[told[worker].flags], worker))
    right = told[model].flags
    return OddOnes(frozenset(worker for worker in told if told[worker].flags != right), model)


class OwnFlags:
    """This worker's flags, on its peer store; empty ones are not compared."""

    def __init__(self, flags: Mapping[str, str], peer_store: PeerStoreServer | None, secret: bytes) -> None:
        self._flags = flags
        self._secret = secret
        self.digest = script_flags.digest(flags) if flags else ""
        if peer_store is not None:
            peer_store.put(KEY, json.dumps(flags))

    def explain(self, address: str) -> str:
        """Where this worker's flags differ from those of the worker whose peer store is at ``address``, in words."""
        theirs = self._ask(address)
        if theirs is None:
            return "which ones could not be found out"
        return script_flags.listed(script_flags.differences(self._flags, theirs))

    def _ask(self, address: str) -> dict[str, str] | None:
        store = PeerStoreClient(address, self._secret)
        with suppress(PeerLost, dist.DistStoreError, ValueError):
            store.wait([KEY], timedelta(seconds=ASKED_SECONDS))
            return {str(flag): str(value) for flag, value in json.loads(store.get(KEY)).items()}
        return None


MOST = 3
PAUSE_SECONDS = 10.0


class UntakenPlaces:
    """The places that one worker was given and could not take: whether it offers itself again."""

    def __init__(self) -> None:
        self._text = ""
        self._times = 0

    @property
    def pause(self) -> float:
        """Seconds to wait before it offers itself again."""
        return PAUSE_SECONDS if self._times > 1 else 0.0

    @property
    def aside(self) -> bool:
        """Whether it does not do so any more."""
        return self._times >= MOST

    def failed(self, error: Exception, decision: Decision) -> str:
        """``error`` has kept it from the place that ``decision`` gave it; what to tell people."""
        others = set(decision.replicas) - set(decision.fresh)
        if not isinstance(error, EpochRevoked) and others:
            self._times = self._times + 1 if alike(str(error)) == self._text else 1
            self._text = alike(str(error))
        if self.aside:
            return f"it is put aside: {MOST} times in a row it could not take a place: {error}"
        return f"it could not take its place: {error}"

    def taken(self) -> None:
        """It has one."""
        self._times = 0
