"""torch's collectives over a tree of connections, for what workers of several replicas do between two steps.

    reduce      up: what the members below give is combined on the way; the first member has the result
    gather      up: all that is given, by rank
    spread      down: what the first member has

    allreduce = reduce, spread    broadcast = gather of one, spread    all-gather, all-to-all, ... = gather, spread

What only the first member needs is not spread, what it alone gives is not gathered.  It is small: losses, a log's
numbers, who wrote what of a checkpoint.  Gradients and states go elsewhere.

    operation(on) --> call(): carried out on the spot --> wait(): nothing is left to wait for
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.tree.connections import Tree


class TreeBackend:
    """A group of workers over ``tree``, whose ranks are those of the operations."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def call(self, start: Callable[[Any], Any]) -> Any:
        """Carry out an operation: ``start`` gets what stands for the backend.

        Raises ``EpochRevoked``, and ``PeerLost`` where this member noticed it first.
        """
        return start(TreeOperations(self._tree))

    def wait(self, work: Any) -> None:
        """It is over already."""

    def close(self) -> None:
        self._tree.close()


class TreeOperations:
    """What torch's groups of gloo offer, as far as operations over replicas need it."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._rank = tree.rank

    # ---- up and down

    def _reduce(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        """Of what all give: at the first member the result, at others that of the members below."""
        tree, combine = self._tree, _combination(operation)
        total = tensor.detach().clone()
        for child in tree.children:
            total = combine(total, _like(tensor, _tensor(tree.receive(child))))
        if tree.parent is not None:
            tree.send(tree.parent, _view(total))
        return total / tree.size if operation == dist.ReduceOp.AVG else total

    def _gather(self, mine: torch.Tensor | None) -> list[torch.Tensor]:
        """What every member gives, as bytes, by rank: at the first member.  None: nothing."""
        tree = self._tree
        parts: dict[int, torch.Tensor] = {} if mine is None else {self._rank: _bytes(mine)}
        for child in tree.children:
            parts |= _unpacked(tree.receive(child))
        if tree.parent is not None:
            tree.send(tree.parent, _packed(parts))
        return self._by_rank(parts)

    def _spread(self, data: Callable[[], bytes | memoryview]) -> bytes | bytearray | memoryview:
        """What the first member has."""
        tree = self._tree
        word = data() if tree.parent is None else tree.receive(tree.parent)
        for child in tree.children:
            tree.send(child, word)
        return word

    def _spread_like(self, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """The first member's ``result``, as a tensor like ``tensor``."""
        return _like(tensor, _tensor(self._spread(lambda: _view(result.to(tensor.dtype)))))

    def _all(self, mine: torch.Tensor | None) -> list[torch.Tensor]:
        """What every member gives, as bytes, by rank: at all of them."""
        found = self._gather(mine)
        word = self._spread(lambda: _packed(dict(enumerate(found))))
        return self._by_rank(_unpacked(word))

    def _by_rank(self, parts: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        return [parts.get(rank, _NOTHING) for rank in range(self._tree.size)]

    # ---- torch's

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> None:
        for tensor in tensors:
            self._tree.begin("allreduce")
            result = self._reduce(tensor, opts.reduceOp)
            tensor.copy_(self._spread_like(tensor, result))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> None:
        for tensor in tensors:
            self._tree.begin("reduce")
            result = self._reduce(tensor, opts.reduceOp)
            if opts.rootRank != 0:
                result = self._spread_like(tensor, result)
            if self._rank == opts.rootRank:
                tensor.copy_(result)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> None:
        for tensor in tensors:
            tensor.copy_(_like(tensor, self._from(opts.rootRank, tensor if self._rank == opts.rootRank else None)))

    def _from(self, root: int, mine: torch.Tensor | None) -> torch.Tensor:
        """What one member gives, at all."""
        self._tree.begin("broadcast")
        given = mine
        if root != 0:
            given = self._gather(mine)[root]
        return _tensor(self._spread(lambda: _view(_NOTHING if given is None else given)))

    def allgather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any) -> None:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._tree.begin("allgather")
            for target, part in zip(output, self._all(tensor), strict=True):
                target.copy_(_like(target, part))

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> None:
        self._tree.begin("allgather into one")
        output.copy_(_like(output, torch.cat(self._all(tensor))))

    def gather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any) -> None:
        for at, tensor in enumerate(inputs):
            self._tree.begin("gather")
            parts = self._gather(tensor) if opts.rootRank == 0 else self._all(tensor)
            if self._rank == opts.rootRank:
                for target, part in zip(outputs[at], parts, strict=True):
                    target.copy_(_like(target, part))

    def scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any) -> None:
        for at, output in enumerate(outputs):
            mine = torch.cat([_bytes(part) for part in inputs[at]]) if self._rank == opts.rootRank else None
            parts = self._from(opts.rootRank, mine)
            output.copy_(_like(output, parts[self._rank * output.nbytes : (self._rank + 1) * output.nbytes]))

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> None:
        whole = tensor.detach().clone()
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        self.allreduce([whole], options)
        mine = whole.reshape(-1)
        output.copy_(mine[self._rank * output.numel() : (self._rank + 1) * output.numel()].view_as(output))

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> None:
        self._tree.begin("alltoall")
        sizes = torch.tensor([part.nbytes for part in inputs])
        for output, part in zip(outputs, self._all(torch.cat([_bytes(sizes), *map(_bytes, inputs)])), strict=True):
            its = part[: sizes.nbytes].clone().view(torch.int64).tolist()
            start = sizes.nbytes + sum(its[: self._rank])
            output.copy_(_like(output, part[start : start + its[self._rank]]))

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any
    ) -> None:
        size = self._tree.size
        rows_out = list(out_sizes) or [output.shape[0] // size] * size
        rows_in = list(in_sizes) or [tensor.shape[0] // size] * size
        self.alltoall(output.split(rows_out), tensor.split(rows_in), opts)

    def barrier(self, opts: Any) -> None:
        self._tree.begin("barrier")
        self._reduce(torch.zeros(1, dtype=torch.uint8), dist.ReduceOp.SUM)
        self._spread(lambda: b"")


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else _NOTHING


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(_bytes(tensor).numpy()).cast("B") if tensor.numel() else memoryview(b"")


def _tensor(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """As bytes; shares the memory of ``data``, which is nobody else's."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else _NOTHING


def _packed(parts: dict[int, torch.Tensor]) -> bytes:
    """Ranks and sizes as a line of text, then the bytes."""
    line = json.dumps([[rank, part.numel()] for rank, part in parts.items()]).encode() + b"\n"
    return b"".join([line, *(_view(part) for part in parts.values())])


def _unpacked(data: bytes | bytearray | memoryview) -> dict[int, torch.Tensor]:
    line, _, _ = bytes(data).partition(b"\n")
    whole, at, found = _tensor(data), len(line) + 1, dict[int, torch.Tensor]()
    for rank, size in json.loads(line):
        found[rank] = whole[at : at + size]
        at += size
    return found


def _like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """The bytes as a tensor of the same kind."""
    return data.clone().view(tensor.dtype).view(tensor.shape)


def _combination(operation: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    known: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        dist.ReduceOp.SUM: torch.add,
        dist.ReduceOp.AVG: torch.add,
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    for one, how in known.items():
        if operation == one:
            return how
    raise NotImplementedError(f"{operation} over replicas")
