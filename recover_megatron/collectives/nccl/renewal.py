"""Choice of the NCCL communicator for a new epoch: one kept from an earlier epoch, or a new one.

    every member   publishes the identities of the communicators that it has kept for its rank and group size
    rank 0         chooses with ``decide``, and publishes the choice
    every member   reuses the chosen kept communicator   if all members have kept it, with equally many operations
                   opens a new communicator              otherwise, with a new unique id; the kept ones are aborted

The members exchange these messages through the epoch's key-value store.  (NCCL can also shrink and grow communicators.
But after an abort a shrunk communicator shares no resources with its parent, so shrinking saves nothing.)
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recover_megatron.collectives.epoch import CancelToken, KeyValue, PeerLost
from recover_megatron.collectives.nccl.communicator import Communicator, State
from recover_megatron.collectives.nccl.library import Library

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01


def decide(held: Sequence[Mapping[str, int]]) -> str | None:
    """Return the identity of a communicator that all members can reuse; None: a new one must be opened.

    ``held``: for each member, its kept communicators: identity -> number of believed operations.  A communicator can be
    reused if all members have kept it and believed equally many of its operations.
    """
    return min((identity for identity, _ in set.intersection(*(set(own.items()) for own in held))), default=None)


class Keeper:
    """Pool of this worker's communicators that no epoch uses currently.  Any thread may use the pool.

    When the members of columns change, the owner of the pool must call ``close``.  ``keeps``: if False, the pool aborts
    every communicator that it gets.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._held: list[Communicator] = []
        self.stream: Any = None
        """CUDA stream that all columns use in all epochs.

        torch's pool has few streams: with a new stream per epoch, it would soon return streams that are in use.
        """
        self._lock = threading.Lock()

    def give(self, communicator: Communicator) -> None:
        """Put a communicator into the pool at the end of its epoch; if it is not READY, abort it instead.

        After an error, ``communicator.quiesce`` must have returned before this call.
        """
        if self._keeps and communicator.state is State.READY:
            communicator.release()
            with self._lock:
                self._held.append(communicator)
        else:
            communicator.close_beside()

    def take(self, rank: int, size: int) -> dict[str, Communicator]:
        """Remove the communicators with this rank and group size from the pool; return identity -> communicator."""
        with self._lock:
            fitting = {kept.identity: kept for kept in self._held if (kept.rank, kept.size) == (rank, size)}
            self._held = [kept for kept in self._held if kept.identity not in fitting]
        return fitting

    def close(self) -> None:
        """Abort all communicators of the pool, each in a detached thread, and empty the pool."""
        with self._lock:
            held, self._held = self._held, []
        for communicator in held:
            communicator.close_beside()


@dataclass(eq=False)
class Opening:
    """Opening of a communicator at one member; ``advance`` does the next step.

    ``prefix``: prefix of the opening's keys in ``store``, the same at all members, and used only once.
    """

    library: Library
    keeper: Keeper
    store: KeyValue
    cancel_token: CancelToken
    prefix: str
    rank: int
    size: int
    communicator: Communicator | None = field(default=None, init=False)
    _kept: dict[str, Communicator] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._steps = self._open()

    def advance(self) -> bool:
        """Do the next step; return whether the communicator is open.  Raises ``PeerLost`` and ``EpochRevoked``."""
        return next(self._steps, True)

    def fail(self) -> None:
        """Stop the opening: abort its communicator, and all communicators that it has taken from the pool."""
        for communicator in filter(None, (self.communicator, *self._kept.values())):
            communicator.close_beside()

    def _open(self) -> Generator[bool]:
        self._kept = self.keeper.take(self.rank, self.size)
        held = {identity: kept.operations for identity, kept in self._kept.items()}
        self.store.set(f"{self.prefix}/held/{self.rank}", json.dumps(held))
        if self.rank == 0:
            members = []
            for rank in range(self.size):
                members.append((yield from self._published("held", rank)))
            chosen = decide(members)
            order = {"identity": chosen or uuid.uuid4().hex, "unique_id": "" if chosen else self.library.unique_id()}
            self.store.set(f"{self.prefix}/decision/0", json.dumps(order))
        order = yield from self._published("decision", 0)
        if (kept := self._kept.pop(order["identity"], None)) is not None:
            kept.adopt(self.cancel_token)
        self.communicator = kept or self._init(**order)
        for other in self._kept.values():  # if one is reused, the others belong to other columns
            self.keeper.give(other) if kept else other.close_beside()
        self._kept = {}
        while not self.communicator.advance():
            yield False

    def _published(self, what: str, rank: int) -> Generator[bool, None, Any]:
        while not self.store.check([key := f"{self.prefix}/{what}/{rank}"]):
            yield False
        return json.loads(self.store.get(key))

    def _init(self, identity: str, unique_id: str) -> Communicator:
        config, read = self.library.config(), self.library.read_unique_id(unique_id)
        try:
            handle = self.library.core.Communicator.init(self.size, self.rank, read, config)
        except self.library.errors as error:
            raise PeerLost(f"NCCL: {error}") from error
        return Communicator(self.library, handle, identity, self.cancel_token, rank=self.rank, size=self.size)


def opened(opening: Opening, timeout: float) -> Communicator:
    """Wait until the communicator is open, and return it.

    Raises ``EpochRevoked``, ``PeerLost``, and ``TimeoutError`` after ``timeout`` seconds; then the opening has failed,
    and its communicators are aborted.
    """
    deadline, pause, cancel_token = time.monotonic() + timeout, _FIRST_PAUSE, opening.cancel_token
    try:
        while not opening.advance():
            if cancel_token.wait(pause):
                raise cancel_token.error()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{opening.prefix}: not all members opened this communicator within {timeout:g} s")
            pause = min(1.5 * pause, _LONGEST_PAUSE)
    except BaseException:
        opening.fail()
        raise
    assert opening.communicator is not None
    return opening.communicator
