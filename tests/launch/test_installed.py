"""From an installed wheel, outside of the checkout: recover-run finds the training script that comes with it."""

import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from recover_megatron import __version__
from recover_megatron.launch.command_line import readers
from recover_megatron.tools import __main__ as tools
from tests.harness import REPOSITORY
from tests.harness.processes import python

pytestmark = pytest.mark.xdist_group("installed")

NAME = "pretrain_gpt_recover.py"
STALE = "of_an_earlier_build.py"
"""A module that was removed since then."""
REFUSED = ["--recover"]
REFUSAL = f"{NAME}: error: Megatron 0.16.1 in"
"""By the script, of the Megatron beside it in ``site``, before it imports it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, and nothing of the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", NAME):
        shutil.copy(REPOSITORY / name, source)
    for folder in ("recover_megatron", "patches", "scripts", "examples", "docs", "tests/doubles"):
        shutil.copytree(REPOSITORY / folder, source / folder)
    (source / "tests" / "__init__.py").touch()
    earlier = source / "build" / "lib" / "recover_megatron" / STALE
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "install", *offline, "--target", target, source], check=True, cwd=source)
    core = target / "megatron" / "core"
    core.mkdir(parents=True)
    for folder in (core.parent, core):
        (folder / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    return target


def run_installed(
    site: Path, folder: Path, command: str, *argv: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return python(site / "bin" / command, *argv, cwd=folder, path=site, seconds=300, **environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [[NAME], ["-m", "pretrain_gpt_recover"], ["--module", "pretrain_gpt_recover"]],
)
def test_an_installed_recover_run_finds_its_script_in_any_folder(site: Path, tmp_path: Path, words: list[str]) -> None:
    flags = [*REFUSED, "--recover-device", "cpu"]
    run = run_installed(site, tmp_path, "recover-run", "--nproc-per-node", "2", *words, *flags)
    assert run.returncode == 2, run.stderr
    assert REFUSAL in run.stderr  # by the script itself, which has run
    assert "does not exist" not in run.stderr
    if NAME in words:
        assert f"{NAME} is not in this folder: using the installed {site / NAME}" in run.stderr


@pytest.mark.slow
def test_the_wheel_has_the_version_the_commands_and_the_data_files(site: Path) -> None:
    (metadata,) = site.glob("recover_megatron-*.dist-info")
    assert metadata.name == f"recover_megatron-{__version__}.dist-info"
    assert {path.name for path in (site / "bin").iterdir()} >= {
        "recover-run",
        "recover-coordinator",
        "recover-report",
        "recover-status",
        "recover-tools",
    }
    assert (site / NAME).is_file()
    assert not (site / "tests").exists()
    assert not (site / "recover_megatron" / STALE).exists()
    package = REPOSITORY / "recover_megatron"
    files = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    missing = [path for path in files if "__pycache__" not in path.parts and not (site / package.name / path).is_file()]
    assert not missing


@pytest.mark.slow
def test_what_comes_beside_the_modules_is_found_in_any_folder(site: Path, tmp_path: Path) -> None:
    typed = partial(run_installed, site, tmp_path, "recover-tools")
    listed = typed()
    assert listed.returncode == 0, listed.stderr
    assert str(site / "recover_megatron" / "shipped" / "scripts" / "slurm") in listed.stdout
    assert typed("copy", "slurm", tmp_path / "mine").returncode == 0
    assert (tmp_path / "mine" / "slurm" / "recover.sbatch").is_file()
    assert "exists already" in typed("copy", "slurm", tmp_path / "mine").stderr
    assert typed("patch", "--version").stdout == f"apply_patches.sh {__version__}\n"
    assert "is not a Megatron-LM checkout" in typed("patch", tmp_path).stderr
    assert "recover-tools patch --check CHECKOUT" in typed("patch", "--help").stdout
    assert typed("corpus", "--version").stdout == f"recover-tools corpus {__version__}\n"


@pytest.mark.slow
def test_the_gpu_checks_of_a_wheel_run(site: Path, tmp_path: Path) -> None:
    """All that they need is in it: without a GPU they say so, on the host device they pass."""
    checks = partial(run_installed, site, tmp_path, "recover-tools", "gpu-checks")
    none = checks(CUDA_VISIBLE_DEVICES="", PYTHONSAFEPATH="1")
    assert none.returncode == 3, none.stderr
    assert none.stdout.count("not run: no CUDA device") == 17
    rehearsed = checks("--rehearse", "--only", "2 ranks", "--seconds", "3000")
    assert rehearsed.returncode == 0, rehearsed.stdout + rehearsed.stderr
    assert "| ok |" in rehearsed.stdout


def test_what_is_copied_can_be_edited_where_the_package_may_only_be_read(tmp_path: Path) -> None:
    theirs = tmp_path / "shipped" / "scripts" / "slurm"
    theirs.mkdir(parents=True)
    (theirs / "run.sh").touch(0o555)
    theirs.chmod(0o555)
    assert tools.copy("slurm", tmp_path, tmp_path / "shipped") == 0
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "slurm", tmp_path / "slurm" / "run.sh")]
    assert modes == [0o755, 0o755]


@pytest.mark.slow
def test_an_index_shows_no_link_that_leads_nowhere(site: Path) -> None:
    (metadata,) = site.glob("recover_megatron-*.dist-info/METADATA")
    text = metadata.read_text()
    assert "Description-Content-Type: text/markdown" in text
    assert "Classifier: Typing :: Typed" in text
    assert "](docs/" not in text
    assert "docs/operations.md" in text


@pytest.mark.slow
def test_a_file_in_the_current_folder_is_what_is_run(site: Path, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("print('of this folder')")
    run = run_installed(site, tmp_path, "recover-run", NAME, *REFUSED)
    assert run.returncode == 0, run.stderr
    assert "of this folder" in run.stdout
    assert "installed" not in run.stderr


def test_only_the_bare_name_means_the_installed_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(REPOSITORY))
    assert readers.installed_module(NAME) == ("pretrain_gpt_recover", str(REPOSITORY / NAME))
    assert readers.installed_module(f"./{NAME}") is None
    assert readers.installed_module("setup.py") is None
    (tmp_path / NAME).symlink_to(tmp_path / "gone")  # a mistake that is to be said
    assert readers.installed_module(NAME) is None


@pytest.mark.parametrize(
    "version", ["2.10.0a0+b558c986e8.nv25.11", "2.11.0a0+eb65b36914.nv26.02", "2.10.0", "2.13.0+cpu", "2.15.1"]
)
def test_the_torch_of_nvidias_containers_is_accepted(version: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (wanted,) = [line for line in project["dependencies"] if line.startswith("torch>")]
    accepted = SpecifierSet(wanted.removeprefix("torch"))
    assert accepted.contains(Version(version))
    assert not accepted.contains(Version("2.16.0"))
    assert not accepted.contains(Version("2.9.0a0+nv25.09"), prereleases=True)


def test_the_commands_for_gpus_leave_what_is_installed_alone_and_bring_the_bindings_of_nccl() -> None:
    """Without ``-c`` pip would replace a container's torch or Megatron that is not of a version we support."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (bindings,) = [line for line in extras["gpu"] if line.startswith("nccl4py")]
    block = (REPOSITORY / "README.md").read_text(encoding="utf-8").partition("## Install")[2].split("```\n")[1]
    kept, install, _ = (shlex.split(line, comments=True) for line in block.splitlines())
    assert kept == ["pip", "list", "--format=freeze", ">", "installed.txt"]
    assert install == ["pip", "install", "-c", "installed.txt", ".", bindings]
