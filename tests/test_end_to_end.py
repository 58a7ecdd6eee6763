"""What a user does: recover-run starts pretrain_gpt_recover.py, and the run folder holds what the README promises."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from recover_megatron.run_log.steps import StepRecord, audit_problem, read_steps
from tests.harness import REPOSITORY
from tests.harness.forkserver import ForkServer
from tests.harness.patience import patient
from tests.harness.processes import alive, free_port, kill_first_candidate, processes_with
from tests.harness.waiting import eventually
from tests.instep.altered import altered
from tests.megatron_hooks.tiny import ASYNCHRONOUSLY, MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE, undisturbed

pytestmark = pytest.mark.slow
with_several_nodes = pytest.mark.xdist_group("several nodes")
"""These share a fork server, which is not that of the group that takes longest."""

PATIENCE = patient(240)
"""Seconds after which a run that should have moved counts as stuck (a loaded machine, two cores)."""
TIMEOUT = ["--recover-heartbeat-timeout", f"{patient(4):g}"]


def launch(out: Path, *argv: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "recover_megatron.launch", "--log-dir", str(out), *argv]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )


def finished(run: subprocess.Popen[str], code: int = 0) -> str:
    """What it has said, when it has ended with this code."""
    said, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == code, said
    return said


def workers(out: Path) -> list[dict[str, object]]:
    return json.loads((out / "workers.json").read_text())


def wait_until_iteration(out: Path, iteration: int) -> None:
    path = out / "steps.jsonl"

    def reached() -> bool:
        return path.exists() and any(step.iteration >= iteration for step in read_steps(path))

    eventually(reached, f"iteration {iteration} is reached", PATIENCE, every=0.05)


def listen(run: subprocess.Popen[str]) -> Future[str]:
    """All that it says until it ends, read meanwhile."""
    assert run.stdout is not None
    return ThreadPoolExecutor(1).submit(run.stdout.read)


def same_training(out: Path, expected: list[StepRecord], iterations: int) -> list[StepRecord]:
    """The steps in ``out``, after checks that each iteration is there once, right, and with the loss it should have."""
    steps = list(read_steps(out / "steps.jsonl"))
    assert [step.iteration for step in steps] == list(range(1, iterations + 1))
    assert [audit_problem(step) for step in steps] == [None] * iterations
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in expected], rel=1e-5)
    return steps


def awaiting(iteration: int) -> tuple[str, ...]:
    """Before a script: this iteration does not begin before ``struck`` in the log folder says yes.

    So the run is not over by then, however late the test is, or what it reads.
    """
    return altered("pacing.awaiting", f"{iteration}:struck:yes")


def test_a_run_leaves_its_audit_its_workers_and_their_logs(tmp_path: Path) -> None:
    said = finished(launch(tmp_path, "--nproc-per-node", "2", OURS, *MODEL, *SCHEDULE, *MOCK, "--recover"))
    steps = list(read_steps(tmp_path / "steps.jsonl"))
    assert [step.iteration for step in steps] == list(range(1, 21))
    assert [audit_problem(step) for step in steps] == [None] * 20
    assert [(w["worker_id"], w["state"]) for w in workers(tmp_path)] == [(0, "finished"), (1, "finished")]
    assert " iteration       20/      20 " in (tmp_path / "worker-1.log").read_text()
    assert "[1] " in said


def test_checkpoints_written_by_a_spawned_writer_are_whole(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "3", "--train-iters", "6"]
    writer = ["--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker"]
    argv = [OURS, *MODEL, *SCHEDULE, *MOCK, *save, *writer, "--recover"]
    finished(launch(tmp_path, "--nproc-per-node", "2", *argv))
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "6"
    before = list(read_steps(tmp_path / "steps.jsonl"))
    again = [*argv, "--load", str(tmp_path / "checkpoints"), "--ckpt-step", "3"]
    finished(launch(tmp_path, "--nproc-per-node", "2", *again))
    after = list(read_steps(tmp_path / "steps.jsonl"))
    assert [(step.iteration, step.loss) for step in after] == [(step.iteration, step.loss) for step in before]


def test_sigterm_ends_a_training_run_in_order(tmp_path: Path) -> None:
    endless = [*MODEL, *SCHEDULE, *MOCK, "--train-iters", "100000", "--recover"]
    run = launch(tmp_path, "--grace-seconds", "5", "--nproc-per-node", "2", OURS, *endless)
    wait_until_iteration(tmp_path, 3)
    pids = [int(str(w["pid"])) for w in workers(tmp_path)]
    run.send_signal(signal.SIGTERM)
    finished(run, 128 + signal.SIGTERM)
    assert [w["state"] for w in workers(tmp_path)] == ["killed", "killed"]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert all(audit_problem(step) is None for step in read_steps(tmp_path / "steps.jsonl"))


@pytest.mark.parametrize(
    ("number", "flags"),
    [(signal.SIGTERM, []), (signal.SIGUSR1, []), (signal.SIGUSR1, ASYNCHRONOUSLY.split())],
    ids=["SIGTERM", "SIGUSR1", "SIGUSR1-asynchronously"],
)
def test_a_signal_to_every_process_has_the_workers_write_a_checkpoint_and_end_with_all_their_children(
    tmp_path: Path, number: signal.Signals, flags: list[str]
) -> None:
    """So SLURM sends them.  Loaders, and what a checkpoint before has started, are there, and needed."""
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    argv = [*MODEL, *SCHEDULE, *MOCK, "--num-workers", "2", "--train-iters", "100000", "--recover", *flags]
    argv += ["--save", str(tracker.parent), "--save-interval", "3"]
    argv += ["--exit-signal-handler", "--exit-signal", number.name]
    mark = {"TOLD": str(tmp_path)}
    run = launch(tmp_path, "--grace-seconds", f"{PATIENCE:g}", "--nproc-per-node", "2", OURS, *argv, environment=mark)
    eventually(tracker.exists, "a checkpoint is written")
    told = processes_with(f"TOLD={tmp_path}")
    assert len(told) >= 2 * (1 + 2 + 1)  # each worker, its loaders, its manager
    for pid in told:
        os.kill(pid, number)
    said = finished(run, 0 if number == signal.SIGUSR1 else 128 + number)
    assert "2 of 2 workers finished" in said
    assert int(tracker.read_text()) == list(read_steps(tmp_path / "steps.jsonl"))[-1].iteration
    assert not any(map(alive, told))


@with_several_nodes
def test_a_run_survives_its_coordinator_and_a_worker_killed_from_outside(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    """Two pipelines of two stages: the leading coordinator first, then, when another one leads, a worker."""
    argv = [OURS, *MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--pipeline-model-parallel-size", "2", "--recover"]
    argv += ["--train-iters", "30", "--recover-heartbeat-interval", "0.2", *TIMEOUT]
    expected = undisturbed(forkserver, 4, argv, tmp_path / "undisturbed")
    out = tmp_path / "killed"
    run = launch(out, "--nproc-per-node", "4", *awaiting(20), *argv, "--recover-log-dir", str(out))
    wait_until_iteration(out, 4)
    kill_first_candidate(out)
    wait_until_iteration(out, 8)
    os.kill(int(str(workers(out)[1]["pid"])), signal.SIGKILL)
    (out / "struck").write_text("yes")
    finished(run)
    # Mostly the other candidate; the one that the launcher started in place of the killed one if the other was held up.
    events = [(out / name).read_text() for name in ("events-0.jsonl", "events-1.jsonl")]
    assert sum(text.count('"event":"lead"') for text in events) >= 2
    assert same_training(out, expected, 30)[-1].replicas == 1


@with_several_nodes
def test_the_launcher_with_the_store_and_its_workers_are_killed_and_the_other_nodes_go_on(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    """Three launchers on this host stand for three nodes; node 0 also has the coordinator that leads."""
    argv = [OURS, *MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--recover", "--train-iters", "20"]
    argv += ["--global-batch-size", "12", "--recover-heartbeat-interval", "0.2", *TIMEOUT]
    expected = undisturbed(forkserver, 3, argv, tmp_path / "undisturbed")
    out = tmp_path / "killed"
    nodes = ["--nproc-per-node", "1", "--nnodes", "3", "--master-port", str(free_port())]
    secret = {"RECOVER_SECRET": "one that all nodes of the test share"}
    script = [*awaiting(15), *argv, "--recover-log-dir", str(out)]
    runs = [launch(out, *nodes, "--node-rank", str(node), *script, environment=secret) for node in range(3)]
    said = [listen(run) for run in runs]
    wait_until_iteration(out, 4)
    runs[0].kill()  # its reaper, and the kernel, end the worker and the candidate
    (out / "struck").write_text("yes")
    assert [run.wait(timeout=PATIENCE) for run in runs] == [-signal.SIGKILL, 0, 0], [
        one.result(PATIENCE) for one in said
    ]
    assert same_training(out, expected, 20)[-1].replicas == 2


def test_refused_flags_are_told_once_and_nothing_is_left_running(tmp_path: Path) -> None:
    bad = [*MODEL, *SCHEDULE, "--data-path", "/nowhere/corpus", "--tensor-model-parallel-size", "2"]
    said = finished(launch(tmp_path, "--nproc-per-node", "3", OURS, *bad), 2)
    assert said.count("cannot form complete replicas of 2") == 1
    assert said.count("no /nowhere/corpus.bin") == 1
    assert "Traceback" not in said


PREPARES = """
import sys
from recover_megatron.arguments import config_from_argv
from recover_megatron.errors import end_process
from recover_megatron.megatron_hooks.entry.program import load

if __name__ == "__main__":
    program = load(config_from_argv(sys.argv[1:]))
    from tests.instep import pacing

    pacing.awaiting("6:first:yes")
    pacing.awaiting("14:second:yes")
    pacing.patient("9-13:2")
    program.check()
    program.run()
    end_process()
"""
"""pretrain_gpt_recover.py, with iterations that wait for this test."""


def test_a_prepared_process_runs_the_code_that_it_has_imported(forkserver: ForkServer, tmp_path: Path) -> None:
    """The script is edited while one waits, which takes its place; the next has imported the edited one, and may not.

    Iteration 6 waits for the first death, 9 to 13 for who replaces it, 14 until the second replacement is refused.
    """
    argv = [*MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--recover", "--recover-heartbeat-interval", "0.2", *TIMEOUT]
    expected = undisturbed(forkserver, 2, [OURS, *argv], tmp_path / "undisturbed")
    out, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text(PREPARES)
    options = ["--nproc-per-node", "2", "--max-restarts", "3", str(script), *argv, "--recover-log-dir", str(out)]
    run = launch(out, *options)
    said = listen(run)

    def log_of(worker: int, text: str) -> None:
        path = out / f"worker-{worker}.log"
        eventually(lambda: path.exists() and text in path.read_text(), f"worker {worker}: {text}", PATIENCE)

    log_of(2, "is prepared to replace the next worker that dies")
    script.write_text(f"{PREPARES}# edited")
    os.kill(int(str(workers(out)[1]["pid"])), signal.SIGKILL)
    (out / "first").write_text("yes")
    log_of(3, "is prepared to replace the next worker that dies")
    os.kill(int(str(workers(out)[2]["pid"])), signal.SIGKILL)
    log_of(3, "runs another program than worker")
    (out / "second").write_text("yes")
    text = said.result(PATIENCE)
    assert run.wait(timeout=PATIENCE) == 0, text
    assert "the content of script train.py differs" in text
    steps = same_training(out, expected, 20)
    assert [steps[12].replicas, steps[-1].replicas] == [2, 1]
    pids = [int(found[1]) for found in re.finditer(r"process (\d+) is prepared", text)]
    assert pids[:2] == [worker["pid"] for worker in workers(out)[2:4]]
    assert [worker["exit_code"] for worker in workers(out)] == [0, None, None, 2]
