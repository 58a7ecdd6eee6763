"""test.sh: its exit status is right whatever fails, and nothing that the tests started outlives it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE

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
    return subprocess.Popen(
        [str(bin_folder.parents[1] / "scripts" / "test.sh"), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != "RECOVER_TESTS"},
    )


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


def test_pre_commits_hooks_are_what_ci_checks() -> None:
    checked = re.findall(r"(?m)^lint (.+)$", (REPOSITORY / "scripts" / "test.sh").read_text())
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text()
    assert checked
    assert re.findall(r"(?m)^ +entry: \.venv/bin/python -m (.+)$", hooks) == checked
