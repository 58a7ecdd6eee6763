"""Every command of the project says its version, which stands in one place."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from recover_megatron import __version__
from tests.harness import REPOSITORY as ROOT
from tests.harness.processes import finished

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
INSTALLED = PROJECT["project"]["scripts"]
MODULES = sorted(path.parent.name for path in (ROOT / "recover_megatron").glob("*/__main__.py"))
SCRIPTS = sorted(
    [
        *(ROOT / "scripts").glob("*.sh"),
        *(ROOT / "scripts").glob("*.py"),
        ROOT / "pretrain_gpt_recover.py",
    ]
)


def said(*command: object) -> str:
    run = finished(*command, "--version", cwd="/")
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


@pytest.mark.parametrize("command", sorted(INSTALLED))
def test_an_installed_command_says_its_version(command: str) -> None:
    module, _, function = INSTALLED[command].partition(":")
    start = f"import sys; from {module} import {function}; sys.exit({function}())"
    assert said(sys.executable, "-c", start) == f"{command} {__version__}\n"


@pytest.mark.parametrize("package", MODULES)
def test_a_package_that_is_a_command_says_its_version(package: str) -> None:
    name, _, version = said(sys.executable, "-m", f"recover_megatron.{package}").rpartition(" ")
    assert name
    assert version == f"{__version__}\n"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_says_its_version(script: Path) -> None:
    interpreter = [sys.executable] if script.suffix == ".py" else []
    name = {"quickstart.py": "quickstart.sh", "gpu_checks.py": "gpu_checks.sh"}.get(script.name, script.name)
    assert said(*interpreter, script) == f"{name} {__version__}\n"


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "recover_megatron.__version__"}
