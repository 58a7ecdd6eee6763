"""The audit says what was accumulated: it must tell when that is not what should have been; and --recover-balance."""

from __future__ import annotations

from pathlib import Path

import pytest

from recover_megatron.run_log.events import read_events
from recover_megatron.run_log.steps import audit_problem, read_steps
from recover_megatron.workload.domains import data_parallel_ranks_per_replica
from recover_megatron.workload.quotas import CONFIRM
from tests.harness.forkserver import ForkServer, Run
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE

pytestmark = pytest.mark.slow

GOOD = [*MODEL, *SCHEDULE, *MOCK, "--train-iters", "4", "--recover"]
SABOTAGE = str(Path(__file__).parent / "sabotage.py")


def sabotaged(forkserver: ForkServer, out: Path, what: str, *flags: str, workers: int = 2) -> Run:
    argv = [SABOTAGE, what, *GOOD, *flags, "--recover-log-dir", str(out)]
    return forkserver.run(workers, argv, out, timeout=240)


def test_a_worker_that_left_out_a_backward_pass_is_put_down_and_its_microbatches_are_run_by_others(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    run = sabotaged(forkserver, tmp_path, "lost-backward")
    assert run.codes == [0, 1], run.tail()
    assert "added the gradients of 3 microbatches instead of 4" in run.logs[1].read_text()
    steps = list(read_steps(tmp_path / "steps.jsonl"))
    assert [sorted(step.microbatches) for step in steps] == [[0, 1], [0, 1], [0], [0]]
    assert [audit_problem(step) for step in steps] == [None] * 4


def test_a_worker_that_reads_other_samples_than_asked_is_put_down(forkserver: ForkServer, tmp_path: Path) -> None:
    run = sabotaged(forkserver, tmp_path, "other-samples")
    assert run.codes == [0, 1], run.tail()
    assert "the loader returned [0, 1]" in run.logs[1].read_text()
    assert [audit_problem(step) for step in read_steps(tmp_path / "steps.jsonl")] == [None] * 4


def test_a_step_whose_microbatches_were_counted_twice_is_not_committed(forkserver: ForkServer, tmp_path: Path) -> None:
    run = sabotaged(forkserver, tmp_path, "same-share")
    assert run.codes == [1, 1], run.tail()
    for log in run.logs:
        assert "some of 8 microbatches were not counted exactly once (id: count): {0: 2.0, 1: 0.0" in log.read_text()
    assert not list(tmp_path.glob("steps.jsonl"))


def test_a_step_whose_sum_lacks_the_gradient_of_a_backward_pass_is_not_committed(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    run = sabotaged(forkserver, tmp_path, "lost-and-summed", "--overlap-grad-reduce", "--ddp-num-buckets", "6")
    assert run.codes == [1, 1], run.tail()
    for log in run.logs:
        assert "added the gradients of 3 microbatches instead of 4" in log.read_text()
    assert [step.iteration for step in read_steps(tmp_path / "steps.jsonl")] == [1, 2]


def test_worker_processes_that_prefetch_do_not_blur_the_audit(forkserver: ForkServer, tmp_path: Path) -> None:
    argv = [OURS, *GOOD, "--num-workers", "2", "--recover-log-dir", str(tmp_path)]
    run = forkserver.run(2, argv, tmp_path, timeout=120)
    assert run.ok, run.tail()
    steps = list(read_steps(tmp_path / "steps.jsonl"))
    assert [step.microbatches for step in steps] == [{0: [0, 2, 4, 6], 1: [1, 3, 5, 7]}] * 4


def test_a_resumed_run_audits_against_its_own_samples(forkserver: ForkServer, tmp_path: Path) -> None:
    checkpoints = ["--save", str(tmp_path / "checkpoints"), "--load", str(tmp_path / "checkpoints")]
    argv = [OURS, *GOOD, *checkpoints, "--recover-log-dir", str(tmp_path)]
    for last in (2, 4, 4):  # the last time there is nothing left to do
        run = forkserver.run(2, [*argv, "--exit-interval", "2", "--save-interval", "2"], tmp_path, timeout=120)
        assert run.ok, run.tail()
        steps = list(read_steps(tmp_path / "steps.jsonl"))
        assert [step.iteration for step in steps] == list(range(1, last + 1))
        assert steps[-1].consumed_samples == 16 * last
        assert [audit_problem(step) for step in steps] == [None] * last
    events = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] in ("start", "plan", "end")]
    told = [(event["event"], event["iteration"]) for event in events]
    assert told == [
        *(("start", 1), ("plan", 1), ("end", 2)), *(("start", 3), ("plan", 3), ("end", 4)),
        *(("start", 5), ("plan", 5), ("end", 5)),
    ]  # fmt: skip


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


ITERATIONS = 9
SLOW = [*NO_DROPOUT, "--train-iters", str(ITERATIONS)]
LATER = 2
"""Iterations that a busy host may add until it is sure of a pace; the exact number: tests/workload/test_quotas.py."""


def losses(run: Run, out: Path) -> list[float]:
    """Of the run with a slow worker, whose audit is whole."""
    steps = list(read_steps(out / "steps.jsonl"))
    assert [audit_problem(step) for step in steps] == [None] * ITERATIONS, run.tail()
    return [step.loss for step in steps if step.loss is not None]


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2"])
def test_a_slow_replica_gets_fewer_microbatches_and_the_losses_stay(
    forkserver: ForkServer, tmp_path: Path, flags: str
) -> None:
    even, balanced = tmp_path / "even", tmp_path / "balanced"
    undisturbed = sabotaged(forkserver, even, "slow", *SLOW, *flags.split(), workers=4)
    run = sabotaged(forkserver, balanced, "slow", *SLOW, *flags.split(), "--recover-balance", workers=4)
    assert undisturbed.ok, undisturbed.tail()
    assert run.ok, run.tail()
    assert losses(run, balanced) == pytest.approx(losses(undisturbed, even), rel=1e-6)
    slow = 0 if flags else 1  # rank 1 is in replica 0 where two ranks make one
    steps = list(read_steps(balanced / "steps.jsonl"))
    shares = [len(step.microbatches[slow]) for step in steps]
    even_share = 8 // len(steps[0].microbatches)
    assert shares[:CONFIRM] == [even_share] * CONFIRM
    assert all(share < even_share for share in shares[CONFIRM + LATER :]), shares
    assert any(event["event"] == "quotas" for event in read_events(balanced / "events.jsonl"))
    for step in read_steps(even / "steps.jsonl"):
        assert len({len(ids) for ids in step.microbatches.values()}) == 1


def test_after_a_death_a_slow_replica_still_gets_fewer_microbatches(forkserver: ForkServer, tmp_path: Path) -> None:
    even, hit = tmp_path / "even", tmp_path / "hit"
    undisturbed = sabotaged(forkserver, even, "slow", *SLOW, workers=4)
    assert undisturbed.ok, undisturbed.tail()
    death = "--recover-balance", "--recover-inject", "3@7:backward:kill"
    run = sabotaged(forkserver, hit, "slow", *SLOW, *death, workers=4)
    assert [code for code in run.codes if code] == [-9], run.tail()
    assert losses(run, hit) == pytest.approx(losses(undisturbed, even), rel=1e-6)
    for step in list(read_steps(hit / "steps.jsonl"))[7:]:  # with even quotas it would run two or three of the eight
        assert len(step.microbatches[1]) == 1, step.microbatches
