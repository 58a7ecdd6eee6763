"""setup.sh: the Python it finds, when it installs and when it does not, what an interrupted or a second run does.

Nothing is installed: the Python is a stub that notes what it is asked to do, `make` for a virtual environment, `pip`
for an installation.  Every file of the script's own is real.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE

STUB = r"""#!/usr/bin/env bash
here="$FAKE"
case "$*" in
    "-E -s -c import os; print"*) cat "$here/lacks" ;;
    "-E -s -c "*) echo "ok $here/python" ;;
    "-I -m venv "*)
        echo "make ${*:4}" >>"$here/calls"
        mkdir -p "${!#}/bin"
        cp "$here/python" "${!#}/bin/python" ;;
    "-I -m pip --version") ;;
    "-m pip install "*)
        echo "pip $*" >>"$here/calls"
        cat "$here/output"
        cat "$here/gate" >/dev/null   # an empty file, or a pipe that the test opens when it has seen enough
        exit "$(cat "$here/status")" ;;
    "-I -c import torch"*) echo 2.99.0 ;;
    "-I -c "*) cat "$here/version" ;;
    "-I --version") echo Python 3.12.99 ;;
    *) echo "stub: unexpected: $*" >&2; exit 99 ;;
esac
"""


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


class Checkout:
    """A checkout with the real scripts and the stub for a Python."""

    def __init__(self, folder: Path, fake: Path) -> None:
        self.root = folder
        self.fake = fake
        shutil.copytree(REPOSITORY / "scripts" / "lib", self.root / "scripts" / "lib")
        for name in ("setup.sh", "constraints.txt"):
            shutil.copy(REPOSITORY / "scripts" / name, self.root / "scripts" / name)
        (self.root / "pyproject.toml").write_text("# as it is\n")
        put(fake / "python", STUB)
        answers = {"calls": "", "output": "", "gate": "", "status": "0", "version": "3.12.99\n", "lacks": ""}
        for name, text in answers.items():
            (fake / name).write_text(text)

    def start(self, **changes: str | None) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RECOVER_")}
        environment = {**kept, "FAKE": str(self.fake), "RECOVER_PYTHON": str(self.fake / "python"), **changes}
        env = {name: value for name, value in environment.items() if value is not None}
        return subprocess.Popen(
            [str(self.root / "scripts" / "setup.sh")], env=env, cwd="/", stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, status: int = 0, **changes: str | None) -> str:
        """Run the script to its end; returns what it said."""
        process = self.start(**changes)
        said = process.communicate(timeout=DEADLINE)[1]
        assert process.returncode == status, said
        return said

    def calls(self) -> list[str]:
        """What was asked of the Python since the last call: the first words, `make` and `pip`."""
        lines = (self.fake / "calls").read_text().splitlines()
        (self.fake / "calls").write_text("")
        return [line.split()[0] for line in lines]

    @contextlib.contextmanager
    def pip_at_work(self) -> Iterator[subprocess.Popen[str]]:
        """A run whose pip is at work; it goes on after this, and later ones' are through at once."""
        gate = self.fake / "gate"
        gate.unlink()
        os.mkfifo(gate)
        process = self.start()
        with gate.open("w"):  # opened when pip has opened it for reading
            gate.unlink()
            gate.write_text("")
            yield process


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout", tmp_path / "fake")


def test_it_installs_what_has_changed_and_nothing_where_nothing_has(checkout: Checkout) -> None:
    checkout.run()
    assert checkout.calls() == ["make", "pip"]
    assert checkout.run() == ""
    assert checkout.calls() == []
    for changed in (checkout.root / "pyproject.toml", checkout.root / "scripts/constraints.txt"):
        changed.write_text(changed.read_text() + "# changed\n")
        checkout.run()
        assert checkout.calls() == ["pip"]
    (checkout.fake / "version").write_text("3.12.100\n")
    checkout.run()
    assert checkout.calls() == ["pip"]
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    checkout.run()
    assert checkout.calls() == ["make", "pip"]


def test_a_python_that_was_built_for_an_older_linux_is_taken_and_named(checkout: Checkout) -> None:
    (checkout.fake / "lacks").write_text("pidfd_open memfd_create\n")
    said = checkout.run()
    assert f"note: {checkout.fake}/python is built for an older Linux and lacks os.pidfd_open, os.memfd_create." in said
    assert checkout.calls() == ["make", "pip"]


def test_pip_is_told_the_pins_and_the_checkout_with_its_spaces(checkout: Checkout) -> None:
    checkout.run()
    call = (checkout.fake / "calls").read_text().splitlines()[-1]
    assert f"--editable {checkout.root}[dev]" in call
    assert "torch==2.15.0" in (checkout.root / ".venv" / ".setup-pins").read_text().splitlines()


def test_a_failed_installation_is_told_with_pips_words_and_done_afresh_next_time(checkout: Checkout) -> None:
    (checkout.fake / "output").write_text("ERROR: No matching distribution found for torch\n")
    (checkout.fake / "status").write_text("1")
    said = checkout.run(status=1)
    assert "No matching distribution found for torch" in said
    assert "PIP_INDEX_URL" in said
    assert checkout.calls() == ["make", "pip"]
    (checkout.fake / "status").write_text("0")
    checkout.run()
    assert checkout.calls() == ["make", "pip"]


def test_what_a_killed_run_left_is_not_used(checkout: Checkout) -> None:
    with checkout.pip_at_work() as process:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE)
    left = checkout.root / ".venv" / "half-written"
    left.write_text("")
    checkout.calls()
    assert "the last run was interrupted" in checkout.run()
    assert checkout.calls() == ["make", "pip"]
    assert not left.exists()


def test_a_second_run_waits_for_the_first_and_does_not_install_too(checkout: Checkout) -> None:
    with checkout.pip_at_work() as first:
        second = checkout.start()
        assert second.stderr is not None
        assert "waiting for it" in second.stderr.readline()
    for process in (first, second):
        said = process.communicate(timeout=DEADLINE)[1]
        assert process.returncode == 0, said
    assert checkout.calls() == ["make", "pip"]


def test_an_environment_that_is_not_ours_is_left_alone(checkout: Checkout) -> None:
    own = checkout.root / ".venv" / "pyvenv.cfg"
    own.parent.mkdir()
    own.write_text("mine")
    assert "was not created by this script" in checkout.run(status=1)
    assert own.read_text() == "mine"
    assert sorted(own.parent.iterdir()) == [own]


def test_choices_are_remembered(checkout: Checkout) -> None:
    checkout.run(RECOVER_CONSTRAINTS="/dev/null", RECOVER_TORCH="keep")
    assert (checkout.root / ".venv" / ".setup-pins").read_text() == "torch==2.99.0\n"
    assert "make --system-site-packages" in (checkout.fake / "calls").read_text()
    checkout.calls()
    checkout.run(RECOVER_PYTHON=None)
    assert checkout.calls() == []
    checkout.run(RECOVER_TORCH="")
    assert checkout.calls() == ["make", "pip"]


def test_the_chosen_python_is_remembered_through_a_failed_installation(checkout: Checkout) -> None:
    (checkout.fake / "status").write_text("1")
    checkout.run(status=1)
    (checkout.fake / "status").write_text("0")
    checkout.run(RECOVER_PYTHON=None)
    assert checkout.calls() == ["make", "pip", "make", "pip"]
    assert (checkout.root / ".venv" / ".setup-choices").read_text().splitlines()[1] == str(checkout.fake / "python")


def test_kept_torch_replaces_the_pin_of_torch_alone(checkout: Checkout) -> None:
    checkout.run(RECOVER_TORCH="keep")
    pins = (checkout.root / ".venv" / ".setup-pins").read_text().splitlines()
    assert [pin for pin in pins if pin.startswith("torch==")] == ["torch==2.99.0"]
    assert "megatron-core==0.19.2" in pins


def test_an_unknown_choice_is_refused_before_anything_is_made(checkout: Checkout) -> None:
    assert "the only value is: keep" in checkout.run(status=1, RECOVER_TORCH="cpu")
    assert "cannot read" in checkout.run(status=1, RECOVER_CONSTRAINTS="/nonexistent")
    assert not (checkout.root / ".venv").exists()


def test_only_large_downloads_are_shown(checkout: Checkout) -> None:
    (checkout.fake / "output").write_text(
        "Collecting torch\n  Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl (526.1 MB)\n"
        "  Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)\n  Downloading x-1-cp312-cp312-linux.whl (9.1 MB)\n"
        "Installing collected packages: six, torch\n"
    )
    said = checkout.run()
    assert "Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl (526.1 MB)\n" in said
    assert "Installing collected packages\n" in said
    assert "six-1" not in said
    assert "x-1" not in said
    assert "six-1.17.0" in (checkout.root / ".venv" / "setup.log").read_text()


FINDER = REPOSITORY / "scripts" / "lib" / "find_python.sh"

SHIM = "#!/bin/sh\necho 'command not found; it exists in these versions: 3.12.1' >&2\nexit 127\n"
# The probe is the fourth argument (-E -s -c PROBE): it is run with a changed idea of what Python this is.
PRETENDS = '#!/bin/sh\nexec \'{python}\' -E -s -c "import sys; {what}; exec(sys.argv[1])" "$4"\n'


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
        (python("3.12", "sys.modules['ensurepip'] = None"), "cannot create virtual environments"),
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
    assert find(machine, "probe_python python3").stdout.startswith("no cannot create virtual environments")


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
