"""Trees of Megatron to patch, and the script that patches them."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from tests.harness import REPOSITORY
from tests.harness.patience import patient

SCRIPT = REPOSITORY / "scripts" / "apply_patches.sh"
FILES = ("megatron/core/__init__.py", "megatron/training/arguments.py", "megatron/training/training.py")
"""What a patch changes."""


def apply(*arguments: str | Path, **options: str | Path) -> subprocess.CompletedProcess[str]:
    """Run scripts/apply_patches.sh; ``options``: those of subprocess.run."""
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(60), **options)  # type: ignore[call-overload]


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
