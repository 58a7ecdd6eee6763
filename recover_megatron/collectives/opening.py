"""Opens the group of an epoch: the one place that knows the kinds of group and transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

from recover_megatron.collectives.door import Door
from recover_megatron.collectives.epoch import Epoch, Revocation
from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.collectives.gloo import GlooBackend
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.native import GlooNative, NativeBackend, NativeGroup
from recover_megatron.collectives.rendezvous import KeyValue
from recover_megatron.collectives.ring import Hook
from recover_megatron.collectives.ring_group import RingGroup, Tuning
from recover_megatron.collectives.staged import StagedNative, StagedTransport
from recover_megatron.collectives.tcp import TcpTransport
from recover_megatron.collectives.transport import Transport

Carrier = Literal["tcp", "tcp-inline", "gloo", "nccl"]
"""``tcp``: connections, with shared memory between neighbours on one host; ``tcp-inline``: without.  All but nccl carry
the buckets of a CUDA device through host memory (``staged``); gloo carries native collectives only."""


def open_door(host: str = "127.0.0.1", tuning: Tuning | None = None, carrier: Carrier = "tcp") -> Door:
    """A door for a group that is opened later with the same arguments."""
    return Door(host, _slots(tuning or Tuning(), carrier))


def _slots(tuning: Tuning, carrier: Carrier) -> tuple[int, int] | None:
    return (tuning.slots, tuning.segment_bytes) if carrier == "tcp" else None


def revocation_of(epoch: Epoch) -> Revocation:
    """Thrown when ``epoch`` is revoked."""
    revocation = Revocation(epoch.number)
    epoch.on_revoke(revocation.throw)
    return revocation


@contextmanager
def lost_revokes(revocation: Revocation) -> Iterator[None]:
    """A member that is lost while a group is opened ends the epoch here: raises ``EpochRevoked``."""
    try:
        yield
    except PeerLost as lost:
        revocation.throw(lost)
        raise EpochRevoked(revocation.epoch, str(lost)) from lost


def open_group(
    epoch: Epoch,
    store: KeyValue,
    *,
    name: str,
    secret: bytes,
    collective: Literal["ring", "native"] = "ring",
    carrier: Carrier | None = None,
    device: torch.device | None = None,
    host: str = "127.0.0.1",
    timeout: float = 60.0,
    tuning: Tuning | None = None,
    hook: Hook | None = None,
    door: Door | None = None,
) -> Group:
    """Join the other members of ``epoch``; every member must call it, with the same arguments.

    ``store``: keys of one group of one epoch are written once, under ``ring/<name>/<epoch>``; gloo and NCCL need a
    ``torch.distributed.Store``.  ``name``: tells the columns apart.  ``carrier``: default tcp (native: gloo), nccl for
    a CUDA ``device``.  ``timeout``: seconds in which all members must have come.  ``door``: from ``open_door``, for the
    carriers tcp and tcp-inline; it is used up.  ``hook``: for tests and fault injection.

    Raises ``EpochRevoked``: also when a member vanished while the group was being opened.  ``TimeoutError``.
    """
    device = device or torch.device("cpu")
    if carrier is None:
        carrier = "nccl" if device.type == "cuda" else "gloo" if collective == "native" else "tcp"
    staged = device.type == "cuda" and carrier != "nccl"
    revocation = revocation_of(epoch)
    rank, size = list(epoch.members).index(epoch.me), len(epoch.members)
    ring = f"ring/{name}/{epoch.number}"
    tuning = tuning or Tuning()

    def torch_store() -> dist.Store:
        if not isinstance(store, dist.Store):
            raise TypeError(f"{carrier} needs a torch.distributed.Store, not {type(store).__name__}")
        return store

    def gloo() -> GlooBackend:
        return GlooBackend(rank, size, torch_store(), revocation, ring=ring, host=host, timeout=timeout)

    def ring_transport() -> Transport:
        if carrier == "nccl":
            from recover_megatron.collectives.nccl import NcclTransport

            return NcclTransport(rank, size, torch_store(), revocation, ring=ring, device=device, timeout=timeout)
        if carrier == "gloo":
            raise ValueError("gloo carries native collectives, not a ring: take tcp")
        slots = _slots(tuning, carrier)
        return TcpTransport(
            rank, size, store, revocation, secret=secret, ring=ring, slots=slots, host=host, timeout=timeout, door=door
        )

    def native_backend() -> NativeBackend:
        if carrier == "nccl":
            from recover_megatron.collectives.nccl import NcclNative

            return NcclNative(rank, size, torch_store(), revocation, ring=ring, device=device, timeout=timeout)
        return StagedNative(GlooNative(gloo()), device) if staged else GlooNative(gloo())

    with lost_revokes(revocation):
        if collective == "native":
            return NativeGroup(epoch, revocation, native_backend(), device=device)
        transport = ring_transport()
        if staged:
            transport = StagedTransport(transport, device)
        return RingGroup(epoch, revocation, transport, device=device, tuning=tuning, hook=hook)
