"""The Python finder: a candidate counts only if it runs and fits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE

FINDER = REPOSITORY / "scripts" / "lib" / "find_python.sh"

SHIM = "#!/bin/sh\necho 'command not found; it exists in these versions: 3.12.1' >&2\nexit 127\n"
# The probe is the fourth argument (-E -s -c PROBE): it is run with a changed idea of what Python this is.
PRETENDS = '#!/bin/sh\nexec \'{python}\' -E -s -c "import sys; {what}; exec(sys.argv[1])" "$4"\n'


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def python(version: str, more: str = "pass") -> str:
    what = f"sys.version_info = {(*map(int, version.split('.')), 0, 'final', 0)}; {more}"
    return PRETENDS.format(python=sys.executable, what=what)


def called(name: Path) -> str:
    """The Python at ``name`` works, and says that this is its path."""
    return python("3.12", f"sys.executable = {str(name)!r}; sys.base_prefix = sys.prefix")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine without any Python: folders for PATH and HOME, and the tools that the finder uses."""
    for tool in ("bash", "sh", "timeout", "cat"):
        found = shutil.which(tool)
        assert found
        (tmp_path / "tools").mkdir(exist_ok=True)
        (tmp_path / "tools" / tool).symlink_to(found)
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    return tmp_path


def find(machine: Path, what: str = "find_python", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euc", f"source '{FINDER}'; system_python_folders=(); {what}"],
        env={"PATH": f"{machine / 'bin'}:{machine / 'tools'}", "HOME": str(machine / "home"), **environment},
        cwd=machine, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=DEADLINE, check=False,
    )  # fmt: skip


def test_a_shim_that_does_not_run_is_passed_over_for_one_that_does(machine: Path) -> None:
    put(machine / "bin" / "python3.12", SHIM)
    good = machine / "home" / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3.12"
    put(good, called(good))
    assert find(machine).stdout == f"{good}\n"


def test_the_second_python_of_a_name_on_path_is_tried_too(machine: Path) -> None:
    put(machine / "bin" / "python3", python("3.11"))
    good = put(machine / "later" / "python3", called(machine / "later" / "python3"))
    found = find(machine, PATH=f"{machine / 'bin'}:{machine / 'later'}:{machine / 'tools'}")
    assert found.stdout == f"{good}\n"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (python("3.11"), "python3 is Python 3.11"),
        (python("3.14"), "python3 is Python 3.14"),
        (python("2.7"), "python3 is Python 2.7"),
        (python("3.12", "sys.modules['ensurepip'] = None"), "cannot make virtual environments"),
    ],
    ids=["3.11", "3.14", "2.7", "no ensurepip"],
)
def test_an_unfit_python_is_refused_with_the_reason_and_a_remedy(machine: Path, found: str, reason: str) -> None:
    put(machine / "bin" / "python3", found)
    answer = find(machine)
    assert (answer.returncode, answer.stdout) == (1, "")
    for said in (reason, "apt install python3.12 python3.12-venv", "RECOVER_PYTHON="):
        assert said in answer.stderr


def test_a_folder_called_venv_does_not_pass_for_the_module(machine: Path) -> None:
    (machine / "venv").mkdir()
    (machine / "ensurepip").mkdir()
    hides = "sys.path[:] = [p for p in sys.path if not p]; sys.path_importer_cache.clear()"
    put(machine / "bin" / "python3", python("3.12", hides))
    assert find(machine, "probe_python python3").stdout.startswith("no cannot make virtual environments")


def test_recover_python_is_taken_before_all_others_and_not_replaced_where_it_is_unfit(machine: Path) -> None:
    put(machine / "bin" / "python3.12", called(machine / "bin" / "python3.12"))
    own = put(machine / "my own" / "python", called(machine / "my own" / "python"))
    assert find(machine, RECOVER_PYTHON=str(own)).stdout == f"{own}\n"
    found = find(machine, RECOVER_PYTHON=str(put(machine / "old" / "python", python("3.9"))))
    assert (found.returncode, found.stdout) == (1, "")
    assert "is Python 3.9" in found.stderr


def test_a_virtual_environments_python_is_answered_with_the_one_behind_it(machine: Path) -> None:
    behind = "/opt/real/bin/python3.12"
    more = f"sys.prefix = '/somewhere/.venv'; sys.base_prefix = '/opt/real'; sys._base_executable = '{behind}'"
    put(machine / "bin" / "python3", python("3.12", more))
    assert find(machine).stdout == f"{behind}\n"


def test_this_very_python_is_found_fit(machine: Path) -> None:
    found = find(machine, RECOVER_PYTHON=sys.executable)
    assert found.returncode == 0, found.stderr
    assert os.access(found.stdout.strip(), os.X_OK)
