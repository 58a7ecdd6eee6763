"""The loops of accelerate and torchtitan, on stand-ins with their seams: a worker is killed, and nothing else changes.

A stand-in is not the package: what these show is that the examples fit the seams, and that the library is called right.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.examples.launching import finish, losses, start
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain pytorch")]

DOUBLES = Path(__file__).parent / "doubles"
STEPS = 400


def launch(out: Path, example: str, workers: int) -> subprocess.Popen[str]:
    held = [STEPS - 20, out / "go", f"examples/{example}", STEPS]
    return start(out, "tests/examples/held.py", *held, workers=workers, path=[DOUBLES])


def pid_of(out: Path, worker: int) -> int | None:
    """None: workers.json does not tell yet."""
    path = out / "workers.json"
    workers = json.loads(path.read_text()) if path.exists() else []
    return next((each["pid"] for each in workers if each["worker_id"] == worker), None)


@pytest.mark.parametrize("example", ["accelerate_loop.py", "torchtitan_trainer.py"])
def test_a_killed_worker_changes_nothing(tmp_path: Path, example: str) -> None:
    for folder in ("alone", "struck"):
        (tmp_path / folder).mkdir()
    (tmp_path / "alone" / "go").touch()
    finish(launch(tmp_path / "alone", example, 1))
    out = tmp_path / "struck"
    run = launch(out, example, 3)
    log = out / "worker-1.log"
    eventually(lambda: log.exists() and 20 in losses(out, 1), "the run trains")
    eventually(lambda: pid_of(out, 1), "the launcher has written down who that is")
    os.kill(pid_of(out, 1), signal.SIGKILL)
    (out / "go").touch()
    assert "was killed by SIGKILL" in finish(run)
    wanted = losses(tmp_path / "alone", 0)
    assert sorted(wanted) == list(range(1, STEPS + 1))
    assert len(losses(tmp_path / "struck", 1)) < STEPS
    for survivor in (0, 2):
        assert losses(tmp_path / "struck", survivor) == pytest.approx(wanted, rel=1e-7)
