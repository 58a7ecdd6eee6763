"""What a real controller says of nodes that are lost or powered down, and who goes on by that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recover_megatron.membership.testimony import Slurm
from recover_megatron.run_log.steps import audit_problem
from tests.slurm.cluster import Cluster, started, wait_until
from tests.slurm.demo import Job

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]

ITERATIONS = 30
PATIENT = "--recover-heartbeat-timeout 30"
"""Four of these are waited for the witness: enough for a controller on a busy machine."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with started(timeout=10, power_saving=True) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        yield cluster


def test_a_lost_node_is_off_only_when_slurm_has_powered_it_down(cluster: Cluster) -> None:
    job = int(cluster.run("sbatch", "--parsable", "--nodes=2", "--no-kill", "--output=/dev/null", "--wrap=sleep 3600"))
    cluster.wait_job(job, ["RUNNING"])
    assert Slurm().look(["n1", "n2", "n9"]) == {"n1": False, "n2": False}
    cluster.kill_node("n2")
    wait_until(lambda: cluster.states()["n2"].startswith("down"), "the controller has noticed")
    assert Slurm().look(["n1", "n2"]) == {"n1": False, "n2": False}
    cluster.run("scontrol", "update", "nodename=n2", "state=power_down_force")
    wait_until(lambda: Slurm().look(["n2"]) == {"n2": True}, "it is powered down")
    assert Slurm().look(["n1"]) == {"n1": False}
    assert (cluster.folder / "powered").read_text().split() == ["n2"]
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_a_job_goes_on_with_one_node_of_three_when_the_others_are_lost_and_powered_down(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Among them the one with the coordinator that leads."""
    job = Job(cluster, tmp_path / "job", iterations=ITERATIONS, flags=PATIENT)
    job.wait_iteration(4)
    for name in ("n2", "n3"):
        cluster.kill_node(name)
    cluster.run("scontrol", "update", "nodename=n[2-3]", "state=power_down_force")
    job.wait("COMPLETED")
    steps = job.steps()
    assert [step.iteration for step in steps] == list(range(1, ITERATIONS + 1))
    assert [audit_problem(step) for step in steps] == [None] * ITERATIONS
    assert steps[-1].replicas == 1
    assert "witness: SLURM says of n2, n3: powered off" in job.said()
