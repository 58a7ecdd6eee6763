"""``python -m recover_megatron.megatron_hooks SCRIPT``: what is inserted into a Megatron's modules, patched or not.

Megatron is one of a few functions here, of which a script uses some; test_patched_training.py trains with a real one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recover_megatron.megatron_hooks import patched
from tests.harness import REPOSITORY
from tests.harness.processes import python
from tests.patches.conftest import run

RUNNER = ("-m", "recover_megatron.megatron_hooks")
INSERTED = """
import sys
if "--recover" in sys.argv:
    from recover_megatron.megatron_hooks import patched
    {}
"""
MODULES = {
    "core/package_info": "MAJOR = 0\nMINOR = 19\nPATCH = 2\n",
    "core/parallel_state": "def initialize_model_parallel(size=1):\n    print('groups of', size)\n",
    "training/arguments": """
def parse_args(extra_args_provider=None, ignore_unknown_args=False): pass
def validate_args(args, defaults={}): pass
def is_te_min_version(version, check_equality=True): pass
""",
    "training/training": "def pretrain(cfg_container, *more):\n    print('trains')\n",
    "training/__init__": "import megatron.core\nfrom .training import pretrain\n",
}
PATCHED = {
    "core/__init__": "patched.before_megatron()",
    "training/arguments": "parse_args = patched.parsing(parse_args)",
    "training/training": "pretrain = patched.surviving(pretrain)",
}
WAYS = {"patch": (True, ()), "runner": (False, RUNNER), "both": (True, RUNNER)}
ways = pytest.mark.parametrize("way", WAYS)


def done(folder: Path, way: str, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a script with a Megatron, patched or not, by the runner or without."""
    is_patched, runner = WAYS[way]
    for name in {**MODULES, "core/__init__": ""}:
        file = folder / "megatron" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = INSERTED.format(PATCHED[name]) if is_patched and name in PATCHED else ""
        file.write_text(MODULES.get(name, "") + lines)
    (folder / "train.py").write_text(script)
    return run(folder, *runner, str(folder / "train.py"), *flags)


@pytest.mark.slow
@ways
@pytest.mark.parametrize("first", ["core", "training"])
def test_each_function_is_wrapped_once_and_the_device_is_chosen_before_anything_of_megatron(
    tmp_path: Path, way: str, first: str
) -> None:
    if way == "patch" and first == "training":
        pytest.skip("a patch's first lines run in megatron.core alone")
    script = f"""
import megatron.{first}
from megatron.core import parallel_state
from megatron.training import arguments, pretrain, training
from recover_megatron import hostdevice
print("on the host", hostdevice.is_active())
for function in (arguments.parse_args, training.pretrain, pretrain, parallel_state.initialize_model_parallel):
    ours = 0
    while function is not None:
        ours += function.__code__.co_filename.endswith("patched.py")
        function = getattr(function, "__wrapped__", None)
    print("ours", ours)
"""
    ended = done(tmp_path, way, script, "--recover", "--recover-device", "cpu")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["on the host True", *["ours 1"] * 4]


@pytest.mark.slow
@ways
def test_a_loop_that_is_not_megatrons_is_refused_before_it_trains(tmp_path: Path, way: str) -> None:
    script = "from megatron.core import parallel_state\nparallel_state.initialize_model_parallel()\nprint('trains')\n"
    ended = done(tmp_path, way, script, "--recover", "--recover-device", "cpu")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "train.py: error: --recover: this script creates Megatron's process groups without" in ended.stderr
    if way == "runner":
        assert done(tmp_path, way, script, "--recover-device", "cpu").stdout == "groups of 1\ntrains\n"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["patch", "runner"])
def test_groups_that_are_made_before_pretrain_are_refused(tmp_path: Path, way: str) -> None:
    script = """
from megatron.training import pretrain
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
pretrain(None)
"""
    script = script.replace("from", "import megatron.core\nfrom", 1)
    ended = done(tmp_path, way, script, "--recover", "--recover-device", "cpu")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "train.py: error: --recover: this script has created process groups before" in ended.stderr


@pytest.mark.slow
def test_without_recover_megatrons_own_function_is_called(tmp_path: Path) -> None:
    script = "from megatron.training import pretrain\npretrain(None)\n"
    ended = done(tmp_path, "runner", script, "--recover-device", "cpu")
    assert (ended.returncode, ended.stdout) == (0, "trains\n")


DROPS = """
import megatron.core, sys
{}
from megatron.training import arguments, pretrain, training
{}(None)
"""


@pytest.mark.slow
@ways
@pytest.mark.parametrize("call", ["arguments.parse_args", "training.pretrain"])
def test_a_script_that_takes_recover_out_of_its_arguments_does_not_train_unprotected(
    tmp_path: Path, way: str, call: str
) -> None:
    late = "import megatron.training.arguments; sys.argv = sys.argv[:1]"  # a patch asks when its module is imported
    ended = done(tmp_path, way, DROPS.format(late, call), "--recover", "--recover-device", "cpu")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "train.py: error: --recover was given, but this script has removed it from sys.argv" in ended.stderr


SPAWNS = """
import megatron.core, multiprocessing, sys
from recover_megatron import hostdevice
from recover_megatron.megatron_hooks import patched

def work(queue):
    from megatron.training import pretrain
    queue.put([hostdevice.is_active(), hasattr(pretrain, "is_ours"), __name__, sys.argv[1:]])

if __name__ == "__main__":
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    child = multiprocessing.get_context("spawn").Process(target=work, args=(queue,))
    child.start()
    child.join()
    print(queue.get())
"""


@pytest.mark.slow
@ways
def test_what_a_script_spawns_has_the_device_and_the_wrapped_functions_too(tmp_path: Path, way: str) -> None:
    ended = done(tmp_path, way, SPAWNS, "--recover", "--recover-device", "cpu")
    assert ended.stdout == "[True, True, '__mp_main__', ['--recover', '--recover-device', 'cpu']]\n", ended.stderr
    assert ended.stderr.count("[hostdevice]") == 1


@pytest.mark.slow
def test_a_megatron_whose_functions_are_others_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODULES, "training/training", "def pretrain(config):\n    print('trains')\n")
    ended = done(tmp_path, "runner", "import megatron.training\n", "--recover", "--recover-device", "cpu")
    assert ended.returncode == 2
    assert "train.py: error: --recover: megatron.training.training.pretrain takes (config)" in ended.stderr


@pytest.mark.parametrize(
    ("script", "flags", "says"),
    [
        ("", ["--recover"], True),
        ("import sys\nsys.exit()", ["--recover"], True),
        ("import sys\ndel sys.argv[1:]", ["--recover"], True),
        ("", ["--recover", "--help"], False),
        ("", ["--recover-log-dir", "logs"], False),
        ("import sys\nsys.exit(3)", ["--recover"], False),
        ("import recover_megatron.membership.io.session", ["--recover"], False),  # by which one takes part in a run
    ],
)
def test_a_script_that_used_nothing_of_recover_is_told_at_its_end(
    tmp_path: Path, script: str, flags: list[str], says: bool
) -> None:
    ended = done(tmp_path, "runner", script, *flags)
    assert ended.returncode == (3 if "3" in script else 0)
    assert ("train.py has ended without a call of Megatron's pretrain()" in ended.stderr) is says


SEES = """
import json, sys
class Annotated:
    x: int
print(json.dumps([sys.argv, __file__, sys.path[0], __package__ or None, __name__, str(Annotated.__annotations__)]))
"""


@pytest.mark.parametrize("safe_path", ["", "1"])
@pytest.mark.parametrize(
    "words", [["a folder/script.py"], ["./a folder/../link.py"], ["folder"], ["folder/"], ["-m", "folder.script"]]
)
@pytest.mark.parametrize("package", ["megatron_hooks", pytest.param("hostdevice", marks=pytest.mark.slow)])
def test_a_script_sees_what_it_would_without_a_runner(
    tmp_path: Path, package: str, words: list[str], safe_path: str
) -> None:
    for folder in ("a folder", "folder"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "script.py").write_text(SEES)
    (tmp_path / "folder" / "__main__.py").write_text(SEES)
    (tmp_path / "link.py").symlink_to("a folder/script.py")
    how = {"cwd": tmp_path, "PYTHONSAFEPATH": safe_path, "path": f"{REPOSITORY}:{tmp_path}"}
    plain = python(*words, "--x", "-m", **how)
    assert plain.returncode == 0, plain.stderr
    assert python("-m", f"recover_megatron.{package}", *words, "--x", "-m", **how).stdout == plain.stdout


def test_a_script_that_is_not_python_is_told_as_python_tells_it(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = (\n")
    plain = python("bad.py", cwd=tmp_path)
    ended = python(*RUNNER, "bad.py", "--recover", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (plain.returncode, plain.stderr)


@pytest.mark.parametrize("package", ["megatron_hooks", pytest.param("hostdevice", marks=pytest.mark.slow)])
def test_what_the_package_of_a_module_lacks_is_said(tmp_path: Path, package: str) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("import no_such_dependency\n")
    (tmp_path / "own" / "train.py").write_text("")
    ended = python("-m", f"recover_megatron.{package}", "-m", "own.train", "--recover", cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ModuleNotFoundError: No module named 'no_such_dependency'\n")
    missing = python("-m", f"recover_megatron.{package}", "-m", "no_such_package.train", cwd=tmp_path)
    assert missing.returncode == 2
    assert missing.stderr.endswith(f"[{package}] no module named no_such_package.train can be run\n")


def test_a_script_of_a_checkout_is_known_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkout" / "megatron" / "core").mkdir(parents=True)
    script, link = tmp_path / "checkout" / "pretrain_gpt.py", tmp_path / "train.py"
    script.write_text("")
    link.symlink_to(script)
    for its in (script, link):
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(its), raising=False)
        assert patched._is_megatrons()
