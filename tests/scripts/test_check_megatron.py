"""scripts/check_megatron.py: which functions of a Megatron fit, which have changed, which do not fit and why."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron import core

from scripts import check_megatron
from tests.harness import REPOSITORY
from tests.harness.processes import python

INSTALLED = Path(core.__file__).parents[1]
BUCKETS = "core/distributed/param_and_grad_buffer.py"
GROUP = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"


def said(checkout: Path, *flags: str) -> tuple[int, list[str], list[str]]:
    """(exit code, lines that were printed, reasons)."""
    done = python("scripts/check_megatron.py", str(checkout), *flags, cwd=REPOSITORY)
    assert "Traceback" not in done.stderr, done.stderr
    reasons = [line for line in done.stderr.splitlines() if line.startswith("does not fit: ")]
    return done.returncode, done.stdout.splitlines(), reasons


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the sources of the installed Megatron."""
    ignore = shutil.ignore_patterns("*.so", "*.pyc")
    shutil.copytree(INSTALLED, tmp_path / "megatron", ignore=ignore)
    return tmp_path


def altered(checkout: Path, file: str, alter: Callable[[str], str]) -> None:
    path = checkout / "megatron" / file
    text, new = path.read_text(), alter(path.read_text())
    assert new != text
    path.write_text(new)


def test_the_megatron_that_is_installed_fits_and_nothing_in_it_has_changed() -> None:
    code, lines, reasons = said(INSTALLED.parent)
    assert (code, lines[-1], reasons) == (0, "all fit", [])
    assert {line[:24].rstrip() for line in lines[1:-2]} == {"fits"}
    assert f"{'fits':24}{GROUP}.start_grad_sync" in lines
    assert f"{'fits':24}megatron.core.tensor_parallel.random.CheckpointWithoutOutput.__init__" in lines


def test_what_is_gone_or_takes_something_else_or_has_another_body_is_told_apart(checkout: Path) -> None:
    altered(
        checkout, BUCKETS, lambda its: its.replace("def start_grad_sync(self, ", "def start_grad_sync(self, when, ")
    )
    altered(checkout, BUCKETS, lambda its: its.replace("def finish_param_sync", "def end_param_sync"))
    altered(checkout, BUCKETS, lambda its: its.replace("per_param_grad_ready_counts", "counts"))
    altered(checkout, "core/parallel_state.py", lambda its: its.replace("def get_model_parallel_group", "def its"))
    altered(
        checkout, "training/training.py", lambda its: its.replace("    args = get_args()\n", "    a = get_args()\n")
    )
    altered(
        checkout, "core/pipeline_parallel/schedules.py", lambda its: its.replace('    """Backward step', '    """A')
    )
    altered(
        checkout,
        "core/pipeline_parallel/schedules.py",
        lambda its: its.replace("def backward_step(", "@traced\ndef backward_step("),
    )
    altered(
        checkout, "core/datasets/utils.py", lambda its: its.replace("def compile_helpers(", "def compile_helpers(j")
    )
    code, lines, reasons = said(checkout)
    assert (code, lines[-1]) == (1, "not all fit")
    assert f"{'does not fit':24}megatron.core.datasets.utils.compile_helpers" in lines
    assert f"{'does not fit':24}{GROUP}.start_grad_sync" in lines
    assert f"{'does not fit':24}{GROUP}.finish_param_sync" in lines
    assert f"{'fits, its body changed':24}megatron.training.training.train_step" in lines
    assert f"{'fits':24}megatron.core.pipeline_parallel.schedules.backward_step" in lines
    taken = f"{GROUP}.start_grad_sync takes (self, when, force_all_reduce), expected (self, force_all_reduce, ...)"
    assert reasons == [
        f"does not fit: {taken}",
        f"does not fit: {GROUP}.finish_param_sync does not exist",
        "does not fit: megatron.core.datasets.utils.compile_helpers has parameters (j), the host device expects ()",
        "does not fit: megatron.core.parallel_state.get_model_parallel_group does not exist",
        "does not fit: the name per_param_grad_ready_counts no longer occurs",
    ]


def test_where_no_megatron_is_installed_the_functions_alone_are_checked() -> None:
    code = (
        "import runpy, sys\n"
        "sys.modules['megatron'] = None\n"
        "runpy.run_path('scripts/check_megatron.py', run_name='__main__')\n"
    )
    done = python("-c", code, str(INSTALLED.parent), cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    first, *lines, last = done.stdout.splitlines()
    assert (first, last) == ("no Megatron is installed here: bodies are not compared", "all fit")
    assert f"{'fits':24}{GROUP}.start_grad_sync" in lines


def test_a_checkout_of_bridge_is_recognised_and_its_parameters_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: what wraps Bridge's functions imports Megatron, which takes its time."""
    command = ["check_megatron.py", str(REPOSITORY / "tests" / "doubles" / "bridge")]
    monkeypatch.setattr(sys, "argv", command)
    assert check_megatron.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all fit"
    monkeypatch.setattr(sys, "argv", [*command, "--json"])
    assert check_megatron.main() == 0
    assert '"megatron.bridge.training.train.train_step": "forward_step_func ' in capsys.readouterr().out


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    assert python("scripts/check_megatron.py", str(tmp_path), cwd=REPOSITORY).returncode == 2
