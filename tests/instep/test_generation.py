"""What an epoch's groups are opened with."""

from __future__ import annotations

import torch

from recover_megatron.instep.generation import Fabric
from recover_megatron.network.store import Board


def test_the_key_of_the_rings_shows_itself_in_no_traceback() -> None:
    fabric = Fabric(Board("127.0.0.1", b"the ring's own key"), b"the ring's own key", torch.device("cpu"))
    assert "own key" not in repr(fabric)
    assert "127.0.0.1" in repr(fabric)
