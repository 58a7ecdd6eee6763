"""The list of deliberate bugs fits the tree, and what the script that tries them says of caught and uncaught ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import mutation_check
import pytest
from mutation_check import LIST, REPOSITORY, VERDICTS, Mutation, problems, read

from tests.harness.processes import alive, python
from tests.harness.waiting import DEADLINE

MUTATIONS = read(REPOSITORY / LIST)
FAIR = """
[[mutation]]
name = "fair"
promise = "Two is more than one."
file = "recover_megatron/rule.py"
old = 'return one > other'
new = 'return one >= other'
tests = ["tests/test_rule.py::test_more"]
"""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_deliberate_bug_can_still_be_made_and_its_tests_are_there(mutation: Mutation) -> None:
    assert problems(mutation, REPOSITORY) == [], "update tests/mutations/mutations.toml"


def test_there_is_a_bug_for_each_rule_and_no_name_twice() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 18


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working tree with one rule, whose test leaves the equality of its arguments out."""
    root = tmp_path / "project"
    for name, text in {
        "recover_megatron/rule.py": "def more(one: int, other: int) -> bool:\n    return one > other\n",
        "tests/test_rule.py": "from recover_megatron.rule import more\n\n\n"
        "def test_more() -> None:\n    assert more(2, 1) and not more(1, 2)\n",
        str(LIST): FAIR,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


def rewrite(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def run(root: Path, *arguments: str) -> int:
    return mutation_check.main(["--root", str(root), *arguments])


def recorded(root: Path) -> dict[str, str]:
    """The only verdict in the file that the script writes."""
    (found,) = json.loads((root / VERDICTS).read_text())
    return found


@pytest.mark.slow
def test_what_no_test_notices_is_told_and_the_tree_is_as_it_was(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(project) == 1
    assert "0 of 1 caught;" in capsys.readouterr().out
    found = recorded(project)
    assert (found["id"], found["promise"], found["verdict"]) == ("fair", "Two is more than one.", "survived")
    rewrite(project / "tests/test_rule.py", "more(1, 2)", "more(1, 1)")
    before = {path: path.read_text() for path in sorted(project.rglob("*.py"))}
    assert run(project, "--no-baseline") == 0
    assert recorded(project)["verdict"] == "caught"
    assert recorded(project)["test"] == "tests/test_rule.py::test_more"
    assert {path: path.read_text() for path in sorted(project.rglob("*.py"))} == before


@pytest.mark.slow
def test_a_test_that_fails_anyway_proves_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(project / "tests/test_rule.py", "more(2, 1)", "more(1, 2)")
    assert run(project) == 2
    assert "these tests must pass before" in capsys.readouterr().err


@pytest.mark.slow
def test_a_bug_that_only_keeps_the_tests_from_running_is_not_caught(project: Path) -> None:
    rewrite(project / LIST, "'return one >= other'", "'return one >'")
    assert run(project, "--no-baseline") == 1
    assert recorded(project)["verdict"] == "no verdict"


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("recover_megatron/rule.py", "one > other", "one - other > 0", "find the rewritten code"),
        ("recover_megatron/rule.py", "def", "# return one > other\ndef", "its text occurs 2 times"),
        ("tests/test_rule.py", "test_more", "test_fewer", "test tests/test_rule.py::test_more does not exist"),
        (str(LIST), "rule.py", "other.py", "it is now in recover_megatron/rule.py"),
    ],
)
def test_an_entry_that_does_not_fit_the_tree_is_named(
    project: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str, said: str
) -> None:
    rewrite(project / file, old, new)
    assert run(project) == 2
    told = capsys.readouterr().err
    assert told.startswith("mutation fair: ")
    assert said in told


IN_PLACE_OF_PYTEST = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
with open({told!r}, "w") as file:
    file.write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGTERM)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("entry", "drawn"), [("", None), ("all = true\n", "all")], ids=["of CI", "of --all"])
def test_the_tests_of_a_bug_are_drawn_as_its_entry_says(
    project: Path, monkeypatch: pytest.MonkeyPatch, entry: str, drawn: str | None
) -> None:
    monkeypatch.setenv("RECOVER_MATRIX", "all")  # of whoever calls it
    told = project / "told"
    (project / "pytest.py").write_text(
        f"import os\nwith open({str(told)!r}, 'a') as file:\n    print(os.environ.get('RECOVER_MATRIX'), file=file)\n"
    )
    (project / LIST).write_text(FAIR + entry)
    assert run(project) == 1, "a pytest that does nothing lets the bug survive"
    assert told.read_text().split() == [str(drawn)] * 2, "without the bug, and with it"


@pytest.mark.parametrize("options", [[], ["--no-baseline"]], ids=["without a mutation", "with one"])
def test_a_check_that_is_stopped_ends_the_tests_that_it_runs(project: Path, options: list[str]) -> None:
    told = project / "pid"
    (project / "pytest.py").write_text(IN_PLACE_OF_PYTEST.format(told=str(told)))
    done = python(REPOSITORY / "scripts" / "mutation_check.py", "--root", project, "--timeout", 60, *options)
    tests = int(told.read_text())
    try:
        assert done.returncode == -signal.SIGINT, done.stderr
        assert not alive(tests)
    finally:
        if alive(tests):
            os.kill(tests, signal.SIGKILL)


def test_tests_that_are_started_while_a_stopped_check_ends_the_others_are_ended(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "pytest.py").write_text("")
    stopped = threading.Event()
    monkeypatch.setattr(mutation_check, "_stopped", stopped)
    assert mutation_check.pytest([], project, DEADLINE) == (0, "")
    stopped.set()
    assert mutation_check.pytest([], project, DEADLINE)[0] is None, "nobody waits for its end any more"
    assert not mutation_check._running
