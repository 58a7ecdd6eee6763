"""What lands is decided by the code: CI runs the same tests and draws every time, and its list fits the tree."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import REPOSITORY
from tests.harness.ci_list import left_out, listed, quarantined, without_a_test
from tests.instep.cells import PHASES, drawn
from tests.instep.runs import CONTEXT_LAYOUTS, LAYOUTS

TOOLS = ("spin", "slurmctld", "ip", "chromium")
"""What .ci/run would install if they were missing: here nothing is."""
CAUGHT_BY_ALL_ALONE = 5
"""Deliberate bugs at most (docs/results/mutations.md says why)."""


def test_ci_runs_what_the_readme_says_whatever_is_set_around_it(tmp_path: Path) -> None:
    root = tmp_path / "a checkout"
    for folder in (".ci", "scripts", "bin"):
        (root / folder).mkdir(parents=True)
    shutil.copy(REPOSITORY / ".ci" / "run", root / ".ci" / "run")
    said = 'echo "arguments: $*; set: ${RECOVER_TESTS-} ${RECOVER_MATRIX-} ${RECOVER_SEED-}"\n'
    (root / "scripts" / "test.sh").write_text(f"#!/bin/sh\n{said}")
    for tool in TOOLS:
        (root / "bin" / tool).write_text("#!/bin/sh\n")
        (root / "bin" / tool).chmod(0o755)
    around = {"RECOVER_TESTS": "all", "RECOVER_MATRIX": "all", "RECOVER_SEED": "7"}
    path = f"{root / 'bin'}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", str(root / ".ci" / "run")],
        env={**os.environ, **around, "PATH": path},
        cwd="/",
        check=True,
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "arguments: ; set:   \n"
    assert "`bash scripts/test.sh`" in (REPOSITORY / "README.md").read_text()


def draws(**environment: str) -> str:
    """The seed that a process of tests draws by."""
    base = {name: value for name, value in os.environ.items() if name not in ("RECOVER_TESTS", "RECOVER_SEED")}
    command = [sys.executable, "-c", "from tests.drawn import SEED; print(SEED)"]
    env = {**base, "RECOVER_MATRIX": "", **environment}
    return subprocess.run(command, cwd=REPOSITORY, env=env, check=True, capture_output=True, text=True).stdout.strip()


def test_a_seed_is_taken_and_drawn_for_all_tests_alone() -> None:
    assert draws() == draws(RECOVER_SEED="7") != "7"
    assert draws(RECOVER_TESTS="all", RECOVER_SEED="7") == "7"


@pytest.mark.parametrize("seed", range(5))
def test_every_phase_is_struck_and_every_layout_comes(seed: int) -> None:
    cells = drawn(seed)
    assert [cell.phase for cell in cells] == list(PHASES)
    assert {cell.layout for cell in cells} == {*LAYOUTS, *CONTEXT_LAYOUTS}


# ---- the list and the quarantine


def item(node: str, slow: bool) -> Any:
    return SimpleNamespace(nodeid=node, get_closest_marker=lambda name: slow and name == "slow")


def test_of_slow_tests_those_of_the_list_run_and_those_that_are_named() -> None:
    items = [item("t/a.py::fast", False), *(item(f"t/a.py::{name}", True) for name in ("f[1]", "f[2]", "g[1]", "h"))]
    table = {"t/a.py::f[2]": "why", "t/a.py::g": "why"}
    assert [one.nodeid for one in left_out(items, table, ())] == ["t/a.py::f[1]", "t/a.py::h"]
    assert [one.nodeid for one in left_out(items, table, ("t/a.py::h",))] == ["t/a.py::f[1]"]


def test_a_name_that_fits_no_test_of_a_file_is_told() -> None:
    items = [item("t/a.py::f[1]", True)]
    names = ["t/a.py::f", "t/a.py::f[1]", "t/a.py::f[2]", "t/a.py::g", "t/other.py::g"]
    assert without_a_test(items, names) == ["t/a.py::f[2]", "t/a.py::g"]


def test_every_line_of_the_list_names_a_test_and_says_why() -> None:
    table = listed()
    assert [name for name in table if not exists(name)] == []
    assert [name for name, why in table.items() if len(why) < 10] == []


def test_the_quarantine_is_small_and_says_since_when_and_how() -> None:
    entries = quarantined()
    assert len(entries) <= 5
    assert [name for name in entries if not exists(name)] == []
    assert all({"date", "how", "times"} < entry.keys() for entry in entries.values())


def exists(name: str) -> bool:
    path, function = name.split("[")[0].split("::")
    file = REPOSITORY / path
    return file.is_file() and function in {
        node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)
    }


def test_the_deliberate_bugs_are_caught_by_what_ci_runs(request: pytest.FixtureRequest) -> None:
    run = [item.nodeid for item in request.session.items]
    files = {node.split("::")[0] for node in run}
    bugs: list[Mapping[str, Any]] = tomllib.loads((REPOSITORY / "tests/mutations/mutations.toml").read_text())[
        "mutation"
    ]
    by_all = [
        bug["name"]
        for bug in bugs
        if any(test.split("::")[0] in files for test in bug["tests"])
        and not any(node.startswith(test) for node in run for test in bug["tests"])
    ]
    assert len(by_all) <= CAUGHT_BY_ALL_ALONE, by_all
