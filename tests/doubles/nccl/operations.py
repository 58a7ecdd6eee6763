"""The kernels of NCCL's double: parts of one launch, each with what it sends, what it waits for and what it writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _write(target: torch.Tensor, data: bytes) -> None:
    target.view(-1).view(torch.uint8)[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


class Part(ABC):
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.key = ""

    @abstractmethod
    def numbered(self, communicator: Any) -> Part:
        """Operations match by their order (guide, "Group Operation Ordering Semantics"): takes its number."""

    @abstractmethod
    def peers(self, communicator: Any) -> set[int]:
        """With whom it talks."""

    def spoil(self) -> None:
        """What is written before the operation is complete: nothing that anybody may believe."""
        return None

    def post(self, communicator: Any) -> None:
        """Send."""
        del communicator

    @abstractmethod
    def finish(self, communicator: Any) -> bool:
        """Receive and write; False: stopped."""

    @abstractmethod
    def run_through(self, communicator: Any, *, posted: bool) -> None:
        """Stopped: garbage for what the others wait for; ``posted``: that of ``post`` has gone out before."""

    def _number(self, communicator: Any, name: str) -> str:
        number = communicator.counts[name] = communicator.counts.get(name, 0) + 1
        return f"{communicator.key}|{name}|{number}"


class Collective(Part):
    """``tensor``: the output."""

    def __init__(self, output: torch.Tensor, source: torch.Tensor) -> None:
        super().__init__(output)
        self.source = source

    def numbered(self, communicator: Any) -> Collective:
        self.key, self.size = self._number(communicator, "collective"), communicator.nranks
        return self

    def peers(self, communicator: Any) -> set[int]:
        return set(range(communicator.nranks))

    def post(self, communicator: Any) -> None:
        for rank in range(communicator.nranks):
            communicator.deliver(rank, f"{self.key}|{rank}|{communicator.rank}", self.parts[rank])

    def spoil(self) -> None:
        """The source is read first: the smaller one may be this rank's part of the larger (guide, "In-place")."""
        self.parts = self.cut()
        self.tensor.view(-1).view(torch.uint8).fill_(0x7F)

    def run_through(self, communicator: Any, *, posted: bool) -> None:
        """What others send passes through this rank, too, as in a ring."""
        for rank in range(communicator.nranks):
            for source in {*range(communicator.nranks)} - {rank} - ({communicator.rank} if posted else set()):
                garbage = b"\x7f" * len(self.parts[rank])
                communicator.deliver(rank, f"{self.key}|{rank}|{source}", garbage)

    @abstractmethod
    def cut(self) -> list[bytes]:
        """What each rank gets of the source."""

    @abstractmethod
    def write(self, parts: list[bytes]) -> None:
        """What it makes of that, by rank."""

    def finish(self, communicator: Any) -> bool:
        found: list[bytes] = []
        for rank in range(communicator.nranks):
            data = communicator.arrived(f"{self.key}|{communicator.rank}|{rank}", [rank])
            if data is None:
                return False
            found.append(data)
        self.write(found)
        return True


class AllGather(Collective):
    def cut(self) -> list[bytes]:
        return [_bytes(self.source)] * self.size

    def write(self, parts: list[bytes]) -> None:
        _write(self.tensor, b"".join(parts))


class ReduceScatter(Collective):
    def cut(self) -> list[bytes]:
        return [_bytes(part) for part in self.source.view(-1).view(self.size, -1)]

    def write(self, parts: list[bytes]) -> None:
        first, *others = (torch.frombuffer(bytearray(part), dtype=self.tensor.dtype) for part in parts)
        self.tensor.view(-1).copy_(sum(others, first))


class Message(Part):
    """To or from ``peer``."""

    def __init__(self, tensor: torch.Tensor, peer: int) -> None:
        super().__init__(tensor)
        self.peer = peer

    def numbered(self, communicator: Any) -> Message:
        source, target = (communicator.rank, self.peer)[:: 1 if isinstance(self, Send) else -1]
        self.key = self._number(communicator, f"{source}>{target}")
        return self

    def peers(self, communicator: Any) -> set[int]:
        del communicator
        return {self.peer}


class Send(Message):
    """Over when the other side has it: NCCL may buffer, but need not (guide, "Point-to-point communication")."""

    def post(self, communicator: Any) -> None:
        communicator.deliver(self.peer, self.key, _bytes(self.tensor))

    def finish(self, communicator: Any) -> bool:
        return communicator.arrived(f"{self.key}|taken", [self.peer]) is not None

    def run_through(self, communicator: Any, *, posted: bool) -> None:
        if not posted:
            communicator.deliver(self.peer, self.key, b"\x7f" * self.tensor.nbytes)


class Receive(Message):
    def spoil(self) -> None:
        self.tensor.view(-1).view(torch.uint8).fill_(0x7F)

    def finish(self, communicator: Any) -> bool:
        data = communicator.arrived(self.key, [self.peer])
        if data is None:
            return False
        assert len(data) == self.tensor.nbytes, "a message of another size than is received"
        _write(self.tensor, data)
        communicator.deliver(self.peer, f"{self.key}|taken")
        return True

    def run_through(self, communicator: Any, *, posted: bool) -> None:
        communicator.deliver(self.peer, f"{self.key}|taken")
