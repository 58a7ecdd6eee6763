"""Who is to blame for what a worker met: a mate, its device, or itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recover_megatron.instep.blame import Blame
from recover_megatron.instep.errors import Orphaned
from recover_megatron.instep.faults import is_of_device

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


def recovery(*, orphaned: bool, positions: int = 2) -> Any:
    """One whose news of a death never comes."""
    return SimpleNamespace(
        orphan=SimpleNamespace(orphaned=orphaned),
        assignment=SimpleNamespace(grid=SimpleNamespace(replicas=[range(positions)]), mates={0, 1}),
        hooks=SimpleNamespace(iteration=lambda: 1),
        session=SimpleNamespace(wait_lost=lambda mates, seconds: False),
    )


@pytest.mark.parametrize(
    ("error", "device"),
    [
        (torch.AcceleratorError(ILLEGAL), True),
        (RuntimeError(ILLEGAL), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("shape mismatch"), False),
        (ValueError(ILLEGAL), False),
    ],
    ids=repr,
)
def test_errors_of_cuda_are_told_from_others(error: Exception, device: bool) -> None:
    assert is_of_device(error) is device


def test_an_orphan_whose_device_has_failed_is_no_spare() -> None:
    """It would wait for good with a device that it cannot use, and nobody would be started in its place."""
    orphan = recovery(orphaned=True)
    assert Blame().of_mates(torch.AcceleratorError(ILLEGAL), orphan) is False
    assert Blame().of_mates(ValueError("its mates are gone"), orphan) is True
    assert Blame().of_mates(Orphaned("its mates are gone"), recovery(orphaned=False)) is True


def test_an_error_of_cuda_behind_one_of_communication_counts() -> None:
    error = dist.DistBackendError("NCCL error: unhandled cuda error")
    assert Blame().of_mates(error, recovery(orphaned=False)) is True
    error.__cause__ = torch.AcceleratorError(ILLEGAL)
    assert Blame().of_mates(error, recovery(orphaned=False)) is False
