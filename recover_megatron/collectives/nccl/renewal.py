"""How the communicator of the next epoch comes to be: from the last one, or anew.

    every member   tells what it has kept for such a rank among so many members ----.
    rank 0                                                   '--> decide(), pure --> tells the decision
    every member   keeps it    the same members, and nothing outstanding at any of them
                   opens one   anything else, with a new unique id; what it had is aborted

All members decide alike since one of them decides.  Everything travels over the epoch's rendezvous, two messages a
member.  (NCCL can shrink and grow communicators, too: what is shrunk after an abort shares nothing with its parent.)
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


def decide(told: Sequence[Mapping[str, int]]) -> str | None:
    """Which communicator is kept; None: none.  ``told``: of each member identity -> operations that it believed."""
    return min((identity for identity, _ in set.intersection(*(set(its.items()) for its in told))), default=None)


class Keeper:
    """The communicators of this worker that no epoch uses at the moment; for any thread.

    It keeps them until they are taken: who knows that columns have got other members calls ``close``.  ``keeps``: False
    aborts what it is given.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._held: list[Communicator] = []
        self.stream: Any = None
        """Of all columns, in every epoch: torch's pool would soon give one that others have, too."""
        self._lock = threading.Lock()

    def give(self, communicator: Communicator) -> None:
        """The epoch that used it is over, and it has settled."""
        if self._keeps and communicator.state is State.READY:
            communicator.release()
            with self._lock:
                self._held.append(communicator)
        else:
            communicator.close_beside()

    def take(self, rank: int, size: int) -> dict[str, Communicator]:
        """Those in which this worker has this rank among so many members, by identity."""
        with self._lock:
            fitting = {its.identity: its for its in self._held if (its.rank, its.size) == (rank, size)}
            self._held = [its for its in self._held if its.identity not in fitting]
        return fitting

    def close(self) -> None:
        """Abort them all, in threads that nobody waits for."""
        with self._lock:
            held, self._held = self._held, []
        for communicator in held:
            communicator.close_beside()


@dataclass(eq=False)
class Opening:
    """One communicator on its way.  ``prefix``: the same at all members, and used for no other."""

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
        """Whether it is open by now.  Raises ``PeerLost`` and ``EpochRevoked``."""
        return next(self._steps, True)

    def fail(self) -> None:
        """Nobody waits for it any more."""
        for its in filter(None, (self.communicator, *self._kept.values())):
            its.close_beside()

    def _open(self) -> Generator[bool]:
        self._kept = self.keeper.take(self.rank, self.size)
        told = {identity: its.operations for identity, its in self._kept.items()}
        self.store.set(f"{self.prefix}/held/{self.rank}", json.dumps(told))
        if self.rank == 0:
            members = []
            for rank in range(self.size):
                members.append((yield from self._told("held", rank)))
            chosen = decide(members)
            order = {"identity": chosen or uuid.uuid4().hex, "unique_id": "" if chosen else self.library.unique_id()}
            self.store.set(f"{self.prefix}/decision/0", json.dumps(order))
        order = yield from self._told("decision", 0)
        if (kept := self._kept.pop(order["identity"], None)) is not None:
            kept.adopt(self.cancel_token)
        self.communicator = kept or self._init(**order)
        for other in self._kept.values():  # of another column, if this one is as it was
            self.keeper.give(other) if kept else other.close_beside()
        self._kept = {}
        while not self.communicator.advance():
            yield False

    def _told(self, what: str, rank: int) -> Generator[bool, None, Any]:
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
    """Raises ``EpochRevoked``, ``PeerLost``, and ``TimeoutError`` after ``timeout`` seconds; then it is given up."""
    deadline, pause, cancel_token = time.monotonic() + timeout, _FIRST_PAUSE, opening.cancel_token
    try:
        while not opening.advance():
            if cancel_token.wait(pause):
                raise cancel_token.error()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{opening.prefix}: not all members have opened it within {timeout:g} s")
            pause = min(1.5 * pause, _LONGEST_PAUSE)
    except BaseException:
        opening.fail()
        raise
    assert opening.communicator is not None
    return opening.communicator
