"""Groups through which one worker communicates in one epoch: gradient rings and other groups, with one cancel token.

    EpochGroups(n) --ring(), control()--> groups, opened when first used
          |
          '--end(reason): from any thread; then every operation of every group raises EpochRevoked
                 |
                 '--close(): no operation of this epoch touches a tensor any more; then EpochGroups(n+1)

Complete replicas continue computing after ``end``, since groups inside a replica do not depend on this module.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked, KeyValue, PeerLost
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import Collective, TransportKind, open_group, progress_thread
from recover_megatron.collectives.nccl.pairs import Pairs
from recover_megatron.collectives.nccl.renewal import Keeper
from recover_megatron.collectives.peers import Neighbours, PeerStoreClient
from recover_megatron.collectives.progress import Hook, ProgressThread
from recover_megatron.collectives.state.holder import KIND, LARGE_CHUNK, Offer, Offers
from recover_megatron.collectives.state.receiver import Receiver, Shared, Source
from recover_megatron.collectives.state.trees import Place, new_memory
from recover_megatron.collectives.tree import Tree, TreeBackend
from recover_megatron.network.peer_store import PeerStoreServer, open_stream
from recover_megatron.workload.grid import Slot

OPENER = "opening rings"


@dataclass(frozen=True)
class CommunicationConfig:
    """Settings with which one worker opens groups; the same in all epochs."""

    peer_store: PeerStoreServer
    """Peer store of this worker."""
    secret: bytes = field(repr=False)
    device: torch.device
    host: str = "127.0.0.1"
    """Address at which other workers can connect to this worker."""
    collective: Collective = "ring"
    transport_kind: TransportKind = "tcp"
    hook: Hook | None = None
    """Hook for tests and fault injection: see ``collectives.ring.executor``."""
    communicators: Keeper = field(default_factory=Keeper)
    """NCCL communicators that are reused from one epoch to the next."""

    @cached_property
    def offers(self) -> Offers:
        return Offers(self.peer_store.streams, self.pairs)

    @cached_property
    def pairs(self) -> Pairs | None:
        """NCCL communicators for sending states from device to device; None: gradients travel over TCP."""
        return Pairs(self.device) if self.over_nccl else None

    def source(self, worker: int, address: str, key: str, patience: Callable[[], None]) -> Source:
        """Return the source of the state that ``worker``, with a peer store at ``address``, offers under ``key``."""
        return Source(worker, lambda: open_stream(address, self.secret, f"{KIND}/{key}", patience))

    @property
    def over_nccl(self) -> bool:
        """True if gradients travel over NCCL; False if they travel over TCP, also between GPUs."""
        return self.collective == "native"


@dataclass(frozen=True)
class _Column:
    """Epoch (``collectives.epoch.Epoch``) restricted to the members of one column."""

    number: int
    members: Sequence[Slot]
    me: Slot
    cancel_token: CancelToken

    def on_revoke(self, callback: Callable[[str], None]) -> None:
        self.cancel_token.on_cancel(lambda: callback(self.cancel_token.reason))


@dataclass(eq=False)
class EpochGroups:
    """Groups of one worker in epoch ``number``.  ``_peer_stores``: slot -> address of the peer store of this slot's
    worker."""

    number: int
    _me: Slot
    _comm_config: CommunicationConfig
    _peer_stores: Mapping[Slot, str]
    all_heard: Callable[[], None] = lambda: None
    """Function that waits until all live workers know that this epoch is over; used for rings over NCCL
    (``CancelToken``)."""
    in_touch: Callable[[], None] = lambda: None
    """Function that waits until the coordinator has answered a message that is less than a heartbeat timeout old; used
    for rings over NCCL (``CancelToken``)."""
    _stores: dict[int, PeerStoreClient] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _rings: dict[tuple[Slot, ...], Future[Group]] = field(default_factory=dict, init=False)
    _openers: list[threading.Thread] = field(default_factory=list, init=False)
    _controls: dict[tuple[str, tuple[Slot, ...]], TreeBackend] = field(default_factory=dict, init=False)
    _states: Counter[tuple[str, bool]] = field(default_factory=Counter, init=False)
    _progress: ProgressThread | None = field(init=False)
    """Thread that launches the sums of all columns over NCCL; None over TCP, where each ring has a thread."""

    def __post_init__(self) -> None:
        self._cancel_token = CancelToken(self.number)
        config, self._progress = self._comm_config, None
        if config.over_nccl:
            cancel_token = CancelToken(self.number, self.all_heard, self.in_touch)
            self.on_end(cancel_token.cancel)
            name = f"sums of epoch {self.number}"
            self._progress = progress_thread(cancel_token, config.device, name, config.collective)

    @property
    def over(self) -> bool:
        return self._cancel_token.cancelled

    def end(self, reason: str | PeerLost) -> None:
        """Make every present and later operation of this epoch fail.  Later calls do not change ``reason``.

        May be called from any thread.
        """
        self._cancel_token.cancel(reason)
        if self._progress is not None:  # another thread that ends the epoch may not have reached this line yet
            self._progress.cancel_token.cancel(str(reason))

    def on_end(self, call: Callable[[str], None]) -> None:
        """Call ``call(reason)`` once, from any thread, when the epoch ends, or now if it has ended."""
        self._cancel_token.on_cancel(lambda: call(self._cancel_token.reason))

    def check(self) -> None:
        """Raise ``EpochRevoked`` if the epoch has ended."""
        self._cancel_token.check()

    @property
    def lost(self) -> PeerLost | None:
        """Error with which an operation of this worker failed; None: no operation failed before the epoch ended."""
        opened = [ring.result() for ring in list(self._rings.values()) if ring.done() and not ring.exception()]
        return next(filter(None, [self._cancel_token.lost, *(ring.lost for ring in opened)]), None)

    def _store(self, members: Sequence[Slot]) -> PeerStoreClient:
        return self._client_of(min(slot for slot in members if slot in self._peer_stores))

    def _client_of(self, slot: int) -> PeerStoreClient:
        with self._lock:  # threads that send states call this method, too
            if slot not in self._stores:
                self._stores[slot] = PeerStoreClient(
                    self._peer_stores[Slot(slot)], self._comm_config.secret, self.number
                )
            return self._stores[slot]

    def open_rings(self, columns: Sequence[Sequence[Slot]]) -> None:
        """Begin to open the rings of several columns, each in a thread; ``ring`` waits until a ring is open.

        NCCL communicators are opened one after the other, in the order of the calls of this method and ``ring``.  This
        order must be the same on all workers; otherwise two workers would wait for each other.
        """
        for members in columns:
            self._opening(tuple(members))

    def ring(self, members: Sequence[Slot]) -> Group:
        """Return the gradient ring of ``members``, in this order; all members must call this.  Raises
        ``EpochRevoked``."""
        return self._opening(tuple(members)).result()

    def _opening(self, members: tuple[Slot, ...]) -> Future[Group]:
        with self._lock:
            if members not in self._rings:
                ring = self._rings[members] = Future()
                before = list(self._openers) if self._comm_config.over_nccl else []
                opener = threading.Thread(target=self._open, args=(members, ring, before), name=OPENER, daemon=True)
                self._openers.append(opener)
                opener.start()
            return self._rings[members]

    def _open(self, members: tuple[Slot, ...], ring: Future[Group], before: Sequence[threading.Thread]) -> None:
        for opener in before:
            opener.join()
        try:
            ring.set_result(self._open_ring(members))
        except BaseException as error:  # noqa: BLE001  the caller of ``ring`` gets every error
            with self._lock:
                self._rings.pop(members, None)  # a stored error would keep its frames, and their connections, alive
            ring.set_exception(error)

    def _open_ring(self, members: tuple[Slot, ...]) -> Group:
        comm_config = self._comm_config
        with self.lost_ends_it():
            self.check()  # the opening of another ring may have ended the epoch
            return open_group(
                _Column(self.number, members, self._me, self._cancel_token),
                self._meeting_place(members),
                name=name_of("ring", members),
                secret=comm_config.secret,
                collective=comm_config.collective,
                transport_kind=comm_config.transport_kind,
                device=comm_config.device,
                host=comm_config.host,
                hook=comm_config.hook,
                communicators=comm_config.communicators,
                progress=self._progress,
            )

    def _meeting_place(self, members: Sequence[Slot]) -> KeyValue:
        comm_config = self._comm_config
        if comm_config.over_nccl or not all(slot in self._peer_stores for slot in members):
            return self._store(members)  # the lowest member's peer store
        return Neighbours(comm_config.peer_store, members, self._client_of, self.number)

    def control(self, name: str, members: Sequence[Slot]) -> TreeBackend:
        """Return a group of ``members`` for small operations outside the gradient rings; all members must call this."""
        key = (name, tuple(members))
        if key not in self._controls:
            self._controls[key] = self._open_control(*key)
        return self._controls[key]

    def _open_control(self, name: str, members: tuple[Slot, ...]) -> TreeBackend:
        config = self._comm_config
        with self.lost_ends_it():
            tree = Tree(
                members.index(self._me), members, [self._peer_stores[slot] for slot in members], config.peer_store,
                config.secret, self._cancel_token, name=f"tree/{self.number}/{name}/{name_of('of', members)}",
            )  # fmt: skip
        return TreeBackend(tree)

    @contextmanager
    def lost_ends_it(self) -> Iterator[None]:
        """End the epoch and raise ``EpochRevoked`` if the ``with`` block fails because a member is lost or absent."""
        try:
            yield
        except (PeerLost, TimeoutError) as error:
            self.end(error if isinstance(error, PeerLost) else PeerLost(str(error)))
            raise EpochRevoked(self.number, str(error)) from error
        except EpochRevoked as over:
            if isinstance(cause := over.__cause__, PeerLost):  # a ring could not be opened
                self.end(cause)
            raise

    def any(self, value: bool, members: Sequence[Slot]) -> bool:
        """Return whether any member passes True as ``value``.  Raises ``EpochRevoked``.

        ``members``: all slots with a worker, ascending.  All members must call this method.
        """
        return self.most([float(value)], members)[0] > 0

    def most(self, values: Sequence[float], members: Sequence[Slot]) -> list[float]:
        """Return the element-wise maximum of the members' ``values``.  ``members``: as in ``any``.  Raises
        ``EpochRevoked``."""
        largest, options = torch.tensor(list(values), dtype=torch.float64), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        with self.lost_ends_it():
            backend = self.control("world", members)
            backend.call(lambda on: on.allreduce([largest], options))
        return [float(value) for value in largest]

    # ---- states

    def offer(self, name: str, tree: Any, shared: int = 0) -> Offer:
        """Offer a tree to other members until the offer is withdrawn, which may be after the end of the epoch.

        The n-th ``fetch`` of ``name`` receives the n-th offer of ``name``.  ``shared``: see ``Offer``.
        """
        config = self._comm_config
        offer = Offer(tree, shared, LARGE_CHUNK if config.over_nccl else None)
        return config.offers.put(self._key(name, giving=True), offer)

    def fetch(
        self,
        name: str,
        holders: Sequence[Slot],
        shared: Shared,
        *,
        place: Place = new_memory,
        by_devices: bool = False,
        stay: Callable[[], None] | None = None,
        progress: Callable[[], None] = lambda: None,
        lost: Callable[[], Collection[Slot]] = tuple,
    ) -> tuple[Any, int]:
        """Return the tree that ``holders`` offer under ``name``, and the number of bytes of its tensors.

        ``by_devices``: send from device to device if gradients travel over NCCL; must be False if the holder waits in
        ``Offer.wait``.  ``stay``: function that raises to stop the fetch; the default raises when the epoch ends.
        A fetch that waits for an offer always fails when the epoch ends.  ``lost``: function that returns the dead
        holders, for a fetch that continues after the epoch.  Raises what ``stay`` raises, ``EpochRevoked``,
        ``PeerLost``, ``Disagreement``.
        """
        key, addresses = self._key(name, giving=False), self._peer_stores
        config = self._comm_config
        sources = [config.source(slot, addresses[slot], key, self.check) for slot in holders if slot in addresses]
        if by_devices:
            sources = [replace(source, pairs=config.pairs) for source in sources]
        receiver = Receiver(sources, place, stay=stay or self.check, awaited=self.check, progress=progress, lost=lost)
        return receiver.fetch(shared)

    def _key(self, name: str, *, giving: bool) -> str:
        self._states[name, giving] += 1
        return f"{self.number}/{name}/{self._states[name, giving]}"

    def close(self) -> None:
        """End the epoch on this worker, and close all groups; after the return no operation touches a bucket."""
        self.end("closed")  # rings that are still being opened then fail
        for opener in self._openers:
            opener.join()
        for ring in self._rings.values():
            ring.result().close()
        for control in self._controls.values():
            control.close()
        self._rings.clear()
        self._controls.clear()
        for store in self._stores.values():
            store.close()


def name_of(kind: str, members: Sequence[Slot]) -> str:
    """Return a name for the group of ``members``; two groups have the same name only if kind and members are equal."""
    return f"{kind}-{hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:24]}"
