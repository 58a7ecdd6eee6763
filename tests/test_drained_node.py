"""What a user does to service a host: drain its node, switch it off, and bring it back with recover-run --join."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recover_megatron.status.folder import candidates
from tests.harness import REPOSITORY
from tests.harness.forkserver import ForkServer
from tests.harness.patience import patient
from tests.harness.processes import free_port
from tests.instep.altered import altered
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE
from tests.test_end_to_end import PATIENCE, launch, listen, same_training, wait_until_iteration, workers

pytestmark = pytest.mark.slow

ITERATIONS = 16
TRAINING = [*MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", str(ITERATIONS), "--global-batch-size", "12"]
TIMES = ["--recover-heartbeat-interval", "0.2", "--recover-heartbeat-timeout", f"{patient(4):g}"]
TIMES += ["--recover-hang-timeout", f"{patient(200):g}"]
PATIENT = altered("pacing.patient", "5-5:over,9-:3")
"""Iteration 5 begins when an epoch is over, by the order, and the ninth when there are three replicas."""
SECRET = {"RECOVER_SECRET": "one that all nodes of the test share"}


def drain(out: Path, node: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recover_megatron.status", str(out), "drain", node]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **SECRET}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_the_node_with_the_store_and_the_leading_coordinator_is_drained_switched_off_and_comes_back(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    """Three launchers on this host stand for three nodes; another one for the first when it comes back."""
    plain = tmp_path / "undisturbed"
    assert forkserver.run(
        3, [OURS, *TRAINING, "--recover", "--recover-log-dir", str(plain)], plain, documents=100000
    ).ok
    out, port = tmp_path / "drained", str(free_port())
    nodes = ["--nproc-per-node", "1", "--nnodes", "3", "--master-port", port, "--max-restarts", "1"]
    script = [*PATIENT, OURS, *TRAINING, "--recover", *TIMES]
    runs = [launch(out, *nodes, "--node-rank", str(node), *script, environment=SECRET) for node in range(3)]
    said = [listen(run) for run in runs]
    wait_until_iteration(out, 4)
    first = {worker["worker_id"]: worker for worker in workers(out)}[0]
    done = drain(out, f"{first['host']}-0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{first['host']}-0 is drained: it may be switched off"
    runs[0].send_signal(signal.SIGTERM)  # as a host does that shuts down
    assert runs[0].wait(timeout=PATIENCE) == 128 + signal.SIGTERM
    joins = ["--join", "--recover-coordinator", candidates(out), "--world-size", "3", "--master-port", port]
    comes_back = ["--nproc-per-node", "1", *joins, *script]
    runs.append(launch(tmp_path / "joined", *comes_back, environment=SECRET))
    said.append(listen(runs[3]))
    texts = [one.result(PATIENCE) for one in said]
    assert [run.wait(timeout=PATIENCE) for run in runs[1:]] == [0, 0, 0], texts
    assert "this node is being drained" in texts[0]
    assert [worker["state"] for worker in workers(out) if worker["node_rank"] == 0] == ["finished"]
    steps = same_training(out, plain, ITERATIONS)
    assert [step.replicas for step in steps[4:7]] == [3, 2, 2]
    assert steps[-1].replicas == 3
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["reran"] for event in events if event.get("reran")] == []
