"""Factory for the groups of an epoch; the only module that uses all kinds of group and transport."""

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
"""Transport of a ring: "tcp" also uses shared memory between neighbours on one host, "tcp-inline" only TCP."""


def open_ring_listener(host: str = "127.0.0.1", transport_kind: TransportKind = "tcp") -> RingListener:
    """Open a listener for the ring of a group that ``open_group`` opens later with the same host and transport kind."""
    return RingListener(host, _slots(Tuning(), transport_kind))


def _slots(tuning: Tuning, transport_kind: TransportKind) -> tuple[int, int] | None:
    return (tuning.slots, tuning.segment_bytes) if transport_kind == "tcp" else None


def cancel_token_of(epoch: Epoch) -> CancelToken:
    """Return a token that is cancelled when ``epoch`` is revoked."""
    cancel_token = CancelToken(epoch.number)
    epoch.on_revoke(cancel_token.cancel)
    return cancel_token


def on_device(collective: Collective, device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes ``device`` the current device, for every thread that calls CUDA or NCCL.

    Without it, device 0 is current in a new thread, whatever device the process uses.
    """
    if collective == "native":
        cuda: AbstractContextManager[object] = libraries.load().cuda.device(device)
        return cuda
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def progress_thread(
    cancel_token: CancelToken, device: torch.device, name: str, collective: Collective
) -> ProgressThread:
    """Create the progress thread of one group, or of all groups of ``device`` in an epoch."""
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
    """Open a group with the other members of ``epoch``; every member must call this with the same arguments.

    ``store``: each key is written once, under ``ring/<name>/<epoch>``.  ``name``: of the column, unique in the epoch.
    ``collective``: "native" uses NCCL's collectives; "ring" uses ``transport_kind``, and host memory if ``device`` is a
    GPU.  ``timeout``: seconds in which all members must have joined.  ``ring_listener``: from ``open_ring_listener``;
    the group takes ownership.  ``tuning``: for a ring.  ``hook``: for tests and fault injection.  ``communicators``:
    keeper of the NCCL communicators; None: they are destroyed with the group.  ``progress``: thread that runs the
    collectives of all groups of a device, in the order in which buckets are submitted (the order must be equal at all
    members), and whose token is cancelled when ``epoch`` is revoked.  Default: a separate thread for this group.

    Raises ``TimeoutError``, and ``EpochRevoked``, also if a member is lost while the group is being opened.
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
    except PeerLost as lost:  # the loss of a member ends the epoch for this worker
        cancel_token.cancel(lost)
        raise EpochRevoked(cancel_token.epoch, str(lost)) from lost
