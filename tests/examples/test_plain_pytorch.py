"""The plain PyTorch loop of examples/ trains as if nobody had died."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain pytorch")]

ITERATIONS = 60
PATIENCE = 120
STEP = re.compile(r"^iteration (\d+) loss (\S+)$", re.MULTILINE)


def start(out: Path) -> subprocess.Popen[str]:
    script = str(REPOSITORY / "examples" / "plain_pytorch.py")
    command = [sys.executable, "-m", "recover_megatron.launch", "--log-dir", str(out), "--nproc-per-node", "4", script]
    return subprocess.Popen(
        [*command, "--iterations", str(ITERATIONS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
    )


def losses(out: Path, worker: int) -> dict[int, float]:
    """What a worker printed; an iteration stands there once."""
    steps = STEP.findall((out / f"worker-{worker}.log").read_text())
    assert len({iteration for iteration, _ in steps}) == len(steps)
    return {int(iteration): float(loss) for iteration, loss in steps}


def wait_for_iteration(out: Path, worker: int, iteration: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if (out / f"worker-{worker}.log").exists() and iteration in losses(out, worker):
            return
        time.sleep(0.002)
    raise AssertionError(f"worker {worker} did not reach iteration {iteration} in {PATIENCE} s")


def finish(run: subprocess.Popen[str]) -> str:
    said, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    out = tmp_path_factory.mktemp("undisturbed")
    finish(start(out))
    reference = losses(out, 0)
    assert sorted(reference) == list(range(1, ITERATIONS + 1))
    assert reference[ITERATIONS] < reference[1]
    assert [losses(out, worker) for worker in (1, 2, 3)] == [reference] * 3
    return reference


@pytest.mark.parametrize("victims", [[0], [1], [2], [3], [3, 1], [0, 2, 1]], ids=str)
def test_survivors_train_as_if_nobody_had_died(
    tmp_path: Path, undisturbed: dict[int, float], victims: list[int]
) -> None:
    run = start(tmp_path)
    choose = random.Random(str(victims))
    for number, victim in enumerate(victims, 1):
        wait_for_iteration(tmp_path, victim, 12 * number)
        time.sleep(choose.random() * 0.02)  # anywhere in an iteration
        pids = {w["worker_id"]: w["pid"] for w in json.loads((tmp_path / "workers.json").read_text())}
        os.kill(pids[victim], signal.SIGKILL)
    said = finish(run)
    assert said.count("was killed by SIGKILL") == len(victims)
    for survivor in set(range(4)) - set(victims):
        assert losses(tmp_path, survivor) == pytest.approx(undisturbed, rel=1e-10)
    for victim in victims:
        assert len(losses(tmp_path, victim)) < ITERATIONS


def test_a_killed_coordinator_is_succeeded(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run = start(tmp_path)
    wait_for_iteration(tmp_path, 2, 10)
    candidates = subprocess.run(
        ["pgrep", "-f", str(tmp_path / "events-0.jsonl")], capture_output=True, text=True, check=True
    )
    for pid in candidates.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    finish(run)
    for worker in range(4):
        assert losses(tmp_path, worker) == pytest.approx(undisturbed, rel=1e-10)
    assert '"event":"plan"' in (tmp_path / "events-1.jsonl").read_text()
