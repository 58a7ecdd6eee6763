"""An example under recover-run, as a test starts it, and what its workers printed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.harness import REPOSITORY
from tests.test_end_to_end import finished as finish
from tests.test_end_to_end import launch

__all__ = ["finish"]

ELASTIC = ("--elastic",)
STEP = re.compile(r"^iteration (\d+) loss (\S+)$", re.MULTILINE)
Losses = dict[int, float]


def start(
    out: Path,
    script: str,
    *arguments: object,
    workers: int = 4,
    options: Sequence[str] = ELASTIC,
    path: Sequence[Path] = (),
) -> subprocess.Popen[str]:
    """``script``: from the top of the repository.  ``path``: what the workers import from besides."""
    environment = {"PYTHONPATH": ":".join(map(str, [REPOSITORY, *path])), "OMP_NUM_THREADS": "1"}
    words = ["--nproc-per-node", workers, *options, REPOSITORY / script, *arguments]
    return launch(out, *map(str, words), environment=environment)


def losses(out: Path, worker: int) -> Losses:
    """What a worker printed; an iteration stands there once."""
    steps = STEP.findall((out / f"worker-{worker}.log").read_text())
    assert len({iteration for iteration, _ in steps}) == len(steps)
    return {int(iteration): float(loss) for iteration, loss in steps}
