"""Groups inside a replica: they can be ended from another thread, and created again among other workers.

    created at start-up (by torch) --end()--> every operation fails --rebuild()--> created again, with a new token

NCCL groups can be aborted.  Gloo groups cannot, but their operations fail when the group's connections are shut down,
so these connections are recorded when a group is created.  (If gloo misses the shutdown, its operation is abandoned:
``guard``.)  A worker that does not get out of the groups exits (``Leaving``).

NCCL's report that an operation has succeeded is not used: ``Work.is_completed`` returns True for a failed operation,
and an aborted kernel leaves garbage.  Results computed from garbage are never sent: the epoch's cancel token is
cancelled before any group is aborted, and a bucket is sent to other replicas only if it was computed before that
(`collectives.device`, ``DeviceStream``).  Model-parallel peers that share an aborted kernel have garbage, too, so
their tokens are cancelled before the abort, as well (``CancelToken.all_heard``).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked, PeerLost, await_key
from recover_megatron.collectives.gloo.abortable_groups import GivenUp, GlooGroups, Identity, open_sockets, shut
from recover_megatron.collectives.gloo.swappable_group import AbortableWorks, MakeGroup, SwappableGroup
from recover_megatron.collectives.nccl.library import abort_beside
from recover_megatron.collectives.peers import PeerStoreClient
from recover_megatron.collectives.torch_nccl import connect, make_group
from recover_megatron.errors import EXIT_OWN_FAULT
from recover_megatron.instep.groups.epoch_groups import EpochGroups
from recover_megatron.logger import get_logger, write_stderr
from recover_megatron.membership.records import MembershipError
from recover_megatron.network.system import watch

log = get_logger(__name__)

LEAVE_SECONDS = 10.0
_LOOK = 0.25
_PAUSE = 0.001

_CALLS = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/",
    "/torch/cuda/",
    "/recover_megatron/collectives/",
    "/recover_megatron/instep/faults.py",
)
"""Source files of frames in calls that wait for a group or for the device."""

Calls = frozenset[tuple[int, int]]
"""Identities of calls in threads; an identity does not change while its thread is in the call."""


def calls_under_way() -> Calls:
    """Return the calls on groups or the device that the main thread or a thread of the backward pass is in."""
    main = threading.main_thread().ident
    frames = {thread: _waiting(frame) for thread, frame in sys._current_frames().items()}
    return frozenset(
        (id(frame), frame.f_lasti)
        for thread, frame in frames.items()
        if any(part in frame.f_code.co_filename for part in (_CALLS if thread == main else _CALLS[:1]))
    )


def _waiting(frame: FrameType) -> FrameType:
    """Return ``frame`` or, if it is inside ``threading``, the frame that called ``threading`` to wait."""
    while frame.f_globals.get("__name__") == "threading" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def end_process(reason: str) -> None:
    """Terminate this worker now; the stack of its main thread goes to stderr."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    write_stderr("".join(traceback.format_stack(main)))
    log.info(
        f"this worker cannot leave the groups of its broken replica within {LEAVE_SECONDS:g} s ({reason}); it exits, "
        "and its launcher starts a replacement if it may (--max-restarts)"
    )
    sys.stdout.flush()
    os._exit(EXIT_OWN_FAULT)


class Leaving:
    """Thread that gets a worker out of the groups of its broken replica, or terminates it.

        begin --> WAITING until all have heard --> ABORTING --every abort has returned--> AWAITING the main thread
                     '--out of the run: over                   |                               |   '--left()--> over
                                                               |--an abort raises              |
                               aborts last for LEAVE_SECONDS --'  in one call for LEAVE_SECONDS'
                                                               '-------------------------------'--> exit code 1

    An abort may wait for a lock that a torch call holds, or for a kernel of another communicator of the device that is
    aborted next.  So all aborts start at once, each in its own thread, and this thread waits for all of them.  It also
    waits while the main thread computes (`spare` limits that time).  Time is counted in checks, not by the clock, so
    that time in which the process was stopped does not count.

    ``groups``: torch process groups over NCCL to abort, on ``device``.  ``all_heard``: as for ``CancelToken``; if this
    worker is out of the run, nothing is aborted, since its process exits.  ``cuda``, ``where``, ``end`` and ``look``
    (seconds between two checks): for tests.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        device: torch.device,
        all_heard: Callable[[], None] = lambda: None,
        *,
        cuda: Any = torch.cuda,
        where: Callable[[], Calls] = calls_under_way,
        end: Callable[[str], None] = end_process,
        look: float = _LOOK,
    ) -> None:
        self._groups = list(groups)
        self._device = device
        self._all_heard = all_heard
        self._cuda = cuda
        self._where = where
        self._end = end
        self._look = look
        self._changed = threading.Condition()
        self._aborting = len(self._groups)
        self._failed = ""
        self._left = False
        self._thread = threading.Thread(target=self._run, name="leaving the replica's groups", daemon=True)

    def begin(self) -> None:
        """Abort all groups, from any thread, and return at once."""
        self._thread.start()

    def left(self) -> None:
        """Record that the main thread is in no call of these groups any more, and will make none."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    # ---- its thread

    def _run(self) -> None:
        try:
            self._all_heard()
        except MembershipError:
            return
        for group in self._groups:
            abort_beside("aborting a communicator of NCCL's", self._cuda, self._device, group.abort, self._aborted)
        self._groups.clear()
        looks = round(LEAVE_SECONDS / _LOOK)
        for _ in range(looks):
            if self._wait(lambda: not self._aborting or bool(self._failed)):
                break
        if self._failed or self._aborting:
            self._end(self._failed or f"{self._aborting} of its communicators are still being aborted")
            return
        stuck, since = Calls(), 0
        while not self._wait(lambda: self._left):
            calls = self._where()
            stuck, since = (stuck & calls, since + 1) if stuck & calls else (calls, 0)
            if since >= looks:
                self._end("its main thread does not come out of a call")
                return

    def _wait(self, done: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(done, self._look)

    def _aborted(self, error: BaseException | None) -> None:
        with self._changed:
            self._aborting -= 1
            if error is not None:  # after any error the state of the communicator is unknown
                self._failed = self._failed or f"an abort failed: {type(error).__name__}: {error}"[:500]
            self._changed.notify_all()


MEET_SECONDS = 60.0


class ModelParallelGroups:
    """Records the groups inside one worker's replica as they are created, ends them, and creates them again.

    ``ports``: ports of the rendezvous store, which other workers need, and of coordinators, which this worker needs;
    connections from or to these ports are never shut.  ``device``: device of the groups over NCCL.  ``make_nccl``:
    creates a group over NCCL; ``leaving``: creates the ``Leaving`` thread.
    """

    def __init__(
        self,
        ports: Collection[int],
        device: torch.device,
        make_nccl: MakeGroup = make_group,
        leaving: Callable[[Sequence[dist.ProcessGroup], torch.device, Callable[[], None]], Leaving] = Leaving,
    ) -> None:
        self._ports = frozenset(ports)
        self._device = device
        self._make_nccl = make_nccl
        self._leaving_of = leaving
        self._leaving: Leaving | None = None
        self._nccl: list[dist.ProcessGroup] = []
        self._sockets: list[socket.socket] = []
        self._mixed: list[socket.socket] = []
        """Connections of groups during whose creation another thread opened connections, which gloo never closes."""
        self._shut = set[Identity]()
        """Connections that ``end`` has shut, and that gloo may not have closed yet."""
        self._settled = True
        self._groups: list[SwappableGroup] = []
        self._gloo: GlooGroups | None = None
        """The present groups over gloo, if ``rebuild`` has created them; None: torch created them at start-up."""
        self._cancel_token = CancelToken(0)
        self.guard = AbortableWorks(self._cancel_token)
        """Guard of the present groups, which abandons an operation that waits in gloo for a lost worker."""
        self._store: PeerStoreClient | None = None
        self._lock = threading.Lock()
        self._ended = False

    def keep(self, group: SwappableGroup) -> None:
        """Keep a group that ``rebuild`` creates again."""
        self._groups.append(group)
        group.guard_by(self.guard)

    def make(self, create: Callable[[], dist.ProcessGroup | None]) -> dist.ProcessGroup:
        """Create a group with ``create`` and record it.

        Called at start-up, while other threads open no lasting connections except those of ``ports``.
        """
        before = set(open_sockets().values())
        group = create()
        if group is None:  # the default one
            group = dist.distributed_c10d._get_default_group()
        if dist.get_backend(group) == "nccl":
            self._nccl.append(group)
            return group
        noted = len(self._sockets)
        for descriptor, identity in open_sockets().items():
            if identity not in before:
                self._note(descriptor)
        if len(self._sockets) - noted >= group.size():  # more than gloo's: it has one connection per other member
            self._mixed += self._sockets[noted:]
            del self._sockets[noted:]
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

    def end(self, all_heard: Callable[[], None] = lambda: None) -> None:
        """Make every operation of these groups fail on this worker and, for gloo, on its peers; from any thread, once.

        ``all_heard``: as for ``CancelToken``, for the last epoch in which the groups were used; default: no other
        worker used them.  The main thread must call ``left`` once it is out of all calls of the groups; if it stays in
        a call, this process exits.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
            sockets, self._sockets = self._sockets, []
            nccl, self._nccl = self._nccl, []
            cancel_token, gloo = self._cancel_token, self._gloo
            leaving = self._leaving = self._leaving_of(nccl, self._device, all_heard)
            # Shut the sockets before the token releases any operation: no later data may reach the operation's tensors.
            self._shut |= shut(sockets)
            shut(self._mixed)
            self._settled = False
            if gloo is not None:
                gloo.abort()
                self._shut |= gloo.shut
        cancel_token.cancel("the replica is broken")
        leaving.begin()

    def left(self) -> None:
        """Record that the main thread, which calls this, is out of all calls of ended groups until ``rebuild``.

        Returns when no gloo thread writes to a tensor any more; terminates the process if gloo does not stop in time.
        """
        self._settle()
        with self._lock:
            leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.left()

    def _settle(self) -> None:
        with self._lock:
            closing, self._shut = self._shut, set()
            settled, self._settled, guard = self._settled, True, self.guard
        if settled:
            return

        def still_open(among: Iterable[int] | None = None) -> dict[int, Identity]:
            return {number: identity for number, identity in open_sockets(among).items() if identity in closing}

        descriptors = still_open()
        given_up = GivenUp()
        for _ in range(round(LEAVE_SECONDS / _PAUSE)):
            if not descriptors or given_up.over(descriptors):
                guard.settle()
                return
            time.sleep(_PAUSE)
            descriptors = still_open(descriptors)
        end_process(f"gloo has not closed {len(descriptors)} connections that this worker shut down")

    def rebuild(self, epoch_groups: EpochGroups, replica: int, store: PeerStoreClient, host: str) -> None:
        """Create all kept groups of several workers, and placeholders, again among the present workers of ``replica``.

        Old groups are ended if they still exist, which happens only after a worker has built its model alone.  The new
        groups outlive the epoch; but if the epoch ends during their creation, they are ended.  Raises ``EpochRevoked``,
        ``PeerLost`` and ``TimeoutError``.
        """
        self.end()
        self.left()
        if self._store is not None:
            self._store.close()
        self._store = store  # NCCL uses it again when two workers first connect to each other
        cancel_token = CancelToken(epoch_groups.number)
        with self._lock:
            self._cancel_token, self.guard, self._ended = cancel_token, AbortableWorks(cancel_token), False
        made = threading.Event()
        epoch_groups.on_end(lambda reason: None if made.is_set() else cancel_token.cancel(reason))
        try:
            self._renew(f"inside/{epoch_groups.number}/{replica}", cancel_token, store, host)
        except dist.DistError as error:
            cancel_token.check()
            raise PeerLost(f"a group inside the replica could not be created: {error}") from error
        made.set()
        if epoch_groups.over:
            raise EpochRevoked(epoch_groups.number, "the epoch ended while the groups of a replica were created")

    def _renew(self, prefix: str, cancel_token: CancelToken, store: dist.Store, host: str) -> None:
        groups = [group for group in self._groups if len(group.positions) > 1 or group.placeholder]
        named = {group.own_name: group.positions for group in groups if group.backend != "nccl"}
        backends: dict[str, Any] = {}
        before = self._gloo
        if named:  # also a group of one worker, if it is a placeholder
            # If this raises, no group has been replaced: all are still the ended ones.
            me = groups[0].positions[groups[0].at]
            self._gloo = GlooGroups(me, named, store, cancel_token, ring=prefix, host=host)
            backends = self._gloo.backends
        if any(group.backend == "nccl" for group in groups):
            self._meet(groups, prefix, cancel_token, store)
        for group in groups:
            group.renew(store, prefix, self.guard, self._device, backends.get(group.own_name), self._make_inside)
        if before is not None:
            before.close()

    def _meet(
        self, groups: Sequence[SwappableGroup], prefix: str, cancel_token: CancelToken, store: dist.Store
    ) -> None:
        """Wait until all workers of the replica have arrived, since no token can end a wait for a peer inside NCCL."""
        store.set(f"{prefix}/here/{groups[0].positions[groups[0].at]}", "1")
        for position in sorted({position for group in groups for position in group.positions}):
            await_key(store, f"{prefix}/here/{position}", cancel_token, MEET_SECONDS)

    def _make_inside(
        self, store: dist.Store, name: str, rank: int, size: int, device: torch.device, options: Any
    ) -> dist.ProcessGroup:
        with self._lock:
            if self._ended:
                raise PeerLost("the replica broke while its groups were created")
            group = self._make_nccl(store, name, rank, size, device, options)
            self._nccl.append(group)  # before the group waits for other workers: ``end`` may have to abort it
        connect(group, device)
        return group
