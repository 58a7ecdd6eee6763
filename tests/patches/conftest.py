"""Megatrons to patch, the script that patches them, and the wheels of those that have a patch, from the index."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.harness import REPOSITORY
from tests.harness.processes import finished, python

WHEELS = {"0.18.2": "core_v0.18.2", "0.19.0": "core_v0.19.0", "0.19.2": "core_v0.19.0"}
"""Version -> the patch that is its."""


@pytest.fixture(scope="session", params=WHEELS)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(version, unpacked wheel); nobody may change it."""
    version, out = request.param, tmp_path_factory.mktemp("wheel")
    command = ("-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", out)
    done = python(*command, f"megatron-core=={version}", seconds=300)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:]
        pytest.skip(f"NOT TESTED: Megatron {version}: pip could not download its wheel: {reason}")
    (archive,) = out.glob("*.whl")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(out / "tree")
    return version, out / "tree"


SCRIPT = REPOSITORY / "scripts" / "apply_patches.sh"
FILES = ("megatron/core/__init__.py", "megatron/training/arguments.py", "megatron/training/training.py")
"""What a patch changes."""


def apply(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run scripts/apply_patches.sh."""
    return finished("bash", SCRIPT, *arguments, cwd=cwd)


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Python with the tree's Megatron first on its path."""
    path = ":".join([str(tree), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return python(*command, seconds=600, path=path, OMP_NUM_THREADS="1")


LEFT_TO_PYTHON = ("--elastic",)
"""Of recover-run: it then puts no runner before a script, as where users start their workers by other means."""


def launch(tree: Path, workers: int, out: Path, *command: str) -> str:
    """Train to the end, with the tree's Megatron; what recover-run said.  Its logs are in ``out``."""
    started = ("-m", "recover_megatron.launch", "--nproc-per-node", str(workers), "--log-dir", str(out))
    done = run(tree, *started, *command)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-5000:]
    return said


def copy_of(tree: Path, out: Path) -> Path:
    """A copy of the tree, without what takes no part in training, and without bytecode that is older than a patch."""
    shutil.copytree(
        tree, out, ignore=shutil.ignore_patterns("__pycache__", ".git", "tests", "docs", "examples", "tools")
    )
    return out


def contents(tree: Path) -> dict[str, str]:
    """Path -> digest and mode of every file in the tree."""
    return {
        str(path.relative_to(tree)): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mode:o}"
        for path in sorted(tree.rglob("*"))
        if path.is_file()
    }
