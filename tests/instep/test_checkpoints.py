"""A checkpoint written after a death is like any other: stock Megatron resumes from it, on any number of workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recover_megatron.membership.records import EXIT_FENCED, EXIT_SAME_FAULT
from recover_megatron.run_log.steps import read_steps
from tests.harness.forkserver import ForkServer, Run
from tests.harness.patience import patient
from tests.instep.altered import altered
from tests.megatron_hooks.tiny import ASYNCHRONOUSLY, MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE, losses

pytestmark = pytest.mark.slow

TRAINING = [OURS, *MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", "8"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]


@pytest.mark.parametrize(
    ("workers", "flags", "inject", "resuming"),
    [
        (4, [], "1@3:forward", 2),
        (4, [], "0@4:checkpoint#3", 4),
        (4, ASYNCHRONOUSLY.split(), "2@2:backward", 2),
        (6, [*PIPELINE, "--global-batch-size", "24"], "1@3:reduce-scatter", 2),
        (4, ["--data-parallel-random-init"], "1@3:forward", 4),
    ],
    ids=["two-of-three", "while-it-is-written", "asynchronous", "pipeline", "random-states"],
)
def test_stock_megatron_resumes_where_a_run_with_a_death_saved(
    forkserver: ForkServer, tmp_path: Path, workers: int, flags: list[str], inject: str, resuming: int
) -> None:
    def train(name: str, count: int, *more: str) -> Path:
        out = tmp_path / name
        run = forkserver.run(count, [*TRAINING, *flags, *more], out, losses=out / "losses.jsonl", timeout=240)
        assert [code for code in run.codes if code not in (0, -9)] == [], run.tail()
        assert run.codes.count(-9) == int("--recover-inject" in more), run.codes
        return out

    recover, saved = ["--recover", "--recover-log-dir"], str(tmp_path / "checkpoints")
    undisturbed = train("undisturbed", workers, *recover, str(tmp_path / "undisturbed"))
    broken = train("broken", workers, *recover, str(tmp_path / "broken"), "--recover-inject", inject,
                   "--save", saved, "--save-interval", "4")  # fmt: skip
    expected = [step.loss for step in read_steps(undisturbed / "steps.jsonl")]
    assert [step.loss for step in read_steps(broken / "steps.jsonl")] == pytest.approx(expected, rel=1e-5)
    resumed = train("resumed", resuming, "--load", saved, "--ckpt-step", "4")
    assert [step["loss"] for step in losses(resumed / "losses.jsonl")] == pytest.approx(expected[4:], rel=1e-5)


QUICK = f"--recover-heartbeat-interval 0.5 --recover-heartbeat-timeout {patient(5):g}".split()
QUICK += ["--recover-hang-timeout", f"{patient(20):g}"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--ckpt-format", "torch"],
        ["--ckpt-format", "torch_dist"],
        ["--ckpt-format", "torch_dist", "--use-distributed-optimizer"],
        ["--ckpt-format", "torch_dist", "--use-distributed-optimizer", "--ckpt-assume-constant-structure"],
    ],
    ids=["torch", "torch_dist", "sharded", "constant structure"],
)
def test_who_was_put_out_in_the_middle_of_a_checkpoint_and_wakes_later_spoils_nothing(
    forkserver: ForkServer, tmp_path: Path, flags: list[str]
) -> None:
    """Worker 0 is stopped while it writes, put out, and goes on writing when the others have finished theirs."""
    checkpoints, resumed = tmp_path / "checkpoints", tmp_path / "resumed"
    script = [*altered("faulty.frozen", checkpoints), *TRAINING]
    run = saving(forkserver, tmp_path, script, *flags, "--save-interval", "4", *QUICK)
    assert run.codes == [EXIT_FENCED, 0, 0, 0], run.tail()
    assert "Traceback" not in run.logs[0].read_text(), run.logs[0].read_text()
    expected = [step.loss for step in read_steps(tmp_path / "run" / "steps.jsonl")]
    assert complete(tmp_path) == [4, 8]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "8"
    loading = [*flags[:3], "--load", str(checkpoints), "--ckpt-step", "4", "--exit-on-missing-checkpoint"]
    run = forkserver.run(2, [*TRAINING, *loading], resumed, losses=resumed / "losses.jsonl", timeout=240)
    assert run.ok, run.tail()
    assert [step["loss"] for step in losses(resumed / "losses.jsonl")] == pytest.approx(expected[4:], rel=1e-5)


def saving(server: ForkServer, folder: Path, script: list[str], *flags: str) -> Run:
    """Four workers that write checkpoints."""
    recover = ["--save", str(folder / "checkpoints"), *flags, "--recover", "--recover-log-dir", str(folder / "run")]
    return server.run(4, [*script, *recover], folder / "run", timeout=240)


def complete(folder: Path) -> list[int]:
    """The iterations of the checkpoints that have got their names."""
    return sorted(int(path.name.removeprefix("iter_")) for path in (folder / "checkpoints").glob("iter_*"))


@pytest.mark.parametrize("how", ["", ASYNCHRONOUSLY], ids=["at once", "asynchronously"])
@pytest.mark.parametrize("unable", [[2], [0, 1, 2, 3]], ids=["one", "all"])
def test_who_cannot_write_its_part_ends_and_the_others_write_again(
    forkserver: ForkServer, tmp_path: Path, unable: list[int], how: str
) -> None:
    """If nobody can, the run ends with the cause."""
    script = [*altered("faulty.limited", ",".join(map(str, unable)), 4), *TRAINING]
    run = saving(forkserver, tmp_path, script, "--save-interval", "2", *how.split())
    cause = (
        f"the checkpoint of iteration 4 cannot be written to {tmp_path / 'checkpoints'}: worker {{}}: OSError: [Errno "
        "27] File too"
    )
    if len(unable) == 4:
        assert set(run.codes) == {EXIT_SAME_FAULT}, run.tail()
        events = [json.loads(line) for line in (tmp_path / "run" / "events-0.jsonl").read_text().splitlines()]
        (told,) = [event["reason"] for event in events if event["event"] == "stop"]
        assert any(cause.format(worker) in told for worker in unable), told
        assert complete(tmp_path) == [2]
    else:
        assert run.codes == [int(worker in unable) for worker in range(4)], run.tail()
        for worker in unable:
            assert cause.format(worker) in run.logs[worker].read_text()
        assert complete(tmp_path) == [2, 4, 6, 8]


def test_loaders_killed_while_a_checkpoint_is_written_cost_their_workers_and_not_the_checkpoint(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    script = [*altered("faulty.lost_loaders", "0,2"), *TRAINING]
    run = saving(forkserver, tmp_path, script, "--num-workers", "2", "--save-interval", "4")
    assert run.codes == [1, 0, 1, 0], run.tail()
    for worker in (0, 2):
        said = run.logs[worker].read_text()
        assert "which reads data for this worker, was killed by signal 9" in said, said
        assert "cannot be written" not in said, said
    assert complete(tmp_path) == [4, 8]
