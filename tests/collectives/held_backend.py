"""A native backend in one process whose operations end when the test lets them.

An operation takes effect at all members when all have enqueued it.  A member *sees* its first ``limit`` operations end,
and no more until the limit is raised.  After a revocation every operation counts as done, and what was not seen has
left garbage (NaN) in its output, as NCCL may.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.native import Message, NativeBackend, NativeGroup, Operation
from tests.collectives.together import DEADLINE, PlainEpoch


@dataclass
class Asked:
    """What one member enqueued."""

    kind: str
    outputs: list[torch.Tensor]
    sources: list[torch.Tensor]
    to: tuple[int, ...] = ()
    of: tuple[int, ...] = ()


class World:
    """The members' common side.  ``asked``: by rank, what it enqueued, in order.  ``limits``: by rank."""

    def __init__(self, size: int, limits: Sequence[int] | None = None) -> None:
        self.size = size
        self.limits = [1 << 30] * size if limits is None else list(limits)
        self.asked: list[list[Asked]] = [[] for _ in range(size)]
        self.performed = 0
        self.changed = threading.Condition()

    def enqueue(self, rank: int, asked: Asked) -> int:
        with self.changed:
            self.asked[rank].append(asked)
            while all(len(member) > self.performed for member in self.asked):
                self._perform([member[self.performed] for member in self.asked])
                self.performed += 1
            self.changed.notify_all()
            return len(self.asked[rank]) - 1

    def let(self, limit: int) -> None:
        """Every member may see so many operations end."""
        with self.changed:
            self.limits = [limit] * self.size
            self.changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE)

    def stuck(self, rank: int, total: int) -> bool:
        """Whether ``rank`` waits at its limit, or has enqueued all of ``total``."""
        return len(self.asked[rank]) > self.limits[rank] or len(self.asked[rank]) == total

    def _perform(self, members: Sequence[Asked]) -> None:
        assert len({member.kind for member in members}) == 1, "the members enqueued different operations"
        if members[0].kind == "reduce_scatter":
            total = sum(member.sources[0] for member in members).chunk(self.size)
            for member, part in zip(members, total, strict=True):
                member.outputs[0].copy_(part)
        elif members[0].kind == "all_gather":
            everything = torch.cat([member.sources[0] for member in members])
            for member in members:
                member.outputs[0].copy_(everything)
        else:
            for rank, member in enumerate(members):
                for other, output in zip(member.of, member.outputs, strict=True):
                    output.copy_(members[other].sources[members[other].to.index(rank)])


class _Held:
    def __init__(self, backend: HeldBackend, number: int) -> None:
        self.backend = backend
        self.number = number

    @property
    def done(self) -> bool:
        return self.backend.over(self.number)


class HeldBackend(NativeBackend):
    def __init__(self, world: World, rank: int, cancel_token: CancelToken) -> None:
        self._world = world
        self._rank = rank
        self._cancel_token = cancel_token
        cancel_token.on_cancel(self._spoil)

    def over(self, number: int) -> bool:
        seen = number < min(self._world.performed, self._world.limits[self._rank])
        return seen or self._cancel_token.cancelled

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        return self._enqueue(Asked("reduce_scatter", [output], [source]))

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        return self._enqueue(Asked("all_gather", [output], [source]))

    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        to, of = tuple(rank for _, rank in sends), tuple(rank for _, rank in receives)
        return self._enqueue(Asked("transfer", [tensor for tensor, _ in receives], [t for t, _ in sends], to, of))

    def _enqueue(self, asked: Asked) -> Operation:
        self._cancel_token.check()
        return _Held(self, self._world.enqueue(self._rank, asked))

    def wait(self, operation: Operation) -> None:
        assert isinstance(operation, _Held)
        self._world.until(lambda: operation.done)
        self._cancel_token.check()

    def settle(self) -> None:
        return None

    def close(self) -> None:
        return None

    def _spoil(self) -> None:
        with self._world.changed:
            for asked in self._world.asked[self._rank][self._world.limits[self._rank] :]:
                for output in asked.outputs:
                    output.fill_(torch.nan)
            self._world.changed.notify_all()


class Members:
    """The groups of one epoch, over one world; use as a context."""

    def __init__(self, world: World, number: int = 1) -> None:
        self.world = world
        self.epochs = [PlainEpoch(number, list(range(world.size)), rank) for rank in range(world.size)]
        self.groups: list[NativeGroup] = []
        for rank, epoch in enumerate(self.epochs):
            token = CancelToken(number)
            epoch.on_revoke(token.cancel)
            self.groups.append(NativeGroup(epoch, token, HeldBackend(world, rank, token)))

    def each(self, work: Callable[[NativeGroup], Any]) -> list[Any]:
        """What ``work`` returns at each member, in a thread each."""
        with ThreadPoolExecutor(self.world.size) as pool:
            futures = [pool.submit(work, group) for group in self.groups]
            return [future.result(DEADLINE) for future in futures]

    def revoke(self) -> None:
        for epoch in self.epochs:
            epoch.revoke("the test ends it")

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *error: object) -> None:
        self.revoke()
        for group in self.groups:
            group.close()
