"""setup.sh: when it installs, when it does not, and what an interrupted or a second run does.

The Python is a stub that notes what it is asked to do, so that nothing is installed: `make` for a virtual environment,
`pip` for an installation.  Every file of the script's own is real.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE

STUB = r"""#!/usr/bin/env bash
here="$FAKE"
case "$*" in
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


class Checkout:
    """A checkout with the real scripts and the stub for a Python."""

    def __init__(self, folder: Path, fake: Path) -> None:
        self.root = folder
        self.fake = fake
        (self.root / "scripts").mkdir(parents=True)
        shutil.copytree(REPOSITORY / "scripts" / "lib", self.root / "scripts" / "lib", dirs_exist_ok=True)
        for name in ("setup.sh", "constraints.txt"):
            shutil.copy(REPOSITORY / "scripts" / name, self.root / "scripts" / name)
        (self.root / "pyproject.toml").write_text("# as it is\n")
        fake.mkdir()
        (fake / "python").write_text(STUB)
        (fake / "python").chmod(0o755)
        for name, text in {"calls": "", "output": "", "gate": "", "status": "0", "version": "3.12.99\n"}.items():
            (fake / name).write_text(text)

    def start(self, **changes: str | None) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RECOVER_")}
        environment = {**kept, "FAKE": str(self.fake), "RECOVER_PYTHON": str(self.fake / "python"), **changes}
        return subprocess.Popen(
            [str(self.root / "scripts" / "setup.sh")],
            env={name: value for name, value in environment.items() if value is not None},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

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


def test_pip_is_told_the_pins_and_the_checkout_with_its_spaces(checkout: Checkout) -> None:
    checkout.run()
    call = (checkout.fake / "calls").read_text().splitlines()[-1]
    assert f"--editable {checkout.root}[dev]" in call
    assert "torch==2.13.0" in (checkout.root / ".venv" / ".setup-pins").read_text().splitlines()


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
    assert "did not come to its end" in checkout.run()
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
    assert "was not made by this script" in checkout.run(status=1)
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
    assert "can be: keep" in checkout.run(status=1, RECOVER_TORCH="cpu")
    assert "cannot read" in checkout.run(status=1, RECOVER_CONSTRAINTS="/nonexistent")
    assert not (checkout.root / ".venv").exists()


def test_only_large_downloads_are_shown(checkout: Checkout) -> None:
    (checkout.fake / "output").write_text(
        "Collecting torch\n  Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl (526.1 MB)\n"
        "  Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)\n  Downloading x-1-cp312-cp312-linux.whl (9.1 MB)\n"
        "Installing collected packages: six, torch\n"
    )
    said = checkout.run()
    assert "downloading torch-2.13.0 (526 MB)" in said
    assert "unpacking 2 packages" in said
    assert "six-1" not in said
    assert "x-1" not in said
    assert "six-1.17.0" in (checkout.root / ".venv" / "setup.log").read_text()
