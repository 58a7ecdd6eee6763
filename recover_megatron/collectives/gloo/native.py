"""gloo's own collectives for a backend group, one after the other: gloo's threads keep no order between two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from recover_megatron.collectives.gloo.abort import GlooBackend
from recover_megatron.collectives.gloo.groups import NO_TIMEOUT
from recover_megatron.collectives.native.backend import InTurn, Message, Operation


class GlooNative(InTurn):
    def __init__(self, gloo: GlooBackend) -> None:
        super().__init__()
        self._gloo = gloo

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        options = ReduceScatterOptions()
        options.timeout = NO_TIMEOUT
        return self._enqueue_all([lambda gloo: gloo._reduce_scatter_base(output, source, options)])

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        options = AllgatherOptions()
        options.timeout = NO_TIMEOUT
        return self._enqueue_all([lambda gloo: gloo._allgather_base(output, source, options)])

    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        return self._enqueue_all([_receive(*message) for message in receives] + [_send(*message) for message in sends])

    def _enqueue_all(self, calls: Sequence[Callable[[Any], Any]]) -> Operation:
        def start() -> Callable[[], None]:
            works = [self._gloo.call(call) for call in calls]

            def finish() -> None:
                for work in works:
                    self._gloo.wait(work)

            return finish

        return self.enqueue(start)

    def settle(self) -> None:
        """Nothing is sent any more when the connections are shut; what may still run writes to its own scratch."""
        self._gloo.abort()

    def close(self) -> None:
        super().close()
        self._gloo.close()


def _send(tensor: torch.Tensor, rank: int) -> Callable[[Any], Any]:
    return lambda gloo: gloo.send([tensor], rank, 0)


def _receive(tensor: torch.Tensor, rank: int) -> Callable[[Any], Any]:
    return lambda gloo: gloo.recv([tensor], rank, 0)
