"""How the communicator of the next epoch comes to be: from what its members still hold, or anew.

    every member   tells what it holds in a usable state ----.
    rank 0                                                   '--> decide(), pure --> tells the decision
    every member   does what it says:
                      keep     the same members, nothing outstanding at any of them
                      shrink   members were lost: ncclCommShrink with ABORT, among those who stay
                      grow     members have come, behind the others: ncclCommGrow
                      init     anything else: ncclCommInitRank with a new unique id

All members decide alike since one of them decides.  Everything travels over the epoch's rendezvous, two messages a
member.  What a decision leaves over is aborted, by threads that nobody waits for.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from recover_megatron.collectives.epoch import CancelToken, KeyValue, PeerLost
from recover_megatron.collectives.nccl.communicator import Communicator, State
from recover_megatron.collectives.nccl.library import Library

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01


@dataclass(frozen=True)
class Holding:
    """What a member tells of a communicator that it holds: its rank in it, and how many operations it believed."""

    rank: int
    size: int
    ready: bool
    """False: revoked, so it can be shrunk only."""
    operations: int


@dataclass(frozen=True)
class Decision:
    how: Literal["keep", "shrink", "grow", "init"]
    parent: str = ""
    """The communicator that the new one is, or is made from."""
    exclude: tuple[int, ...] = ()
    """Ranks in the parent."""


def decide(held: Sequence[Mapping[str, Holding]], *, can_grow: bool) -> Decision:
    """``held``: by rank in the new epoch, what each member holds, by identity.  Ranks are never permuted."""
    found = [
        decision
        for identity in sorted({identity for its in held for identity in its})
        if (decision := _with(identity, [its.get(identity) for its in held], can_grow)) is not None
    ]
    return min(found, key=lambda decision: ("keep", "shrink", "grow").index(decision.how), default=Decision("init"))


def _with(identity: str, held: Sequence[Holding | None], can_grow: bool) -> Decision | None:
    """What can be made of this communicator."""
    holders = [holding for holding in held if holding is not None]
    size, ranks = holders[0].size, [holding.rank for holding in holders]
    untouched = all(holding.ready for holding in holders) and len({holding.operations for holding in holders}) == 1
    whole = ranks == list(range(size))
    if len(holders) == len(held):
        if whole and untouched:
            return Decision("keep", identity)
        if not whole and ranks == sorted(ranks):
            return Decision("shrink", identity, tuple(rank for rank in range(size) if rank not in ranks))
        return None
    if can_grow and whole and untouched and None not in held[:size]:
        return Decision("grow", identity)
    return None


class Keeper:
    """The communicators of this worker that no epoch uses at the moment; used by one thread at a time.

    ``keeps``: False aborts what it is given.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._held: dict[str, tuple[int, Communicator]] = {}
        self._epoch = 0

    def give(self, communicator: Communicator, epoch: int) -> None:
        """``epoch``, which used it, is over and it has settled."""
        communicator.release()
        if not self._keeps:
            dispose(communicator)
        elif communicator.state in (State.READY, State.REVOKED):
            self._held[communicator.identity] = epoch, communicator

    def holdings(self) -> dict[str, Holding]:
        return {
            identity: Holding(its.rank, its.size, its.idle, its.operations) for identity, (_, its) in self._held.items()
        }

    def take(self, identity: str) -> Communicator:
        return self._held.pop(identity)[1]

    def decided(self, epoch: int) -> None:
        """What ``epoch`` will use is being taken: what was left over by the last one before is of no use any more."""
        if epoch != self._epoch:
            stale = [identity for identity, (used, _) in self._held.items() if used < self._epoch]
            dispose(*(self.take(identity) for identity in stale))
            self._epoch = epoch

    def close(self) -> None:
        """Abort them all."""
        dispose(*(self.take(identity) for identity in list(self._held)))


def dispose(*communicators: Communicator) -> None:
    """Abort each in a thread of its own: it may wait for the device."""
    for communicator in communicators:
        threading.Thread(target=communicator.close, name="aborting a communicator of NCCL's", daemon=True).start()


class Opening:
    """One communicator on its way; several are opened at the same time with ``open_all``.

    ``prefix``: the same at all members, and used for no other.  ``max_ctas``: as for ``Library.config``.
    """

    def __init__(
        self,
        library: Library,
        keeper: Keeper,
        store: KeyValue,
        cancel_token: CancelToken,
        *,
        prefix: str,
        rank: int,
        size: int,
        max_ctas: int | None = None,
    ) -> None:
        self.prefix = prefix
        self.communicator: Communicator | None = None
        self._library = library
        self._keeper = keeper
        self._store = store
        self._cancel_token = cancel_token
        self._rank = rank
        self._size = size
        self._max_ctas = max_ctas
        self._parent: Communicator | None = None
        self._steps = self._open()

    def advance(self) -> bool:
        """Whether it is open by now.  Raises ``PeerLost`` and ``EpochRevoked``."""
        return next(self._steps, True)

    def fail(self) -> None:
        """Nobody waits for it any more."""
        dispose(*(its for its in (self.communicator, self._parent) if its is not None))

    def _open(self) -> Generator[bool]:
        mine = {identity: asdict(holding) for identity, holding in self._keeper.holdings().items()}
        told = {"held": mine, "grows": self._library.revokes_and_grows}
        self._store.set(f"{self.prefix}/held/{self._rank}", json.dumps(told))
        if self._rank == 0:
            yield from self._lead()
        key = f"{self.prefix}/decision/0"
        while not self._store.check([key]):
            yield False
        order = json.loads(self._store.get(key))
        self._keeper.decided(self._cancel_token.epoch)
        yield from self._act(order)

    def _lead(self) -> Generator[bool]:
        members = []
        for rank in range(self._size):
            while not self._store.check([key := f"{self.prefix}/held/{rank}"]):
                yield False
            members.append(json.loads(self._store.get(key)))
        held = [{name: Holding(**its) for name, its in member["held"].items()} for member in members]
        decision = decide(held, can_grow=all(member["grows"] for member in members))
        order = asdict(decision) | {"identity": decision.parent if decision.how == "keep" else uuid.uuid4().hex}
        if decision.how == "init":
            order["unique_id"] = self._library.unique_id()
        elif decision.how == "grow":
            order["unique_id"] = self._take(decision.parent).manage(lambda handle: bytes(handle.get_unique_id()).hex())
            order["old_size"] = held[0][decision.parent].size
        self._store.set(f"{self.prefix}/decision/0", json.dumps(order))

    def _take(self, identity: str) -> Communicator:
        if self._parent is None:
            self._parent = self._keeper.take(identity)
            self._parent.adopt(self._cancel_token)
        return self._parent

    def _act(self, order: Mapping[str, Any]) -> Generator[bool]:
        how = order["how"]
        if how == "keep":
            self.communicator, self._parent = self._take(order["parent"]), None
        else:
            handle = {"init": self._init, "shrink": self._shrink, "grow": self._grow}[how](order)
            self.communicator = Communicator(
                self._library, handle, order["identity"], self._cancel_token,
                rank=self._rank, size=self._size, parent=self._parent,
            )  # fmt: skip
        while not self.communicator.advance():
            yield False
        if self._parent is not None:
            dispose(self._parent)
            self._parent = None

    def _init(self, order: Mapping[str, Any]) -> Any:
        unique_id = self._library.read_unique_id(order["unique_id"])
        try:
            config = self._library.config(self._max_ctas)
            return self._library.core.Communicator.init(self._size, self._rank, unique_id, config)
        except self._library.errors as error:
            raise PeerLost(f"NCCL: {error}") from error

    def _shrink(self, order: Mapping[str, Any]) -> Any:
        flag, config = self._library.core.CommShrinkFlag.ABORT, self._library.config(self._max_ctas)
        return self._take(order["parent"]).manage(lambda handle: handle.shrink(order["exclude"], config, flag))

    def _grow(self, order: Mapping[str, Any]) -> Any:
        unique_id, size = self._library.read_unique_id(order["unique_id"]), self._size
        config = self._library.config(self._max_ctas)
        if self._rank < order["old_size"]:  # the one that made the id passes it, the other ones must not
            own = unique_id if self._rank == 0 else None
            return self._take(order["parent"]).manage(lambda handle: handle.grow(size, own, config=config))
        try:
            return self._library.core.Communicator().grow(size, unique_id, self._rank, config)
        except self._library.errors as error:
            raise PeerLost(f"NCCL: {error}") from error


def open_all(openings: Sequence[Opening], cancel_token: CancelToken, timeout: float) -> list[Communicator]:
    """All of them at the same time: no order of theirs can make two members wait for each other.

    Raises ``EpochRevoked``, ``PeerLost``, and ``TimeoutError`` after ``timeout`` seconds; then all are given up.
    """
    deadline, pause, waiting = time.monotonic() + timeout, _FIRST_PAUSE, list(openings)
    try:
        while True:
            waiting = [opening for opening in waiting if not opening.advance()]
            if not waiting:
                return [opening.communicator for opening in openings if opening.communicator is not None]
            if cancel_token.wait(pause):
                raise cancel_token.error()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{waiting[0].prefix}: not all members have opened it within {timeout:g} s")
            pause = min(1.5 * pause, _LONGEST_PAUSE)
    except BaseException:
        for opening in openings:
            opening.fail()
        raise
