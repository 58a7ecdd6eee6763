"""The hooks for pre-commit are the checks that scripts/test.sh, and so CI, runs before the tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_hooks_are_what_ci_checks() -> None:
    checked = re.findall(r"(?m)^lint (.+)$", (ROOT / "scripts" / "test.sh").read_text())
    hooks = re.findall(r"(?m)^ +entry: \.venv/bin/python -m (.+)$", (ROOT / ".pre-commit-config.yaml").read_text())
    assert checked
    assert hooks == checked
