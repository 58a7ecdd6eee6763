"""Collectives for small data over a tree of TCP connections: each member connects to its parent in the tree.

                     0                n members have n - 1 connections (gloo: n (n - 1) / 2);
        .--------.---'---.--------.   a member has at most FAN children;
        1        2       3        4   a message takes at most 2 log n hops
     .--'--.    ...
     5 6 7 8

    open   a member connects to its parent's peer store (`network.peer_store`); its children connect to its peer store.
           The plan contains the addresses of all peer stores, so no key-value store is read.

Between two steps, torch's collectives over workers of several replicas use the tree.  They are built from three passes:

    reduce      up the tree: each member combines its children's results with its own input; rank 0 gets the result
    gather      up the tree: rank 0 gets the inputs of all members
    spread      down the tree: all members get data of rank 0

    allreduce = reduce, spread    broadcast = gather (one input), spread    all-gather, all-to-all, ... = gather, spread

If only rank 0 needs the result, the spread is left out; if only rank 0 has an input, the gather is left out.
The data are losses, numbers for the log, and metadata of a checkpoint; gradients and states use other connections.

If a member dies, its connections close, so its parent and its children raise ``PeerLost``.  Then the epoch is revoked,
which makes all other members raise ``EpochRevoked``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken, CollectiveMismatch, PeerLost
from recover_megatron.collectives.state.transport import bytes_of, receive_into
from recover_megatron.network.connection import Unreachable, is_path_error
from recover_megatron.network.peer_store import PeerStoreServer, open_stream
from recover_megatron.network.system import close_in_children, forget, watch

FAN = 8
"""Maximum number of children of a member.  It is large because an additional hop costs more than a connection."""
_HEADER = struct.Struct("<IQ")


def parents(size: int) -> list[int]:
    """Return, by rank, the rank of each member's parent in a tree of ``size`` members; -1 for rank 0 (no parent)."""
    return [-1, *((rank - 1) // FAN for rank in range(1, size))]


class Tree:
    """Connections of this worker to its parent and its children in the tree of a group.

    ``rank``: rank of this worker in the group.  ``members``: worker ids by rank.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        addresses: Sequence[str],
        own: PeerStoreServer,
        secret: bytes,
        cancel_token: CancelToken,
        *,
        name: str,
        timeout: float = 60.0,
    ) -> None:
        """Connect to the parent, and wait until all children have connected.

        ``addresses``: addresses of the members' peer stores, by rank.  ``own``: peer store of this worker.  ``secret``:
        secret of all peer stores.  ``name``: name of this group and epoch, the same on all members.  ``timeout``: time
        limit in seconds.

        Raises ``EpochRevoked``, ``TimeoutError``, ``PeerLost``.
        """
        self.rank, self.size = rank, len(members)
        self._cancel_token = cancel_token
        self._members, self._name, self._streams = members, name, own.streams
        self._sockets: dict[int, socket.socket] = {}
        self._closing = threading.Lock()
        self._number = 0
        above = parents(self.size)
        self.parent = above[rank] if rank else None
        self.children = [member for member in range(self.size) if above[member] == rank]
        self._deadline = time.monotonic() + timeout
        close_in_children(self)
        cancel_token.on_cancel(self.abort)
        try:
            self._open(addresses, secret)
        except BaseException:
            self.close()
            raise

    def _open(self, addresses: Sequence[str], secret: bytes) -> None:
        if self.parent is not None:
            try:
                name = f"{self._name}/{self.rank}"
                sock = open_stream(addresses[self.parent], secret, name, self._patience)
            except Unreachable as error:
                self._cancel_token.check()
                raise PeerLost(str(error), self._members[self.parent], unreachable=error.unreachable) from error
            self._keep(self.parent, sock)
        for child in self.children:
            self._keep(child, self._streams.take(f"{self._name}/{child}", self._patience))
        self._cancel_token.check()

    def _patience(self) -> None:
        self._cancel_token.check()
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"not all members of {self._name} connected within the time limit")

    def _keep(self, member: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watch(sock)
        with self._closing:
            self._sockets[member] = sock
        if self._cancel_token.cancelled:  # ``abort`` may have run before the socket was stored, so run it again
            self.abort()

    # ---- messages

    def begin(self, what: str) -> None:
        """Begin the operation with name ``what``; all members must begin the same operations in the same order.

        The messages that follow carry a tag of the operation, which ``receive`` checks.
        """
        self._number += 1
        self._what, self._tag = what, zlib.crc32(f"{what} {self._number}".encode())

    def send(self, member: int, data: bytes | bytearray | memoryview) -> None:
        """Send ``data`` to ``member``, the parent or a child.  Raises ``EpochRevoked``, ``PeerLost``."""
        try:
            self._sockets[member].sendall(_HEADER.pack(self._tag, len(data)))
            self._sockets[member].sendall(data)
        except OSError as error:
            raise self._lost(member, error) from error

    def receive(self, member: int) -> bytearray:
        """Return the next message of ``member``, the parent or a child.

        Raises ``EpochRevoked``, ``PeerLost``, and ``CollectiveMismatch`` if the message belongs to another operation.
        """
        tag, length = _HEADER.unpack(self._exactly(member, _HEADER.size))
        if tag != self._tag:
            raise CollectiveMismatch(
                f"member {member} of {self._name} runs another operation than {self._what}, which is this worker's "
                f"operation {self._number}: the members did not issue the same operations in the same order"
            )
        return self._exactly(member, length)

    def _exactly(self, member: int, size: int) -> bytearray:
        found = bytearray(size)
        try:
            receive_into(self._sockets[member], [memoryview(found)])
        except OSError as error:
            raise self._lost(member, error) from error
        return found

    def _lost(self, member: int, error: OSError) -> PeerLost:
        self._cancel_token.check()
        return PeerLost(
            f"member {member} of {self._name}: {error}", self._members[member], unreachable=is_path_error(error)
        )

    # ---- the end

    def abort(self) -> None:
        """Make ``send`` and ``receive`` raise on this worker, its parent and its children; any thread may call this."""
        with self._closing:
            for sock in self._sockets.values():
                with contextlib.suppress(OSError):  # the other end has shut the connection first
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections; data that this worker has sent still arrives.  Idempotent."""
        forget(self)
        with self._closing:
            for sock in self._sockets.values():
                sock.close()
            self._sockets.clear()
        for child in self.children:
            self._streams.forget(f"{self._name}/{child}")

    def close_in_child(self) -> None:
        """Close the sockets in a process forked from this worker.

        Otherwise the connections would stay open when this worker dies, and its neighbours would not notice the death.
        """
        for sock in self._sockets.values():
            sock.close()


class TreeBackend:
    """Collectives over ``tree`` with the method names and arguments of gloo's backend, for small CPU tensors.

    Ranks are ranks of the tree.  Every method blocks until the operation is finished, and returns no work.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._rank = tree.rank

    def call(self, start: Callable[[Any], Any]) -> Any:
        """Run an operation: return ``start(self)``.

        Raises ``EpochRevoked``, or ``PeerLost`` if a connection of this member broke before the revocation.
        """
        return start(self)

    def close(self) -> None:
        self._tree.close()

    # ---- up and down

    def _reduce(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        """Return the combination of the inputs of this member and of all members below it in the tree.

        At rank 0 this is the result over all members.
        """
        tree, combine = self._tree, _combination(operation)
        total = tensor.detach().clone()
        for child in tree.children:
            total = combine(total, _like(tensor, _tensor(tree.receive(child))))
        if tree.parent is not None:
            tree.send(tree.parent, _view(total))
        return total / tree.size if operation == dist.ReduceOp.AVG else total

    def _gather(self, own_input: torch.Tensor | None) -> list[torch.Tensor]:
        """Gather the inputs of all members at rank 0; ``own_input``: None if this member has no input.

        Returns the inputs as tensors of bytes, by rank.  A rank other than 0 gets only its own input and the inputs of
        the members below it; all other tensors of its result are empty.
        """
        tree = self._tree
        parts: dict[int, torch.Tensor] = {} if own_input is None else {self._rank: bytes_of(own_input)}
        for child in tree.children:
            parts |= _unpacked(tree.receive(child))
        if tree.parent is not None:
            tree.send(tree.parent, _packed(parts))
        return self._by_rank(parts)

    def _spread(self, data: Callable[[], bytes | memoryview]) -> bytes | bytearray | memoryview:
        """Send the result of ``data()`` at rank 0 to all members, and return it on each of them."""
        tree = self._tree
        message = data() if tree.parent is None else tree.receive(tree.parent)
        for child in tree.children:
            tree.send(child, message)
        return message

    def _spread_like(self, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Send ``result`` of rank 0 to all members; return it with the shape and dtype of ``tensor``."""
        return _like(tensor, _tensor(self._spread(lambda: _view(result.to(tensor.dtype)))))

    def _all(self, own_input: torch.Tensor | None) -> list[torch.Tensor]:
        """Send the inputs of all members to all members; return them as tensors of bytes, by rank."""
        found = self._gather(own_input)
        message = self._spread(lambda: _packed(dict(enumerate(found))))
        return self._by_rank(_unpacked(message))

    def _by_rank(self, parts: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        return [parts.get(rank, _NOTHING) for rank in range(self._tree.size)]

    # ---- torch's operations

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

    def _from(self, root: int, own_input: torch.Tensor | None) -> torch.Tensor:
        """Send the input of rank ``root`` to all members; return it as a tensor of bytes."""
        self._tree.begin("broadcast")
        given = own_input
        if root != 0:
            given = self._gather(own_input)[root]
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
            own_input = torch.cat([bytes_of(part) for part in inputs[at]]) if self._rank == opts.rootRank else None
            parts = self._from(opts.rootRank, own_input)
            output.copy_(_like(output, parts[self._rank * output.nbytes : (self._rank + 1) * output.nbytes]))

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> None:
        joined = tensor.detach().clone()
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        self.allreduce([joined], options)
        flat = joined.reshape(-1)
        output.copy_(flat[self._rank * output.numel() : (self._rank + 1) * output.numel()].view_as(output))

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> None:
        self._tree.begin("alltoall")
        sizes = torch.tensor([part.nbytes for part in inputs])
        for output, part in zip(outputs, self._all(torch.cat([bytes_of(sizes), *map(bytes_of, inputs)])), strict=True):
            lengths = part[: sizes.nbytes].clone().view(torch.int64).tolist()
            start = sizes.nbytes + sum(lengths[: self._rank])
            output.copy_(_like(output, part[start : start + lengths[self._rank]]))

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


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytes_of(tensor).numpy()).cast("B") if tensor.numel() else memoryview(b"")


def _tensor(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """Return a copy of ``data`` as a tensor of bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else _NOTHING


def _packed(parts: dict[int, torch.Tensor]) -> bytes:
    """Return ``parts`` (rank -> tensor of bytes) as one message: a JSON line of ranks and sizes, then all bytes."""
    line = json.dumps([[rank, part.numel()] for rank, part in parts.items()]).encode() + b"\n"
    return b"".join([line, *(_view(part) for part in parts.values())])


def _unpacked(data: bytes | bytearray | memoryview) -> dict[int, torch.Tensor]:
    line, _, _ = bytes(data).partition(b"\n")
    joined, at, found = _tensor(data), len(line) + 1, dict[int, torch.Tensor]()
    for rank, size in json.loads(line):
        found[rank] = joined[at : at + size]
        at += size
    return found


def _like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return the bytes ``data`` as a tensor with the dtype and shape of ``tensor``."""
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
    raise NotImplementedError(f"the reduction {operation} is not supported for groups over several replicas")
