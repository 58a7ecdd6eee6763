"""--recover-balance: a straggler gets fewer microbatches, and the batch stays the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from recover_megatron.run_log.events import read_events
from recover_megatron.run_log.steps import audit_problem, read_steps
from recover_megatron.workload.quotas import CONFIRM
from tests.harness.forkserver import ForkServer
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, SCHEDULE

SABOTAGE = str(Path(__file__).parent / "sabotage.py")


ITERATIONS = 9
LATER = 2
"""Iterations that a busy host may add until it is sure of a pace; the exact number: tests/workload/test_quotas.py."""


def run(server: ForkServer, out: Path, workers: int, *flags: str) -> list[float]:
    argv = [SABOTAGE, "slow", *MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", str(ITERATIONS), "--recover"]
    result = server.run(workers, [*argv, *flags, "--recover-log-dir", str(out)], out, timeout=240)
    assert result.ok, result.tail()
    steps = list(read_steps(out / "steps.jsonl"))
    assert [audit_problem(step) for step in steps] == [None] * ITERATIONS
    return [step.loss for step in steps if step.loss is not None]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "flags"), [(4, ""), (4, "--tensor-model-parallel-size 2")])
def test_a_slow_replica_gets_fewer_microbatches_and_the_losses_stay(
    forkserver: ForkServer, tmp_path: Path, workers: int, flags: str
) -> None:
    even = run(forkserver, tmp_path / "even", workers, *flags.split())
    balanced = run(forkserver, tmp_path / "balanced", workers, *flags.split(), "--recover-balance")
    assert balanced == pytest.approx(even, rel=1e-6)
    slow = 1 if workers == 4 and not flags else 0  # rank 1 is in replica 0 where two ranks make one
    steps = list(read_steps(tmp_path / "balanced" / "steps.jsonl"))
    shares = [len(step.microbatches[slow]) for step in steps]
    even_share = 8 // len(steps[0].microbatches)
    assert shares[:CONFIRM] == [even_share] * CONFIRM
    assert all(share < even_share for share in shares[CONFIRM + LATER :]), shares
    assert any(event["event"] == "quotas" for event in read_events(tmp_path / "balanced" / "events.jsonl"))
    for step in read_steps(tmp_path / "even" / "steps.jsonl"):
        assert len({len(ids) for ids in step.microbatches.values()}) == 1


@pytest.mark.slow
def test_after_a_death_a_slow_replica_still_gets_fewer_microbatches(forkserver: ForkServer, tmp_path: Path) -> None:
    even = run(forkserver, tmp_path / "even", 4)
    death = "--recover-balance", "--recover-inject", "3@7:backward:kill"
    argv = [SABOTAGE, "slow", *MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", str(ITERATIONS), "--recover"]
    result = forkserver.run(4, [*argv, *death, "--recover-log-dir", str(tmp_path / "d")], tmp_path / "d", timeout=240)
    assert [code for code in result.codes if code] == [-9], result.tail()
    steps = list(read_steps(tmp_path / "d" / "steps.jsonl"))
    assert [audit_problem(step) for step in steps] == [None] * ITERATIONS
    assert [step.loss for step in steps] == pytest.approx(even, rel=1e-6)
    for step in steps[7:]:  # with even quotas it would run two or three of the eight
        assert len(step.microbatches[1]) == 1, step.microbatches
