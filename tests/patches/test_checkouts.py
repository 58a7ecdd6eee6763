"""Real Megatron-LM checkouts, patched, by the runner, by the hooks alone: a run with deaths equals the stock one.

    MEGATRON_LM_CHECKOUTS=/path/to/core_v0.18.2:/path/to/core_v0.19.0 bash scripts/test.sh tests/patches

Each is copied before it is patched.  What it needs besides (docs/compatibility.md) must be there.  In each way, for
three replicas of two tensor-parallel workers:

    a worker is killed in its backward pass      the step is finished by the others; another worker is started, and
                                                 with the orphan makes a new third replica
    two, of one position, in one iteration       of the two orphans, which have the other, one takes that position:
                                                 it builds Megatron once more in its process
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from recover_megatron.run_log.steps import audit_problem, read_steps
from tests.instep.runs import GRAD_NORM, LAYOUTS, LOSS, MODEL, NO_EVALUATION
from tests.megatron_hooks.tiny import NO_DROPOUT, OURS
from tests.patches.conftest import LEFT_TO_PYTHON, apply, copy_of, launch

CHECKOUTS = [Path(path) for path in os.environ.get("MEGATRON_LM_CHECKOUTS", "").split(":") if path]
WHY_NOT = "NOT TESTED: MEGATRON_LM_CHECKOUTS names no Megatron-LM checkout"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.checkout,
    pytest.mark.skipif(not CHECKOUTS, reason=WHY_NOT),
    pytest.mark.xdist_group("checkouts"),
]

ITERATIONS = 80
"""Enough for a worker to be started, and to build its model, on a loaded machine."""
LAYOUT = next(layout for layout in LAYOUTS if layout.name == "tp2-dp3")
SLOWLY = ("--lr", "0.03", "--min-lr", "0.01")
"""Or rounding would grow from iteration to iteration."""
FLAGS = [*MODEL, *LAYOUT.argv, *NO_EVALUATION, *NO_DROPOUT, *SLOWLY, "--train-iters", str(ITERATIONS)]
LOGGED = re.compile(r" iteration +(\d+)/.* lm loss: (\S+) .* grad norm: (\S+) ")


@dataclass(frozen=True)
class Megatron:
    """A checkout, as it is and patched, and what it trains without --recover."""

    plain: Path
    patched: Path
    losses: list[float]
    grad_norms: list[float]

    def command(self, way: str) -> tuple[Path, list[str]]:
        """The Megatron to import and the script to run."""
        tree = self.patched if way == "patch" else self.plain
        return tree, [OURS] if way == "hooks" else [*LEFT_TO_PYTHON * (way == "patch"), str(tree / "pretrain_gpt.py")]


def train(tree: Path, out: Path, options: Sequence[str], script: Sequence[str], *flags: str) -> str:
    """Train to the end; returns what recover-run said."""
    return launch(tree, LAYOUT.grid.world, out, *options, *script, *FLAGS, *flags)


@pytest.fixture(scope="module", params=CHECKOUTS, ids=lambda path: path.name)
def megatron(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Megatron:
    folder = tmp_path_factory.mktemp(request.param.name)
    plain, patched = (copy_of(request.param, folder / name) for name in ("plain", "patched"))
    done = apply(patched)
    assert done.returncode == 0, done.stderr
    train(plain, folder / "stock", (), [OURS])
    log = (folder / "stock" / f"worker-{LAYOUT.grid.world - 1}.log").read_text()
    rows = [found.groups() for found in map(LOGGED.search, log.splitlines()) if found]
    assert [int(iteration) for iteration, _, _ in rows] == list(range(1, ITERATIONS + 1))
    return Megatron(
        plain,
        patched,
        [float(loss) for _, loss, _ in rows],
        [float(norm) for _, _, norm in rows],
    )


def check(megatron: Megatron, out: Path) -> list[int]:
    """The losses are the stock run's, each microbatch was counted once; returns the replicas of each iteration."""
    steps = list(read_steps(out / "steps.jsonl"))
    assert [step.iteration for step in steps] == list(range(1, ITERATIONS + 1))
    assert [audit_problem(step) for step in steps] == [None] * ITERATIONS
    losses = [step.loss for step in steps]
    losses[1] = (losses[0] + losses[1]) / 2  # as Megatron logs the second iteration
    assert losses == pytest.approx(megatron.losses, rel=LOSS)
    # Megatron logs three decimals of it.
    assert [step.grad_norm for step in steps] == pytest.approx(megatron.grad_norms, rel=GRAD_NORM, abs=0.6e-3)
    return [step.replicas for step in steps]


@pytest.mark.parametrize("way", ["patch", "runner", "hooks"])
def test_a_step_in_which_a_worker_is_killed_is_the_stock_one_and_another_worker_takes_its_place(
    megatron: Megatron, tmp_path: Path, way: str
) -> None:
    tree, script = megatron.command(way)
    faults = ("--recover", "--recover-inject", "3@3:backward#2")
    said = train(tree, tmp_path, ["--max-restarts", "1"], script, *faults)
    assert "worker 3 killed by SIGKILL" in said
    replicas = check(megatron, tmp_path)
    assert replicas[:3] == [3, 3, 2]
    assert replicas[-1] == 3, replicas
    assert "worker 6 takes position 1" in (tmp_path / "worker-6.log").read_text()


@pytest.mark.parametrize("way", ["patch", "runner", "hooks"])
def test_of_two_orphans_of_one_position_one_builds_the_model_of_the_other(
    megatron: Megatron, tmp_path: Path, way: str
) -> None:
    tree, script = megatron.command(way)
    train(tree, tmp_path, (), script, "--recover", "--recover-inject", "3@3:backward,5@3:forward")
    replicas = check(megatron, tmp_path)
    assert replicas[:3] == [3, 3, 1]
    assert replicas[-1] == 2, replicas
    logs = [(tmp_path / f"worker-{orphan}.log").read_text() for orphan in (2, 4)]
    assert sum("builds the model of position 1" in log for log in logs) == 1
