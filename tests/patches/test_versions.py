"""Every Megatron that is supported and has a wheel trains, by the patch or the hooks alone, and survives a death.

The wheel of 0.18 has no GPT script: small_gpt.py beside its tree makes a checkout of it.  0.19.2 is the
Megatron of all other tests.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recover_megatron.megatron_hooks.loop_counters import CONSUMED, LAUNCH
from recover_megatron.run_log.steps import StepRecord, audit_problem, read_steps
from tests.harness import REPOSITORY
from tests.harness.patience import patient
from tests.megatron_hooks.in_checkpoints import travels
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE
from tests.patches.conftest import WHEELS, apply, copy_of, launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheels")]

WAYS = [("0.18.2", "hooks"), ("0.18.2", "patch"), ("0.19.0", "hooks")]
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
        installed = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tree), "PyYAML"]
        done = subprocess.run(installed, capture_output=True, text=True, timeout=patient(300))
        if done.returncode != 0:  # what this wheel imports and the newest does not
            reason = done.stderr.strip().splitlines()[-1:]
            pytest.skip(f"NOT TESTED: Megatron {version}: pip could not install PyYAML: {reason}")
        shutil.copy(Path(__file__).with_name("small_gpt.py"), tree / "pretrain_gpt.py")
        shutil.copy(REPOSITORY / "tests" / "megatron_hooks" / "reference_gpt.py", tree)
    if way == "patch":
        done = apply(tree)
        assert done.returncode == 0, done.stderr
        script = str(tree / "pretrain_gpt.py")
    undisturbed = train(tree, tmp_path / "undisturbed", script, "--recover")
    steps = train(tree, tmp_path / "killed", script, "--recover", "--recover-inject", "1@3:backward#2")
    assert f"Megatron-Core {version}" in (tmp_path / "killed" / "worker-0.log").read_text() or script != OURS
    assert [step.replicas for step in steps] == [2, 2, 1, 1, 1, 1]
    assert [audit_problem(step) for step in steps] == [None] * 6
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in undisturbed], rel=1e-6)
    assert [step.grad_norm for step in steps] == pytest.approx([step.grad_norm for step in undisturbed], rel=1e-5)


def train(tree: Path, out: Path, script: str, *flags: str) -> list[StepRecord]:
    """Two replicas, with the tree's Megatron."""
    launch(tree, 2, out, script, *FLAGS, *flags)
    return list(read_steps(out / "steps.jsonl"))
