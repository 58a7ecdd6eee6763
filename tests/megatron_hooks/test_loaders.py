"""Processes that read data and die: whoever reads is told, and nobody else."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest
import torch

from recover_megatron.megatron_hooks.data import LoaderKilled, Source, TaggedDataset, _reading
from recover_megatron.megatron_hooks.microbatches import InOrder

DEADLY = 6


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The last of them ends by ``number`` whoever reads it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return DEADLY + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == DEADLY:
            os.kill(os.getpid(), self._number)
        return {"text": torch.tensor([index])}


def source(number: int = signal.SIGKILL) -> Source:
    loader = torch.utils.data.DataLoader(TaggedDataset(Samples(number)), num_workers=1)
    found = Source(loader, 1, 0, InOrder(DEADLY + 1, 1))
    found.begin(0, range(DEADLY + 1), DEADLY + 1)
    return found


def end(reads: Source) -> None:
    """Of its processes: they would hold our pipes, the one to the fork server, too."""
    with suppress(AttributeError):
        reads._batches._shutdown_workers()  # type: ignore[union-attr]


def test_a_killed_one_is_told_to_who_reads_and_not_to_what_else_the_main_thread_does() -> None:
    reads = source()
    assert reads.get(0)["text"].item() == 0
    (process,) = reads._batches._workers  # type: ignore[union-attr]
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # join() would hide it from torch
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(LoaderKilled, match="was killed by signal 9"):
        reads.get(1)
    end(reads)


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGKILL, LoaderKilled), (signal.SIGTERM, LoaderKilled), (signal.SIGSEGV, RuntimeError)]
)
def test_whose_fault_it_is_says_the_signal(number: int, kind: type[Exception]) -> None:
    """A sample that ends whoever reads it is none of the host."""
    reads = source(number)
    with pytest.raises((LoaderKilled, RuntimeError)) as raised:
        list(map(reads.get, range(DEADLY + 1)))
    assert type(raised.value) is kind
    assert f"was killed by signal {int(number)}" in str(raised.value)
    end(reads)


class Ending:
    """A process whose descriptors are closed, and whose exit code is known once it has been waited for."""

    pid, exitcode = 7, None

    def __init__(self) -> None:
        self.sentinel, write = os.pipe()
        os.close(write)

    def join(self) -> None:
        self.exitcode = -signal.SIGKILL


def test_a_connection_that_closes_before_the_exit_code_is_known_is_told_as_the_end_of_the_process() -> None:
    process = Ending()
    with pytest.raises(LoaderKilled, match=r"process 7, .* was killed by signal 9"), _reading([process]):
        raise ConnectionResetError(104, "Connection reset by peer")
    os.close(process.sentinel)
