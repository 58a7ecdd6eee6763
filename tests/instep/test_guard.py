"""A worker whose replica broke comes out of what it waits for, whatever gloo tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", ["messages", "collectives", "scattered"])
def test_whoever_waits_inside_a_broken_replica_comes_out(tmp_path: Path, kind: str) -> None:
    """Twenty-four pairs of workers: without the guard three of them, by the average, are stuck."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.instep.pairs", str(tmp_path), kind]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
