"""Opens the group of an epoch: the one place that knows the kinds of group and transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken, Epoch
from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.collectives.gloo.abort import GlooBackend
from recover_megatron.collectives.gloo.native import GlooNative
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.native.backend import NativeBackend
from recover_megatron.collectives.native.group import NativeGroup
from recover_megatron.collectives.nccl.group_opening import NcclOpener
from recover_megatron.collectives.nccl.renewal import Keeper
from recover_megatron.collectives.rendezvous import KeyValue
from recover_megatron.collectives.ring.executor import Hook
from recover_megatron.collectives.ring.group import RingGroup, Tuning
from recover_megatron.collectives.transport.host_staged import StagedNative, StagedTransport
from recover_megatron.collectives.transport.interface import Transport
from recover_megatron.collectives.transport.listener import RingListener
from recover_megatron.collectives.transport.tcp import TcpTransport

TransportKind = Literal["tcp", "tcp-inline", "gloo", "nccl"]
"""``tcp``: connections, with shared memory between neighbours on one host; ``tcp-inline``: without.  All but nccl carry
the buckets of a CUDA device through host memory (``staged``); gloo carries native collectives only."""


def open_ring_listener(
    host: str = "127.0.0.1", tuning: Tuning | None = None, transport_kind: TransportKind = "tcp"
) -> RingListener:
    """A ring listener for a group that is opened later with the same arguments."""
    return RingListener(host, _slots(tuning or Tuning(), transport_kind))


def _slots(tuning: Tuning, transport_kind: TransportKind) -> tuple[int, int] | None:
    return (tuning.slots, tuning.segment_bytes) if transport_kind == "tcp" else None


def cancel_token_of(epoch: Epoch) -> CancelToken:
    """A token that is cancelled when ``epoch`` is revoked."""
    cancel_token = CancelToken(epoch.number)
    epoch.on_revoke(cancel_token.cancel)
    return cancel_token


@contextmanager
def lost_revokes(cancel_token: CancelToken) -> Iterator[None]:
    """A member that is lost while a group is opened ends the epoch here: raises ``EpochRevoked``."""
    try:
        yield
    except PeerLost as lost:
        cancel_token.cancel(lost)
        raise EpochRevoked(cancel_token.epoch, str(lost)) from lost


def open_group(
    epoch: Epoch,
    store: KeyValue,
    *,
    name: str,
    secret: bytes,
    collective: Literal["ring", "native"] = "ring",
    transport_kind: TransportKind | None = None,
    device: torch.device | None = None,
    host: str = "127.0.0.1",
    timeout: float = 60.0,
    tuning: Tuning | None = None,
    hook: Hook | None = None,
    ring_listener: RingListener | None = None,
    communicators: Keeper | None = None,
) -> Group:
    """Join the other members of ``epoch``; every member must call it, with the same arguments.

    ``store``: keys of one group of one epoch are written once, under ``ring/<name>/<epoch>``; gloo needs a
    ``torch.distributed.Store``.  ``name``: tells the columns apart.  ``transport``: default tcp (native: gloo), nccl
    for a CUDA ``device``.  ``timeout``: seconds in which all members must have come.  ``ring_listener``: from
    ``open_ring_listener``, for the transports tcp and tcp-inline; it is used up.  ``hook``: for tests and fault
    injection.  ``communicators``: where those of NCCL come from and go to; without it they end with the group.

    Raises ``EpochRevoked``: also when a member vanished while the group was being opened.  ``TimeoutError``.
    """
    device = device or torch.device("cpu")
    if transport_kind is None:
        transport_kind = "nccl" if device.type == "cuda" else "gloo" if collective == "native" else "tcp"
    staged = device.type == "cuda" and transport_kind != "nccl"
    cancel_token = cancel_token_of(epoch)
    rank, size = list(epoch.members).index(epoch.me), len(epoch.members)
    ring = f"ring/{name}/{epoch.number}"
    tuning = tuning or (Tuning.over_nccl() if transport_kind == "nccl" else Tuning())

    def torch_store() -> dist.Store:
        if not isinstance(store, dist.Store):
            raise TypeError(f"{transport_kind} needs a torch.distributed.Store, not {type(store).__name__}")
        return store

    def gloo() -> GlooBackend:
        return GlooBackend(rank, size, torch_store(), cancel_token, ring=ring, host=host, timeout=timeout)

    def nccl() -> NcclOpener:
        keeper = communicators if communicators is not None else Keeper(keeps=False)
        return NcclOpener(rank, size, store, cancel_token, keeper, prefix=ring, device=device, timeout=timeout)

    def ring_transport() -> Transport:
        if transport_kind == "nccl":
            return nccl().ring()
        if transport_kind == "gloo":
            raise ValueError("gloo carries native collectives, not a ring: take tcp")
        slots = _slots(tuning, transport_kind)
        return TcpTransport(
            rank,
            size,
            store,
            cancel_token,
            secret=secret,
            ring=ring,
            slots=slots,
            host=host,
            timeout=timeout,
            ring_listener=ring_listener,
        )

    def native_backend() -> NativeBackend:
        if transport_kind == "nccl":
            return nccl().native()
        return StagedNative(GlooNative(gloo()), device) if staged else GlooNative(gloo())

    with lost_revokes(cancel_token):
        if collective == "native":
            return NativeGroup(epoch, cancel_token, native_backend(), device=device)
        transport = ring_transport()
        if staged:
            transport = StagedTransport(transport, device)
        return RingGroup(epoch, cancel_token, transport, device=device, tuning=tuning, hook=hook)
