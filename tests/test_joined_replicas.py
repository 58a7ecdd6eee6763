"""What a user does with devices that become free for a while: recover-run --join, and the run has more replicas."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from recover_megatron.status.folder import candidates
from tests.harness.forkserver import ForkServer
from tests.harness.patience import patient
from tests.harness.processes import alive, free_port
from tests.harness.waiting import eventually
from tests.instep.altered import altered
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE
from tests.test_end_to_end import PATIENCE, launch, listen, same_training, wait_until_iteration

pytestmark = pytest.mark.slow

ITERATIONS = 32
TRAINING = [*MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", str(ITERATIONS), "--global-batch-size", "12"]
RECOVER = ["--recover", "--recover-max-replicas", "4", "--recover-hang-timeout", f"{patient(200):g}"]
TIMES = ["--recover-heartbeat-interval", "0.2", "--recover-heartbeat-timeout", f"{patient(4):g}"]
PATIENT = [*altered("pacing.patient", "5-24:4"), *altered("pacing.awaiting", "28:lost:joined")]
"""Iterations 5 to 24 wait for four replicas, but for one of each epoch meanwhile; the 28th until the loss is over."""
SECRET = {"RECOVER_SECRET": "one that both launchers of the test share"}


def builds(folder: Path) -> bool:
    return any("builds the model of position" in log.read_text() for log in folder.glob("worker-*.log"))


def test_a_launcher_that_joins_a_whole_run_brings_replicas_and_takes_them_away_whatever_coordinator_dies(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    plain = tmp_path / "undisturbed"
    assert forkserver.run(
        2, [OURS, *TRAINING, "--recover", "--recover-log-dir", str(plain)], plain, documents=100000
    ).ok
    out, port = tmp_path / "grown", str(free_port())
    script = [*PATIENT, OURS, *TRAINING, *RECOVER, *TIMES, "--recover-log-dir", str(out)]
    run = launch(out, "--nproc-per-node", "2", "--master-port", port, *script, environment=SECRET)
    wait_until_iteration(out, 2)
    joins = ["--join", "--recover-coordinator", candidates(out), "--world-size", "2", "--master-port", port]
    joined = launch(tmp_path / "joined", "--nproc-per-node", "2", *joins, *script, environment=SECRET)
    said = [listen(run), listen(joined)]
    eventually(lambda: builds(tmp_path / "joined"), seconds=PATIENCE)
    leading = subprocess.run(["pgrep", "-f", str(out / "events-0.jsonl")], capture_output=True, text=True, check=True)
    for pid in leading.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    wait_until_iteration(out, 26)
    lost = [worker["pid"] for worker in json.loads((tmp_path / "joined" / "workers.json").read_text())]
    joined.kill()  # its reaper, and the kernel, end its workers
    eventually(lambda: not any(alive(pid) for pid in lost), "the workers that joined have ended")
    (out / "lost").write_text("joined")
    texts = [one.result(PATIENCE) for one in said]
    assert run.wait(timeout=PATIENCE) == 0, texts
    assert joined.wait(timeout=PATIENCE) == -signal.SIGKILL
    steps = same_training(out, plain, ITERATIONS)
    assert [step.replicas for step in steps[24:26]] == [4, 4]
    assert steps[-1].replicas == 2
    assert "is new, with worker" in texts[0] + texts[1]
    assert "4 replicas (2 at the launch)" in texts[0] + texts[1]
