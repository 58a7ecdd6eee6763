"""Groups of tests stay together, whatever versions are installed; the fork server gives ids that were never used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import REPOSITORY
from tests.harness.forkserver import ForkServer
from tests.harness.processes import python
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
    done = python("-m", "pytest", *options, "--rootdir", tmp_path, tmp_path, cwd=REPOSITORY, seconds=300)
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


def said(folder: Path, worker: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"worker-{worker}.log").read_text().splitlines() if line[:1] == "{"]


def test_spares_and_one_in_place_of_each_that_ended_join_the_run(forkserver: ForkServer, tmp_path: Path) -> None:
    script = str(REPOSITORY / "tests" / "agreeing.py")
    argv = [script, "10", "0.05", "--recover", "--recover-heartbeat-interval", "0.5"]
    strikes = json.dumps([[1, 10, "kill"], [4, 0, 7]])  # the first one started in place of another fails, too
    environment = {"AGREEING_STRIKES": strikes, "AGREEING_AWAITS": "[3, 5]"}
    nodes = ["a", "b", "c"]
    run = forkserver.run(3, argv, tmp_path, environment=environment, spares=1, restarts=2, nodes=nodes)
    assert run.codes == [0, -9, 0], run.tail()
    assert run.more == {3: 0, 4: 7, 5: 0}, run.tail()
    spare, first, second = (said(tmp_path, worker) for worker in (3, 4, 5))
    assert spare[0] | {"pid": 0} == {
        "event": "starts", "worker": 3, "pid": 0, "RANK": "0", "LOCAL_RANK": "3", "WORLD_SIZE": "3",
        "RECOVER_JOIN": "1", "RECOVER_SPARE": "1", "RECOVER_REPLACED": "1", "RECOVER_NODE_NAME": "c",
    }  # fmt: skip
    for successor in (first, second):
        assert (successor[0]["RANK"], successor[0]["RECOVER_NODE_NAME"]) == ("1", "b")
        assert "RECOVER_SPARE" not in successor[0]
    plans = [line["members"] for line in said(tmp_path, 0) if line["event"] == "plan"]
    assert plans[-1] == [0, 2, 3, 5]
    assert [4 in line["members"] for line in first if line["event"] == "plan"] == [True], "it was in the run"


def test_who_comes_when_the_run_is_over_is_ended(forkserver: ForkServer, tmp_path: Path) -> None:
    script = str(REPOSITORY / "tests" / "agreeing.py")
    environment = {"AGREEING_STRIKES": json.dumps([[0, 3, "kill"]]), "AGREEING_LATE": "1"}
    environment["AGREEING_UNTIL"] = str(tmp_path / "go")  # made by the one that comes
    run = forkserver.run(2, [script, "10", "0.1", "--recover"], tmp_path, environment=environment, restarts=1)
    assert run.codes == [-9, 0]
    assert run.more == {2: -9}
