"""CI runs the same tests and draws every time; its list fits the tree; tables that scripts write into the docs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import recipe_table
from mutation_check import exists

from tests.harness import REPOSITORY, ci_list
from tests.harness.ci_list import CHOSEN, LEFT_OUT, among, left_out, listed, quarantined, without_a_test
from tests.harness.patience import MOST
from tests.harness.waiting import DEADLINE
from tests.instep.cells import PHASES, drawn
from tests.instep.runs import CONTEXT_LAYOUTS, LAYOUTS

TOOLS = ("spin", "slurmctld", "ip", "chromium")
"""What .ci/run would install if they were missing: here nothing is."""
CAUGHT_BY_ALL_ALONE = 5
"""Deliberate bugs at most: the others are caught by tests that CI runs (docs/contributing.md)."""


def test_ci_runs_what_the_readme_says_whatever_is_set_around_it(tmp_path: Path) -> None:
    root = tmp_path / "a checkout"
    for folder in (".ci", "scripts", "bin"):
        (root / folder).mkdir(parents=True)
    shutil.copy(REPOSITORY / ".ci" / "run", root / ".ci" / "run")
    said = "echo \"arguments: $*; set: $(env | grep -E '^RECOVER_(TESTS|MATRIX|SEED|EXAMPLES|SOAK)=')\"\n"
    (root / "scripts" / "test.sh").write_text(f"#!/bin/sh\n{said}")
    for tool in TOOLS:
        (root / "bin" / tool).write_text("#!/bin/sh\n")
        (root / "bin" / tool).chmod(0o755)
    around = {f"RECOVER_{name}": "7" for name in ("TESTS", "MATRIX", "SEED", "EXAMPLES", "SOAK")}
    env = {**os.environ, **around, "PATH": f"{root / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(root / ".ci" / "run")]
    ran = subprocess.run(command, env=env, cwd="/", check=True, capture_output=True, text=True)
    assert ran.stdout == "arguments: ; set: \n"
    assert "`bash scripts/test.sh`" in (REPOSITORY / "README.md").read_text()


def said_by(module: str, name: str, **environment: str) -> str:
    """What a process of tests takes for a value of one of its modules."""
    apart = ("RECOVER_TESTS", "RECOVER_SEED", "RECOVER_MATRIX", "RECOVER_TEST_PATIENCE")
    env = {name: value for name, value in os.environ.items() if name not in apart} | environment
    command = [sys.executable, "-c", f"import os; from {module} import {name}; print({name}, os.environ)"]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, check=True, capture_output=True, text=True)
    return done.stdout


def draws(**environment: str) -> str:
    """The seed that a process of tests draws by."""
    return said_by("tests.drawn", "SEED", **environment).split()[0]


def test_a_seed_is_taken_and_drawn_for_all_tests_alone() -> None:
    assert draws() == draws(RECOVER_SEED="7") != "7"
    assert draws(RECOVER_TESTS="all", RECOVER_SEED="7") == "7"


def test_limits_are_multiplied_by_the_factor_that_is_said_or_measured_once_for_all() -> None:
    assert said_by("tests.harness.waiting", "DEADLINE", RECOVER_TEST_PATIENCE="2.5").split()[0] == "300.0"
    factor, environment = said_by("tests.harness.patience", "PATIENCE").split(maxsplit=1)
    assert 1 <= float(factor) <= MOST
    assert f"'RECOVER_TEST_PATIENCE': '{float(factor):g}'" in environment, "processes that are started take its number"


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


@pytest.mark.parametrize("everything", [False, True])
def test_what_is_in_quarantine_is_skipped_by_ci_with_a_line_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everything: bool
) -> None:
    away = {"test": "t/a.py::f", "date": "2026-01-31", "how": "late", "times": "1 of 40"}
    (tmp_path / "ci.toml").write_text('[step]\n"t/a.py::g" = "what only it shows"\n')
    lines = [f'{name} = "{value}"' for name, value in away.items()]
    (tmp_path / "quarantine.toml").write_text("\n".join(["[[test]]", *lines]))
    monkeypatch.setattr(ci_list, "TESTS", tmp_path)
    monkeypatch.setattr(ci_list, "ALL", everything)
    marks: list[tuple[str, str]] = []
    items = [item(node, slow) for node, slow in (("t/a.py::f[1]", False), ("t/a.py::g", True), ("t/a.py::h", True))]
    for one in items:
        one.add_marker = lambda mark, node=one.nodeid: marks.append((node, mark.kwargs["reason"]))
    deselected = SimpleNamespace(pytest_deselected=lambda items: None)
    config: Any = SimpleNamespace(args=["tests"], stash={}, hook=deselected)
    ci_list.pytest_collection_modifyitems(config, items)
    nodes = [one.nodeid for one in items]
    if everything:
        assert (nodes, marks) == (["t/a.py::f[1]", "t/a.py::g", "t/a.py::h"], [])
    else:
        assert nodes == ["t/a.py::f[1]", "t/a.py::g"]
        assert marks == [("t/a.py::f[1]", "IN QUARANTINE since 2026-01-31: late")]
    assert config.stash[CHOSEN] == set(nodes)


def test_the_end_of_a_run_tells_the_seconds_of_each_folder() -> None:
    def report(node: str, duration: float) -> pytest.TestReport:
        return pytest.TestReport(node, ("", 0, ""), {}, "passed", None, "call", duration=duration)

    said: list[str] = []
    passed = [report("tests/launch/test_a.py::f", 2), report("tests/instep/test_b.py::g[1]", 3)]
    stats = {"passed": passed, "failed": [report("tests/launch/test_a.py::h", 4)], "warnings": [object()]}
    reporter: Any = SimpleNamespace(stats=stats, write_line=said.append)
    ci_list.pytest_terminal_summary(reporter)
    assert said[0] == "seconds by folder: launch 6, instep 3"


def test_every_line_of_the_list_names_a_test_and_says_why() -> None:
    table = listed()
    assert [name for name in table if not exists(name, REPOSITORY)] == []
    assert [name for name, why in table.items() if len(why) < 10] == []


def test_the_quarantine_is_small_and_says_since_when_and_how() -> None:
    entries = quarantined()
    assert len(entries) <= 5
    assert [name for name in entries if not exists(name, REPOSITORY)] == []
    assert all({"date", "how", "times"} < entry.keys() for entry in entries.values())


def test_the_deliberate_bugs_are_caught_by_what_ci_runs(pytestconfig: pytest.Config) -> None:
    chosen = pytestconfig.stash[CHOSEN]
    files = {node.split("::")[0] for node in chosen | pytestconfig.stash[LEFT_OUT]}
    listing = tomllib.loads((REPOSITORY / "tests" / "mutations" / "mutations.toml").read_text())
    bugs = [bug for bug in listing["mutation"] if any(test.split("::")[0] in files for test in bug["tests"])]
    by_all = [bug["name"] for bug in bugs if not any(among(node, bug["tests"]) for node in chosen)]
    assert by_all == [bug["name"] for bug in bugs if bug.get("all")], "no others can be tried without all = true"
    assert len(by_all) <= CAUGHT_BY_ALL_ALONE, by_all


STUB = r"""#!/usr/bin/env bash
here="${BASH_SOURCE[0]%/*}"
echo "$*" >>"$here/calls"
echo "tests: ${RECOVER_TESTS-those of CI}" >>"$here/calls"
case "$2" in
    ruff | mypy) exit "$(cat "$here/$2")" ;;
    pytest)
        case "$(cat "$here/pytest")" in
            wait)
                # What a test left behind; it holds the pipe `alive` open for writing as long as it lives.
                sleep 600 >"$here/alive" &
                trap 'echo "interrupted" >>"$here/calls"; exit 2' INT
                echo started
                while :; do sleep 600 & wait $!; done ;;
            leave)
                sleep 599 >"$here/alive" &
                until grep -qx sleep "/proc/$!/comm"; do :; done # until then its arguments are those of this script
                echo "3 passed in 0.01s" ;;
            *) echo "3 passed in 0.01s"; exit "$(cat "$here/pytest")" ;;
        esac ;;
esac
"""


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """.venv/bin of a checkout with the real test.sh, a setup.sh that does nothing, and a stub for Python."""
    folder = tmp_path / "a checkout" / ".venv" / "bin"
    folder.mkdir(parents=True)
    scripts = tmp_path / "a checkout" / "scripts"
    scripts.mkdir()
    shutil.copy(REPOSITORY / "scripts" / "test.sh", scripts / "test.sh")
    for path, text in ((scripts / "setup.sh", "#!/bin/sh\n"), (folder / "python", STUB)):
        path.write_text(text)
        path.chmod(0o755)
    for tool in ("ruff", "mypy", "pytest"):
        (folder / tool).write_text("0")
    return folder


def ended(bin_folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit status, and what it said on stdout and stderr."""
    process = start(bin_folder, *arguments)
    out, err = process.communicate(timeout=DEADLINE)
    return process.returncode, out, err


def start(bin_folder: Path, *arguments: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != "RECOVER_TESTS"}
    return subprocess.Popen(
        [str(bin_folder.parents[1] / "scripts" / "test.sh"), *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/", env=env,
    )  # fmt: skip


def test_pytests_closing_line_is_the_last_of_a_good_run(bin_folder: Path) -> None:
    code, out, _ = ended(bin_folder, "--fast", "-k", "two words")
    assert code == 0
    assert out.splitlines()[-1] == "3 passed in 0.01s"
    processes = os.environ.get("RECOVER_TEST_PROCESSES", "2")
    called = f"-m pytest -n {processes} --dist loadgroup --durations=20 -m not slow -k two words"
    assert called in (bin_folder / "calls").read_text()


@pytest.mark.parametrize(
    ("arguments", "tests"), [(["tests/launch"], "those of CI"), (["--all", "tests/launch"], "all")]
)
def test_all_tests_of_a_place_run_where_that_is_asked_for(bin_folder: Path, arguments: list[str], tests: str) -> None:
    assert ended(bin_folder, *arguments)[0] == 0
    assert (bin_folder / "calls").read_text().endswith(f"--durations=20 tests/launch\ntests: {tests}\n")


@pytest.mark.parametrize(("tool", "status"), [("ruff", 1), ("mypy", 1), ("pytest", 5)])
def test_each_failure_alone_fails_the_run(bin_folder: Path, tool: str, status: int) -> None:
    (bin_folder / tool).write_text(str(status))
    code, _, err = ended(bin_folder)
    assert code == status
    assert "pytest" in (bin_folder / "calls").read_text()  # it ran all the same
    assert ("lint failed" in err) == (tool != "pytest")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_lets_pytest_clean_up_and_leaves_no_process(bin_folder: Path, number: signal.Signals) -> None:
    (bin_folder / "pytest").write_text("wait")
    os.mkfifo(bin_folder / "alive")
    process = start(bin_folder)
    with (bin_folder / "alive").open("rb") as alive:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        process.communicate(timeout=DEADLINE)
        assert process.returncode != 0
        assert "interrupted" in (bin_folder / "calls").read_text()
        assert alive.read() == b""  # ends only when nobody holds the pipe any more


def test_processes_that_the_tests_have_left_are_ended_and_named(bin_folder: Path) -> None:
    (bin_folder / "pytest").write_text("leave")
    code, out, err = ended(bin_folder)  # returns when nobody holds its pipes any more
    assert (code, out.splitlines()[-1]) == (0, "3 passed in 0.01s")
    assert re.search(r"\n== killed processes that the tests left behind:\n +\d+ sleep 599\n", err)
    (bin_folder / "pytest").write_text("0")
    assert "left" not in ended(bin_folder)[2]


def test_pre_commits_hooks_are_what_ci_checks() -> None:
    checked = re.findall(r"(?m)^lint (.+)$", (REPOSITORY / "scripts" / "test.sh").read_text())
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text()
    assert checked
    assert re.findall(r"(?m)^ +entry: \.venv/bin/python -m (.+)$", hooks) == checked


def test_a_configuration_is_refused_by_every_flag_that_cannot_be_kept() -> None:
    found = {its.recipe.name: its for its in recipe_table.verdicts()}
    assert len(found) > 270
    fsdp = found["examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8"]
    assert fsdp.answer is recipe_table.Answer.UNTESTED
    assert fsdp.reasons == ("delayed FP8 scaling (--fp8-recipe delayed, Megatron's default)",)
    mixtral = found["release/mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release"]
    assert (mixtral.answer, mixtral.reasons, mixtral.unknown) == (recipe_table.Answer.TAKEN, (), ())


def test_what_this_megatron_does_not_know_of_a_recipe_is_named_and_the_rest_is_judged() -> None:
    found = {its.recipe.name: its for its in recipe_table.verdicts()}
    run = found["performance/swiss-ai/apertus_70b"]
    assert {"--optimizer ademamix", "--goldfish-loss"} <= set(run.unknown)
    graphs = found["performance/moe-model-zoo/qwen3_235b_256xh100"]
    assert graphs.answer is recipe_table.Answer.SWITCHED
    assert "CUDA graphs" in graphs.reasons
