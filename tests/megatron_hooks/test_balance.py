"""--recover-balance: a straggler gets fewer microbatches, and the batch stays the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from recover_megatron.run_log.events import read_events
from recover_megatron.run_log.steps import audit_problem, read_steps
from tests.harness.forkserver import ForkServer
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, SCHEDULE

SABOTAGE = str(Path(__file__).parent / "sabotage.py")


def run(server: ForkServer, out: Path, workers: int, *flags: str) -> list[float]:
    argv = [SABOTAGE, "slow", *MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", "5", "--recover", *flags]
    result = server.run(workers, [*argv, "--recover-log-dir", str(out)], out, timeout=240)
    assert result.ok, result.tail()
    steps = list(read_steps(out / "steps.jsonl"))
    assert [audit_problem(step) for step in steps] == [None] * 5
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
    assert shares[0] == 8 // len(steps[0].microbatches)
    assert all(share < shares[0] for share in shares[1:]), shares
    assert any(event["event"] == "quotas" for event in read_events(tmp_path / "balanced" / "events.jsonl"))
    for step in read_steps(tmp_path / "even" / "steps.jsonl"):
        assert len({len(ids) for ids in step.microbatches.values()}) == 1
