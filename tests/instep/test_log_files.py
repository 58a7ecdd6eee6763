"""A run whose log files cannot be written, or not now, is the run without failures all the same."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.instep.conftest import Runs
from tests.instep.runs import LAYOUTS, PARAMETERS, Case, Strike, distance

pytestmark = pytest.mark.slow

FILES = ("steps.jsonl", "events.jsonl", "events-0.jsonl")


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Every write fails: there is no space left."""
    for name in FILES:
        (folder / name).symlink_to("/dev/full")
    yield


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Every write blocks for as long as the run goes on."""
    descriptors = []
    for name in FILES:
        os.mkfifo(folder / name)
        descriptors.append(os.open(folder / name, os.O_RDWR | os.O_NONBLOCK))
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(descriptors[-1], bytes(4096))
    yield
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("disk", [full, frozen], ids=lambda disk: disk.__name__)
def test_a_full_or_frozen_log_disk_changes_nothing_and_neither_does_a_death_of_who_writes(
    runs: Runs, tmp_path: Path, disk: contextlib.AbstractContextManager[None]
) -> None:
    case = Case(LAYOUTS[0], (Strike(0, 0, 3, "backward"),))
    with disk(tmp_path):  # type: ignore[operator]
        result = runs(case)
    assert result.ended.codes == [-9, 0, 0, 0], result.told()
    theirs = runs.reference(case).left[0]["parameters"]
    assert sorted(result.left) == [1, 2, 3]
    for left in result.left.values():
        assert distance(left["parameters"], theirs) < PARAMETERS
    said = "".join(result.log(worker) for worker in (0, 1))
    for name in FILES[:2] if disk is full else ():
        warning = f"recover: warning: {tmp_path / name} cannot be written (No space left on device)"
        assert said.count(warning) == 2, said  # by each who wrote
