"""Groups inside a replica, which another thread can abort, and which can be created again with other workers.

    created at start-up (by torch) --end()--> every operation fails --rebuild()--> created again, with a new token

NCCL groups can be aborted.  Gloo groups cannot, but their operations fail when the group's connections are shut down,
so these connections are recorded when a group is created.  (If gloo misses the shutdown, its operation is abandoned:
``guard``.)  A worker whose main thread does not leave the operations exits (``Leaving``).

NCCL's report that an operation has succeeded is not used, since ``Work.is_completed`` returns True for a failed
operation, and an aborted kernel leaves garbage.  Results computed from garbage are never sent: the epoch's cancel token
is cancelled before any group is aborted, and only buckets computed before the cancellation are sent to other replicas
(`collectives.device`, ``DeviceStream``).  An abort also leaves garbage on model-parallel peers, so their tokens must be
cancelled before the abort, too (``CancelToken.all_heard``).
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
"""Parts of the paths of source files whose functions wait for a group or for the device."""

Calls = frozenset[tuple[int, int]]
"""Calls under way, each as (id of the frame, last instruction): these do not change while a thread is in the call."""


def calls_under_way() -> Calls:
    """Return the calls on groups or the device in which the main thread or a backward thread is now."""
    main = threading.main_thread().ident
    frames = {thread: _waiting(frame) for thread, frame in sys._current_frames().items()}
    return frozenset(
        (id(frame), frame.f_lasti)
        for thread, frame in frames.items()
        if any(part in frame.f_code.co_filename for part in (_CALLS if thread == main else _CALLS[:1]))
    )


def _waiting(frame: FrameType) -> FrameType:
    """Return ``frame`` or, if this is a wait inside ``threading``, the frame that called ``threading``."""
    while frame.f_globals.get("__name__") == "threading" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def end_process(reason: str) -> None:
    """Print the stack of the main thread to stderr, and terminate this process immediately."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    write_stderr("".join(traceback.format_stack(main)))
    log.info(
        f"this worker cannot leave the groups of its broken replica within {LEAVE_SECONDS:g} s ({reason}); it exits, "
        "and its launcher starts a replacement if --max-restarts permits it"
    )
    sys.stdout.flush()
    os._exit(EXIT_OWN_FAULT)


class Leaving:
    """Thread that aborts the NCCL groups of a broken replica, and ends the process if its main thread stays in them.

        begin --> WAITING for ``all_heard`` -----> ABORTING --every abort has returned--> AWAITING the main thread
                     '--out of the run: over                   |                               |   '--left()--> over
                                                               |--an abort raises              |
                               aborts last for LEAVE_SECONDS --'  in one call for LEAVE_SECONDS'
                                                               '-------------------------------'--> exit code 1

    An abort may wait for a lock that a torch call holds, or for a kernel of another communicator that is not aborted
    yet.  So each abort runs in a separate thread, and the thread of ``Leaving`` waits for all.  Time in which the main
    thread computes does not count towards ``LEAVE_SECONDS`` (`spare` limits this time).  Time is counted in checks
    instead of seconds, so that time in which the process was stopped does not count.

    ``groups``: torch process groups over NCCL to abort, on ``device``.  ``all_heard``: function that waits until all
    workers know that the epoch is over (``CancelToken``).  If this worker is out of the run, nothing is aborted, since
    its process exits.  ``cuda``, ``where``, ``end`` and ``look`` (seconds between two checks): for tests.
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
        """Start to abort all groups, without waiting; may be called from any thread."""
        self._thread.start()

    def left(self) -> None:
        """Record that the main thread has left all calls of these groups, and will make no more calls."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    # ---- the thread of this object

    def _run(self) -> None:
        try:
            self._all_heard()
        except MembershipError:
            return
        for group in self._groups:
            abort_beside("aborting an NCCL communicator", self._cuda, self._device, group.abort, self._aborted)
        self._groups.clear()
        looks = round(LEAVE_SECONDS / _LOOK)
        for _ in range(looks):
            if self._wait(lambda: not self._aborting or bool(self._failed)):
                break
        if self._failed or self._aborting:
            self._end(self._failed or f"the aborts of {self._aborting} NCCL communicators last too long")
            return
        stuck, since = Calls(), 0
        while not self._wait(lambda: self._left):
            calls = self._where()
            stuck, since = (stuck & calls, since + 1) if stuck & calls else (calls, 0)
            if since >= looks:
                self._end("its main thread is stuck in a call")
                return

    def _wait(self, done: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(done, self._look)

    def _aborted(self, error: BaseException | None) -> None:
        with self._changed:
            self._aborting -= 1
            if error is not None:  # after an error the state of the communicator is unknown
                self._failed = self._failed or f"an abort failed: {type(error).__name__}: {error}"[:500]
            self._changed.notify_all()


MEET_SECONDS = 60.0


class ModelParallelGroups:
    """Groups inside one worker's replica: records them when they are created, ends them, and creates them again.

    ``ports``: ports of the rendezvous store and of coordinators; connections from or to these ports are never shut,
    since the run still needs them.  ``device``: device of the groups over NCCL.  ``make_nccl``: function that creates
    a group over NCCL.  ``leaving``: function that creates the ``Leaving`` thread.
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
        """Connections recorded while a group was created and another thread opened connections, too.  ``end`` shuts
        them down.  ``left`` does not wait for their close: some belong to the other thread, not to gloo."""
        self._shut = set[Identity]()
        """Connections that ``end`` has shut down, and that gloo may not have closed yet."""
        self._gloo_done = True
        self._groups: list[SwappableGroup] = []
        self._gloo: GlooGroups | None = None
        """The present groups over gloo, created by ``rebuild``; None: torch created the present groups at start-up."""
        self._cancel_token = CancelToken(0)
        self.guard = AbortableWorks(self._cancel_token)
        """Guard of the present groups: abandons operations that wait in gloo for a lost worker."""
        self._store: PeerStoreClient | None = None
        self._lock = threading.Lock()
        self._ended = False

    def keep(self, group: SwappableGroup) -> None:
        """Record ``group``, which ``rebuild`` will create again."""
        self._groups.append(group)
        group.guard_by(self.guard)

    def make(self, create: Callable[[], dist.ProcessGroup | None]) -> dist.ProcessGroup:
        """Call ``create`` to create a group; record the group's connections, and return the group.

        ``create``: function that returns the new group, or None if the new group is the default group.

        Called at start-up, while other threads open no lasting connections except those from or to ``ports``.
        """
        before = set(open_sockets().values())
        group = create()
        if group is None:  # ``create`` has created the default group
            group = dist.distributed_c10d._get_default_group()
        if dist.get_backend(group) == "nccl":
            self._nccl.append(group)
            return group
        noted = len(self._sockets)
        for descriptor, identity in open_sockets().items():
            if identity not in before:
                self._note(descriptor)
        # Gloo opens one connection per other member; if there are more, another thread has opened some.
        if len(self._sockets) - noted >= group.size():
            self._mixed += self._sockets[noted:]
            del self._sockets[noted:]
        return group

    def _note(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):  # the descriptor has been closed
            sock = socket.socket(fileno=os.dup(descriptor))
            try:
                # Gloo ends the process when its listener fails, so a listener must not be shut down.
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
        """Make every operation of these groups fail, on this worker and, with gloo, on all other members.

        May be called from any thread.  ``all_heard``: function that waits until all workers know that the last epoch of
        the groups is over (``CancelToken``); the default, for groups that no other worker uses, does not wait.  The
        main thread must call ``left`` when it has left all calls of the groups; if it stays in a call, this process
        exits.  A second call has no effect.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
            sockets, self._sockets = self._sockets, []
            nccl, self._nccl = self._nccl, []
            cancel_token, gloo = self._cancel_token, self._gloo
            leaving = self._leaving = self._leaving_of(nccl, self._device, all_heard)
            # Shut the sockets before the token releases the operations: released tensors must receive no more data.
            self._shut |= shut(sockets)
            shut(self._mixed)
            self._gloo_done = False
            if gloo is not None:
                gloo.abort()
                self._shut |= gloo.shut
        cancel_token.cancel("the replica is broken")
        leaving.begin()

    def left(self) -> None:
        """Record that the main thread, which calls this method, has left all calls of the groups that ``end`` has
        ended.

        Returns when no gloo thread writes to a tensor any more; terminates the process if gloo does not stop in time.
        """
        self._await_gloo()
        with self._lock:
            leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.left()

    def _await_gloo(self) -> None:
        with self._lock:
            closing, self._shut = self._shut, set()
            gloo_done, self._gloo_done, guard = self._gloo_done, True, self.guard
        if gloo_done:
            return

        def still_open(among: Iterable[int] | None = None) -> dict[int, Identity]:
            return {number: identity for number, identity in open_sockets(among).items() if identity in closing}

        descriptors = still_open()
        given_up = GivenUp()
        for _ in range(round(LEAVE_SECONDS / _PAUSE)):
            if not descriptors or given_up.over(descriptors):
                guard.quiesce()
                return
            time.sleep(_PAUSE)
            descriptors = still_open(descriptors)
        end_process(f"gloo has not closed {len(descriptors)} connections that this worker shut down")

    def rebuild(self, epoch_groups: EpochGroups, replica: int, store: PeerStoreClient, host: str) -> None:
        """Create the recorded groups again, among the present workers of ``replica``.

        Groups of a single worker are not created again, unless they are placeholders.

        Ends the old groups first, if they have not been ended; they still exist only if this worker has built its model
        alone.  The new groups outlive the epoch; but if the epoch ends while they are created, they are ended, too.
        Raises ``EpochRevoked``, ``PeerLost`` and ``TimeoutError``.
        """
        self.end()
        self.left()
        if self._store is not None:
            self._store.close()
        self._store = store  # NCCL uses the store later, when two workers first connect to each other
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
        if named:  # includes placeholders, which may have only one worker
            # If this raises, no group has been replaced yet.
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
        """Wait until all workers of the replica call this method, since a wait for them inside NCCL cannot be
        cancelled."""
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
            self._nccl.append(group)  # ``end`` must be able to abort the group while ``connect`` waits
        connect(group, device)
        return group
