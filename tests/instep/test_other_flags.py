"""Workers that were started with other flags than the run get no place, and nothing of theirs is summed."""

from __future__ import annotations

from pathlib import Path

import pytest

from recover_megatron.collectives.comparison import ComparedStatus, odd_ones
from recover_megatron.instep.faults import EXIT_REFUSED
from recover_megatron.run_log.steps import audit_problem, read_steps
from recover_megatron.status.folder import candidates
from tests.harness.forkserver import ForkServer
from tests.harness.processes import free_port
from tests.instep.altered import altered
from tests.instep.conftest import Runs
from tests.instep.runs import Case, Layout
from tests.test_end_to_end import finished, launch, wait_until_iteration
from tests.test_joined_replicas import SECRET, training, undisturbed


def placed(flags: str) -> ComparedStatus:
    return ComparedStatus(flags, placed=True, holds=True)


def spare(flags: str, version: int | None = None) -> ComparedStatus:
    return ComparedStatus(flags, holds=version is not None)


@pytest.mark.parametrize(
    ("statuses", "odd", "model"),
    [
        ({}, set(), -1),
        ({0: placed(""), 1: spare("")}, set(), -1),
        ({0: placed("a"), 1: placed("a"), 2: spare("a"), 3: spare("")}, set(), 0),
        ({0: placed("a"), 5: spare("b"), 6: spare("b"), 7: spare("b")}, {5, 6, 7}, 0),
        ({0: placed("b"), 1: placed("a"), 2: placed("a")}, {0}, 1),
        ({0: placed("b"), 1: placed("a")}, {1}, 0),
        ({3: spare("a", version=7), 5: spare("b"), 6: spare("b")}, {5, 6}, 3),
        ({3: spare("a"), 5: spare("b"), 6: spare("b")}, {3}, 5),
    ],
)
def test_the_flags_of_the_run_are_those_of_who_has_a_place_then_of_who_holds_a_state(
    statuses: dict[int, ComparedStatus], odd: set[int], model: int
) -> None:
    found = odd_ones(statuses)
    assert (found.workers, found.model) == (odd, model)


@pytest.mark.slow
def test_a_launcher_that_joins_with_another_learning_rate_is_turned_away_and_the_run_goes_on(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    plain = undisturbed(forkserver, tmp_path / "undisturbed", 2, 24)
    out, port = tmp_path / "run", str(free_port())
    waits = [*altered("pacing.patient", "1-1:2"), *altered("pacing.awaiting", "8:told:turned away")]
    script = [*waits, *training(24)]
    run = launch(
        out, "--nproc-per-node", "2", "--master-port", port, *script, "--recover-log-dir", str(out), environment=SECRET
    )
    wait_until_iteration(out, 2)
    joins = ["--join", "--recover-coordinator", candidates(out), "--world-size", "2", "--master-port", port]
    other = [*script, "--lr", "0.123", "--recover-log-dir", str(tmp_path / "elsewhere")]
    joined = launch(
        tmp_path / "joined", "--nproc-per-node", "1", "--max-restarts", "2", *joins, *other, environment=SECRET
    )
    said = finished(joined, EXIT_REFUSED)
    (out / "told").write_text("turned away")
    finished(run)
    assert "was started with other flags than worker 0 of the run: --lr 0.001 0.123 (the run: 0.001)" in said
    assert "the run has refused all workers of this node" in said
    assert len(list((tmp_path / "joined").glob("worker-*.log"))) == 1, "nobody is started in its place"
    steps = list(read_steps(out / "steps.jsonl"))
    assert [audit_problem(step) for step in steps] == [None] * 24
    assert [step.replicas for step in steps] == [2] * 24
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in plain], rel=1e-6)


@pytest.mark.slow
def test_a_launch_whose_workers_have_different_flags_does_not_begin(runs: Runs) -> None:
    result = runs(Case(Layout("dp3", 3)).altered("instruments.other_flag", 1, "--lr", 0.1))
    assert result.ended.codes == [EXIT_REFUSED] * 3, result.told()
    said = "was started with other flags than worker 0 of the run: --lr 0.1 (the run: 0.3)"
    assert all(said in result.log(worker) for worker in range(3)), result.told()
    assert result.steps == []
