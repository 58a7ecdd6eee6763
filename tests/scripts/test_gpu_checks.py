"""gpu_checks.sh where there is no GPU, and what its table does with failures.  On a GPU: ``pytest -m gpu``."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from gpu_checks import CHECKS, NO_DEVICE, NotRun, Place, run
from lib.gpu_training import Failed

from recover_megatron.hostdevice.detect import driver_device_count

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_checks.sh"


def rows(output: str) -> list[list[str]]:
    """The cells of the table, without its head."""
    table = [line for line in output.splitlines() if line.startswith("|")]
    assert table[0] == "| check | result | seconds | number |"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_without_a_gpu_every_check_is_told_as_not_run_and_nothing_has_failed() -> None:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([SCRIPT], env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout) == [[name, NO_DEVICE, "", ""] for name, _ in CHECKS]


def place(folder: Path, seconds: float = 60) -> Place:
    return Place(folder, rehearse=True, deadline=time.monotonic() + seconds)


def test_a_failure_and_what_nobody_foresaw_are_told_and_a_check_that_cannot_be_run_is_none(tmp_path: Path) -> None:
    def raising(error: Exception) -> tuple[str, str]:
        def check(where: Place) -> str:
            raise error

        return run(check, place(tmp_path))

    assert raising(Failed("losses differ by 3e-02")) == ("FAILED: losses differ by 3e-02", "")
    assert raising(KeyError("loss")) == ("FAILED: KeyError: 'loss'", "")
    assert raising(NotRun("not installed")) == ("not installed", "")
    assert run(lambda where: "2 GB/s", place(tmp_path)) == ("ok", "2 GB/s")


def test_a_check_for_which_no_time_is_left_has_failed(tmp_path: Path) -> None:
    assert run(lambda where: "", place(tmp_path, seconds=1)) == ("FAILED: no time was left for it", "")


def test_the_ring_of_the_checks_adds_up_right(tmp_path: Path) -> None:
    checks = dict(CHECKS)
    result, number = run(checks["ring over tcp, 3 members, CUDA tensors"], place(tmp_path, seconds=120))
    assert result == "ok"
    assert number.endswith("GB/s")


@pytest.mark.gpu
@pytest.mark.slow
def test_every_check_passes_on_this_gpu(tmp_path: Path) -> None:
    if not driver_device_count():
        pytest.skip("NO GPU HERE: nothing was run on one")
    done = subprocess.run([SCRIPT, "--keep", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
