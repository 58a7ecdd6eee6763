"""Workers that offer states: in this process, or each in one of its own.

``python -m tests.instep.states SECRET SEED COUNT [NCCL CHUNK]`` prints the address of its peer store, and serves until
it is killed.  NCCL: a JSON object, what ``tests.doubles.nccl.library`` takes; the state then goes from device to
device.  CHUNK: bytes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.nccl.pairs import Pairs
from recover_megatron.collectives.state.holder import KIND, Offer, Offers
from recover_megatron.collectives.state.receiver import Receiver, Source
from recover_megatron.collectives.state.transport import bytes_of
from recover_megatron.collectives.state.trees import Path, flatten, new_memory
from recover_megatron.network.peer_store import PeerStoreServer, open_stream
from tests.doubles.nccl import library as nccl_double
from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE

KEY = "5/state/1"
SECRET = b"what the workers of the test share"


def state_of(seed: int, count: int, elements: int = 1 << 15) -> dict[str, list[torch.Tensor]]:
    """``count`` tensors of random numbers: the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {"column": [torch.randn(elements, generator=generator) for _ in range(count)]}


def same(ours: Any, theirs: Any) -> bool:
    """Equal in kind, and tensors bit for bit."""
    if isinstance(ours, torch.Tensor):
        alike = isinstance(theirs, torch.Tensor) and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        return alike and bytes_of(ours).equal(bytes_of(theirs))
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs


class Holder:
    """A worker in this process that offers a state; ``shared``: of its tensors; more than there are: all."""

    def __init__(
        self, tree: Any = None, worker: int = 0, shared: int = 1 << 30, pairs: Pairs | None = None, chunk: int = 0
    ) -> None:
        self.worker, self._chunk = worker, chunk
        self.peer_store = PeerStoreServer("127.0.0.1", SECRET)
        self.offers = Offers(self.peer_store.streams, pairs)
        if tree is not None:
            self.given = self.offer(tree, shared)

    def offer(self, tree: Any, shared: int = 1 << 30) -> Offer:
        return self.offers.put(KEY, Offer(tree, min(shared, len(flatten(tree)[1])), self._chunk or None))

    def source(self, patience: Callable[[], None] = lambda: None, pairs: Pairs | None = None) -> Source:
        return source(self.worker, self.peer_store.address, patience, pairs=pairs)


def source(
    worker: int,
    address: str,
    patience: Callable[[], None] = lambda: None,
    secret: bytes = SECRET,
    pairs: Pairs | None = None,
) -> Source:
    return Source(worker, lambda: open_stream(address, secret, f"{KIND}/{KEY}", patience), pairs)


def fetch(sources: Sequence[Source], shared: int = 1 << 30, place: Any = new_memory, **named: Any) -> tuple[Any, int]:
    """``shared``: of the tree's tensors; more than there are: all."""
    named = {"stay": lambda: None, "awaited": lambda: None} | named
    return Receiver(sources, place, **named).fetch(lambda tree: min(shared, len(flatten(tree)[1])))


def woken_in_the_middle(holder: Holder, pairs: Pairs | None = None) -> None:
    """Fetch what ``holder`` gives, four tensors, and be told in the middle that nothing of it is wanted any more."""
    into, middle, go_on, original = state_of(2, 4), threading.Event(), threading.Event(), holder.given.parts

    def parts(number: int) -> list[torch.Tensor]:
        if number == 9:
            middle.set()
            go_on.wait(DEADLINE)
        return original(number)

    def stay() -> None:
        if middle.is_set():
            raise EpochRevoked(5, "the test ends it")

    def place(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return into["column"][int(path[1])]

    holder.given.parts = parts  # type: ignore[method-assign]
    with pytest.raises(EpochRevoked):
        fetch([holder.source(pairs=pairs)], place=place, stay=stay)
    after = [tensor.clone() for tensor in into["column"]]
    go_on.set()
    with pytest.raises(PeerLost):
        holder.given.wait(lambda: None)  # the holder has noticed, and has sent what it had to send
    assert same(into["column"], after)


@contextlib.contextmanager
def holder_process(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A holder of a state, ``arguments``: SEED COUNT [NCCL CHUNK]; and the address of its peer store."""
    argv = [sys.executable, "-m", "tests.instep.states", SECRET.decode(), *map(str, arguments)]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def main() -> None:
    secret, seed, count = sys.argv[1].encode(), int(sys.argv[2]), int(sys.argv[3])
    peer_store, pairs, chunk = PeerStoreServer("127.0.0.1", secret), None, None
    if sys.argv[4:]:
        double, chunk = nccl_double(**json.loads(sys.argv[4])), int(sys.argv[5])
        libraries.load = lambda: double  # type: ignore[assignment]
        pairs = Pairs(torch.device("cpu", 1))
    Offers(peer_store.streams, pairs).put(KEY, Offer(state_of(seed, count), count, chunk))
    print(peer_store.address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
