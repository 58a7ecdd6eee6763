"""An example under recover-run, as a test starts it, and what its workers printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.harness import REPOSITORY
from tests.harness.patience import patient

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
    launch = [sys.executable, "-m", "recover_megatron.launch", "--log-dir", str(out), "--nproc-per-node", str(workers)]
    return subprocess.Popen(
        [*launch, *options, str(REPOSITORY / script), *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": ":".join(map(str, [REPOSITORY, *path])), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finish(run: subprocess.Popen[str], code: int = 0) -> str:
    """What recover-run said; it must end with ``code``."""
    said, _ = run.communicate(timeout=patient(180))
    assert run.returncode == code, said
    return said


def losses(out: Path, worker: int) -> Losses:
    """What a worker printed; an iteration stands there once."""
    steps = STEP.findall((out / f"worker-{worker}.log").read_text())
    assert len({iteration for iteration, _ in steps}) == len(steps)
    return {int(iteration): float(loss) for iteration, loss in steps}
