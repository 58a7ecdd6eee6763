"""gpu_checks.sh where there is no GPU, and what its table does with failures.  On a GPU: ``pytest -m gpu``."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from gpu_checks import CHECKS, NO_DEVICE, run
from lib.gpu_training import Failed, NotRun, Place

from recover_megatron.hostdevice import driver_device_count
from tests.drawn import some
from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE

SCRIPT = REPOSITORY / "scripts" / "gpu_checks.sh"


def rows(output: str) -> list[list[str]]:
    """The cells of the table, without its head."""
    table = [line for line in output.splitlines() if line.startswith("|")]
    assert table[0] == "| check | result | seconds | number |"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_without_a_gpu_every_check_is_told_as_not_run_and_the_status_says_that_nothing_could_be_run() -> None:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([SCRIPT], env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert rows(done.stdout) == [[name, NO_DEVICE, "", ""] for name, _ in CHECKS]


def place(folder: Path, seconds: float = DEADLINE) -> Place:
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
    assert run(lambda where: "", place(tmp_path, seconds=1)) == (
        "FAILED: no time was left for it (--keep DIR --resume runs it now)",
        "",
    )


def test_what_has_passed_is_not_run_again_when_the_checks_are_resumed(tmp_path: Path) -> None:
    (first, _), *others = CHECKS
    before = {name: ["ok", "3", "2 GB/s"] for name, _ in others}
    (tmp_path / "results.json").write_text(json.dumps(before | {first: ["FAILED: hung", "60", ""]}))
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [SCRIPT, "--keep", tmp_path, "--resume"], env=hidden, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert rows(done.stdout) == [[first, NO_DEVICE, "", ""], *([name, *row] for name, row in before.items())]


def test_resuming_needs_the_folder_of_the_call_before() -> None:
    done = subprocess.run([SCRIPT, "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--resume needs --keep DIR" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("check", ["queue:", "2 ranks", "killed in sums"])
def test_ranks_that_stall_die_or_are_revoked_have_right_sums_in_a_rehearsal(tmp_path: Path, check: str) -> None:
    """The same processes and the same checks of every element as on a GPU, over sockets."""
    rehearsed(tmp_path, check)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", some("trainings", [name for name, _ in CHECKS if name[:2] in ("ov", "DP", "TP", "di")], 1)
)
def test_trainings_with_deaths_are_those_without_in_a_rehearsal(tmp_path: Path, check: str) -> None:
    rehearsed(tmp_path, check, "--seconds", "3000")


def rehearsed(folder: Path, check: str, *options: str) -> None:
    done = subprocess.run(
        [SCRIPT, "--rehearse", "--only", check, "--keep", folder, *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    logs = "".join(log.read_text() for log in folder.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert rows(done.stdout)[0][1] == "ok", done.stdout


@pytest.mark.gpu
@pytest.mark.slow
def test_every_check_passes_on_this_gpu(tmp_path: Path) -> None:
    if not driver_device_count():
        pytest.skip("NO GPU HERE: nothing was run on one")
    done = subprocess.run([SCRIPT, "--keep", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
