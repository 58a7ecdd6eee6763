"""Jobs of the shipped script on a real SLURM: a tiny GPT trains on three nodes while workers and nodes are killed.

All losses must be those of the job in which nobody dies.  What the controller says of nodes that are lost or powered
down, and who goes on by that.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from recover_megatron.membership.io.testimony import Slurm
from recover_megatron.run_log.events import read_events
from recover_megatron.run_log.steps import StepRecord, audit_problem
from tests.harness.forkserver import ForkServer
from tests.megatron_hooks.tiny import MOCK, OURS, undisturbed
from tests.slurm.cluster import Cluster, Job, started, training, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]

BATCH, LEADER, OTHER = "n1", "n2", "n3"
"""The nodes: with the batch script and the store; with the coordinator that leads; with neither."""
ITERATIONS = 40


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with started() as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """All of its nodes up and idle, before and after."""
    running.revive()
    yield running
    running.run("scancel", "--user=root")
    running.revive()


@pytest.fixture(scope="module")
def expected(running: Cluster, forkserver: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> list[StepRecord]:
    """The steps of the training of a job in which nobody dies."""
    steps = trained(forkserver, 3, tmp_path_factory.mktemp("undisturbed"))
    assert [step.iteration for step in steps] == list(range(1, ITERATIONS + 1))
    assert {step.replicas for step in steps} == {3}
    return steps


def trained(forkserver: ForkServer, workers: int, folder: Path, flags: str = "") -> list[StepRecord]:
    argv = [OURS, *MOCK, *training(ITERATIONS).split(), *flags.split(), "--recover"]
    return undisturbed(forkserver, workers, argv, folder)


def check_steps(job: Job, expected: list[StepRecord] | None, replicas: int, at_first: int = 3) -> None:
    """The losses are those of ``expected``, each microbatch was counted once; ``replicas``: in the end."""
    steps = job.steps()
    assert [step.iteration for step in steps] == list(range(1, ITERATIONS + 1))
    assert [audit_problem(step) for step in steps] == [None] * ITERATIONS
    if expected is not None:
        assert [step.loss for step in steps] == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert (steps[0].replicas, steps[-1].replicas) == (at_first, replicas)


def check_secret(job: Job, running_commands: bool = False) -> None:
    """It is its owner's alone, and in nothing that anybody else may read."""
    secret = job.run / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    text = secret.read_bytes()
    assert len(text) == 64
    logs = [path for path in (*job.run.iterdir(), *job.folder.iterdir()) if path.is_file() and path != secret]
    assert len(logs) > 5
    assert not [path for path in logs if text in path.read_bytes()]
    if running_commands:
        assert not [pid for pid in job.cluster.tasks() if text in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_worker_and_a_whole_node_are_killed_and_the_job_completes(
    cluster: Cluster, tmp_path: Path, expected: list[StepRecord]
) -> None:
    """A range of nodes is asked for, and the job gets all three, since they are idle."""
    job = Job(cluster, tmp_path / "job", nodes="2-3", iterations=ITERATIONS)
    job.wait_iteration(4)
    assert job.steps()[0].replicas == 3
    check_secret(job, running_commands=True)
    os.kill(job.pid_of(0), signal.SIGKILL)
    job.wait_iteration(12)
    cluster.kill_node(OTHER)
    job.wait("COMPLETED")
    check_steps(job, expected, replicas=1)
    assert cluster.job(job.number)["NodeList"] == "n[1-2]"
    check_secret(job)


@pytest.mark.parametrize(("node", "ends"), [(LEADER, "COMPLETED"), (BATCH, "CANCELLED")], ids=["leader", "batch"])
def test_a_node_that_leads_or_has_the_store_is_killed_and_the_training_is_finished(
    cluster: Cluster, tmp_path: Path, expected: list[StepRecord], node: str, ends: str
) -> None:
    """Without the batch script SLURM has nobody left who could say that the job is completed: the others end it."""
    job = Job(cluster, tmp_path / "job", iterations=ITERATIONS)
    job.wait_iteration(4)
    assert '"event":"plan"' in job.events(1)
    cluster.kill_node(node)
    job.wait(ends)
    check_steps(job, expected, replicas=2)
    if node == LEADER:
        assert '"event":"plan"' in job.events(2)
    else:
        assert {path.read_text() for path in (job.run / "ends").glob("0-[12]")} == {"0\n"}


def test_a_node_with_all_that_hold_a_stage_is_killed_and_the_job_completes(
    cluster: Cluster, tmp_path: Path, forkserver: ForkServer
) -> None:
    """Of two, the one that leads, of pipelines in Megatron's default order: by the lease, back to a snapshot."""
    pipelines = "--pipeline-model-parallel-size 2"
    flags = f"{pipelines} --recover-memory-interval 2"
    job = Job(cluster, tmp_path / "job", nodes=2, workers=2, iterations=ITERATIONS, flags=flags)
    job.wait_iteration(6)
    cluster.kill_node(LEADER)
    job.wait("COMPLETED")
    check_steps(job, trained(forkserver, 4, tmp_path / "undisturbed", pipelines), replicas=1, at_first=2)
    (back,) = (event for event in read_events(job.run / "events.jsonl") if event["event"] == "rolled back")
    assert back["tier"] == "memory", job.said()
    assert cluster.job(job.number)["NodeList"] == BATCH


def test_a_job_whose_time_is_up_writes_a_checkpoint_and_goes_on_after_it_until_scancel_ends_all_of_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """SLURM looks every 30 s, and counts in minutes; so the limit is set, and near, when the training is under way.

    By then checkpoints have been written, and their helpers, like loaders, are among the processes that are told.
    """
    flags = "--ckpt-format torch_dist --save-interval 50 --num-workers 1"
    job = Job(cluster, tmp_path / "job", "--time=60", "--signal=B:USR1@60", iterations=1_000_000, flags=flags)
    tracker = job.run / "checkpoint" / "latest_checkpointed_iteration.txt"
    wait_until(tracker.exists, "a checkpoint is written")
    hours, minutes, _ = cluster.job(job.number)["RunTime"].split(":")
    limit = 60 * int(hours) + int(minutes) + 2
    cluster.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={limit}")

    def requeued() -> bool:
        shown = cluster.run("scontrol", "show", "job", str(job.number))
        assert "JobState=FAILED" not in shown, job.said()
        return "Restarts=1" in shown

    wait_until(requeued, "it is requeued")
    at = int(tracker.read_text())
    assert job.steps()[-1].iteration == at, job.said()
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    job.wait_iteration(at + 3)
    cluster.run("scancel", str(job.number))
    job.wait("CANCELLED")
    wait_until(lambda: cluster.tasks() == [], "nothing of the job is left")
    steps = job.steps()
    assert [step.iteration for step in steps] == list(range(1, len(steps) + 1))
    assert [step.consumed_samples for step in steps] == [12 * step.iteration for step in steps]
    assert [audit_problem(step) for step in steps] == [None] * len(steps)
    loaded = [
        f"loading distributed checkpoint from {tracker.parent} at iteration {at}" in log for log in job.launchers(1)
    ]
    assert any(loaded), job.said()
    assert "exit code 0; the time limit is near: requeued" in job.said()


def test_where_srun_starts_every_worker_the_one_with_the_store_is_killed_and_the_job_completes(
    cluster: Cluster, tmp_path: Path, expected: list[StepRecord]
) -> None:
    job = Job(cluster, tmp_path / "job", name="recover-tasks.sbatch", iterations=ITERATIONS)
    job.wait_iteration(4)
    for pid in cluster.with_variable(("RANK", "0")):
        os.kill(pid, signal.SIGKILL)
    job.wait("COMPLETED")
    check_steps(job, expected, replicas=2)
    assert '"event":"lead"' in job.events(1)  # of the second node, as under recover-run


# -- the witness -----------------------------------------------------------------------------------------------------


@pytest.fixture
def powered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """One whose controller may power nodes down."""
    with started(timeout=10, power_saving=True) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        yield cluster


def test_a_lost_node_is_off_only_when_slurm_has_powered_it_down(powered: Cluster) -> None:
    job = int(powered.run("sbatch", "--parsable", "--nodes=2", "--no-kill", "--output=/dev/null", "--wrap=sleep 3600"))
    powered.wait_job(job, ["RUNNING"])
    assert Slurm().look(["n1", "n2", "n9"]) == {"n1": False, "n2": False}
    powered.kill_node("n2")
    wait_until(lambda: powered.states()["n2"].startswith("down"), "the controller has noticed")
    assert Slurm().look(["n1", "n2"]) == {"n1": False, "n2": False}
    powered.run("scontrol", "update", "nodename=n2", "state=power_down_force")
    wait_until(lambda: Slurm().look(["n2"]) == {"n2": True}, "it is powered down")
    assert Slurm().look(["n1"]) == {"n1": False}
    assert (powered.folder / "powered").read_text().split() == ["n2"]
    assert powered.job(job)["JobState"] == "RUNNING"


def test_a_job_goes_on_with_one_node_of_three_when_the_others_are_lost_and_powered_down(
    powered: Cluster, tmp_path: Path
) -> None:
    """Among them the one with the coordinator that leads."""
    patient = "--recover-heartbeat-timeout 30"  # four of these are waited for the witness: a controller may be busy
    job = Job(powered, tmp_path / "job", iterations=ITERATIONS, flags=patient)
    job.wait_iteration(4)
    powered.kill_node("n2", "n3")
    powered.run("scontrol", "update", "nodename=n[2-3]", "state=power_down_force")
    job.wait("COMPLETED")
    check_steps(job, None, replicas=1)
    assert "witness: SLURM reports n2, n3 as powered off" in job.said()
