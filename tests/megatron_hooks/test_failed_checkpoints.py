"""Why a checkpoint cannot be written, and whether others are to try it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from recover_megatron.megatron_hooks.checkpoint_writers import PartFailed
from recover_megatron.megatron_hooks.checkpoints import _reason


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.EDQUOT, errno.ENOSPC])
def test_what_the_file_system_says_is_everybodys_whatever_it_means_elsewhere(tmp_path: Path, number: int) -> None:
    """A worker's own would cost one replica after the other."""
    words = os.strerror(number)
    folder = str(tmp_path / "attempt_4")
    why, own = _reason(OSError(number, words, folder, None, str(tmp_path / "iter_4")), str(tmp_path))
    assert words in why
    assert not own


def test_a_full_table_of_descriptors_is_a_workers_own() -> None:
    assert _reason(OSError(errno.EMFILE, "Too many open files"), "/nowhere")[1]


@pytest.mark.parametrize("others_can", [True, False])
@pytest.mark.parametrize(
    ("text", "full"),
    [("Input/output error", False), ("Disk quota exceeded", True), ("No space left on device", True)],
)
def test_a_part_that_others_can_write_is_the_workers_own_if_there_is_space(
    text: str, full: bool, others_can: bool
) -> None:
    why, own = _reason(PartFailed(f"worker 2: OSError: {text}", own=others_can), "/nowhere")
    assert text in why
    assert own is (others_can and not full)
