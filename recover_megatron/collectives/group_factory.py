"""Opens the group of an epoch: the one place that knows the kinds of group and transport."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import torch

from recover_megatron.collectives.epoch import CancelToken, Epoch, EpochRevoked, KeyValue, PeerLost
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.native import NativeGroup
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.nccl.groups import NcclOpener
from recover_megatron.collectives.nccl.renewal import Keeper
from recover_megatron.collectives.ring.executor import Hook, RingGroup, Tuning
from recover_megatron.collectives.ring.progress import ProgressThread
from recover_megatron.collectives.transport.handshake import RingListener
from recover_megatron.collectives.transport.interface import StagedTransport, Transport
from recover_megatron.collectives.transport.tcp import TcpTransport

TransportKind = Literal["tcp", "tcp-inline", "nccl"]
"""``tcp``: connections, with shared memory between neighbours on one host; ``tcp-inline``: without.  Both carry the
buckets of a CUDA device through host memory, and no native collectives, which are NCCL's."""


def open_ring_listener(host: str = "127.0.0.1", transport_kind: TransportKind = "tcp") -> RingListener:
    """A ring listener for a group that is opened later with the same arguments."""
    return RingListener(host, _slots(Tuning(), transport_kind))


def _slots(tuning: Tuning, transport_kind: TransportKind) -> tuple[int, int] | None:
    return (tuning.slots, tuning.segment_bytes) if transport_kind == "tcp" else None


def cancel_token_of(epoch: Epoch) -> CancelToken:
    """A token that is cancelled when ``epoch`` is revoked."""
    cancel_token = CancelToken(epoch.number)
    epoch.on_revoke(cancel_token.cancel)
    return cancel_token


def carrier(transport_kind: TransportKind | None, device: torch.device) -> TransportKind:
    """What carries the buckets of ``device`` where nothing else is asked for."""
    return transport_kind or ("nccl" if device.type == "cuda" else "tcp")


def on_device(transport_kind: TransportKind | None, device: torch.device) -> AbstractContextManager[object]:
    """For a thread that calls CUDA or NCCL: its current device is number 0 before, whichever the process works with."""
    if carrier(transport_kind, device) == "nccl":
        cuda: AbstractContextManager[object] = libraries.load().cuda.device(device)
        return cuda
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def progress_thread(
    cancel_token: CancelToken, device: torch.device, name: str, transport_kind: TransportKind | None = None
) -> ProgressThread:
    """The thread of one group, or of all groups of ``device`` in an epoch."""
    return ProgressThread(cancel_token, name, partial(on_device, transport_kind, device))


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
    progress: ProgressThread | None = None,
) -> Group:
    """Join the other members of ``epoch``; every member must call it, with the same arguments.

    ``store``: keys of one group of one epoch are written once, under ``ring/<name>/<epoch>``.  ``name``: tells the
    columns apart.  ``transport_kind``: default nccl for a CUDA ``device``, else tcp.  ``timeout``: seconds in which all
    members must have come.  ``ring_listener``: from ``open_ring_listener``, for the transports tcp and tcp-inline; it
    is used up.  ``hook``: for tests and fault injection.  ``communicators``: where those of NCCL come from and go to;
    without it they end with the group.  ``progress``: the thread in which all groups of a device are summed, in the
    order in which buckets are handed in, which must be the same at all members; its switch is cancelled by ``epoch``.
    Default: one of the group's own.

    Raises ``EpochRevoked``: also when a member vanished while the group was being opened.  ``TimeoutError``.
    ``ValueError``: this transport has no native collectives.
    """
    device = device or torch.device("cpu")
    transport_kind = carrier(transport_kind, device)
    if collective == "native" and transport_kind != "nccl":
        raise ValueError(f"native collectives are NCCL's, not those of {transport_kind}")
    progress = progress or progress_thread(
        cancel_token_of(epoch), device, f"{name} of epoch {epoch.number}", transport_kind
    )
    cancel_token = progress.cancel_token
    rank, size = list(epoch.members).index(epoch.me), len(epoch.members)
    ring = f"ring/{name}/{epoch.number}"
    tuning = tuning or (Tuning.over_nccl() if transport_kind == "nccl" else Tuning())
    transport: Transport
    try:
        with on_device(transport_kind, device):
            if transport_kind == "nccl":
                keeper = communicators if communicators is not None else Keeper(keeps=False)
                nccl = NcclOpener(rank, size, store, cancel_token, keeper, ring, device, timeout)
                if collective == "native":
                    return NativeGroup(epoch, progress, nccl.native(), device=device)
                transport = nccl.ring()
            else:
                transport = TcpTransport(
                    rank, epoch.members, store, cancel_token, secret=secret, ring=ring,
                    slots=_slots(tuning, transport_kind), host=host, timeout=timeout, ring_listener=ring_listener,
                )  # fmt: skip
                if device.type == "cuda":
                    transport = StagedTransport(transport, device, cancel_token)
            return RingGroup(epoch, progress, transport, device=device, tuning=tuning, hook=hook)
    except PeerLost as lost:  # a member that is lost meanwhile ends the epoch here
        cancel_token.cancel(lost)
        raise EpochRevoked(cancel_token.epoch, str(lost)) from lost
