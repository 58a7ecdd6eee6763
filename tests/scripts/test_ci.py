""".ci/run: what is drawn of the long families of tests is the same for all commits, unless a seed is given."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("spin", "slurmctld", "ip", "chromium")
"""What .ci/run would install if they were missing: here nothing is."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one commit with the real .ci/run and a scripts/test.sh that prints its seed."""
    root = tmp_path / "a checkout"
    for folder in (".ci", "scripts", "bin", "tests"):
        (root / folder).mkdir(parents=True)
    shutil.copy(REPOSITORY / ".ci" / "run", root / ".ci" / "run")
    (root / "scripts" / "test.sh").write_text('#!/bin/sh\necho "$RECOVER_SEED"\n')
    for tool in TOOLS:
        (root / "bin" / tool).write_text("#!/bin/sh\n")
    for path in (root / "scripts" / "test.sh", *(root / "bin" / tool for tool in TOOLS)):
        path.chmod(0o755)
    (root / "tests" / "test_it.py").write_text("")
    git(root, "init", "--quiet")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "-m", "a commit")


def seed(root: Path, **environment: str) -> str:
    base = {name: value for name, value in os.environ.items() if name != "RECOVER_SEED"}
    path = f"{root / 'bin'}:{base['PATH']}"
    ran = subprocess.run(
        ["bash", str(root / ".ci" / "run")],
        env={**base, "PATH": path, **environment},
        cwd="/",
        check=True,
        capture_output=True,
        text=True,
    )
    return ran.stdout.strip()


def test_ci_draws_the_same_cells_for_all_commits(checkout: Path) -> None:
    first = seed(checkout)
    assert first.isdecimal()
    (checkout / "tests" / "test_it.py").write_text("changed")
    commit(checkout)
    assert seed(checkout) == first


def test_a_seed_that_is_given_is_taken(checkout: Path) -> None:
    assert seed(checkout, RECOVER_SEED="7") == "7"
