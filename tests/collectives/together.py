"""All members of a group as threads of one process: for what needs no death."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch

from recover_megatron.collectives import group_factory
from recover_megatron.collectives.epoch import CancelToken, EpochRevoked, Known
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.transport.interface import StagedTransport
from recover_megatron.collectives.transport.tcp import TcpTransport
from tests.doubles.epoch import PlainEpoch
from tests.harness.patience import patient

SECRET = b"the secret of a test"
DEADLINE = patient(60)


class Dictionary(Known):
    """The plainest key-value exchange there is."""

    def __init__(self) -> None:
        super().__init__({})

    def set(self, key: str, value: str) -> None:
        self._values[key] = value


def _staged(*place: Any, **options: Any) -> StagedTransport:
    return StagedTransport(TcpTransport(*place, **options), torch.device("cpu"), CancelToken(1))


def together(
    size: int, work: Callable[[Group], Any], store: Any = None, *, staged: bool = False, **options: Any
) -> list[Any]:
    """What ``work`` returns at each member, by rank.  ``staged``: with the copies of a device, made on the CPU.

    Raises what the lowest failing rank raised, if there is one whose epoch was not merely ended by another's failure;
    what all others raised stands in its notes.
    """
    shared = Dictionary() if store is None else store
    members = [10 * rank for rank in range(size)]

    def member(rank: int) -> Any:
        epoch, device = PlainEpoch(1, members, members[rank]), torch.device("cpu", rank)
        group = group_factory.open_group(
            epoch, shared, name="column", secret=SECRET, timeout=DEADLINE, device=device, **options
        )
        try:
            return work(group)
        except BaseException:
            group.abort("a member of the test failed")
            raise
        finally:
            group.close()

    copies = patch.object(group_factory, "TcpTransport", _staged) if staged else nullcontext()
    with copies, ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(member, rank) for rank in range(size)]
        wait(futures, 2 * DEADLINE)
    failed = {rank: error for rank, future in enumerate(futures) if (error := future.exception(0)) is not None}
    if not failed:
        return [future.result(0) for future in futures]
    first = min(failed, key=lambda rank: (isinstance(failed[rank], EpochRevoked), rank))
    for rank, error in failed.items():
        failed[first].add_note(f"rank {rank}: {error!r}")
    raise failed[first]
