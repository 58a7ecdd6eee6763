"""Two hosts share a folder: either may lose its power, and of two that do not hear each other one goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drawn import some
from tests.harness.waiting import DEADLINE, eventually, written_lines

from .hosts import Hosts
from .test_lost_host import REPOSITORY, STEPS

pytestmark = pytest.mark.slow


@pytest.fixture
def two_hosts(can_have_hosts: None) -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


class Run:
    """Two workers a host; the log folder is one."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        (folder / "steps.py").write_text(textwrap.dedent(STEPS))
        environment = {"RECOVER_SECRET": "what the hosts share here", "PYTHONPATH": str(REPOSITORY)}
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        for host in hosts:
            command = [sys.executable, "-m", "recover_megatron.launch", "--nnodes", 2, "--node-rank", host - 1]
            command += ["--nproc-per-node", 2, "--master-addr", hosts.address(1), "--master-port", 29400]
            command += ["--log-dir", "logs", "steps.py", "--recover-hang-timeout", "3600"]
            out = folder / f"host{host}.out"
            self.launchers[host] = hosts.start(host, command, out, environment=environment, cwd=folder)
        eventually(lambda: all(self.plans(rank) for rank in range(4)), "the run starts")
        assert "either half of the workers may be lost: the lease is at" in (folder / "host1.out").read_text()

    def plans(self, rank: int) -> list[dict]:
        return [json.loads(line) for line in written_lines(self.folder / f"plans-{rank}")]

    def alone(self, host: int) -> bool:
        left = [2 * host - 2, 2 * host - 1]
        return all(self.plans(rank)[-1]["members"] == left for rank in left)

    @property
    def holders(self) -> list[list[list[int]]]:
        files = sorted((self.folder / "logs").glob("lease-*.*"))
        return [json.loads(path.read_text())["members"] for path in files]


@pytest.mark.parametrize("lost", some("host of two", [1, 2], 1))
def test_either_host_of_two_may_lose_its_power(two_hosts: Hosts, tmp_path: Path, lost: int) -> None:
    """Host 1 has the coordinator that leads, and the store."""
    run = Run(two_hosts, tmp_path)
    two_hosts.power_off(lost)
    other = 3 - lost
    eventually(lambda: run.alone(other), "the other host goes on, without waiting for the hang timeout")
    (tmp_path / "over").touch()
    assert run.launchers[other].wait(DEADLINE) == 42
    assert run.holders == [[[2 * other - 2, 2 * other - 1]]]


def test_of_two_hosts_that_do_not_hear_each_other_one_goes_on(two_hosts: Hosts, tmp_path: Path) -> None:
    run = Run(two_hosts, tmp_path)
    two_hosts.cable(2, up=False)
    eventually(lambda: run.alone(1) or run.alone(2), "one of them goes on")
    winner = 1 if run.alone(1) else 2
    assert run.launchers[3 - winner].wait(DEADLINE) == 11
    two_hosts.cable(2, up=True)
    assert not run.alone(3 - winner)
    (tmp_path / "over").touch()
    assert run.launchers[winner].wait(DEADLINE) == 42
    assert run.holders == [[[2 * winner - 2, 2 * winner - 1]]]
