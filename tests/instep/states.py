"""A worker that offers a state, in a process of its own: ``python -m tests.instep.states SECRET SEED COUNT``.

It prints the address of its peer store, and serves until it is killed.
"""

from __future__ import annotations

import sys
import threading

import torch

from recover_megatron.instep.state_holder import Offer, Offers
from recover_megatron.network.peer_store import PeerStoreServer

KEY = "5/state/1"


def state_of(seed: int, count: int, elements: int = 1 << 15) -> dict[str, list[torch.Tensor]]:
    """``count`` tensors of random numbers: the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {"column": [torch.randn(elements, generator=generator) for _ in range(count)]}


def main() -> None:
    secret, seed, count = sys.argv[1].encode(), int(sys.argv[2]), int(sys.argv[3])
    peer_store = PeerStoreServer("127.0.0.1", secret)
    Offers(peer_store.streams).put(KEY, Offer(state_of(seed, count), count))
    print(peer_store.address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
