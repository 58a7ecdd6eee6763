"""Creation of the communicator of the next epoch: the last one is reused, or a new one is opened.

    every member   publishes the communicators that it has kept for its rank and number of members ----.
    rank 0                                                   '--> decide(), pure --> publishes the decision
    every member   reuses it   if the members are the same, and no operation is outstanding at any of them
                   opens one   otherwise, with a new unique id; kept ones are aborted

Rank 0 decides for all members.  Everything travels over the epoch's rendezvous, two messages per member.  (NCCL can
shrink and grow communicators, too: after an abort the shrunk one shares nothing with its parent.)
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
    """Return the identity to reuse, if any.  ``held``: for each member identity -> number of believed operations."""
    return min((identity for identity, _ in set.intersection(*(set(own.items()) for own in held))), default=None)


class Keeper:
    """Pool of this worker's communicators that no epoch uses at the moment; for any thread.

    A communicator stays until it is taken; when the members of columns have changed, the caller calls ``close``.
    ``keeps``: False: every communicator is aborted instead of kept.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._held: list[Communicator] = []
        self.stream: Any = None
        """Stream of all columns, in every epoch: torch's pool would soon return streams that are in use."""
        self._lock = threading.Lock()

    def give(self, communicator: Communicator) -> None:
        """Keep a communicator whose epoch is over and which has settled; abort it if it is not READY."""
        if self._keeps and communicator.state is State.READY:
            communicator.release()
            with self._lock:
                self._held.append(communicator)
        else:
            communicator.close_beside()

    def take(self, rank: int, size: int) -> dict[str, Communicator]:
        """Remove and return the communicators with this rank and size, by identity."""
        with self._lock:
            fitting = {kept.identity: kept for kept in self._held if (kept.rank, kept.size) == (rank, size)}
            self._held = [kept for kept in self._held if kept.identity not in fitting]
        return fitting

    def close(self) -> None:
        """Abort all of them, in detached threads."""
        with self._lock:
            held, self._held = self._held, []
        for communicator in held:
            communicator.close_beside()


@dataclass(eq=False)
class Opening:
    """Communicator that is being opened.  ``prefix``: of its keys; the same at all members, and unique."""

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
        """Return whether it is open.  Raises ``PeerLost`` and ``EpochRevoked``."""
        return next(self._steps, True)

    def fail(self) -> None:
        """Give up: abort the communicator and all kept ones."""
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
        for other in self._kept.values():  # a communicator of another column, if this column is unchanged
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
    """Wait until the communicator is open and return it; on an error it is given up.

    Raises ``EpochRevoked``, ``PeerLost``, and ``TimeoutError`` after ``timeout`` seconds.
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
