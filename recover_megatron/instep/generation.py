"""Everything of one worker that lives and dies with one epoch: its switch, its rings, its groups between steps.

    Generation(n) --ring(), control()--> groups, opened when first used
          |
          '--end(reason): from any thread; every operation of every group raises EpochRevoked, now and later
                 |
                 '--close(): nothing of this epoch touches a tensor any more; then Generation(n+1)

Healthy replicas go on computing after ``end``: nothing here is used by what stays inside a replica.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from recover_megatron.collectives.board import Board, Pinned
from recover_megatron.collectives.epoch import Revocation
from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.collectives.gloo import GlooBackend
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.opening import Carrier, open_group
from recover_megatron.collectives.ring import Hook


@dataclass(frozen=True)
class Fabric:
    """What opening a group needs and no epoch changes."""

    board: Board
    """This worker's own."""
    secret: bytes
    device: torch.device
    host: str = "127.0.0.1"
    """The address at which the other workers reach this one."""
    collective: Literal["ring", "native"] = "ring"
    carrier: Carrier | None = None
    """None: that of the device."""
    hook: Hook | None = None
    """For tests and fault injection: see ``collectives.ring``."""
    hanging: bool = False
    """For tests: a transport that hangs instead of failing, as NCCL does."""


@dataclass(frozen=True)
class _Column:
    """An ``Epoch`` (see collectives.epoch) restricted to some of its members."""

    number: int
    members: Sequence[int]
    me: int
    switch: Revocation

    def on_revoke(self, callback: Callable[[str], None]) -> None:
        self.switch.on_throw(lambda: callback(self.switch.reason))


class Generation:
    """The groups of epoch ``number`` at slot ``me``.  All members are slots (see ``grid``).

    ``boards``: slot -> the address of the board of who stands there.  The members of a group find each other by that of
    the lowest of them: whom all of them need anyway, and no board serves more workers than a group has.
    """

    def __init__(self, number: int, me: int, fabric: Fabric, boards: Mapping[int, str]) -> None:
        self.number = number
        self._me = me
        self._fabric = fabric
        self._boards = boards
        self._stores: dict[str, Pinned] = {}
        self._lock = threading.Lock()
        self._switch = Revocation(number)
        self._rings: dict[tuple[int, ...], Group] = {}
        self._controls: dict[tuple[str, tuple[int, ...]], GlooBackend] = {}

    @property
    def over(self) -> bool:
        """Whether the epoch has ended: cheap."""
        return self._switch.thrown

    def end(self, reason: str) -> None:
        """Make every operation of this epoch fail, now and later; from any thread."""
        self._switch.throw(reason)

    def on_end(self, call: Callable[[str], None]) -> None:
        """Call ``call(reason)`` once, from any thread, when the epoch ends; at once if it has."""
        self._switch.on_throw(lambda: call(self._switch.reason))

    def check(self) -> None:
        """Raise ``EpochRevoked`` if the epoch has ended."""
        self._switch.check()

    def _store(self, members: Sequence[int]) -> Pinned:
        address = self._boards[min(slot for slot in members if slot in self._boards)]
        with self._lock:  # states change hands in threads
            if address not in self._stores:
                self._stores[address] = Pinned(address, self._fabric.secret)
            return self._stores[address]

    def ring(self, members: Sequence[int]) -> Group:
        """The gradient ring of these workers, in this order.  Every one of them must ask.  Raises ``EpochRevoked``."""
        key = tuple(members)
        if key not in self._rings:
            fabric = self._fabric
            with self._lost_ends_it():
                self._rings[key] = open_group(
                    _Column(self.number, key, self._me, self._switch),
                    self._store(key),
                    name=_name("ring", key),
                    secret=fabric.secret,
                    collective=fabric.collective,
                    carrier=fabric.carrier,
                    device=fabric.device,
                    host=fabric.host,
                    hook=fabric.hook,
                    hanging=fabric.hanging,
                )
        return self._rings[key]

    def control(self, name: str, members: Sequence[int]) -> GlooBackend:
        """A gloo group of these workers for the small traffic between steps; as ``ring``."""
        key = (name, tuple(members))
        if key not in self._controls:
            with self._lost_ends_it():
                self._controls[key] = GlooBackend(
                    list(members).index(self._me),
                    len(members),
                    self._store(members),
                    self._switch,
                    ring=f"control/{name}/{_name('of', key[1])}/{self.number}",
                    host=self._fabric.host,
                )
        return self._controls[key]

    @contextmanager
    def _lost_ends_it(self) -> Iterator[None]:
        """A member that is lost, or does not come, ends the epoch: at the next rendezvous it is known who lives."""
        try:
            yield
        except (PeerLost, TimeoutError) as lost:
            self.end(str(lost))
            raise EpochRevoked(self.number, str(lost)) from lost

    def any(self, mine: bool, members: Sequence[int]) -> bool:
        """Whether any of these slots, the whole world in ascending order, says yes.  Raises ``EpochRevoked``."""
        said = torch.tensor([float(mine)])
        with self._lost_ends_it():
            backend = self.control("world", members)
            backend.wait(backend.call(lambda gloo: gloo.allreduce([said], dist.AllreduceOptions())))
        return bool(said.item())

    def close(self) -> None:
        """Give everything back; afterwards the buckets are the caller's.  Ends the epoch here if it has not ended."""
        self.end("closed")
        for ring in self._rings.values():
            ring.close()
        for control in self._controls.values():
            control.close()
        self._rings.clear()
        self._controls.clear()
        for store in self._stores.values():
            store.close()


def _name(kind: str, members: Sequence[int]) -> str:
    """Tells groups of one epoch apart: two groups of the same workers are one group."""
    return f"{kind}-{hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:24]}"
