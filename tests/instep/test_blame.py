"""Whose fault an exception is: a mate's, the device's or the host's, the worker's own."""

from __future__ import annotations

import errno
import platform
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recover_megatron.errors import Disagreement
from recover_megatron.instep.faults import (
    CheckpointFailed,
    Orphaned,
    in_short,
    is_communication,
    is_of_device,
    is_of_folder,
    is_own,
    signature,
)
from recover_megatron.instep.recovery import Blame
from recover_megatron.membership.ending import ExceptionReport


@pytest.mark.parametrize(
    ("error", "communication"),
    [
        (RuntimeError("[.../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"), True),
        (dist.DistBackendError("NCCL error in: x.cpp"), True),
        (ConnectionResetError("by peer"), False),
        (RuntimeError("the store says: Connection reset by peer"), False),
        (RuntimeError("shape mismatch"), False),
        (ValueError("Connection closed by peer"), False),
        (Disagreement("counted twice"), False),
    ],
    ids=repr,
)
def test_only_errors_of_communication_may_be_another_workers_fault(error: Exception, communication: bool) -> None:
    assert is_communication(error) is communication


def raised(error: Exception, path: str) -> Exception:
    """The error, raised in a file of this path, and caught."""
    code = compile("def fail(error):\n    raise error", path, "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    try:
        names["fail"](error)
    except type(error) as caught:
        return caught
    raise AssertionError


@pytest.mark.parametrize(
    ("path", "communication"),
    [
        ("/v/torch/distributed/distributed_c10d.py", True),
        ("/v/recover_megatron/collectives/gloo/abortable_groups.py", True),
        ("/v/torch/utils/data/dataloader.py", False),
        ("/home/user/my_dataset.py", False),
    ],
)
def test_a_broken_connection_is_a_mates_fault_only_where_it_is_a_groups(path: str, communication: bool) -> None:
    assert is_communication(raised(ConnectionResetError("by peer"), path)) is communication
    assert is_communication(raised(RuntimeError("Broken pipe"), path)) is communication
    late = ValueError("torch cannot log it")
    late.__context__ = raised(ConnectionResetError("by peer"), path)
    assert is_communication(late) is communication


def test_what_fails_below_the_data_set_is_no_mates_fault_whatever_its_type() -> None:
    error = dist.DistNetworkError("the client socket has timed out")
    assert is_communication(error)
    assert not is_communication(raised(error, "/v/recover_megatron/megatron_hooks/data/source.py"))


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (RuntimeError("unable to write to file </torch_1>: No space left on device (28)"), True),
        (RuntimeError("received 0 items of ancdata"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (
            RuntimeError("DefaultCPUAllocator: you tried to allocate 64 bytes. Error code 12 (Cannot allocate memory)"),
            True,
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (OSError(errno.EIO, "Input/output error"), False),
        (ValueError("sample 3 is rotten"), False),
    ],
    ids=repr,
)
def test_what_is_a_fault_of_the_host_or_device(error: Exception, own: bool) -> None:
    assert is_own(error) is own
    wrapped = RuntimeError("the loader has failed")
    wrapped.__cause__ = error
    assert is_own(wrapped) is own


@pytest.mark.parametrize(
    ("error", "of_folder"),
    [
        (OSError(errno.EMFILE, "Too many open files", "/save/attempt_4", None, "/save/iter_4"), True),
        (OSError(errno.ESTALE, "Stale file handle", "/save"), True),
        (RuntimeError("OSError: Too many open files (in /save/attempt_4/__2_0.distcp)"), True),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (OSError(errno.EMFILE, "Too many open files", "/saves/iter_4"), False),
    ],
    ids=repr,
)
def test_what_is_met_in_a_folder_is_known_by_its_name(error: Exception, of_folder: bool) -> None:
    assert is_of_folder(error, "/save") is of_folder


@pytest.mark.parametrize("own", [True, False])
def test_a_failed_checkpoint_says_itself_whose_fault_it_is(own: bool) -> None:
    error = CheckpointFailed("cannot be written", own=own)
    error.__cause__ = OSError(errno.EMFILE if not own else errno.EIO, "as it means elsewhere")
    assert is_own(error) is own


def test_the_same_fault_is_known_on_whatever_worker_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def words(worker: int, host: str, error: Exception) -> ExceptionReport:
        monkeypatch.setattr(platform, "node", lambda: host)
        return ExceptionReport(f"worker {worker}", worker, 4, 7, signature(error))

    nan = "Rank {}, node {}, device {}, iteration 4: Unexpected result nan (message='NaN\nin the loss')"
    first = words(1, "node-a", RuntimeError(nan.format(1, "node-a", 1)))
    assert words(12, "node-b.rack2", RuntimeError(nan.format(12, "node-b", 4))).repeats(first)
    assert words(12, "node-b", RuntimeError(nan.format(12, "node-b", 4))).repeats(first)
    assert not words(12, "node-b", ValueError(nan.format(12, "node-b", 4))).repeats(first)
    assert not words(12, "node-b", RuntimeError("out of memory")).repeats(first)
    assert not words(1, "node-a", RuntimeError(nan.format(1, "node-a", 1))).repeats(first), "a mate's is no second one"


def test_a_fault_that_a_loader_process_meets_is_the_one_met_on_the_spot() -> None:
    class Reads(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            raise ValueError(f"sample {index} is rotten")

    with pytest.raises(ValueError, match="rotten") as on_the_spot:
        Reads()[0]
    batches = iter(torch.utils.data.DataLoader(Reads(), num_workers=1))
    with pytest.raises(ValueError, match="rotten") as in_a_process:
        next(batches)
    batches._shutdown_workers()  # the error holds them, and they hold our pipes, the one to the fork server, too
    assert signature(in_a_process.value) == signature(on_the_spot.value) == "ValueError: sample 0 is rotten"


# ---- a mate's, its device's or its own

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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[/pytorch/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:11159. This\nmeans a lot.",
            "Connection closed by peer [127.0.0.1]:11159",
        ),
        ("a worker of its replica is lost", "a worker of its replica is lost"),
        ("x" * 200, "x" * 120),
        ("", "RuntimeError"),
    ],
)
def test_an_error_in_short_is_its_first_sentence(text: str, told: str) -> None:
    assert in_short(RuntimeError(text)) == told
