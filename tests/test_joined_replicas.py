"""What a user does with recover-run --join: devices that are free for a while; a host that was serviced comes back."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from recover_megatron.run_log.steps import StepRecord, read_steps
from recover_megatron.status.folder import candidates
from tests.harness import REPOSITORY
from tests.harness.forkserver import ForkServer
from tests.harness.patience import patient
from tests.harness.processes import alive, free_port, kill_first_candidate, python
from tests.harness.waiting import eventually
from tests.instep.altered import altered
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE
from tests.test_end_to_end import PATIENCE, launch, listen, same_training, wait_until_iteration, workers

pytestmark = pytest.mark.slow

TIMES = ["--recover-heartbeat-interval", "0.2", "--recover-heartbeat-timeout", f"{patient(4):g}"]
TIMES += ["--recover-hang-timeout", f"{patient(200):g}"]
SECRET = {"RECOVER_SECRET": "one that all launchers of the test share"}


PLAIN = str(REPOSITORY / "tests" / "megatron_hooks" / "reference_gpt.py")
"""A script that knows nothing of this package."""


def training(iterations: int, *flags: str, script: str = OURS) -> list[str]:
    schedule = [*SCHEDULE, "--train-iters", str(iterations), "--global-batch-size", "12"]
    return [script, *MODEL, *schedule, *MOCK, *NO_DROPOUT, "--recover", *flags]


def undisturbed(forkserver: ForkServer, folder: Path, workers: int, iterations: int) -> list[StepRecord]:
    """The steps of the run without any of this."""
    script = training(iterations, "--recover-log-dir", str(folder))
    assert forkserver.run(workers, script, folder, documents=100000).ok
    return list(read_steps(folder / "steps.jsonl"))


def builds(folder: Path) -> bool:
    return any("builds the model of position" in log.read_text() for log in folder.glob("worker-*.log"))


@pytest.mark.parametrize("own", [OURS, PLAIN], ids=["ours", "any"])
def test_a_launcher_that_joins_a_whole_run_brings_replicas_and_takes_them_away_whatever_coordinator_dies(
    forkserver: ForkServer, tmp_path: Path, own: str
) -> None:
    """Iterations 5 to 24 wait for four replicas, but for one of each epoch; the 28th until the loss is over."""
    iterations = 32
    plain = undisturbed(forkserver, tmp_path / "undisturbed", 2, iterations)
    out, port = tmp_path / "grown", str(free_port())
    script = [*altered("pacing.patient", "5-24:4"), *altered("pacing.awaiting", "28:lost:joined")]
    script += training(iterations, "--recover-max-replicas", "4", *TIMES, "--recover-log-dir", str(out), script=own)
    run = launch(out, "--nproc-per-node", "2", "--master-port", port, *script, environment=SECRET)
    wait_until_iteration(out, 2)
    joins = ["--join", "--recover-coordinator", candidates(out), "--world-size", "2", "--master-port", port]
    joined = launch(tmp_path / "joined", "--nproc-per-node", "2", *joins, *script, environment=SECRET)
    said = [listen(run), listen(joined)]
    eventually(lambda: builds(tmp_path / "joined"), seconds=PATIENCE)
    kill_first_candidate(out)
    wait_until_iteration(out, 26)
    lost = [worker["pid"] for worker in json.loads((tmp_path / "joined" / "workers.json").read_text())]
    joined.kill()  # its reaper, and the kernel, end its workers
    eventually(lambda: not any(alive(pid) for pid in lost), "the workers that joined have ended")
    (out / "lost").write_text("joined")
    texts = [one.result(PATIENCE) for one in said]
    assert run.wait(timeout=PATIENCE) == 0, texts
    assert joined.wait(timeout=PATIENCE) == -signal.SIGKILL
    steps = same_training(out, plain, iterations)
    assert [step.replicas for step in steps[24:26]] == [4, 4]
    assert steps[-1].replicas == 2
    assert "is new, with worker" in texts[0] + texts[1]
    assert "4 replicas (2 at the launch)" in texts[0] + texts[1]


def test_the_node_with_the_store_and_the_leading_coordinator_is_drained_switched_off_and_comes_back(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    """Three launchers on this host stand for three nodes; another one for the first when it comes back.

    Iteration 5 begins when an epoch is over, by the order, and the ninth when there are three replicas.
    """
    iterations = 16
    plain = undisturbed(forkserver, tmp_path / "undisturbed", 3, iterations)
    out, port = tmp_path / "drained", str(free_port())
    nodes = ["--nproc-per-node", "1", "--nnodes", "3", "--master-port", port, "--max-restarts", "1"]
    script = [*altered("pacing.patient", "5-5:over,9-:3"), *training(iterations, *TIMES)]
    runs = [launch(out, *nodes, "--node-rank", str(node), *script, environment=SECRET) for node in range(3)]
    said = [listen(run) for run in runs]
    wait_until_iteration(out, 4)
    first = {worker["worker_id"]: worker for worker in workers(out)}[0]
    done = python("-m", "recover_megatron.status", out, "drain", f"{first['host']}-0", seconds=240, **SECRET)
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
    steps = same_training(out, plain, iterations)
    assert [step.replicas for step in steps[4:7]] == [3, 2, 2]
    assert steps[-1].replicas == 3
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["reran"] for event in events if event.get("reran")] == []
