"""What an epoch's groups are opened with."""

from __future__ import annotations

import torch

from recover_megatron.instep.epoch_groups import CommunicationConfig
from recover_megatron.network.peer_store import PeerStoreServer


def test_the_key_of_the_rings_shows_itself_in_no_traceback() -> None:
    comm_config = CommunicationConfig(
        PeerStoreServer("127.0.0.1", b"the ring's own key"), b"the ring's own key", torch.device("cpu")
    )
    assert "own key" not in repr(comm_config)
    assert "127.0.0.1" in repr(comm_config)
