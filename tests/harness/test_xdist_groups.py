"""Groups of tests stay together, whatever versions of pytest and pytest-xdist are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import REPOSITORY
from tests.harness.xdist_groups import processes_for

TESTS = """
import pathlib
import pytest

@pytest.fixture
def forkserver(): ...

def note(kind, worker_id, number):
    (pathlib.Path(__file__).parent / f"{kind}-{worker_id}-{number}").touch()

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_marked(number, worker_id):
    note("marked", worker_id, number)

@pytest.mark.parametrize("number", range(8))
def test_fork_server(number, worker_id, forkserver):
    note("forkserver", worker_id, number)
"""


@pytest.mark.slow
def test_the_tests_of_a_group_and_those_of_the_fork_server_run_in_one_process_each(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    options = ["-p", "tests.harness.xdist_groups", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadgroup"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("marked", "forkserver"):
        notes = [path.name.split("-") for path in tmp_path.glob(f"{kind}-*")]
        assert len(notes) == 8
        assert len({worker for _, worker, _ in notes}) == 1


@pytest.mark.parametrize(
    ("arguments", "processes"),
    [
        (["tests"], 3),
        (["tests/instep", "tests/test_layers.py"], 3),
        (["tests/test_layers.py"], 0),
        (["tests/test_layers.py::test_it", "tests/test_circles.py"], 0),
    ],
)
def test_folders_are_run_by_several_processes_and_files_by_the_one_that_was_started(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], processes: int
) -> None:
    monkeypatch.setenv("RECOVER_TEST_PROCESSES", "3")
    assert processes_for(arguments) == processes
