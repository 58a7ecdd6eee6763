"""examples/kubernetes on hosts in place of pods: a pod is lost with its node, and another one joins the run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.test_plain_pytorch import alone, losses, same
from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE, eventually

from .hosts import Hosts

POD = REPOSITORY / "examples" / "kubernetes" / "pod.sh"
WORKERS = 2


@pytest.mark.slow
def test_a_lost_pod_is_replaced_while_the_others_train(three_hosts: Hosts, tmp_path: Path) -> None:
    hosts, run, commands = three_hosts, tmp_path / "run", tmp_path / "bin"
    commands.mkdir()
    for name, module in (("recover-run", "launch"), ("recover-status", "status")):  # as in an image
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m recover_megatron.{module} "$@"\n')
        (commands / name).chmod(0o755)

    def pod(host: int, life: int) -> object:
        environment = {
            "JOB_COMPLETION_INDEX": str(host - 1), "POD_IP": hosts.address(host), "PODS": "3",
            "WORKERS": str(WORKERS), "MASTER": hosts.name(1), "RUN_DIR": str(run),
            "RECOVER_SECRET": "what the pods share here", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
            "PATH": f"{commands}:{os.environ['PATH']}",
        }  # fmt: skip
        script = [REPOSITORY / "tests" / "examples" / "struck_plain.py", "", tmp_path, "joined+5"]
        out = tmp_path / f"pod{host}-{life}.out"
        return hosts.start(host, ["bash", POD, "--elastic", *script], out, environment=environment, cwd=tmp_path)

    pods = {host: pod(host, 1) for host in hosts}
    eventually(lambda: all(20 in log(run, worker) for worker in range(6)), "the run trains")
    hosts.power_off(3)
    before = max(log(run, 0))
    eventually(lambda: max(log(run, 0)) > before + 20, "the others go on")
    hosts.cable(3, up=True)
    pods[3] = pod(3, 2)
    assert [pods[host].wait(DEADLINE) for host in hosts] == [0, 0, 0], (tmp_path / "pod3-2.out").read_text()
    assert "the run goes on: this pod joins it" in (tmp_path / "pod3-2.out").read_text()
    states = {path: torch.load(path) for path in tmp_path.glob("worker-*.pt")}
    assert len(states) == 3 * WORKERS, "four that were there all the time, and two that came"
    first = next(iter(states.values()))
    assert all(
        same(state["state"], first["state"]) and state["workers"] == first["workers"] for state in states.values()
    )
    seen = [list(losses(run, worker).values()) for worker in range(2 * WORKERS)]
    assert len(seen[0]) > before + 20, "as many as they have made, and the pod came back behind them"
    compared = min(len(seen[0]), 60)
    assert [each[:compared] for each in seen] == [pytest.approx(alone(compared)[0], rel=1e-9)] * len(seen)


def log(run: Path, worker: int) -> dict[int, float]:
    """What a worker has printed by now."""
    return losses(run, worker) if (run / f"worker-{worker}.log").exists() else {0: 0.0}
