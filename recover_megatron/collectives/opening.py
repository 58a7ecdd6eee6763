"""Opens the group of an epoch: the one place that knows the kinds of transport."""

from __future__ import annotations

import torch

from recover_megatron.collectives.epoch import Epoch, Revocation
from recover_megatron.collectives.rendezvous import KeyValue
from recover_megatron.collectives.ring import Hook
from recover_megatron.collectives.ring_group import RingGroup, Tuning
from recover_megatron.collectives.tcp import TcpTransport


def open_group(
    epoch: Epoch,
    store: KeyValue,
    *,
    name: str,
    secret: bytes,
    transport: str = "tcp",
    device: torch.device | None = None,
    host: str = "127.0.0.1",
    timeout: float = 60.0,
    tuning: Tuning | None = None,
    hook: Hook | None = None,
) -> RingGroup:
    revocation = Revocation(epoch.number)
    epoch.on_revoke(revocation.throw)
    rank = list(epoch.members).index(epoch.me)
    ring = f"ring/{name}/{epoch.number}"
    tuning = tuning or Tuning()
    slots = (tuning.slots, tuning.segment_bytes) if transport == "tcp" else None
    t = TcpTransport(rank, len(epoch.members), store, revocation, secret=secret, ring=ring, slots=slots, host=host, timeout=timeout)
    return RingGroup(epoch, revocation, t, device=device, tuning=tuning, hook=hook)
