"""A script that knows nothing of this package: fault-tolerant with --recover, stock without it.

By a patch, by the runner that recover-run puts before it, or by both.  The installed wheel is patched in a copy, and
the script is the plain one of the parity tests; test_checkouts.py does the same with checkouts and their own
pretrain_gpt.py.
"""

from __future__ import annotations

import importlib.util
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from recover_megatron.arguments import RecoverConfig
from recover_megatron.megatron_hooks import patched
from recover_megatron.megatron_hooks.entry import flags, program
from recover_megatron.run_log.steps import audit_problem, read_steps
from tests.harness import REPOSITORY
from tests.harness.forkserver import ForkServer
from tests.instep.altered import altered
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, SCHEDULE, losses
from tests.patches.conftest import LEFT_TO_PYTHON, apply, copy_of, launch, run

pytestmark = pytest.mark.xdist_group("fork server")

SCRIPT = str(REPOSITORY / "tests" / "megatron_hooks" / "reference_gpt.py")
FLAGS = [*MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", "6"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched copy of the installed Megatron."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    (installed,) = spec.submodule_search_locations or ()
    tree = tmp_path_factory.mktemp("patched")
    copy_of(Path(installed), tree / "megatron")
    assert apply(tree).returncode == 0
    return tree


WHOLE_AGAIN = altered("pacing.patient", "5-:4")
"""From iteration 5 on the training waits for four replicas."""
WAYS = {
    # whether Megatron is patched, what the script is given to, flags, replicas at the end
    "patch": (True, LEFT_TO_PYTHON, (), 3),
    "runner": (False, (), (), 3),
    "both": (True, (), (), 3),
    "runner, replaced": (False, ("--max-restarts", "1", *WHOLE_AGAIN), (), 4),
    "runner, spare": (False, WHOLE_AGAIN, ("--recover-spares", "1"), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_step_in_which_a_worker_is_killed_is_that_of_the_stock_run(
    forkserver: ForkServer, tree: Path, tmp_path: Path, way: str
) -> None:
    is_patched, given_to, flags, replicas = WAYS[way]
    stock = forkserver.run(4, [SCRIPT, *FLAGS], tmp_path / "stock", losses=tmp_path / "stock.jsonl", documents=100_000)
    assert stock.ok, stock.tail()
    out, faults = tmp_path / "killed", ("--recover", "--recover-inject", "1@3:backward#2", *flags)
    said = launch(tree if is_patched else REPOSITORY, 4, out, *given_to, SCRIPT, *FLAGS, *faults)
    assert "worker 1 killed by SIGKILL" in said
    logs = "".join(log.read_text() for log in out.glob("worker-*.log"))
    assert logs.count("reference_gpt.py is not one of Megatron's training scripts") == 1
    steps = list(read_steps(out / "steps.jsonl"))
    assert [step.replicas for step in steps] == [4, 4, 3, *[step.replicas for step in steps[3:4]], replicas, replicas]
    assert [audit_problem(step) for step in steps] == [None] * 6
    expected = losses(tmp_path / "stock.jsonl")
    assert [step.loss for step in steps] == pytest.approx([row["loss"] for row in expected], rel=1e-6)
    assert [step.grad_norm for step in steps] == pytest.approx([row["grad_norm"] for row in expected], rel=1e-5)


@pytest.mark.slow
def test_without_recover_nothing_of_ours_is_imported_and_every_function_is_megatrons_own(tree: Path) -> None:
    code = (
        "import sys\n"
        "sys.argv = ['script.py', '--mock-data', '--recover-log-dir', 'x']  # not --recover\n"
        "import megatron.core, megatron.training\n"
        "from megatron.training import arguments, training\n"
        "print(megatron.core.__file__)\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'recover_megatron']\n"
        "for function in (arguments.parse_args, training.pretrain, megatron.training.pretrain):\n"
        "    assert function.__code__.co_filename.startswith(megatron.__path__[0]), function\n"
    )
    done = run(tree, "-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr
    assert str(tree) in done.stdout


RUNNER = ("-m", "recover_megatron.megatron_hooks")


@pytest.mark.slow
@pytest.mark.parametrize("runner", [(), RUNNER], ids=["patch", "runner"])
def test_what_cannot_be_recovered_is_refused_before_anything_starts_all_reasons_at_once(
    tree: Path, runner: tuple[str, ...]
) -> None:
    done = run(
        REPOSITORY if runner else tree,
        *runner,
        SCRIPT,
        *FLAGS,
        "--recover",
        "--inprocess-restart",
        "--enable-ft-package",
        "--te-rng-tracker",
    )
    assert done.returncode == 2
    said = done.stderr[done.stderr.index("reference_gpt.py: 3 errors:") :].splitlines()
    for line, reason in zip(
        said[1:],
        (
            "cannot be combined with --inprocess-restart yet",
            "cannot be combined with --enable-ft-package yet",
            "accepts --te-rng-tracker only with --recover-untested",
        ),
        strict=True,
    ):
        assert line.startswith(f"  - --recover {reason}: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_by_the_runner_help_lists_our_flags(tree: Path) -> None:
    done = run(REPOSITORY, *RUNNER, SCRIPT, "--help")
    assert done.returncode == 0, done.stderr
    assert "--recover-inject" in done.stdout
    assert "--tensor-model-parallel-size" in done.stdout


@pytest.mark.slow
def test_started_without_recover_run_it_says_what_to_start_it_with(tree: Path) -> None:
    done = run(tree, SCRIPT, *FLAGS, "--recover")
    assert done.returncode == 2
    assert "reference_gpt.py: error: --recover needs a coordinator: start the workers with recover-run" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_version_that_the_hooks_do_not_know_is_refused_before_its_first_line(tmp_path: Path) -> None:
    """Somebody has inserted the lines by hand."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    patch = (REPOSITORY / "patches" / "core_v0.19.0" / "recover.patch").read_text()
    inserted = [line[1:] for line in patch.split("diff --git")[1].splitlines() if line.startswith("+")][1:]
    assert "    patched.before_megatron()" in inserted
    (core / "__init__.py").write_text("\n".join([*inserted, "raise AssertionError('imported')"]))
    done = run(tmp_path, "-c", "import sys; sys.argv = ['train.py', '--recover']; import megatron.core")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"train.py: error: Megatron 0.16.1 in {tmp_path} is not supported")


def test_under_the_entry_script_a_patched_megatron_does_nothing_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_in_charge", True)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_recover.py", "--recover", "--recover-device", "nonsense"])
    asked = []

    def parse_args(extra_args_provider: object = None, ignore_unknown_args: bool = False) -> Namespace:
        asked.append((extra_args_provider, ignore_unknown_args))
        return Namespace()

    def pretrain(*given: object, **options: object) -> None:
        asked.append((given, options))

    def provider(parser: ArgumentParser) -> ArgumentParser:
        return parser

    patched.before_megatron()
    patched.parsing(parse_args)(provider)
    patched.surviving(pretrain)(1, store=None)
    assert asked == [(provider, False), ((1,), {"store": None})]


def test_a_script_that_is_not_megatrons_may_have_data_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one of Megatron's, by its place in a checkout, its flags say all."""
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    monkeypatch.setattr(program, "_in_charge", False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--recover"])
    found: list[list[str]] = []

    def problems(args: Namespace, config: RecoverConfig, *, may_have_data: bool = False) -> list[str]:
        found.append(flags._data(args, may_have_data))
        return []

    monkeypatch.setattr(flags, "problems", problems)
    names = ("pretrain_gpt.py", "examples/t5/pretrain_t5.py", "train.py", "mine/pretrain_gpt.py")
    for name in names:
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / name), raising=False)
        patched.parsing(lambda provider=None, ignore=False: Namespace())()
    assert [bool(reasons) for reasons in found] == [True, True, False, False]
