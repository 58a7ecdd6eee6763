"""torch's collectives over a ring, for groups in which not everybody can reach everybody.

gloo connects all members with all.  Here every operation is the one thing that a ring can do without that: all give
what they have to all, and each takes what it needs.  It costs the members' number times the traffic, and is used only
where an edge between two of the members is broken (`workload.edges`): what goes through such groups between two steps
is small.

    operation(on) --> call(): carried out on the spot --> wait(): nothing is left to wait for
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.bucket import Bucket
from recover_megatron.collectives.errors import EpochRevoked
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.ledger import Span
from recover_megatron.collectives.ring.reordered import Reordered


class RoundBackend:
    """The interface of ``GlooBackend``, over the ring ``group``, whose ranks are those of the operations."""

    def __init__(self, group: Group | Reordered) -> None:
        self._group = group

    def call(self, start: Callable[[Any], Any]) -> Any:
        """Carry out an operation: ``start`` gets what stands for the backend.

        Raises ``EpochRevoked``, and ``PeerLost``, which names a member, where this one noticed it first.
        """
        try:
            return start(Round(self._group))
        except EpochRevoked:
            if (lost := self._group.lost) is not None:
                raise lost from None
            raise

    def wait(self, work: Any) -> None:
        """It is over already."""

    def abort(self) -> None:
        self._group.abort("aborted")

    def close(self) -> None:
        self._group.close()


class Round:
    """What torch's groups of gloo offer, as far as operations over replicas need it."""

    def __init__(self, group: Group | Reordered) -> None:
        self._group = group
        self._rank = group.rank

    def _all(self, mine: torch.Tensor | None) -> list[torch.Tensor]:
        """What every member gives, as bytes; None: nothing."""
        data = torch.empty(0, dtype=torch.uint8) if mine is None else _bytes(mine)
        sizes = [row[0] for row in self._group.exchange([data.numel()])]
        ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
        spans = [Span(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        flat = torch.zeros(ends[-1], dtype=torch.uint8)
        flat[spans[self._rank].start : spans[self._rank].stop].copy_(data)
        if ends[-1]:
            self._group.all_gather(Bucket(flat), [[span] if len(span) else [] for span in spans]).wait()
        return [flat[span.start : span.stop] for span in spans]

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> None:
        for tensor in tensors:
            parts = [_like(tensor, part) for part in self._all(tensor)]
            tensor.copy_(_reduced(parts, opts.reduceOp))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> None:
        for tensor in tensors:
            parts = [_like(tensor, part) for part in self._all(tensor)]
            if self._rank == opts.rootRank:
                tensor.copy_(_reduced(parts, opts.reduceOp))

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> None:
        for tensor in tensors:
            parts = self._all(tensor if self._rank == opts.rootRank else None)
            tensor.copy_(_like(tensor, parts[opts.rootRank]))

    def allgather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any) -> None:
        for output, tensor in zip(outputs, inputs, strict=True):
            for target, part in zip(output, self._all(tensor), strict=True):
                target.copy_(_like(target, part))

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> None:
        output.copy_(_like(output, torch.cat(self._all(tensor))))

    def gather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any) -> None:
        for at, tensor in enumerate(inputs):
            parts = self._all(tensor)
            if self._rank == opts.rootRank:
                for target, part in zip(outputs[at], parts, strict=True):
                    target.copy_(_like(target, part))

    def scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any) -> None:
        for at, output in enumerate(outputs):
            mine = torch.cat([_bytes(part) for part in inputs[at]]) if self._rank == opts.rootRank else None
            parts = self._all(mine)[opts.rootRank]
            output.copy_(_like(output, parts[self._rank * output.nbytes : (self._rank + 1) * output.nbytes]))

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> None:
        parts = [_like(tensor, part) for part in self._all(tensor)]
        mine = _reduced(parts, opts.reduceOp).reshape(-1)
        output.copy_(mine[self._rank * output.numel() : (self._rank + 1) * output.numel()].view_as(output))

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> None:
        sizes = self._group.exchange([part.nbytes for part in inputs])
        parts = self._all(torch.cat([_bytes(part) for part in inputs]))
        for output, part, its in zip(outputs, parts, sizes, strict=True):
            start = sum(its[: self._rank])
            output.copy_(_like(output, part[start : start + its[self._rank]]))

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any
    ) -> None:
        size = self._group.size
        rows_out = list(out_sizes) or [output.shape[0] // size] * size
        rows_in = list(in_sizes) or [tensor.shape[0] // size] * size
        self.alltoall(output.split(rows_out), tensor.split(rows_in), opts)

    def barrier(self, opts: Any) -> None:
        self._group.exchange([0])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0).view(torch.uint8)
    )


def _like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """The bytes as a tensor of the same kind."""
    return data.clone().view(tensor.dtype).view(tensor.shape)


def _reduced(parts: Sequence[torch.Tensor], operation: Any) -> torch.Tensor:
    """In the order of the ranks: the same bits at all of them."""
    combine: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        dist.ReduceOp.SUM: torch.add,
        dist.ReduceOp.AVG: torch.add,
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    chosen = next((how for known, how in combine.items() if operation == known), None)
    if chosen is None:
        raise NotImplementedError(f"{operation} between members that cannot all reach each other")
    total = parts[0]
    for part in parts[1:]:
        total = chosen(total, part)
    return total / len(parts) if operation == dist.ReduceOp.AVG else total
