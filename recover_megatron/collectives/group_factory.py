"""Factory for the groups of an epoch; the only module that imports all kinds of groups and transports."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import torch

from recover_megatron.collectives.epoch import CancelToken, Epoch, EpochRevoked, KeyValue, PeerLost
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.native import NativeGroup
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.nccl.renewal import Keeper
from recover_megatron.collectives.nccl.resources import open_native
from recover_megatron.collectives.progress import Hook, ProgressThread
from recover_megatron.collectives.ring.executor import RingGroup, Tuning
from recover_megatron.collectives.transport.handshake import RingListener
from recover_megatron.collectives.transport.interface import StagedTransport, Transport
from recover_megatron.collectives.transport.tcp import TcpTransport

Collective = Literal["ring", "native"]
TransportKind = Literal["tcp", "tcp-inline"]
"""Transport of a ring: "tcp" uses shared memory between neighbours on one host, else TCP; "tcp-inline" only TCP."""


def open_ring_listener(host: str = "127.0.0.1", transport_kind: TransportKind = "tcp") -> RingListener:
    """Open a listener to pass to ``open_group`` later, with the same ``host`` and ``transport_kind``."""
    return RingListener(host, _slots(Tuning(), transport_kind))


def _slots(tuning: Tuning, transport_kind: TransportKind) -> tuple[int, int] | None:
    return (tuning.slots, tuning.segment_bytes) if transport_kind == "tcp" else None


def cancel_token_of(epoch: Epoch) -> CancelToken:
    """Return a token that is cancelled when ``epoch`` is revoked."""
    cancel_token = CancelToken(epoch.number)
    epoch.on_revoke(cancel_token.cancel)
    return cancel_token


def on_device(collective: Collective, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is the calling thread's current device.

    Every thread that calls CUDA or NCCL must enter it, because in a new thread device 0 is current.
    """
    if collective == "native":
        cuda: AbstractContextManager[object] = libraries.load().cuda.device(device)
        return cuda
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def progress_thread(
    cancel_token: CancelToken, device: torch.device, name: str, collective: Collective
) -> ProgressThread:
    """Create a progress thread for one group, or for all groups of ``device`` in an epoch."""
    return ProgressThread(cancel_token, name, partial(on_device, collective, device))


def open_group(
    epoch: Epoch,
    store: KeyValue,
    *,
    name: str,
    secret: bytes,
    collective: Collective = "ring",
    transport_kind: TransportKind = "tcp",
    device: torch.device | None = None,
    host: str = "127.0.0.1",
    timeout: float = 60.0,
    tuning: Tuning | None = None,
    hook: Hook | None = None,
    ring_listener: RingListener | None = None,
    communicators: Keeper | None = None,
    progress: ProgressThread | None = None,
) -> Group:
    """Open a group of the members of ``epoch``; every member must call this.

    ``name``, ``secret``, ``collective``, ``transport_kind`` and ``tuning`` must be equal on all members.

    ``store``: key-value store for the rendezvous; each key is written once, and begins with ``ring/<name>/<epoch>``.
    ``name``: name of the column, unique in the epoch.  ``collective``: "native": NCCL's collectives.  "ring": a ring
    over ``transport_kind``; if ``device`` is a GPU, its data goes through host memory.  ``host``: address of this
    machine that the other members can reach.  ``timeout``: seconds in which all members must have joined.
    ``tuning``, ``ring_listener`` (from ``open_ring_listener``; closed when both neighbours are connected): only for a
    ring.
    ``communicators``: pool from which NCCL communicators are reused; None: each group opens and aborts one.
    ``hook``: for tests and fault injection.

    ``progress``: thread that several groups share.  Its token must be cancelled when ``epoch`` is revoked, and all
    members must submit buckets in the same order.  None: the group gets a separate thread.

    Raises ``TimeoutError``.  Raises ``EpochRevoked``, also if a member is lost while the group is being opened.
    """
    device = device or torch.device("cpu")
    progress = progress or progress_thread(
        cancel_token_of(epoch), device, f"{name} of epoch {epoch.number}", collective
    )
    cancel_token = progress.cancel_token
    rank, size = list(epoch.members).index(epoch.me), len(epoch.members)
    prefix = f"ring/{name}/{epoch.number}"
    try:
        with on_device(collective, device):
            if collective == "native":
                keeper = communicators if communicators is not None else Keeper(keeps=False)
                native = open_native(rank, size, store, cancel_token, keeper, prefix, device, timeout)
                return NativeGroup(epoch, progress, native, device=device, hook=hook)
            tuning = tuning or Tuning()
            transport: Transport = TcpTransport(
                rank, epoch.members, store, cancel_token, secret=secret, ring=prefix,
                slots=_slots(tuning, transport_kind), host=host, timeout=timeout, ring_listener=ring_listener,
            )  # fmt: skip
            if device.type == "cuda":
                transport = StagedTransport(transport, device, cancel_token)
            return RingGroup(epoch, progress, transport, device=device, tuning=tuning, hook=hook)
    except PeerLost as lost:  # without a group this worker cannot use the epoch, so it treats the epoch as revoked
        cancel_token.cancel(lost)
        raise EpochRevoked(cancel_token.epoch, str(lost)) from lost
