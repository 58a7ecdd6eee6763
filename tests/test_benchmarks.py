"""Benchmarks that no other test runs still run, on very little; what they find is no matter of tests."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.harness import REPOSITORY
from tests.harness.patience import patient

SECONDS = patient(120.0)


@pytest.mark.slow
def test_a_recovery_of_plain_processes_is_measured_phase_by_phase() -> None:
    command = [sys.executable, "benchmarks/bench_recovery.py", "--workers", "3", "--kills", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    row = next(line for line in done.stdout.splitlines() if line.startswith("| 3 |"))
    *phases, total = (float(cell) for cell in re.findall(r"([0-9.]+) \(", row))
    assert len(phases) == 6
    assert total == pytest.approx(sum(phases), abs=0.5)
    assert total > 0
