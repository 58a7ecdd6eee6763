"""A torch process group of workers of one replica, whose inside can be exchanged when the replica gets new workers.

    SwappableGroup --bind(inner)--> every method is the inner group's own bound method: a call costs what it did
                                  (gloo's: with a work that can be left when the replica breaks, ``AbortableWorks``)
         '--renew(...)--> a new inner group among the workers that stand in the same positions of another replica
         '--carried_by(other)--> for a while collectives go another way, messages do not

Megatron keeps groups in layers, buckets, optimizers and communicators.  They all hold the outside, which never changes;
so does the number of its members, and this worker's rank, which are those of its position.
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
from recover_megatron.collectives.gloo.groups import NO_TIMEOUT, Waiter
from recover_megatron.collectives.torch_nccl import make_group, register

POLL = timedelta(seconds=0.25)
"""How long a worker of a broken replica may go on waiting for a collective."""

_NOT_IN_PIECES = (
    "send", "recv", "recv_anysource", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single", "reduce_scatter_single_coalesced",
)  # fmt: skip
"""Operations whose wait ends at no time limit, or breaks the group when it does."""
_RECEIVES = ("recv", "recv_anysource")
_SETTLE_SECONDS = 1.0
SETTLING = "waiting for a collective that was left"


class AbortableWorks:
    """Has gloo's operations inside a replica waited for in a way that can be left.

    ``cancel_token``: cancelled when the replica is broken, after its connections have been shut; gloo does not always
    pass that on, and then its wait never returns.

        collective      the wait is cut in pieces: it begins again as long as the replica is whole
        message         can't be waited for in pieces (a time that runs out shuts gloo's connections): a thread waits,
                        and is left behind
        reduce-scatter  likewise (torch 2.13 makes one of other works, and its wait takes no notice of a time limit)

    What is left behind holds its tensors, and may write to them until ``settle`` has returned.

    A receive that nobody has waited for is kept until then, too.  If its work is freed in the middle of the message,
    gloo (torch 2.13) neither reads the rest nor notices that the connection was shut, and its thread spins.
    """

    def __init__(self, cancel_token: CancelToken) -> None:
        self.cancel_token = cancel_token
        self._waiter = Waiter(cancel_token)
        self._under_way = set[Any]()
        """Works of collectives; those that were completed, but never waited for, go when the next one is started."""
        self._receives = set[Any]()
        """Works of receives that nobody has waited for yet."""

    def method(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, a method of a gloo group, with a work that can be left."""
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
        """Return when no collective writes to its tensors any more; its connections are shut, and gloo has closed them.

        A thread of gloo's may still add up what arrived before.  One that has missed that its connections were shut
        waits for a message, which does not come: it is told from one that works by the time, a second.
        """
        self._forget_completed()
        # Of a reduce-scatter that has failed ``is_completed`` says no.
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
        """From any thread: looks through a copy, since another thread may start or finish an operation meanwhile."""
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
    with suppress(RuntimeError):  # its error is that of a broken replica
        work.wait(NO_TIMEOUT)


def _left() -> dist.DistBackendError:
    return dist.DistBackendError("an operation of a broken replica, of whose end gloo has not told, was left")


class AbortableWork(dist.Work):
    """A work of gloo's with another way to wait for it."""

    def __init__(self, work: Any, wait: Callable[[Any], bool], over: Callable[[Any], None]) -> None:
        """``wait``: returns when the work is done.  ``over``: told of a work that was waited for in gloo's own way."""
        super().__init__()
        self._work = work
        self._wait = wait
        self._over = over

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done; raises ``RuntimeError`` as gloo does, and ``DistBackendError`` when it is left.

        ``timeout``: for a caller's own; then gloo's own way is taken.
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
"""Operations that ``carried_by`` sends another way: all that ``instep.groups.process_group.EpochGroup`` carries out."""
_WITHOUT_WORK = ("rank", "size", "name")
"""Megatron asks for these more often than it sends: over a hundred times in an iteration of four layers."""


class SwappableGroup(dist.ProcessGroup):
    """A group whose inside can change.  ``positions``: of its members in the replica, in rank order; ``me``: its own.

    ``name``: the same on all members, and of no other group of theirs.  ``placeholder``: ``inner`` is nobody's group,
    and must not stay, not even where this worker is the only member: its ranks are those of another replica.
    ``options``: those that its maker gave it (``ProcessGroupNCCL.Options``), for every inside that it will have.
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
        """Forward every operation to ``inner``, the group of the present epoch."""
        self.inner = inner
        # A group of one waits for nobody. Megatron makes twenty operations over such groups in an iteration.
        guard = self._guard if self.backend == "gloo" and len(self.positions) > 1 else None
        for name in _METHODS:
            method = getattr(inner, name, None)
            if method is not None:
                if guard is not None and name not in _WITHOUT_WORK:
                    method = guard.method(name, method)
                self.__dict__[name] = method

    def guard_by(self, guard: AbortableWorks) -> None:
        """Have gloo's operations end with ``guard``'s switch."""
        self._guard = guard
        self.bind(self.inner)

    @contextmanager
    def carried_by(self, other: dist.ProcessGroup) -> Iterator[None]:
        """For a while have ``other``, of the same members, carry out the collectives.  In the main thread."""
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

        ``gloo``: the inside, made already, which ends when the switch of ``guard`` is cancelled; over NCCL ``make``
        makes it, with the options of the one before, and who calls this aborts it.
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

    # What torch knows as attributes, not methods.

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
