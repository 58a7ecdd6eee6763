"""The audit says what was accumulated: it must tell when that is not what should have been."""

from __future__ import annotations

from pathlib import Path

import pytest

from recover_megatron.run_log.steps import audit_problem, read_steps
from recover_megatron.workload.domains import data_parallel_ranks_per_replica
from tests.harness.forkserver import ForkServer, Run
from tests.megatron_hooks.tiny import MOCK, MODEL, OURS, SCHEDULE

pytestmark = pytest.mark.slow

GOOD = [*MODEL, *SCHEDULE, *MOCK, "--train-iters", "4", "--recover"]


def sabotaged(forkserver: ForkServer, out: Path, what: str) -> Run:
    script = str(Path(__file__).parent / "sabotage.py")
    return forkserver.run(2, [script, what, *GOOD, "--recover-log-dir", str(out)], out, timeout=120)


def test_a_worker_that_left_out_a_backward_pass_is_put_down_and_its_microbatches_are_run_by_others(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    run = sabotaged(forkserver, tmp_path, "lost-backward")
    assert run.codes == [0, 1], run.tail()
    assert "added the gradients of 3 microbatches, not of its 4" in run.logs[1].read_text()
    steps = list(read_steps(tmp_path / "steps.jsonl"))
    assert [sorted(step.microbatches) for step in steps] == [[0, 1], [0, 1], [0], [0]]
    assert [audit_problem(step) for step in steps] == [None] * 4


def test_a_worker_that_reads_other_samples_than_asked_is_put_down(forkserver: ForkServer, tmp_path: Path) -> None:
    run = sabotaged(forkserver, tmp_path, "other-samples")
    assert run.codes == [0, 1], run.tail()
    assert "the loader gave [0, 1]" in run.logs[1].read_text()
    assert [audit_problem(step) for step in read_steps(tmp_path / "steps.jsonl")] == [None] * 4


def test_a_step_whose_microbatches_were_counted_twice_is_not_committed(forkserver: ForkServer, tmp_path: Path) -> None:
    run = sabotaged(forkserver, tmp_path, "same-share")
    assert run.codes == [1, 1], run.tail()
    assert "microbatches counted other than once, of 8: {0: 2.0, 1: 0.0" in run.logs[0].read_text()
    assert not list(tmp_path.glob("steps.jsonl"))


def test_worker_processes_that_prefetch_do_not_blur_the_audit(forkserver: ForkServer, tmp_path: Path) -> None:
    argv = [OURS, *GOOD, "--num-workers", "2", "--recover-log-dir", str(tmp_path)]
    run = forkserver.run(2, argv, tmp_path, timeout=120)
    assert run.ok, run.tail()
    steps = list(read_steps(tmp_path / "steps.jsonl"))
    assert [step.microbatches for step in steps] == [{0: [0, 2, 4, 6], 1: [1, 3, 5, 7]}] * 4


def test_a_resumed_run_audits_against_its_own_samples(forkserver: ForkServer, tmp_path: Path) -> None:
    checkpoints = ["--save", str(tmp_path / "checkpoints"), "--load", str(tmp_path / "checkpoints")]
    argv = [OURS, *GOOD, *checkpoints, "--recover-log-dir", str(tmp_path)]
    for last in (2, 4):
        run = forkserver.run(2, [*argv, "--exit-interval", "2", "--save-interval", "2"], tmp_path, timeout=120)
        assert run.ok, run.tail()
        steps = list(read_steps(tmp_path / "steps.jsonl"))
        assert [step.iteration for step in steps] == list(range(1, last + 1))
        assert steps[-1].consumed_samples == 16 * last
        assert [audit_problem(step) for step in steps] == [None] * last


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"tensor": 1, "context": 1, "expert": 1, "expert_tensor": 1}, 1),
        ({"tensor": 4, "context": 2, "expert": 1, "expert_tensor": 4}, 1),
        ({"tensor": 1, "context": 1, "expert": 8, "expert_tensor": 1}, 8),
        ({"tensor": 2, "context": 1, "expert": 4, "expert_tensor": 1}, 2),
        ({"tensor": 2, "context": 1, "expert": 4, "expert_tensor": 2}, 4),
        ({"tensor": 4, "context": 1, "expert": 2, "expert_tensor": 1}, 1),
    ],
)
def test_a_replica_is_closed_under_its_dense_and_its_expert_groups(sizes: dict[str, int], ranks: int) -> None:
    assert data_parallel_ranks_per_replica(**sizes) == ranks
