"""The blame for what a worker met: a mate, its device, or itself."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recover_megatron.instep.faults import Orphaned, is_of_device
from recover_megatron.instep.recovery import Blame
from tests.instep.test_plan import raised

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


def recovery(*, orphaned: bool, positions: int = 2, lost: bool = False) -> Any:
    """``lost``: whether the news of a mate's death comes."""
    return SimpleNamespace(
        orphan=SimpleNamespace(orphaned=orphaned),
        assignment=SimpleNamespace(grid=SimpleNamespace(replicas=[range(positions)]), mates={0, 1}),
        hooks=SimpleNamespace(iteration=lambda: 1),
        session=SimpleNamespace(wait_lost=lambda mates, seconds: lost),
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


BARRIER = RuntimeError("[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 600000 ms")
IN_A_GROUP, ELSEWHERE = "/v/torch/distributed/distributed_c10d.py", "/home/user/my_model.py"


@pytest.mark.parametrize(
    ("error", "path", "lost", "of_a_mate"),
    [
        (BARRIER, IN_A_GROUP, True, True),
        (ValueError("a text of torch's that is not known"), IN_A_GROUP, True, True),
        (BARRIER, IN_A_GROUP, False, False),
        (BARRIER, ELSEWHERE, True, False),
        (OSError(errno.EMFILE, "Too many open files"), IN_A_GROUP, True, False),
        (torch.AcceleratorError(ILLEGAL), IN_A_GROUP, True, False),
    ],
    ids=repr,
)
def test_what_fails_in_a_group_while_a_mate_is_lost_is_the_mates_fault_whatever_its_text(
    error: Exception, path: str, lost: bool, of_a_mate: bool
) -> None:
    error = raised(error.with_traceback(None), path)
    assert Blame().of_mates(error, recovery(orphaned=False, lost=lost)) is of_a_mate
    assert Blame().of_mates(error, recovery(orphaned=False, lost=lost, positions=1)) is False
