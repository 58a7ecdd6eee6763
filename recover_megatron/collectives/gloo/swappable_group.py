"""Process group inside a replica (``SwappableGroup``), whose inner group is exchanged when the replica changes.

    bind(inner)         each method of the outer group becomes the bound method of ``inner``, so calls have no extra
                        cost; with gloo, waits are interruptible (``AbortableWorks``)
    renew(...)          replace the inner group by a new group of the workers that now have the members' positions
    carried_by(other)   temporarily, ``other`` runs the collectives; point-to-point messages use the inner group

Megatron keeps references to groups in layers, buckets, optimizers and communicators.  All of them refer to the outer
group, which is never replaced.  The positions of its members in the replica never change, so its size and this worker's
rank in it never change either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked
from recover_megatron.collectives.gloo.abortable_groups import NO_TIMEOUT, Waiter
from recover_megatron.collectives.torch_nccl import make_group, register

POLL = timedelta(seconds=0.25)
"""Time limit of one wait for a collective; after it the worker checks whether its replica is broken, and repeats."""

_NOT_IN_PIECES = (
    "send", "recv", "recv_anysource", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single", "reduce_scatter_single_coalesced",
)  # fmt: skip
"""Operations whose wait cannot be split into short waits.

gloo's wait for them ignores a time limit, or breaks the group when the limit expires.
"""
_RECEIVES = ("recv", "recv_anysource")
_SETTLE_SECONDS = 1.0
SETTLING = "waiting for an abandoned collective"


class AbortableWorks:
    """Wrapper that makes the waits for gloo operations inside a replica interruptible.

    ``cancel_token``: cancelled when the replica is broken, after the replica's connections were shut down.  gloo does
    not always notice the shutdown; then gloo's own wait never returns.

        collective      many short waits, until the collective is over or the token is cancelled
        message         an expired time limit would shut gloo's connections, so a separate thread calls gloo's wait; the
                        thread is abandoned if the token is cancelled
        reduce-scatter  like a message, because gloo's wait for it ignores a time limit (torch 2.13)

    An abandoned operation keeps its tensors alive, and may write to them until ``quiesce`` has returned.

    If no caller waits for a receive, its work is also kept until ``quiesce``.  If the work were freed in the middle of
    the message, gloo (torch 2.13) would neither read the remaining bytes nor notice the shutdown, and gloo's thread
    would spin.
    """

    def __init__(self, cancel_token: CancelToken) -> None:
        self.cancel_token = cancel_token
        self._waiter = Waiter(cancel_token)
        self._under_way = set[Any]()
        """Works of collectives whose wait has not returned; each start of a collective drops completed works."""
        self._receives = set[Any]()
        """Works of receives for which no wait has returned yet."""

    def method(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``call``, the method ``name`` of a gloo group, so that the works that it returns are interruptible."""
        wait = self._wait_in_thread if name in _NOT_IN_PIECES else self._wait_in_pieces

        def guarded(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if not isinstance(result, dist.Work):
                return result
            if name in _RECEIVES:
                self._receives.add(result)
            elif name != "send":
                self._forget_completed()
                self._under_way.add(result)
            return AbortableWork(result, wait, self._waited_for)

        return guarded

    def quiesce(self) -> None:
        """Wait until no abandoned collective writes to its tensors, but for at most one second.

        Call this when gloo has closed the connections.  Even then a thread of gloo may still sum data that arrived
        before the shutdown.  If a collective is not over after one second, this method assumes that gloo has missed the
        shutdown; then gloo's thread waits for a message that never comes, and writes nothing.
        """
        self._forget_completed()
        # ``is_completed`` of a failed reduce-scatter returns False, so threads wait for all remaining works.
        works = self._under_way.copy()
        waiting = [threading.Thread(target=_over, args=(work,), name=SETTLING, daemon=True) for work in works]
        for thread in waiting:
            thread.start()
        deadline = time.monotonic() + _SETTLE_SECONDS
        for thread in waiting:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._under_way.clear()
        self._receives.clear()

    def _forget_completed(self) -> None:
        """Drop completed works.  The set is copied first, because other threads may change it at the same time."""
        self._under_way -= {work for work in self._under_way.copy() if work.is_completed()}

    def _wait_in_thread(self, work: Any) -> bool:
        try:
            self._waiter.wait(work)
        except EpochRevoked as over:
            raise _left() from over
        self._waited_for(work)
        return True

    def _wait_in_pieces(self, work: Any) -> bool:
        while True:
            try:
                done = bool(work.wait(POLL))
            except RuntimeError:
                if work.is_completed():
                    return bool(work.wait())  # does not block: it returns the result, or raises gloo's error
                if self.cancel_token.cancelled:
                    raise _left() from None
            else:
                self._waited_for(work)
                return done

    def _waited_for(self, work: Any) -> None:
        self._under_way.discard(work)
        self._receives.discard(work)


def _over(work: Any) -> None:
    with suppress(RuntimeError):  # the operation failed because the replica is broken
        work.wait(NO_TIMEOUT)


def _left() -> dist.DistBackendError:
    return dist.DistBackendError("a gloo operation was abandoned before its end, because its replica is broken")


class AbortableWork(dist.Work):
    """Work of a gloo operation whose wait is interruptible."""

    def __init__(self, work: Any, wait: Callable[[Any], bool], over: Callable[[Any], None]) -> None:
        """``work``: gloo's work.  ``wait``: function that waits for ``work`` and can be interrupted.

        ``over``: called with ``work`` when a wait with a time limit, which calls gloo's own wait, has returned.
        """
        super().__init__()
        self._work = work
        self._wait = wait
        self._over = over

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is done.  Raises ``DistBackendError`` if the replica breaks.

        If the operation itself fails first, raises gloo's ``RuntimeError``; for a message or a reduce-scatter
        ``PeerLost``.

        ``timeout``: time limit for gloo's own wait, which cannot be interrupted.  None: the wait has no limit, and it
        is interruptible.
        """
        if timeout is None:
            return self._wait(self._work)
        done = bool(self._work.wait(timeout))
        self._over(self._work)
        return done

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        return list(self._work.result())

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()


MakeGroup = Callable[[dist.Store, str, int, int, torch.device, Any], dist.ProcessGroup]

_METHODS = tuple(
    name
    for name, value in vars(dist.ProcessGroup).items()
    if callable(value) and not name.startswith("__") and not isinstance(value, type)
)
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "all_gather_single",
    "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "alltoall", "alltoall_base", "all_to_all_single", "barrier", "monitored_barrier",
)  # fmt: skip
"""Methods that ``carried_by`` redirects: all collectives of ``instep.groups.process_group.EpochGroup``."""
_WITHOUT_WORK = ("rank", "size", "name")
"""Methods that are not wrapped: they return no work, and Megatron calls them very often."""


class SwappableGroup(dist.ProcessGroup):
    """Process group inside a replica whose inner group can be exchanged.

    ``positions``: positions of the members in the replica, in rank order.  ``me``: this worker's position.  ``name``:
    name of the group, the same on all members, and unique among a worker's groups.  ``placeholder``: True if ``inner``
    was created before this worker had a place; ``renew`` must then replace ``inner`` before the group is used.
    ``options``: options of ``inner`` (``ProcessGroupNCCL.Options``), with which later inner groups are created.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        positions: Sequence[int],
        me: int,
        name: str,
        backend: str,
        *,
        placeholder: bool = False,
        options: Any = None,
    ) -> None:
        super().__init__(list(positions).index(me), len(positions))
        self.positions = tuple(positions)
        self.at = self.positions.index(me)
        self.own_name = name
        self.backend = backend
        self.placeholder = placeholder
        self.options = options
        self.inner = inner
        self._guard: AbortableWorks | None = None
        self.bind(inner)

    def bind(self, inner: Any) -> None:
        """Make ``inner`` the inner group, to which all methods of this group are forwarded."""
        self.inner = inner
        # A group with one member never blocks, so its works are not wrapped.  This saves time: Megatron runs twenty
        # operations over such groups in an iteration.
        guard = self._guard if self.backend == "gloo" and len(self.positions) > 1 else None
        for name in _METHODS:
            method = getattr(inner, name, None)
            if method is not None:
                if guard is not None and name not in _WITHOUT_WORK:
                    method = guard.method(name, method)
                self.__dict__[name] = method

    def guard_by(self, guard: AbortableWorks) -> None:
        """Make gloo waits of this group without a time limit raise when the token of ``guard`` is cancelled."""
        self._guard = guard
        self.bind(self.inner)

    @contextmanager
    def carried_by(self, other: dist.ProcessGroup) -> Iterator[None]:
        """Context in which ``other``, a group with the same members, runs the collectives; for the main thread only."""
        self.__dict__.update({name: getattr(other, name) for name in COLLECTIVES})
        try:
            yield
        finally:
            for name in COLLECTIVES:
                self.__dict__.pop(name)
            self.bind(self.inner)

    def renew(
        self,
        store: dist.Store,
        prefix: str,
        guard: AbortableWorks,
        device: torch.device,
        gloo: Any = None,
        make: MakeGroup = make_group,
    ) -> None:
        """Replace the inner group by a new group of the workers that call this with the same ``prefix``.

        ``gloo``: gloo backend of the new inner group; ``guard``: makes its waits interruptible.  If ``gloo`` is None,
        the group uses NCCL: ``make`` creates it with ``self.options``, and the caller must abort it when the replica
        breaks.
        """
        rank, size = self.at, len(self.positions)
        name = f"{prefix}/{self.own_name}"
        if gloo is None:
            group = make(store, name, rank, size, device, self.options)
        else:
            group = dist.ProcessGroup(dist.PrefixStore(name, store), rank, size)
            for kind in {"cpu", device.type}:
                register(group, torch.device(kind), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_group_name(name)
        group._set_group_desc(self.own_name)
        self._guard = guard
        self.bind(group)
        self.placeholder = False

    # Attributes of torch's groups that ``bind`` does not forward, because they are not methods.

    @property
    def group_name(self) -> str:
        return str(self.inner.group_name)

    @property
    def group_desc(self) -> str:
        return str(self.inner.group_desc)

    @property
    def bound_device_id(self) -> torch.device | None:
        return self.inner.bound_device_id

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner._device_types
