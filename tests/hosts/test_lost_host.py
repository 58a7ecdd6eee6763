"""A host loses power: the run goes on without its workers alone, whichever host it was, and soon.

Two hosts share a folder: either may lose its power, and of two that do not hear each other one goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recover_megatron.run_log.steps import read_steps
from tests.drawn import some
from tests.examples.test_plain_pytorch import alone, losses, same
from tests.harness import REPOSITORY
from tests.harness.forkserver import ForkServer
from tests.harness.waiting import DEADLINE, eventually, written_lines
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, OURS, undisturbed

from .hosts import Hosts

pytestmark = pytest.mark.slow

STEPS = """
    import json, os, pathlib, time
    from recover_megatron.membership import EpochRevoked
    from recover_megatron.membership.io.session import connect

    session = connect()
    while True:
        try:
            plan = session.join({})
            told = {"members": sorted(plan.members), "at": plan.committed, "mono": time.monotonic()}
            with open(f"plans-{os.environ['RANK']}", "a") as file:
                file.write(json.dumps(told) + "\\n")
            for at in range(plan.committed + 1, 1 << 60):
                time.sleep(0.1)
                if pathlib.Path("over").exists():
                    session.give_up(42, "the test is over")
                session.agree(at)
        except EpochRevoked:
            continue
    """


SECRET = {"RECOVER_SECRET": "what the hosts share here", "OMP_NUM_THREADS": "1"}


class Run:
    """Two workers a host."""

    def __init__(self, hosts: Hosts, folder: Path, logs: str, *flags: object) -> None:
        """``logs``: the log folder of each, {0} is its number."""
        self.folder = folder
        (folder / "steps.py").write_text(textwrap.dedent(STEPS))
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        for host in hosts:
            argv = ["--nproc-per-node", 2, "--log-dir", logs.format(host), "steps.py", *flags]
            out = folder / f"host{host}.out"
            self.launchers[host] = hosts.recover_run(host, *argv, out=out, environment=SECRET, cwd=folder)
        eventually(lambda: all(self.plans(rank) for rank in range(2 * hosts.count)), "the run starts")

    def plans(self, rank: int) -> list[dict]:
        return [json.loads(line) for line in written_lines(self.folder / f"plans-{rank}")]

    def goes_on_with(self, left: list[int]) -> bool:
        return all(self.plans(rank)[-1]["members"] == left for rank in left)

    def ends(self, *hosts: int) -> None:
        """As its workers give it up."""
        (self.folder / "over").touch()
        assert {self.launchers[host].wait(DEADLINE) for host in hosts} == {42}


@pytest.mark.parametrize("lost", [1, 2])
def test_a_host_without_power_costs_its_own_workers_alone(three_hosts: Hosts, tmp_path: Path, lost: int) -> None:
    """Host 1 has the coordinator that leads."""
    run = Run(three_hosts, tmp_path, "logs{0}")
    left = [rank for rank in range(6) if rank // 2 != lost - 1]
    three_hosts.power_off(lost)
    lost_at = time.monotonic()
    eventually(lambda: run.goes_on_with(left), "the others go on")
    print(f"host {lost}: {max(run.plans(rank)[-1]['mono'] for rank in left) - lost_at:.1f} s")
    others = [host for host in three_hosts if host != lost]
    run.ends(*others)
    assert all(plan["members"] in (left, list(range(6))) for rank in left for plan in run.plans(rank))
    logs = [path for host in others for path in (tmp_path / f"logs{host}").glob("events-*.jsonl")]
    events = [json.loads(line) for path in logs for line in path.read_text().splitlines()]
    assert {event["worker"] for event in events if event["event"] == "fault"} == set(range(6)) - set(left)


AT_THE_START = """
    import os, pathlib, time
    from recover_megatron.membership.io.session import connect

    session = connect()
    pathlib.Path(f"up-{os.environ['RECOVER_WORKER_ID']}").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    session.join({})
    session.leave()
    """


@pytest.mark.parametrize("spares", [0, 2])
def test_a_host_that_is_cut_off_at_the_start_is_missed_or_replaced(
    three_hosts: Hosts, tmp_path: Path, spares: int
) -> None:
    """Two workers a host, and the spares on the last one; the host that is cut off still holds the log folder."""
    (tmp_path / "start.py").write_text(textwrap.dedent(AT_THE_START))
    argv = ["--nproc-per-node", 2, "--log-dir", "logs", "start.py", "--recover", "--recover-spares", spares]
    secret = {"RECOVER_SECRET": "what the hosts share here"}
    out = {host: tmp_path / f"host{host}.out" for host in three_hosts}
    launchers = {
        host: three_hosts.recover_run(host, *argv, out=out[host], environment=secret, cwd=tmp_path)
        for host in three_hosts
    }
    eventually(lambda: all((tmp_path / f"up-{worker}").exists() for worker in range(6 + spares)), "all are up")
    three_hosts.cable(2, up=False)
    silent = "node 1 (its host has not answered for 5 s) is lost; the training has not begun"
    eventually(lambda: silent in out[1].read_text(), "node 0 misses it")
    (tmp_path / "go").touch()
    ended = [launchers[host].wait(DEADLINE) for host in (1, 3)]
    lost = "node 0 (its host has not answered for 5 s) is lost"
    eventually(lambda: lost in out[2].read_text(), "node 1 misses node 0")
    three_hosts.cable(2, up=True)
    assert ended == ([0, 0] if spares else [10, 10]), [path.read_text()[-2000:] for path in out.values()]
    assert ("the launch starts again (1 of at most 2) without node 1" in out[1].read_text()) is bool(spares)
    assert launchers[2].wait(DEADLINE) == 10


@pytest.fixture
def two_hosts(can_have_hosts: None) -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


class TwoHosts(Run):
    """The log folder is one."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        super().__init__(hosts, folder, "logs", "--recover-hang-timeout", "3600")
        assert "loss of either half of the workers: the lease is at" in (folder / "host1.out").read_text()

    def alone(self, host: int) -> bool:
        return self.goes_on_with([2 * host - 2, 2 * host - 1])

    def ends_with(self, host: int) -> None:
        """It ends on this host, which has had the lease."""
        self.ends(host)
        files = sorted((self.folder / "logs").glob("lease-*.*"))
        assert [json.loads(path.read_text())["members"] for path in files] == [[[2 * host - 2, 2 * host - 1]]]


@pytest.mark.parametrize("lost", some("host of two", [1, 2], 1))
def test_either_host_of_two_may_lose_its_power(two_hosts: Hosts, tmp_path: Path, lost: int) -> None:
    """Host 1 has the coordinator that leads, and the store."""
    run = TwoHosts(two_hosts, tmp_path)
    two_hosts.power_off(lost)
    other = 3 - lost
    eventually(lambda: run.alone(other), "the other host goes on, without waiting for the hang timeout")
    run.ends_with(other)


TRAINING = (
    *MODEL,
    *MOCK,
    *NO_DROPOUT,
    "--global-batch-size",
    "16",
    "--train-iters",
    "100",
    "--recover",
    "--recover-device",
    "cpu",
)
STAGES = ("--pipeline-model-parallel-size", "2")
"""In Megatron's default order each host has one of the two, of both replicas."""


@pytest.mark.parametrize("lost", some("host of two stages", [1, 2], 1))
def test_a_host_that_all_replicas_have_a_worker_on_may_lose_its_power(
    two_hosts: Hosts, forkserver: ForkServer, tmp_path: Path, lost: int
) -> None:
    """It is taken for no stall: the others go back to a snapshot in memory."""
    argv = ["--nproc-per-node", 2, "--log-dir", "logs", OURS, *TRAINING, *STAGES]
    started = {
        host: two_hosts.recover_run(host, *argv, out=tmp_path / f"{host}.out", environment=SECRET, cwd=tmp_path)
        for host in two_hosts
    }
    steps = tmp_path / "logs" / "steps.jsonl"
    eventually(lambda: len(written_lines(steps)) > 15, "the run trains")
    two_hosts.power_off(lost)
    other = started[3 - lost]
    assert other.wait(DEADLINE) == 0, (tmp_path / f"{3 - lost}.out").read_text()
    reference = undisturbed(forkserver, 4, [OURS, *TRAINING, *STAGES], tmp_path / "alone")
    found = {step.iteration: step.loss for step in read_steps(steps)}
    assert found == pytest.approx({step.iteration: step.loss for step in reference}, rel=1e-5)
    events = [json.loads(line) for path in (tmp_path / "logs").glob("events-*.jsonl") for line in path.open()]
    assert not [event for event in events if event["event"] == "stalled"]


def test_of_two_hosts_that_do_not_hear_each_other_one_goes_on(two_hosts: Hosts, tmp_path: Path) -> None:
    run = TwoHosts(two_hosts, tmp_path)
    two_hosts.cable(2, up=False)
    eventually(lambda: run.alone(1) or run.alone(2), "one of them goes on")
    winner = 1 if run.alone(1) else 2
    assert run.launchers[3 - winner].wait(DEADLINE) == 11
    two_hosts.cable(2, up=True)
    assert not run.alone(3 - winner)
    run.ends_with(winner)


POD = REPOSITORY / "examples" / "kubernetes" / "pod.sh"
WORKERS = 2


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
    assert "the run is already running: this pod joins it" in (tmp_path / "pod3-2.out").read_text()
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
