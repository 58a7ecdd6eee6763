"""Torch process group of workers of one replica, whose inner group is exchanged when the replica gets new workers.

    SwappableGroup --bind(inner)--> every method is the inner group's bound method: a call costs no more than before
                                  (gloo: with a work that can be abandoned when the replica breaks, ``AbortableWorks``)
         '--renew(...)--> a new inner group of the workers in the same positions of another replica
         '--carried_by(other)--> temporarily ``other`` runs the collectives; messages still use the inner group

Megatron keeps groups in layers, buckets, optimizers and communicators.  All of them refer to the outer group, which
never changes.  The number of members and this worker's rank follow from the positions, and never change either.
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
"""Longest time for which a worker of a broken replica continues to wait for a collective."""

_NOT_IN_PIECES = (
    "send", "recv", "recv_anysource", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single", "reduce_scatter_single_coalesced",
)  # fmt: skip
"""Operations whose wait ignores a time limit, or breaks the group when the limit is reached."""
_RECEIVES = ("recv", "recv_anysource")
_SETTLE_SECONDS = 1.0
SETTLING = "waiting for an abandoned collective"


class AbortableWorks:
    """Makes the waits for gloo's operations inside a replica interruptible.

    ``cancel_token``: cancelled when the replica is broken, after its connections have been shut; gloo does not always
    notice that, and then its wait never returns.

        collective      the wait is split into short waits, repeated as long as the replica is complete
        message         cannot be split (an expired time limit shuts gloo's connections): a thread waits, and is left
                        behind
        reduce-scatter  likewise (torch 2.13 composes it of other works, and its wait ignores a time limit)

    An abandoned operation holds its tensors, and may write to them until ``settle`` has returned.

    A receive without a wait is kept until then, too.  If its work is freed in the middle of the message, gloo
    (torch 2.13) neither reads the rest nor notices that the connection was shut, and its thread spins.
    """

    def __init__(self, cancel_token: CancelToken) -> None:
        self.cancel_token = cancel_token
        self._waiter = Waiter(cancel_token)
        self._under_way = set[Any]()
        """Works of collectives; completed works without a wait are removed when the next collective is started."""
        self._receives = set[Any]()
        """Works of receives without a finished wait."""

    def method(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``call``, a method of a gloo group: the wait of its work can be abandoned."""
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

    def settle(self) -> None:
        """Return when no collective writes to its tensors any more; call it when gloo has closed the shut connections.

        A thread of gloo may still add up data that arrived before.  A thread that has missed the shutdown waits for a
        message that never comes.  A time limit of one second distinguishes the two.
        """
        self._forget_completed()
        # For a failed reduce-scatter ``is_completed`` is False.
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
        """Drop completed works.  From any thread: works on a copy, since others may start or finish an operation."""
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
                    return bool(work.wait())  # or raises gloo's own error
                if self.cancel_token.cancelled:
                    raise _left() from None
            else:
                self._waited_for(work)
                return done

    def _waited_for(self, work: Any) -> None:
        self._under_way.discard(work)
        self._receives.discard(work)


def _over(work: Any) -> None:
    with suppress(RuntimeError):  # the error of a broken replica
        work.wait(NO_TIMEOUT)


def _left() -> dist.DistBackendError:
    return dist.DistBackendError("a gloo operation of a broken replica never completed and was abandoned")


class AbortableWork(dist.Work):
    """Work of gloo with an interruptible wait."""

    def __init__(self, work: Any, wait: Callable[[Any], bool], over: Callable[[Any], None]) -> None:
        """``wait``: returns when the work is done.  ``over``: called with a work after gloo's own wait for it."""
        super().__init__()
        self._work = work
        self._wait = wait
        self._over = over

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done; raise ``RuntimeError`` as gloo does, and ``DistBackendError`` if it is abandoned.

        ``timeout``: with a time limit of the caller, gloo's own wait is used.
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
"""Operations that ``carried_by`` redirects: all operations of ``instep.groups.process_group.EpochGroup``."""
_WITHOUT_WORK = ("rank", "size", "name")
"""Methods without a work; Megatron calls them over a hundred times in an iteration of four layers."""


class SwappableGroup(dist.ProcessGroup):
    """Group with an exchangeable inner group.

    ``positions``: positions of the members in the replica, in rank order; ``me``: this worker's position.  ``name``:
    the same on all members, and unique among their groups.  ``placeholder``: ``inner`` is not a usable group and must
    be replaced, even if this worker is the only member: its ranks are those of another replica.
    ``options``: options from its creator (``ProcessGroupNCCL.Options``), for every later inner group.
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
        """Forward every operation to ``inner``, the group of the current epoch."""
        self.inner = inner
        # A group of one never blocks.  Megatron runs twenty operations over such groups in an iteration.
        guard = self._guard if self.backend == "gloo" and len(self.positions) > 1 else None
        for name in _METHODS:
            method = getattr(inner, name, None)
            if method is not None:
                if guard is not None and name not in _WITHOUT_WORK:
                    method = guard.method(name, method)
                self.__dict__[name] = method

    def guard_by(self, guard: AbortableWorks) -> None:
        """Make gloo's operations end when ``guard``'s token is cancelled."""
        self._guard = guard
        self.bind(self.inner)

    @contextmanager
    def carried_by(self, other: dist.ProcessGroup) -> Iterator[None]:
        """Run the collectives on ``other``, which has the same members, inside this context.  In the main thread."""
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
        """Become a group of the workers that call this with the same ``prefix``, each in its position.

        ``gloo``: the new inner group, created already, which fails when the token of ``guard`` is cancelled.  For NCCL
        ``make`` creates the inner group, with the options of the previous one, and the caller must abort it.
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

    # Attributes of torch's groups that are not methods.

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
