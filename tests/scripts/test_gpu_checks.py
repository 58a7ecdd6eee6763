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


def called(*options: object, status: int = 0, **environment: str) -> list[list[str]]:
    """The cells of the table that gpu_checks.sh prints, without its head."""
    script = REPOSITORY / "scripts" / "gpu_checks.sh"
    done = subprocess.run(
        [script, *map(str, options)], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    head, _, *table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert head == "| check | result | seconds | number |"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_without_a_gpu_every_check_is_told_as_not_run_and_the_status_says_that_nothing_could_be_run() -> None:
    assert called(status=3, CUDA_VISIBLE_DEVICES="") == [[name, NO_DEVICE, "", ""] for name, _ in CHECKS]


@pytest.mark.parametrize(
    ("error", "told"),
    [(Failed("losses differ by 3e-02"), ("FAILED: losses differ by 3e-02", "")), (None, ("ok", "2 GB/s")),
     (KeyError("loss"), ("FAILED: KeyError: 'loss'", "")), (NotRun("not installed"), ("not installed", ""))],
    ids=["a failure", "well", "what nobody foresaw", "not to be run here"],
)  # fmt: skip
def test_what_a_check_comes_to_is_told(tmp_path: Path, error: Exception | None, told: tuple[str, str]) -> None:
    def check(where: Place) -> str:
        if error:
            raise error
        return "2 GB/s"

    assert run(check, Place(tmp_path, rehearse=True, deadline=time.monotonic() + DEADLINE)) == told
    late, _ = run(check, Place(tmp_path, rehearse=True, deadline=time.monotonic() + 1))
    assert late == "FAILED: no time was left for this check; call again with --keep DIR --resume to run it"


def test_what_has_passed_is_not_run_again_when_the_checks_are_resumed(tmp_path: Path) -> None:
    (first, _), *others = CHECKS
    before = {name: ["ok", "3", "2 GB/s"] for name, _ in others}
    (tmp_path / "results.json").write_text(json.dumps(before | {first: ["FAILED: hung", "60", ""]}))
    assert called("--keep", tmp_path, "--resume", CUDA_VISIBLE_DEVICES="") == [
        [first, NO_DEVICE, "", ""], *([name, *row] for name, row in before.items()),
    ]  # fmt: skip


def test_resuming_needs_the_folder_of_the_call_before() -> None:
    with pytest.raises(AssertionError, match="--resume needs --keep DIR"):
        called("--resume")


RANKS = ["queue:", "2 ranks", "killed in sums"]
TRAININGS = [name for name, _ in CHECKS if not name.startswith((*RANKS, "a worker's device"))]


@pytest.mark.slow
@pytest.mark.parametrize("check", [*RANKS, *some("trainings", TRAININGS, 1)])
def test_checks_pass_in_a_rehearsal(tmp_path: Path, check: str) -> None:
    """The same processes and the same looks at every element and iteration as on a GPU, over sockets."""
    ((_, result, _, number),) = called("--rehearse", "--only", check, "--keep", tmp_path, "--seconds", "3000")
    assert result == "ok", number


@pytest.mark.gpu
@pytest.mark.slow
def test_every_check_passes_on_this_gpu(tmp_path: Path) -> None:
    if not driver_device_count():
        pytest.skip("NO GPU HERE: nothing was run on one")
    called("--keep", tmp_path)
