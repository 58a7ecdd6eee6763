"""scripts/apply_patches.sh on the trees inside the wheels of each supported Megatron; each then trains and survives."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from recover_megatron.megatron_hooks.loop.loop_counters import CONSUMED, LAUNCH
from recover_megatron.megatron_hooks.monkeypatch import NEWEST, OLDEST, parse_release
from recover_megatron.run_log.steps import StepRecord, audit_problem, read_steps
from tests.harness import REPOSITORY
from tests.harness.processes import python
from tests.megatron_hooks.in_checkpoints import travels
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE
from tests.patches.conftest import FILES, LEFT_TO_PYTHON, WHEELS, apply, contents, copy_of, launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheels")]

PATCHES = sorted((REPOSITORY / "patches").glob("*/recover.patch"))


@pytest.fixture
def tree(wheel: tuple[str, Path], tmp_path: Path) -> Path:
    """A copy of the wheel's tree, to be changed."""
    return copy_of(wheel[1], tmp_path / "tree")


def test_it_is_checked_applied_once_and_taken_back_byte_for_byte(wheel: tuple[str, Path], tree: Path) -> None:
    version, name = wheel[0], WHEELS[wheel[0]]
    before = contents(tree)

    def says(expected: str, *arguments: str) -> None:
        done = apply(*arguments, tree)
        assert (done.returncode, done.stderr) == (0, "")
        assert (
            done.stdout == f"apply_patches: {expected} (Megatron {version})" + done.stdout[done.stdout.index(")") + 1 :]
        )

    says(f"would apply {name} in {tree}", "--check")
    says(f"{name} is not applied in {tree}", "--reverse")
    assert contents(tree) == before
    says(f"applied {name} in {tree}")
    after = contents(tree)
    assert sorted(path for path in after if after[path] != before.get(path)) == list(FILES)
    says(f"{name} is applied already in {tree}")
    says(f"{name} is applied already in {tree}", "--check")
    says(f"would revert {name} in {tree}", "--reverse", "--check")
    assert contents(tree) == after
    says(f"reverted {name} in {tree}", "--reverse")
    assert contents(tree) == before


def test_the_seams_are_the_functions_that_are_wrapped(wheel: tuple[str, Path], tree: Path) -> None:
    """Each is there when the inserted lines run, takes what its wrapper gives it, and is wrapped once."""
    assert apply(tree).returncode == 0
    parameters = {
        "parse_args": ["extra_args_provider", "ignore_unknown_args"],
        "pretrain": ["cfg_container"],
    }
    for path, (name, expected) in zip(FILES[1:], parameters.items(), strict=True):
        module = ast.parse((tree / path).read_text())
        (function,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name)
        (wrapping,) = (node for node in module.body if f"{name} = patched." in ast.unparse(node))
        assert isinstance(wrapping, ast.If)
        assert ast.unparse(wrapping.test) == "'--recover' in sys.argv"
        assert function.lineno < wrapping.lineno
        assert [argument.arg for argument in function.args.args][: len(expected)] == expected
        before = [node for node in module.body if node.lineno < wrapping.lineno]
        assert any(isinstance(node, ast.Import) and node.names[0].name == "sys" for node in before)
    first = next(node for node in ast.parse((tree / FILES[0]).read_text()).body if isinstance(node, ast.If))
    assert "patched.before_megatron()" in ast.unparse(first)


def test_a_file_that_was_changed_elsewhere_is_patched_and_keeps_the_change(tree: Path) -> None:
    training = tree / FILES[2]
    training.write_text(training.read_text().replace("import gc\n", "import gc\n\n# a line of ours\n", 1))
    before = contents(tree)
    assert apply(tree).returncode == 0
    assert "# a line of ours" in training.read_text()
    assert apply("--reverse", tree).returncode == 0
    assert contents(tree) == before


def assert_refused(tree: Path, ways: Iterable[list[str]], *words: str) -> None:
    """And left as it is."""
    before = contents(tree)
    for arguments in ways:
        done = apply(*arguments, tree)
        assert done.returncode == 1
        assert all(each in done.stderr for each in words)
    assert contents(tree) == before


@pytest.mark.parametrize("path", FILES)
def test_files_that_were_changed_at_the_seam_are_refused_and_left_as_they_are(tree: Path, path: str) -> None:
    beside = dict(zip(FILES, ("import torch", "    return args", "    one_logger_utils.finish()"), strict=True))[path]
    text = (tree / path).read_text()
    assert f"{beside}\n" in text
    (tree / path).write_text(text.replace(f"{beside}\n", f"{beside}  # theirs\n"))
    assert_refused(tree, ([], ["--check"]), f"{path}: patch does not apply", "nothing was changed")


@pytest.mark.parametrize("path", FILES)
def test_a_tree_of_which_one_file_is_not_patched_is_refused_either_way(tree: Path, path: str) -> None:
    original = (tree / path).read_bytes()
    assert apply(tree).returncode == 0
    (tree / path).write_bytes(original)
    assert_refused(tree, ([], ["--reverse"]), "or contain parts of it already")


def test_a_checkout_of_git_is_patched_wherever_the_command_is_run(tree: Path, tmp_path: Path) -> None:
    """In a repository of its own, in a folder of another repository, and by a relative path."""
    for repository in (tree.parent, tree):
        subprocess.run(["git", "init", "-q", str(repository)], check=True)
        done = apply(tree.name, cwd=tree.parent)
        assert done.stdout.startswith("apply_patches: applied"), done.stderr
        assert "patched by recover_megatron" in (tree / FILES[2]).read_text()
        assert apply("--reverse", ".", cwd=tree).stdout.startswith("apply_patches: reverted")


# ---- without a wheel ---------------------------------------------------------------------------------------------


def fake_checkout(root: Path, version: str) -> Path:
    core = root / "megatron" / "core"
    core.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    (core / "package_info.py").write_text("".join(f"{name} = {number}\n" for name, number in parts))
    return root


@pytest.mark.parametrize("version", ["0.17.1", "0.18.0", "0.20.0"])
def test_an_unknown_version_is_refused_by_name_with_the_known_ones(tmp_path: Path, version: str) -> None:
    done = apply(fake_checkout(tmp_path, version))
    assert done.returncode == 2
    assert f"error: there is no patch for Megatron {version} ({tmp_path})" in done.stderr
    assert "supported versions: 0.18.2, 0.19.0, 0.19.1, 0.19.2\n" in done.stderr


def test_a_folder_that_is_no_megatron_and_a_wrong_command_line_are_refused(tmp_path: Path) -> None:
    assert "is not a Megatron-LM checkout: it has no megatron/core/package_info.py" in apply(tmp_path).stderr
    assert "no checkout was given" in apply().stderr
    assert "unknown option --revert" in apply("--revert", tmp_path).stderr
    assert "give one" in apply(tmp_path, tmp_path).stderr
    for arguments in ([tmp_path], [], ["--revert", tmp_path], [tmp_path, tmp_path]):
        assert apply(*arguments).returncode == 2


def test_help_says_how_it_is_used() -> None:
    done = apply("--help")
    assert done.returncode == 0
    assert "scripts/apply_patches.sh --reverse CHECKOUT" in done.stdout


def test_every_patched_version_is_one_that_the_hooks_support() -> None:
    versions = [v for patch in PATCHES for v in (patch.parent / "versions").read_text().split()]
    assert len(versions) == len(set(versions))
    assert all(OLDEST <= parse_release(version) <= NEWEST for version in versions)


def test_the_patches_insert_the_same_lines_and_remove_none() -> None:
    inserted = set()
    for patch in PATCHES:
        lines = patch.read_text().splitlines()
        body = [line for line in lines if not line.startswith(("+++", "---"))]
        assert not any(line.startswith("-") for line in body)
        inserted.add("\n".join(line for line in lines if line.startswith("+")))
    assert len(inserted) == 1


WAYS = [("0.18.2", "hooks"), ("0.18.2", "patch"), ("0.18.2", "runner"), ("0.19.0", "hooks")]
SHARDED = ["--use-distributed-optimizer", "--overlap-grad-reduce"]
FLAGS = [*MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, *SHARDED, "--train-iters", "6"]


def test_each_wheel_is_trained_with_by_this_file_or_by_all_others() -> None:
    assert {*dict(WAYS), "0.19.2"} == WHEELS.keys()


@pytest.mark.parametrize(("wheel", "way"), WAYS, indirect=["wheel"])
def test_a_step_in_which_a_worker_is_killed_is_that_of_the_undisturbed_run(
    wheel: tuple[str, Path], tmp_path: Path, way: str
) -> None:
    version = wheel[0]
    travels(wheel[1] / "megatron", {*CONSUMED, *LAUNCH})
    tree = copy_of(wheel[1], tmp_path / "tree")
    script = OURS
    if version < "0.19":
        done = python("-m", "pip", "install", "-q", "--no-deps", "--target", tree, "PyYAML", seconds=300)
        if done.returncode != 0:  # what this wheel imports and the newest does not
            reason = done.stderr.strip().splitlines()[-1:]
            pytest.skip(f"NOT TESTED: Megatron {version}: pip could not install PyYAML: {reason}")
        shutil.copy(Path(__file__).with_name("small_gpt.py"), tree / "pretrain_gpt.py")
        shutil.copy(REPOSITORY / "tests" / "megatron_hooks" / "reference_gpt.py", tree)
    given_to = LEFT_TO_PYTHON if way == "patch" else ()
    if way != "hooks":
        script = str(tree / "pretrain_gpt.py")
    if way == "patch":
        done = apply(tree)
        assert done.returncode == 0, done.stderr
    undisturbed = train(tree, tmp_path / "undisturbed", *given_to, script, *FLAGS, "--recover")
    faults = ("--recover", "--recover-inject", "1@3:backward#2")
    steps = train(tree, tmp_path / "killed", *given_to, script, *FLAGS, *faults)
    assert f"Megatron-Core {version}" in (tmp_path / "killed" / "worker-0.log").read_text() or script != OURS
    assert [step.replicas for step in steps] == [2, 2, 1, 1, 1, 1]
    assert [audit_problem(step) for step in steps] == [None] * 6
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in undisturbed], rel=1e-6)
    assert [step.grad_norm for step in steps] == pytest.approx([step.grad_norm for step in undisturbed], rel=1e-5)


def train(tree: Path, out: Path, *command: str) -> list[StepRecord]:
    """Two replicas, with the tree's Megatron."""
    launch(tree, 2, out, *command)
    return list(read_steps(out / "steps.jsonl"))
