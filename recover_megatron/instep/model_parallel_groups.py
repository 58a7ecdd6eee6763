"""The groups inside a replica: they can be ended from another thread, and made again among other workers.

A worker whose replica broke may wait in one of them for somebody who waits for somebody who is dead.  NCCL has an
abort; gloo has none, but wakes when the connections of a group are shut, so the connections are noted when it is made.
(Where gloo misses that, its operation is left: ``guard``.)  A worker that does not get out of them ends (`leaving`).

No operation of NCCL's is asked here whether it has succeeded: ``Work.is_completed`` says yes of one that failed, and
an aborted kernel leaves garbage.  What is computed from it goes nowhere: the switch of the epoch is thrown before any
group is aborted, and a bucket goes to the others only if it was computed before the switch (`transport.streams`).

    made at start-up (torch's own) --end()--> every operation fails --rebuild()--> made anew, with a switch of their own
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.collectives.gloo.abortable_work import AbortableWorks
from recover_megatron.collectives.gloo.groups import GlooGroups
from recover_megatron.collectives.gloo.swappable_group import MakeGroup, SwappableGroup
from recover_megatron.collectives.peer_store_client import PeerStoreClient
from recover_megatron.collectives.rendezvous import await_key
from recover_megatron.collectives.torch_nccl import connect, make_group
from recover_megatron.instep.epoch_groups import EpochGroups
from recover_megatron.instep.leaving import Leaving
from recover_megatron.network.silence import watch

MEET_SECONDS = 60.0


def _connections() -> dict[int, tuple[int, ...]]:
    """The TCP sockets of this process: descriptor -> identity (device, inode)."""
    found: dict[int, tuple[int, ...]] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                status = os.stat(int(name))
                found[int(name)] = (status.st_dev, status.st_ino)
    return found


class ModelParallelGroups:
    """Notes the groups of one worker's replica as they are made, and ends them all.

    ``ports``: connections from or to these are the rendezvous store's, which other workers need, or to a coordinator,
    by which this one goes on, and are left alone.
    ``make_nccl``: makes a group over NCCL; ``leaving``: gets this worker out of some.
    """

    def __init__(
        self,
        ports: Collection[int],
        make_nccl: MakeGroup = make_group,
        leaving: Callable[[Sequence[dist.ProcessGroup]], Leaving] = Leaving,
    ) -> None:
        self._ports = frozenset(ports)
        self._make_nccl = make_nccl
        self._leaving_of = leaving
        self._leaving: Leaving | None = None
        self._nccl: list[dist.ProcessGroup] = []
        self._sockets: list[socket.socket] = []
        self._groups: list[SwappableGroup] = []
        self._gloo: GlooGroups | None = None
        """Those that were made anew."""
        self._cancel_token = CancelToken(0)
        self.guard = AbortableWorks(self._cancel_token)
        """Of the present groups: what waits in gloo for somebody who is lost is left."""
        self._store: PeerStoreClient | None = None
        self._lock = threading.Lock()
        self._ended = False

    def keep(self, group: SwappableGroup) -> None:
        """One that ``rebuild`` makes anew."""
        self._groups.append(group)
        group.guard_by(self.guard)

    def make(self, create: Callable[[], dist.ProcessGroup | None]) -> dist.ProcessGroup:
        """Make a group with ``create`` and note it.

        Called at start-up, while other threads open no connections that last but those of ``ports``.
        """
        before = set(_connections().values())
        group = create()
        if group is None:  # the default one
            group = dist.distributed_c10d._get_default_group()
        if dist.get_backend(group) == "nccl":
            self._nccl.append(group)
            return group
        for descriptor, identity in _connections().items():
            if identity not in before:
                self._note(descriptor)
        return group

    def _note(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):  # closed meanwhile
            sock = socket.socket(fileno=os.dup(descriptor))
            try:
                # A listener must not be shut: gloo ends the process when its listener fails.
                listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                ports = {sock.getsockname()[1], sock.getpeername()[1]}
            except (OSError, IndexError, TypeError):  # not connected, or not TCP
                listening, ports = 1, set()
            if listening or self._ports & ports or sock.family not in (socket.AF_INET, socket.AF_INET6):
                sock.close()
            else:
                watch(sock)
                self._sockets.append(sock)

    def end(self) -> None:
        """Make every operation of these groups fail, here and, for gloo, at the other ends; from any thread, once.

        The main thread says ``left`` when it is out of them; else this process ends.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
            sockets, self._sockets = self._sockets, []
            nccl, self._nccl = self._nccl, []
            cancel_token = self._cancel_token
            leaving = self._leaving = self._leaving_of(nccl)
        for sock in sockets:
            with contextlib.suppress(OSError):  # the other end was faster
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        cancel_token.cancel("the replica is broken")
        leaving.begin()

    def left(self) -> None:
        """In the main thread, out of every call of groups that were ended: it makes no other until they are rebuilt."""
        with self._lock:
            leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.left()

    def rebuild(
        self, epoch_groups: EpochGroups, replica: int, store: PeerStoreClient, host: str, device: torch.device
    ) -> None:
        """Make all kept groups of several workers, and placeholders, anew, among those who stand in ``replica`` now.

        They outlive the epoch; only while they are made does its end end them.  Raises ``EpochRevoked``, ``PeerLost``
        and ``TimeoutError``.
        """
        self.end()
        self.left()
        if self._store is not None:
            self._store.close()
        self._store = store  # NCCL asks it again when two workers first talk to each other
        cancel_token = CancelToken(epoch_groups.number)
        with self._lock:
            self._cancel_token, self.guard, self._ended = cancel_token, AbortableWorks(cancel_token), False
        made = threading.Event()
        epoch_groups.on_end(lambda reason: None if made.is_set() else cancel_token.cancel(reason))
        try:
            self._renew(f"inside/{epoch_groups.number}/{replica}", cancel_token, store, host, device)
        except dist.DistError as error:
            cancel_token.check()
            raise PeerLost(f"a group inside the replica could not be opened: {error}") from error
        made.set()
        if epoch_groups.over:
            raise EpochRevoked(epoch_groups.number, "the epoch ended while the groups of a replica were made")

    def _renew(
        self, prefix: str, cancel_token: CancelToken, store: dist.Store, host: str, device: torch.device
    ) -> None:
        groups = [group for group in self._groups if len(group.positions) > 1 or group.placeholder]
        named = {group.own_name: group.positions for group in groups if group.backend != "nccl"}
        backends: dict[str, Any] = {}
        before = self._gloo
        if named:  # of one worker alone, too, where it is a placeholder
            # All or none: where this raises, every group still is the one that has been ended.
            me = groups[0].positions[groups[0].at]
            self._gloo = GlooGroups(me, named, store, cancel_token, ring=prefix, host=host)
            backends = self._gloo.backends
        if any(group.backend == "nccl" for group in groups):
            self._meet(groups, prefix, cancel_token, store)
        for group in groups:
            group.renew(store, prefix, self.guard, device, backends.get(group.own_name), self._make_inside)
        if before is not None:
            before.close()

    def _meet(
        self, groups: Sequence[SwappableGroup], prefix: str, cancel_token: CancelToken, store: dist.Store
    ) -> None:
        """Wait until all who stand in the replica are here: no switch ends a wait for somebody in NCCL."""
        store.set(f"{prefix}/here/{groups[0].positions[groups[0].at]}", "1")
        for position in sorted({position for group in groups for position in group.positions}):
            await_key(store, f"{prefix}/here/{position}", cancel_token, MEET_SECONDS)

    def _make_inside(
        self, store: dist.Store, name: str, rank: int, size: int, device: torch.device, options: Any
    ) -> dist.ProcessGroup:
        with self._lock:
            if self._ended:
                raise PeerLost("the replica broke while its groups were made")
            group = self._make_nccl(store, name, rank, size, device, options)
            self._nccl.append(group)  # before it waits for others: ``end`` may have to abort it
        connect(group, device)
        return group
